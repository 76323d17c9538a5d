// The gradient norm, its clipping, and one step of an optimizer.
#pragma once

#include "kernels/loss.h"

namespace pentatron {

constexpr int norm_parts = 1024;  // the gradient norm has so many partial sums

// sum[0] += the sum of the squares of x [size], in double.
void sum_of_squares(const accum* x, size_t size, double* parts /*[norm_parts]*/, double* sum /*[1]*/,
                    cudaStream_t stream);

struct AdamW {
  double lr, beta1, beta2, weight_decay;
};
constexpr double adamw_epsilon = 1e-8;  // is added to the root of the second moment
// What only the device knows when a step is issued.
struct StepFactors {
  accum gradient;             // factor of the gradients; negative: nothing changes
  accum step_size;            // AdamW's learning rate, over the bias correction of the first moment
  accum inverse_correction2;  // one over that of the root of the second
};
// Computes them for step number `step` (from 1). The gradients' factor is min(1, max_norm / (norm + 1e-6)),
// as PyTorch's clip_grad_norm_, and 1 when max_norm is 0. If the norm is not finite, the step is skipped.
// With a loss scale, norm_squared is first divided by its square. Then the scale is set for the next step: it
// doubles after so many good steps, and halves, down to 1, after one that overflowed. AdamW's corrections do
// not count skipped steps. (Without a loss scale no step follows one: the run ends.)
constexpr int steps_to_double_scale = 2000;
void step_factors(double* norm_squared, double max_norm, const AdamW& adamw, int64_t step, LossScale* scale,
                  StepFactors* factors, cudaStream_t stream);

// Bytes that the two steps below move for each element.
constexpr double adamw_bytes = 7 * accum_bytes + (has_master_weights ? real_bytes : 0),
                 sgd_bytes = 3 * accum_bytes + (has_master_weights ? real_bytes : 0);

// One AdamW step over `size` elements (Loshchilov and Hutter, 2019). It updates `master`, and rounds the
// weights from it. Without master weights, `master` points to the weights.
void adamw_step(const AdamW& adamw, real* weights, accum* master, const accum* gradients, accum* moment1,
                accum* moment2, const StepFactors* factors, size_t size, cudaStream_t stream);

// weights -= lr * (factor * gradients + weight_decay * weights).
void sgd_step(double lr, double weight_decay, real* weights, accum* master, const accum* gradients,
              const StepFactors* factors, size_t size, cudaStream_t stream);

}  // namespace pentatron
