// The kernels of the model and the optimizer, except attention's (attention.h). Each function launches the
// kernel of its name on `stream`. Comments beside the arguments give shapes; "rows" are tokens.
//
// Sums run in a fixed order without atomics, so a run repeats bit for bit. All arithmetic is in `accum`.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/tensor.h"
#include "kernels/config.h"
#include "kernels/philox.h"

namespace pentatron {

// ---- Embedding --------------------------------------------------------------------------------------------

// out[r] = table[tokens[r] - first_token]. The table holds rows [first_token, first_token + table.rows) of
// the vocabulary; out[r] is zero if the token is not among them.
void embedding_forward(Tensor table /*[vocabulary, d]*/, const int32_t* tokens /*[rows]*/, int first_token,
                       Tensor out /*[rows, d]*/, cudaStream_t stream);

// gradient[t] (+)= the sum of d_out[r] over the rows r with token t. `by_token` lists the rows sorted by
// token (stable). So one block sums all rows of a token, in a fixed order.
void embedding_backward(Tensor d_out /*[rows, d]*/, const int32_t* tokens /*[rows]*/,
                        const int32_t* by_token /*[rows]*/, int first_token,
                        Gradient gradient /*[vocabulary, d]*/, cudaStream_t stream);

// ---- RMSNorm (Zhang and Sennrich, 2019) -------------------------------------------------------------------

// x = before + branch (a residual connection), and out = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) +
// epsilon) of each row, in one pass over memory. Without a branch, `before` is x itself.
void rmsnorm_forward(Tensor before /*[rows, d]*/, Tensor branch /*[rows, d], or none*/,
                     const real* weight /*[d]*/, double epsilon, Tensor x /*[rows, d]*/,
                     Tensor out /*[rows, d]*/, accum* rstd /*[rows]*/, cudaStream_t stream);

// Rows of `partials` for rmsnorm_backward, which sums the rows in that many bands, on any device.
int64_t rmsnorm_bands(int64_t rows);

// d_x: the gradient of x, added or (unless `accumulate`) assigned. weight_gradient is assigned.
void rmsnorm_backward(Tensor d_out /*[rows, d]*/, Tensor x /*[rows, d]*/, const real* weight /*[d]*/,
                      const accum* rstd /*[rows]*/, bool accumulate, Tensor d_x /*[rows, d]*/,
                      AccumTensor partials /*[rmsnorm_bands(rows), d]*/, accum* weight_gradient /*[d]*/,
                      cudaStream_t stream);

// ---- Rotary positions (Su et al., 2021; rotate-half as in Llama) ------------------------------------------

struct HeadShape {
  int heads, kv_heads, head_size;  // of this rank
  int qkv_columns() const { return (heads + 2 * kv_heads) * head_size; }
};

// Radians by which the next position turns pair i < head_size / 2 of a head: theta^(-2i / head_size).
std::vector<double> rotary_frequencies(double theta, int head_size);
// table[p] = the cosines, then the sines, of p times each frequency. The host computes them in double.
void fill_rotary_table(const std::vector<double>& frequencies /*[head_size / 2]*/,
                       AccumTensor table /*[positions, head_size]*/, cudaStream_t stream);

// Splits the fused product qkv into q, k, v, and rotates q and k by their rows' positions.
void rotary_forward(Tensor qkv /*[rows, q | k | v]*/, const int32_t* positions /*[rows]*/, AccumTensor table,
                    HeadShape shape, Tensor q /*[rows, heads*head_size]*/,
                    Tensor k /*[rows, kv_heads*head_size]*/, Tensor v /*as k*/, cudaStream_t stream);

// Backward: rotates d_q and d_k by the negative angles, and joins them with d_v.
void rotary_backward(Tensor d_q, Tensor d_k, Tensor d_v, const int32_t* positions /*[rows]*/,
                     AccumTensor table, HeadShape shape, Tensor d_qkv /*[rows, q | k | v]*/,
                     cudaStream_t stream);

// ---- SwiGLU (Shazeer, 2020) -------------------------------------------------------------------------------

// out = silu(gate) * up.
void swiglu_forward(Tensor gate_up /*[rows, gate | up]*/, Tensor out /*[rows, f]*/, cudaStream_t stream);
void swiglu_backward(Tensor d_out /*[rows, f]*/, Tensor gate_up, Tensor d_gate_up /*[rows, gate | up]*/,
                     cudaStream_t stream);

// ---- Loss scaling (Micikevicius et al., "Mixed Precision Training", 2017, section 3.2) --------------------

// In fp16 the gradient of the loss is multiplied by `factor`, so that small gradients do not become 0. It is
// halved after a step whose gradients overflowed, and doubled after a number of good ones. On the device, so
// that the host need not wait; the same on all ranks. Without it, kernels take a null pointer.
struct LossScale {
  accum factor;
  accum good_steps;  // since it changed
  accum skipped;     // steps in all that overflowed
};

// ---- Cross-entropy over a slice of the vocabulary ---------------------------------------------------------

constexpr int ignored_target = -1;  // such a row has no loss and no gradient

// Writes three statistics of each row of logits: the largest logit; the sum of exp(logit - largest); the
// target's logit, or 0 if another rank holds it.
void cross_entropy_statistics(Tensor logits /*[rows, vocabulary]*/, const int32_t* targets /*[rows]*/,
                              int first_token, AccumTensor statistics /*[3, rows]*/, cudaStream_t stream);

// Replaces each row's largest logit by that over all ranks, and rescales: sum *= exp(own largest - largest).
void cross_entropy_rescale(const accum* largest /*[rows]*/, AccumTensor statistics /*[3, rows]*/,
                           cudaStream_t stream);

// loss[0] = scale * sum over the rows of log(sum) + largest - target's logit.
void cross_entropy_loss(AccumTensor statistics /*[3, rows]*/, const int32_t* targets, double scale,
                        accum* loss /*[1]*/, cudaStream_t stream);

// Replaces the logits by their gradient, scale * (softmax - one-hot target), times the loss scale.
void cross_entropy_backward(Tensor logits /*[rows, vocabulary]*/, const int32_t* targets, int first_token,
                            double scale, const LossScale* loss_scale, AccumTensor statistics /*[3, rows]*/,
                            cudaStream_t stream);

// ---- Elementwise ------------------------------------------------------------------------------------------

void residual_add(Tensor x, Tensor branch, Tensor out /*all [rows, d]*/,
                  cudaStream_t stream);                                            // out = x + branch
void accumulate(const accum* term, accum* sum, size_t size, cudaStream_t stream);  // sum += term
void accumulate(AccumTensor term, Gradient gradient, cudaStream_t stream);         // gradient (+)= term
void round_to_real(const accum* x, real* out, size_t size, cudaStream_t stream);   // out = x

// Copies `parts` equal parts of the columns of x one after the other, or back. T: real or accum.
template <class T>
void split_columns(Matrix<T> x /*[rows, parts*columns]*/, int parts, T* packed /*[parts, rows, columns]*/,
                   cudaStream_t stream);
void join_columns(const real* packed, int parts, Tensor x, cudaStream_t stream);

// ---- Initialisation ---------------------------------------------------------------------------------------

// A local matrix of `columns` columns is the slice of a global one that begins at (first_row, first_column).
struct GlobalSlice {
  int64_t columns, first_row, first_column, global_columns;
};
// weights[i] = element first + i of the local matrix, a normal number times standard_deviation. It depends on
// (key, global index) alone, so every slicing of the global matrix gives the same bits.
void fill_normal(real* weights /*[size]*/, size_t first, size_t size, GlobalSlice slice, PhiloxKey key,
                 double standard_deviation, cudaStream_t stream);
void fill_constant(real* weights, size_t size, double value, cudaStream_t stream);

// ---- Optimizer --------------------------------------------------------------------------------------------

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

// Bytes that the three steps below move for each element.
constexpr double adamw_bytes = 7 * accum_bytes + (has_master_weights ? real_bytes : 0),
                 sgd_bytes = 3 * accum_bytes + (has_master_weights ? real_bytes : 0),
                 sign_bytes = 3 * accum_bytes + real_bytes;

// One AdamW step over `size` elements (Loshchilov and Hutter, 2019). It updates `master`, and rounds the
// weights from it. Without master weights, `master` points to the weights.
void adamw_step(const AdamW& adamw, real* weights, accum* master, const accum* gradients, accum* moment1,
                accum* moment2, const StepFactors* factors, size_t size, cudaStream_t stream);

// weights -= lr * (factor * gradients + weight_decay * weights).
void sgd_step(double lr, double weight_decay, real* weights, accum* master, const accum* gradients,
              const StepFactors* factors, size_t size, cudaStream_t stream);

// weights += rate * sign(target - sums), with sign(0) = 0.
void sign_step(double rate, double target, real* weights, accum* master, const accum* sums,
               const StepFactors* factors, size_t size, cudaStream_t stream);

}  // namespace pentatron
