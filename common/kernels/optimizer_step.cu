#include <cmath>

#include "kernels/optimizer_step.h"
#include "kernels/pack.h"

namespace pentatron {

// The number of blocks is the same on every device, and with it the order of the sum.
template <int width>
__global__ void sum_of_squares_kernel(const accum* x /*[size]*/, size_t size,
                                      double* parts /*[norm_parts]*/) {
  double sum = 0;
  for (size_t i : grid_range(size, width)) {
    const Pack<width> pack = load<width>(x + i);
    for (int e = 0; e < width; ++e) sum += static_cast<double>(pack[e]) * pack[e];
  }
  sum = block_sum(sum);
  if (is_first_thread()) parts[blockIdx.x] = sum;
}

// One block in all.
__global__ void add_parts_kernel(const double* parts /*[count]*/, int count, double* sum /*[1]*/) {
  double total = 0;
  for (int i : block_range(count)) total += parts[i];
  total = block_sum(total);
  if (is_first_thread()) sum[0] += total;
}

void sum_of_squares(const accum* x, size_t size, double* parts, double* sum, cudaStream_t stream) {
  launch(width_for(size, x) == 1 ? sum_of_squares_kernel<1> : sum_of_squares_kernel<pack_width>,
         dim3(norm_parts), moves(accum_bytes * size), stream, x, size, parts);
  launch(add_parts_kernel, dim3(1), shortest_kernel, stream, parts, norm_parts, sum);
}

// The factor that shortens a gradient to the norm max_norm; 1 if it is no longer, or if max_norm is 0.
__device__ double clip_factor(double norm_squared, double max_norm) {
  const double factor = max_norm / (sqrt(norm_squared) + 1e-6);
  return max_norm > 0 && factor < 1 ? factor : 1.0;
}

// The loss scale of the next step.
__device__ LossScale next_loss_scale(LossScale now, bool overflow) {
  if (overflow) return {now.factor > 1 ? now.factor / 2 : now.factor, 0, now.skipped + 1};
  if (now.good_steps + 1 == steps_to_double_scale) return {now.factor * 2, 0, now.skipped};
  return {now.factor, now.good_steps + 1, now.skipped};
}

__global__ void step_factors_kernel(double* norm_squared /*[1]*/, double max_norm, double lr, double beta1,
                                    double beta2, int64_t step, LossScale* scale, StepFactors* factors) {
  if (is_first_thread()) {
    double unscale = 1, taken = static_cast<double>(step);  // steps not skipped
    const bool overflow = !(norm_squared[0] < INFINITY);
    if (scale != nullptr) {
      unscale = 1 / static_cast<double>(scale->factor);
      norm_squared[0] *= unscale * unscale;
      if (overflow) norm_squared[0] = INFINITY;
      *scale = next_loss_scale(*scale, overflow);
      taken -= scale->skipped;
    }
    const double factor = overflow ? -1 : unscale * clip_factor(norm_squared[0], max_norm);
    *factors = {static_cast<accum>(factor), static_cast<accum>(lr / (1 - pow(beta1, taken))),
                static_cast<accum>(1 / sqrt(1 - pow(beta2, taken)))};
  }
}

void step_factors(double* norm_squared, double max_norm, const AdamW& adamw, int64_t step, LossScale* scale,
                  StepFactors* factors, cudaStream_t stream) {
  launch(step_factors_kernel, dim3(1), shortest_kernel, stream, norm_squared, max_norm, adamw.lr, adamw.beta1,
         adamw.beta2, step, scale, factors);
}

// Stores new weights where they are kept: as `master`, and rounded where the weights are something else.
template <int width>
__device__ void store_weights(const Pack<width>& updated, size_t i, accum* master, real* weights) {
  store(master + i, updated);
  if constexpr (has_master_weights) store(weights + i, updated);
}

// The bias corrections of AdamW are in `factors`, the learning rate is folded into the weight `decay`; gain1
// and gain2 are 1 - beta1 and 1 - beta2, subtracted in double, as a float close to 1 lacks the digits. Reads
// gradient, two moments and master weight; writes all but the gradient, and the weight beside its master.
template <int width>
__global__ void adamw_step_kernel(accum beta1, accum beta2, accum gain1, accum gain2, accum decay,
                                  real* weights, accum* master, In<accum> gradients, Out<accum> moment1,
                                  Out<accum> moment2 /*all [size]*/, const StepFactors* factors,
                                  size_t size) {
  const accum factor = factors->gradient, step_size = factors->step_size,
              inverse_correction2 = factors->inverse_correction2, epsilon = adamw_epsilon;
  if (factor < 0) return;
  for (size_t i : grid_range(size, width)) {
    const Pack<width> gradient = load<width>(gradients + i);
    Pack<width> m = load<width>(moment1 + i), v = load<width>(moment2 + i), weight = load<width>(master + i);
    for (int e = 0; e < width; ++e) {
      const accum g = factor * gradient[e];
      m[e] = beta1 * m[e] + gain1 * g;
      v[e] = beta2 * v[e] + gain2 * g * g;
      weight[e] = weight[e] * decay - step_size * m[e] / (sqrt(v[e]) * inverse_correction2 + epsilon);
    }
    store(moment1 + i, m);
    store(moment2 + i, v);
    store_weights(weight, i, master, weights);
  }
}

// Starts the kernel, whose `decay` is the factor 1 - lr * weight_decay.
void adamw_step(const AdamW& adamw, real* weights, accum* master, const accum* gradients, accum* moment1,
                accum* moment2, const StepFactors* factors, size_t size, cudaStream_t stream) {
  const int width = width_for(size, weights, master, gradients, moment1, moment2);
  launch(width == 1 ? adamw_step_kernel<1> : adamw_step_kernel<pack_width>, elementwise_grid(size),
         moves(adamw_bytes * size), stream, adamw.beta1, adamw.beta2, 1 - adamw.beta1, 1 - adamw.beta2,
         1 - adamw.lr * adamw.weight_decay, weights, master, gradients, moment1, moment2, factors, size);
}

template <int width>
__global__ void sgd_step_kernel(accum lr, accum weight_decay, real* weights, accum* master,
                                In<accum> gradients /*all [size]*/, const StepFactors* factors, size_t size) {
  const accum factor = factors->gradient;
  if (factor < 0) return;
  for (size_t i : grid_range(size, width)) {
    const Pack<width> gradient = load<width>(gradients + i);
    Pack<width> weight = load<width>(master + i);
    for (int e = 0; e < width; ++e) weight[e] -= lr * (factor * gradient[e] + weight_decay * weight[e]);
    store_weights(weight, i, master, weights);
  }
}

void sgd_step(double lr, double weight_decay, real* weights, accum* master, const accum* gradients,
              const StepFactors* factors, size_t size, cudaStream_t stream) {
  const int width = width_for(size, weights, master, gradients);
  launch(width == 1 ? sgd_step_kernel<1> : sgd_step_kernel<pack_width>, elementwise_grid(size),
         moves(sgd_bytes * size), stream, lr, weight_decay, weights, master, gradients, factors, size);
}

}  // namespace pentatron
