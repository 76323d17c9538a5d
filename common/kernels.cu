#include <cmath>

#include "kernels.h"

namespace pentatron {

// ---- Embedding --------------------------------------------------------------------------------------------

// One block a row.
__global__ void embedding_forward_kernel(const real* __restrict__ table, const int32_t* __restrict__ tokens,
                                         int first_token, int vocabulary, int d, real* __restrict__ out) {
  const size_t row = blockIdx.x;
  const int token = tokens[row] - first_token;
  const bool here = 0 <= token && token < vocabulary;
  for (int j : block_range(d))
    out[row * d + j] = here ? table[static_cast<size_t>(token) * d + j] : real(0.0f);
}

void embedding_forward(Tensor table, const int32_t* tokens, int first_token, Tensor out,
                       cudaStream_t stream) {
  launch(embedding_forward_kernel, dim3(out.rows), stream, table.data, tokens, first_token, table.rows,
         out.columns, out.data);
}

// One block a place in `by_token`; the first place of each token adds up all the rows of that token.
__global__ void embedding_backward_kernel(const real* __restrict__ d, const int32_t* __restrict__ tokens,
                                          const int32_t* __restrict__ by_token, int rows, int first_token,
                                          int vocabulary, int columns, accum* __restrict__ gradient) {
  const int place = blockIdx.x;
  const int global_token = tokens[by_token[place]], token = global_token - first_token;
  if (token < 0 || token >= vocabulary) return;
  if (place > 0 && tokens[by_token[place - 1]] == global_token) return;
  for (int i = place; i < rows && tokens[by_token[i]] == global_token; ++i) {
    const size_t row = by_token[i];
    for (int j : block_range(columns))
      gradient[static_cast<size_t>(token) * columns + j] += accum(d[row * columns + j]);
  }
}

void embedding_backward(Tensor d, const int32_t* tokens, const int32_t* by_token, int first_token,
                        Statistics gradient, cudaStream_t stream) {
  launch(embedding_backward_kernel, dim3(d.rows), stream, d.data, tokens, by_token, d.rows, first_token,
         gradient.rows, d.columns, gradient.data);
}

// ---- RMSNorm ----------------------------------------------------------------------------------------------

// One block a row.
__global__ void rmsnorm_forward_kernel(const real* __restrict__ x, const real* __restrict__ weight,
                                       accum epsilon, int d, real* __restrict__ out,
                                       accum* __restrict__ rstd) {
  const size_t row = blockIdx.x;
  accum sum = 0;
  for (int j : block_range(d)) sum += accum(x[row * d + j]) * accum(x[row * d + j]);
  const accum scale = 1 / sqrt(block_sum(sum) / d + epsilon);
  for (int j : block_range(d)) out[row * d + j] = real(accum(x[row * d + j]) * scale * accum(weight[j]));
  for ([[maybe_unused]] int once : block_range(1)) rstd[row] = scale;
}

void rmsnorm_forward(Tensor x, const real* weight, double epsilon, Tensor out, accum* rstd,
                     cudaStream_t stream) {
  launch(rmsnorm_forward_kernel, dim3(x.rows), stream, x.data, weight, epsilon, x.columns, out.data, rstd);
}

int64_t rmsnorm_bands(int64_t rows) { return std::min<int64_t>(rows, 256); }

// One block a band of rows. With n = x * rstd:
//   d_x = rstd * (d_out * weight - n * mean(d_out * weight * n)),   d_weight = sum over rows of d_out * n.
__global__ void rmsnorm_backward_kernel(const real* __restrict__ d_out, const real* __restrict__ x,
                                        const real* __restrict__ weight, const accum* __restrict__ rstd,
                                        bool add, int rows, int d, real* __restrict__ d_x,
                                        accum* __restrict__ partials) {
  accum* partial = partials + static_cast<size_t>(blockIdx.x) * d;
  const int rows_a_band = (rows + gridDim.x - 1) / gridDim.x;
  const int first = blockIdx.x * rows_a_band, last = std::min(rows, first + rows_a_band);
  for (int j : block_range(d)) partial[j] = 0;
  for (int row = first; row < last; ++row) {
    const size_t start = static_cast<size_t>(row) * d;
    const accum scale = rstd[row];
    accum dot = 0;
    for (int j : block_range(d)) dot += accum(d_out[start + j]) * accum(weight[j]) * accum(x[start + j]);
    const accum mean = block_sum(dot) * scale / d;
    for (int j : block_range(d)) {
      const accum normed = accum(x[start + j]) * scale, incoming = accum(d_out[start + j]);
      const accum before = add ? accum(d_x[start + j]) : accum(0);
      d_x[start + j] = real(before + scale * (incoming * accum(weight[j]) - normed * mean));
      partial[j] += incoming * normed;
    }
  }
}

__global__ void column_sums_kernel(const accum* __restrict__ x, int rows, int columns,
                                   accum* __restrict__ sums) {
  for (size_t j : grid_range(columns)) {
    accum sum = 0;
    for (int row = 0; row < rows; ++row) sum += x[static_cast<size_t>(row) * columns + j];
    sums[j] = sum;
  }
}

void rmsnorm_backward(Tensor d_out, Tensor x, const real* weight, const accum* rstd, bool accumulate,
                      Tensor d_x, Statistics partials, accum* weight_gradient, cudaStream_t stream) {
  launch(rmsnorm_backward_kernel, dim3(partials.rows), stream, d_out.data, x.data, weight, rstd, accumulate,
         x.rows, x.columns, d_x.data, partials.data);
  launch(column_sums_kernel, elementwise_grid(8 * x.columns), stream, partials.data, partials.rows,
         partials.columns, weight_gradient);
}

// ---- Rotary positions -------------------------------------------------------------------------------------

void fill_rotary_table(double theta, Statistics table, cudaStream_t stream) {
  const int half = static_cast<int>(table.columns / 2);
  PinnedArray<accum> host(table.size());
  for (int64_t position = 0; position < table.rows; ++position) {
    for (int i = 0; i < half; ++i) {
      const double angle = position * std::pow(theta, -static_cast<double>(i) / half);
      host[position * table.columns + i] = static_cast<accum>(std::cos(angle));
      host[position * table.columns + half + i] = static_cast<accum>(std::sin(angle));
    }
  }
  CUDA_CHECK(cudaMemcpyAsync(table.data, host.data(), table.bytes(), cudaMemcpyHostToDevice, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

// Turns one head: the pair (i, i + half) by its angle, or by minus its angle for direction = -1.
__device__ void rotate_head(const real* in, const accum* cos_sin, int half, int direction, real* out) {
  for (int i : block_range(half)) {
    const accum c = cos_sin[i], s = direction * cos_sin[half + i], low = accum(in[i]),
                high = accum(in[half + i]);
    out[i] = real(low * c - high * s);
    out[half + i] = real(high * c + low * s);
  }
}

// One block a row.
__global__ void rotary_forward_kernel(const real* __restrict__ qkv, const int32_t* __restrict__ positions,
                                      const accum* __restrict__ table, int heads, int kv_heads, int size,
                                      real* __restrict__ q, real* __restrict__ k, real* __restrict__ v) {
  const size_t row = blockIdx.x;
  const int q_columns = heads * size, kv_columns = kv_heads * size;
  const real* joined = qkv + row * (q_columns + 2 * kv_columns);
  const accum* cos_sin = table + static_cast<size_t>(positions[row]) * size;
  for (int head = 0; head < heads; ++head) {
    rotate_head(joined + head * size, cos_sin, size / 2, 1, q + row * q_columns + head * size);
  }
  for (int head = 0; head < kv_heads; ++head) {
    rotate_head(joined + q_columns + head * size, cos_sin, size / 2, 1, k + row * kv_columns + head * size);
  }
  for (int j : block_range(kv_columns)) v[row * kv_columns + j] = joined[q_columns + kv_columns + j];
}

void rotary_forward(Tensor qkv, const int32_t* positions, Statistics table, HeadShape shape, Tensor q,
                    Tensor k, Tensor v, cudaStream_t stream) {
  launch(rotary_forward_kernel, dim3(qkv.rows), stream, qkv.data, positions, table.data, shape.heads,
         shape.kv_heads, shape.head_size, q.data, k.data, v.data);
}

// One block a row.
__global__ void rotary_backward_kernel(const real* __restrict__ d_q, const real* __restrict__ d_k,
                                       const real* __restrict__ d_v, const int32_t* __restrict__ positions,
                                       const accum* __restrict__ table, int heads, int kv_heads, int size,
                                       real* __restrict__ d_qkv) {
  const size_t row = blockIdx.x;
  const int q_columns = heads * size, kv_columns = kv_heads * size;
  real* joined = d_qkv + row * (q_columns + 2 * kv_columns);
  const accum* cos_sin = table + static_cast<size_t>(positions[row]) * size;
  for (int head = 0; head < heads; ++head) {
    rotate_head(d_q + row * q_columns + head * size, cos_sin, size / 2, -1, joined + head * size);
  }
  for (int head = 0; head < kv_heads; ++head) {
    rotate_head(d_k + row * kv_columns + head * size, cos_sin, size / 2, -1,
                joined + q_columns + head * size);
  }
  for (int j : block_range(kv_columns)) joined[q_columns + kv_columns + j] = d_v[row * kv_columns + j];
}

void rotary_backward(Tensor d_q, Tensor d_k, Tensor d_v, const int32_t* positions, Statistics table,
                     HeadShape shape, Tensor d_qkv, cudaStream_t stream) {
  launch(rotary_backward_kernel, dim3(d_qkv.rows), stream, d_q.data, d_k.data, d_v.data, positions,
         table.data, shape.heads, shape.kv_heads, shape.head_size, d_qkv.data);
}

// ---- SwiGLU -----------------------------------------------------------------------------------------------

// One block a row.
__global__ void swiglu_forward_kernel(const real* __restrict__ gate_up, int f, real* __restrict__ out) {
  const size_t row = blockIdx.x;
  const real *gates = gate_up + row * 2 * f, *ups = gates + f;
  for (int j : block_range(f)) {
    const accum gate = accum(gates[j]), sigmoid = 1 / (1 + exp(-gate));
    out[row * f + j] = real(gate * sigmoid * accum(ups[j]));
  }
}

void swiglu_forward(Tensor gate_up, Tensor out, cudaStream_t stream) {
  launch(swiglu_forward_kernel, dim3(out.rows), stream, gate_up.data, out.columns, out.data);
}

// One block a row. silu'(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g))).
__global__ void swiglu_backward_kernel(const real* __restrict__ d_out, const real* __restrict__ gate_up,
                                       int f, real* __restrict__ d_gate_up) {
  const size_t row = blockIdx.x;
  const real *gates = gate_up + row * 2 * f, *ups = gates + f;
  real *d_gates = d_gate_up + row * 2 * f, *d_ups = d_gates + f;
  for (int j : block_range(f)) {
    const accum gate = accum(gates[j]), sigmoid = 1 / (1 + exp(-gate)), d = accum(d_out[row * f + j]);
    d_gates[j] = real(d * accum(ups[j]) * sigmoid * (1 + gate * (1 - sigmoid)));
    d_ups[j] = real(d * gate * sigmoid);
  }
}

void swiglu_backward(Tensor d_out, Tensor gate_up, Tensor d_gate_up, cudaStream_t stream) {
  launch(swiglu_backward_kernel, dim3(d_out.rows), stream, d_out.data, gate_up.data, d_out.columns,
         d_gate_up.data);
}

// ---- Cross-entropy ----------------------------------------------------------------------------------------

// One block a row.
__global__ void cross_entropy_statistics_kernel(const real* __restrict__ logits,
                                                const int32_t* __restrict__ targets, int first_token,
                                                int vocabulary, accum* __restrict__ statistics) {
  const size_t row = blockIdx.x, rows = gridDim.x;
  const real* row_logits = logits + row * vocabulary;
  const accum largest = block_max_of<accum>(row_logits, vocabulary);
  accum sum = 0;
  for (int j : block_range(vocabulary)) sum += exp(accum(row_logits[j]) - largest);
  sum = block_sum(sum);
  for ([[maybe_unused]] int once : block_range(1)) {
    const int target = targets[row] - first_token;
    const bool here = targets[row] != ignored_target && 0 <= target && target < vocabulary;
    statistics[row] = largest;
    statistics[rows + row] = sum;
    statistics[2 * rows + row] = here ? accum(row_logits[target]) : accum(0);
  }
}

void cross_entropy_statistics(Tensor logits, const int32_t* targets, int first_token, Statistics statistics,
                              cudaStream_t stream) {
  launch(cross_entropy_statistics_kernel, dim3(logits.rows), stream, logits.data, targets, first_token,
         logits.columns, statistics.data);
}

__global__ void cross_entropy_rescale_kernel(const accum* __restrict__ largest, size_t rows,
                                             accum* __restrict__ statistics) {
  for (size_t row : grid_range(rows)) {
    statistics[rows + row] *= exp(statistics[row] - largest[row]);
    statistics[row] = largest[row];
  }
}

void cross_entropy_rescale(const accum* largest, Statistics statistics, cudaStream_t stream) {
  launch(cross_entropy_rescale_kernel, elementwise_grid(statistics.columns), stream, largest,
         statistics.columns, statistics.data);
}

// One block in all.
__global__ void cross_entropy_loss_kernel(const accum* __restrict__ statistics,
                                          const int32_t* __restrict__ targets, int rows, accum scale,
                                          accum* __restrict__ loss) {
  accum sum = 0;
  for (int row : block_range(rows)) {
    const accum largest = statistics[row], of_target = statistics[2 * rows + row];
    const accum term = log(statistics[rows + row]) + largest - of_target;
    sum += targets[row] == ignored_target ? accum(0) : term;
  }
  sum = block_sum(sum);
  for ([[maybe_unused]] int once : block_range(1)) loss[0] = scale * sum;
}

void cross_entropy_loss(Statistics statistics, const int32_t* targets, double scale, accum* loss,
                        cudaStream_t stream) {
  launch(cross_entropy_loss_kernel, dim3(1), stream, statistics.data, targets, statistics.columns, scale,
         loss);
}

// One block a row.
__global__ void cross_entropy_backward_kernel(real* __restrict__ logits, const int32_t* __restrict__ targets,
                                              int first_token, int vocabulary, accum scale,
                                              const accum* __restrict__ statistics) {
  const size_t row = blockIdx.x, rows = gridDim.x;
  const accum largest = statistics[row], row_scale = targets[row] == ignored_target ? accum(0) : scale;
  const accum factor = row_scale / statistics[rows + row];
  const int target = targets[row] - first_token;
  real* row_logits = logits + row * vocabulary;
  for (int j : block_range(vocabulary)) {
    row_logits[j] = real(factor * exp(accum(row_logits[j]) - largest) - (j == target ? row_scale : accum(0)));
  }
}

void cross_entropy_backward(Tensor logits, const int32_t* targets, int first_token, double scale,
                            Statistics statistics, cudaStream_t stream) {
  launch(cross_entropy_backward_kernel, dim3(logits.rows), stream, logits.data, targets, first_token,
         logits.columns, scale, statistics.data);
}

// ---- Elementwise ------------------------------------------------------------------------------------------

__global__ void residual_add_kernel(const real* x, const real* branch, size_t size, real* out) {
  for (size_t i : grid_range(size)) out[i] = real(accum(x[i]) + accum(branch[i]));
}

void residual_add(Tensor x, Tensor branch, Tensor out, cudaStream_t stream) {
  launch(residual_add_kernel, elementwise_grid(out.size()), stream, x.data, branch.data, out.size(),
         out.data);
}

__global__ void accumulate_kernel(const accum* __restrict__ term, accum* __restrict__ sum, size_t size) {
  for (size_t i : grid_range(size)) sum[i] += term[i];
}

void accumulate(const accum* term, accum* sum, size_t size, cudaStream_t stream) {
  launch(accumulate_kernel, elementwise_grid(size), stream, term, sum, size);
}

__global__ void round_to_real_kernel(const accum* __restrict__ x, real* __restrict__ out, size_t size) {
  for (size_t i : grid_range(size)) out[i] = real(x[i]);
}

void round_to_real(const accum* x, real* out, size_t size, cudaStream_t stream) {
  launch(round_to_real_kernel, elementwise_grid(size), stream, x, out, size);
}

// ---- Initialisation ---------------------------------------------------------------------------------------

// Number `index` of a sequence of normal numbers: each Philox block gives four, by two Box-Muller transforms.
// Not inlined, because a vectorised loop may round its last elements differently, and a slice of a matrix
// must have the bits of the whole.
__device__ __attribute__((noinline)) double normal_number(PhiloxKey key, uint64_t index) {
  constexpr double two_to_minus_32 = 1.0 / 4294967296.0, two_pi = 6.283185307179586;
  const PhiloxBlock bits = philox4x32(0, index / 4, key);
  const int pair = index % 4 / 2;
  const double u1 = (bits.word[2 * pair] + 0.5) * two_to_minus_32,
               u2 = bits.word[2 * pair + 1] * two_to_minus_32;
  return sqrt(-2 * log(u1)) * (index % 2 == 0 ? cos(two_pi * u2) : sin(two_pi * u2));
}

__global__ void fill_normal_kernel(real* weights, size_t first, size_t size, int64_t columns,
                                   int64_t first_row, int64_t first_column, int64_t global_columns,
                                   uint32_t key0, uint32_t key1, double standard_deviation) {
  for (size_t i : grid_range(size)) {
    const uint64_t row = first_row + (first + i) / columns, column = first_column + (first + i) % columns;
    const double normal = normal_number({{key0, key1}}, row * global_columns + column);
    weights[i] = real(static_cast<accum>(standard_deviation * normal));
  }
}

void fill_normal(real* weights, size_t first, size_t size, GlobalSlice slice, PhiloxKey key,
                 double standard_deviation, cudaStream_t stream) {
  launch(fill_normal_kernel, elementwise_grid(size), stream, weights, first, size, slice.columns,
         slice.first_row, slice.first_column, slice.global_columns, key.word[0], key.word[1],
         standard_deviation);
}

__global__ void fill_constant_kernel(real* weights, size_t size, accum value) {
  for (size_t i : grid_range(size)) weights[i] = real(value);
}

void fill_constant(real* weights, size_t size, double value, cudaStream_t stream) {
  launch(fill_constant_kernel, elementwise_grid(size), stream, weights, size, value);
}

// ---- Optimizer --------------------------------------------------------------------------------------------

// The number of blocks is the same on every device, and with it the order of the sum.
__global__ void sum_of_squares_kernel(const accum* x, size_t size, double* parts) {
  double sum = 0;
  for (size_t i : grid_range(size)) sum += static_cast<double>(x[i]) * x[i];
  sum = block_sum(sum);
  for ([[maybe_unused]] int once : block_range(1)) parts[blockIdx.x] = sum;
}

// One block in all.
__global__ void add_parts_kernel(const double* parts, int count, double* sum) {
  double total = 0;
  for (int i : block_range(count)) total += parts[i];
  total = block_sum(total);
  for ([[maybe_unused]] int once : block_range(1)) sum[0] += total;
}

void sum_of_squares(const accum* x, size_t size, double* parts, double* sum, cudaStream_t stream) {
  launch(sum_of_squares_kernel, dim3(norm_parts), stream, x, size, parts);
  launch(add_parts_kernel, dim3(1), stream, parts, norm_parts, sum);
}

__global__ void clip_factor_kernel(const double* norm_squared, double max_norm, accum* clip) {
  for ([[maybe_unused]] int once : block_range(1)) {
    const double factor = max_norm / (sqrt(norm_squared[0]) + 1e-6);
    clip[0] = static_cast<accum>(max_norm > 0 && factor < 1 ? factor : 1.0);
  }
}

void clip_factor(const double* norm_squared, double max_norm, accum* clip, cudaStream_t stream) {
  launch(clip_factor_kernel, dim3(1), stream, norm_squared, max_norm, clip);
}

// The bias corrections of AdamW are folded into step_size and inverse_correction2, the weight decay into
// `decay`; gain1 and gain2 are 1 - beta1 and 1 - beta2, subtracted in double, as a float close to 1 lacks the
// digits.
__global__ void adamw_step_kernel(accum beta1, accum beta2, accum gain1, accum gain2, accum step_size,
                                  accum inverse_correction2, accum epsilon, accum decay, real* weights,
                                  accum* master, const accum* gradients, accum* moment1, accum* moment2,
                                  const accum* clip, size_t size) {
  const accum factor = clip[0];
  for (size_t i : grid_range(size)) {
    const accum g = factor * gradients[i];
    const accum m = beta1 * moment1[i] + gain1 * g, v = beta2 * moment2[i] + gain2 * g * g;
    const accum weight = master[i] * decay - step_size * m / (sqrt(v) * inverse_correction2 + epsilon);
    moment1[i] = m;
    moment2[i] = v;
    master[i] = weight;
    weights[i] = real(weight);
  }
}

void adamw_step(const AdamW& adamw, real* weights, accum* master, const accum* gradients, accum* moment1,
                accum* moment2, const accum* clip, size_t size, cudaStream_t stream) {
  const double correction1 = 1 - std::pow(adamw.beta1, adamw.step),
               correction2 = 1 - std::pow(adamw.beta2, adamw.step);
  launch(adamw_step_kernel, elementwise_grid(size), stream, adamw.beta1, adamw.beta2, 1 - adamw.beta1,
         1 - adamw.beta2, adamw.lr / correction1, 1 / std::sqrt(correction2), adamw.epsilon,
         1 - adamw.lr * adamw.weight_decay, weights, master, gradients, moment1, moment2, clip, size);
}

__global__ void sgd_step_kernel(accum lr, accum weight_decay, real* weights, accum* master,
                                const accum* gradients, const accum* clip, size_t size) {
  const accum factor = clip[0];
  for (size_t i : grid_range(size)) {
    const accum weight = master[i] - lr * (factor * gradients[i] + weight_decay * master[i]);
    master[i] = weight;
    weights[i] = real(weight);
  }
}

void sgd_step(double lr, double weight_decay, real* weights, accum* master, const accum* gradients,
              const accum* clip, size_t size, cudaStream_t stream) {
  launch(sgd_step_kernel, elementwise_grid(size), stream, lr, weight_decay, weights, master, gradients, clip,
         size);
}

}  // namespace pentatron
