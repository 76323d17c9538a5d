#include <cmath>

#include "kernels/kernels.h"
#include "kernels/pack.h"

// Each launch says what the kernel has to move (device/cost.h). What a block reads a second time comes from
// its cache. A kernel whose `row` is blockIdx.x has one block a row.

namespace pentatron {

// ---- Embedding --------------------------------------------------------------------------------------------

template <int width>
__global__ void embedding_forward_kernel(In<real> table, In<int32_t> tokens, int first_token, int vocabulary,
                                         int d, Out<real> out) {
  const size_t row = blockIdx.x;
  const int token = tokens[row] - first_token;
  const bool here = 0 <= token && token < vocabulary;
  const real* const of_token = table + (here ? static_cast<size_t>(token) * d : 0);
  for (int j : block_range(d, width))
    store(out + row * d + j, here ? load<width>(of_token + j) : Pack<width>{});
}

void embedding_forward(Tensor table, const int32_t* tokens, int first_token, Tensor out,
                       cudaStream_t stream) {
  const int width = width_for(out.columns, table.data, out.data);
  launch(width == 1 ? embedding_forward_kernel<1> : embedding_forward_kernel<pack_width>,
         block_a_row(out.rows, out.columns / width), moves(2 * real_bytes * out.size()), stream, table.data,
         tokens, first_token, table.rows, out.columns, out.data);
}

// One block a place in `by_token`; the first place of each token adds up all the rows of that token.
template <int width>
__global__ void embedding_backward_kernel(In<real> d_out, In<int32_t> tokens, In<int32_t> by_token, int rows,
                                          int first_token, int vocabulary, int columns, Out<accum> gradient) {
  const int place = blockIdx.x;
  const int global_token = tokens[by_token[place]], token = global_token - first_token;
  if (token < 0 || token >= vocabulary) return;
  if (place > 0 && tokens[by_token[place - 1]] == global_token) return;
  int end = place + 1;
  while (end < rows && tokens[by_token[end]] == global_token) ++end;
  accum* const of_token = gradient + static_cast<size_t>(token) * columns;
  for (int j : block_range(columns, width)) {
    Pack<width> sum = load<width>(of_token + j);
#pragma unroll 4
    for (int i = place; i < end; ++i)
      sum += load<width>(d_out + static_cast<size_t>(by_token[i]) * columns + j);
    store(of_token + j, sum);
  }
}

void embedding_backward(Tensor d_out, const int32_t* tokens, const int32_t* by_token, int first_token,
                        Gradient gradient, cudaStream_t stream) {
  const AccumTensor sum = gradient.sum;
  // Most tokens do not occur, and the kernel writes only those that do.
  if (!gradient.add) CUDA_CHECK(cudaMemsetAsync(sum.data, 0, sum.bytes(), stream));
  const int width = width_for(d_out.columns, d_out.data, sum.data);
  launch(width == 1 ? embedding_backward_kernel<1> : embedding_backward_kernel<pack_width>,
         block_a_row(d_out.rows, d_out.columns / width), moves((real_bytes + 2 * accum_bytes) * d_out.size()),
         stream, d_out.data, tokens, by_token, d_out.rows, first_token, sum.rows, d_out.columns, sum.data);
}

// ---- RMSNorm ----------------------------------------------------------------------------------------------

// Reads before and branch, writes x and out; without a branch it reads x and writes out.
template <int width>
__global__ void rmsnorm_forward_kernel(const real* before, const real* branch, In<real> weight, accum epsilon,
                                       int d, real* x, Out<real> out, Out<accum> rstd) {
  const size_t row = blockIdx.x, start = row * d;
  accum sum = 0;
  for (int j : block_range(d, width)) {
    Pack<width> stream = load<width>(before + start + j);
    if (branch) {
      const Pack<width> added = load<width>(branch + start + j);
      for (int e = 0; e < width; ++e) stream[e] = accum(real(stream[e] + added[e]));  // what others will read
      store(x + start + j, stream);
    }
    for (int e = 0; e < width; ++e) sum += stream[e] * stream[e];
  }
  const accum scale = 1 / sqrt(block_sum(sum) / d + epsilon);
  for (int j : block_range(d, width)) {  // a thread reads the elements that it has written
    const Pack<width> stream = load<width>(x + start + j), weights = load<width>(weight + j);
    Pack<width> normed;
    for (int e = 0; e < width; ++e) normed[e] = stream[e] * scale * weights[e];
    store(out + start + j, normed);
  }
  if (is_first_thread()) rstd[row] = scale;
}

void rmsnorm_forward(Tensor before, Tensor branch, const real* weight, double epsilon, Tensor x, Tensor out,
                     accum* rstd, cudaStream_t stream) {
  const int width = width_for(x.columns, before.data, branch.data, weight, x.data, out.data);
  launch(width == 1 ? rmsnorm_forward_kernel<1> : rmsnorm_forward_kernel<pack_width>,
         block_a_row(x.rows, x.columns / width), moves((branch.data ? 4 : 2) * real_bytes * x.size()), stream,
         before.data, branch.data, weight, epsilon, x.columns, x.data, out.data, rstd);
}

int64_t rmsnorm_bands(int64_t rows) { return std::min<int64_t>(rows, 256); }

// One block a band of rows, one warp a row. With n = x * rstd:
//   d_x = rstd * (d_out * weight - n * mean(d_out * weight * n)),   d_weight = sum over rows of d_out * n.
// Reads d_out and x, and d_x where it adds to it; writes d_x. What it reads twice is then in a cache.
template <int width>
__global__ void rmsnorm_backward_kernel(In<real> d_out, In<real> x, In<real> weight, In<accum> rstd, bool add,
                                        int rows, int d, Out<real> d_x, Out<accum> partials) {
  const int rows_a_band = (rows + gridDim.x - 1) / gridDim.x;
  const int first = blockIdx.x * rows_a_band, count = std::min(rows - first, rows_a_band);
  const StridedRange<int> rows_of_warp = warp_range(count);
  accum* const of_warps = block_memory<accum>();  // [warps, d]; a lane has the same columns of every row
  accum* const of_weight = of_warps + rows_of_warp.first * d;
  for (int j : lane_range(d, width)) store(of_weight + j, Pack<width>{});
  for (int i : rows_of_warp) {
    const size_t start = static_cast<size_t>(first + i) * d;
    const accum scale = rstd[first + i];
    accum dot = 0;
#pragma unroll 4  // as many loads are under way
    for (int j : lane_range(d, width)) {
      const Pack<width> incoming = load<width>(d_out + start + j), weights = load<width>(weight + j),
                        in = load<width>(x + start + j);
      for (int e = 0; e < width; ++e) dot += incoming[e] * weights[e] * in[e];
    }
    const accum mean = lane_sum(dot) * scale / d;
#pragma unroll 2
    for (int j : lane_range(d, width)) {
      const Pack<width> incoming = load<width>(d_out + start + j), weights = load<width>(weight + j),
                        in = load<width>(x + start + j);
      Pack<width> sum = {}, added = load<width>(of_weight + j);
      if (add) sum = load<width>(d_x + start + j);
      for (int e = 0; e < width; ++e) {
        const accum normed = in[e] * scale;
        sum[e] += scale * (incoming[e] * weights[e] - normed * mean);
        added[e] += incoming[e] * normed;
      }
      store(d_x + start + j, sum);
      store(of_weight + j, added);
    }
  }
  __syncthreads();
  for (int j : block_range(d, width)) {
    Pack<width> sum = {};
    for (int warp = 0; warp < rows_of_warp.stride; ++warp) sum += load<width>(of_warps + warp * d + j);
    store(partials + static_cast<size_t>(blockIdx.x) * d + j, sum);
  }
}

// One block for every 32 columns. Eight warps share out the rows, and their sums meet in block memory.
constexpr int column_warps = threads_per_block / 32;
__global__ void column_sums_kernel(In<accum> x, int rows, int columns, Out<accum> sums) {
  accum* const of_warp = block_memory<accum>();  // [column_warps, 32]
  const int first = 32 * blockIdx.x, count = std::min(32, columns - first);
  for (int warp : warp_range(column_warps)) {
    for (int j : lane_range(count)) {
      accum sum = 0;
      for (int row = warp; row < rows; row += column_warps) {
        sum += x[static_cast<size_t>(row) * columns + first + j];
      }
      of_warp[warp * 32 + j] = sum;
    }
  }
  __syncthreads();
  for (int j : block_range(count)) {
    accum sum = 0;
    for (int warp = 0; warp < column_warps; ++warp) sum += of_warp[warp * 32 + j];
    sums[first + j] = sum;
  }
}

void rmsnorm_backward(Tensor d_out, Tensor x, const real* weight, const accum* rstd, bool accumulate,
                      Tensor d_x, AccumTensor partials, accum* weight_gradient, cudaStream_t stream) {
  const int width = width_for(x.columns, d_out.data, x.data, weight, d_x.data, partials.data);
  // A warp for each of 8 rows, or fewer where their sums do not fit: two blocks share 228 KiB of an H100.
  constexpr size_t memory_of_block = 100 << 10;
  const size_t row_of_sums = x.columns * sizeof(accum);
  const auto warps = static_cast<unsigned>(std::clamp<size_t>(memory_of_block / row_of_sums, 1, 8));
  launch_with_memory(width == 1 ? rmsnorm_backward_kernel<1> : rmsnorm_backward_kernel<pack_width>,
                     Grid(dim3(partials.rows), 32 * warps), warps * row_of_sums,
                     moves((accumulate ? 4 : 3) * real_bytes * x.size() + partials.bytes()), stream,
                     d_out.data, x.data, weight, rstd, accumulate, x.rows, x.columns, d_x.data,
                     partials.data);
  launch_with_memory(column_sums_kernel, dim3((x.columns + 31) / 32), column_warps * 32 * sizeof(accum),
                     moves(partials.bytes()), stream, partials.data, partials.rows, partials.columns,
                     weight_gradient);
}

// ---- Rotary positions -------------------------------------------------------------------------------------

std::vector<double> rotary_frequencies(double theta, int head_size) {
  const int half = head_size / 2;
  std::vector<double> frequencies(half);
  for (int i = 0; i < half; ++i) frequencies[i] = std::pow(theta, -static_cast<double>(i) / half);
  return frequencies;
}

void fill_rotary_table(const std::vector<double>& frequencies, AccumTensor table, cudaStream_t stream) {
  const int half = static_cast<int>(table.columns / 2);
  PinnedArray<accum> host(table.size());
  const int64_t positions = is_dry_run() ? 0 : table.rows;  // a dry run turns nothing
  for (int64_t position = 0; position < positions; ++position) {
    for (int i = 0; i < half; ++i) {
      const double angle = position * frequencies[i];
      host[position * table.columns + i] = static_cast<accum>(std::cos(angle));
      host[position * table.columns + half + i] = static_cast<accum>(std::sin(angle));
    }
  }
  CUDA_CHECK(cudaMemcpyAsync(table.data, host.data(), table.bytes(), cudaMemcpyHostToDevice, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

// Turns a head: the pair (i, i + half) by direction times its angle. A head is short: a warp has several.
template <int width>
__device__ void rotate_head(const real* from /*[2*half]*/, const accum* cos_sin, int half, int direction,
                            int lanes, real* to) {
  for (int i : lane_range(half, width, lanes)) {
    const Pack<width> cos = load<width>(cos_sin + i), sin = load<width>(cos_sin + half + i),
                      low = load<width>(from + i), high = load<width>(from + half + i);
    Pack<width> turned_low, turned_high;
    for (int e = 0; e < width; ++e) {
      const accum s = direction * sin[e];
      turned_low[e] = low[e] * cos[e] - high[e] * s;
      turned_high[e] = high[e] * cos[e] + low[e] * s;
    }
    store(to + i, turned_low);
    store(to + half + i, turned_high);
  }
}

template <int width>
__device__ void copy_row(const real* from, int columns, real* to) {
  for (int j : block_range(columns, width)) store(to + j, load<width>(from + j));
}

// The split is where q and k are turned.
template <int width>
__global__ void rotary_forward_kernel(In<real> qkv, In<int32_t> positions, In<accum> table, int heads,
                                      int kv_heads, int size, Out<real> q, Out<real> k, Out<real> v) {
  const size_t row = blockIdx.x;
  const int turned = heads + kv_heads, lanes = lanes_for(size / 2 / width);
  const real* joined = qkv + row * (turned + kv_heads) * size;
  const accum* cos_sin = table + static_cast<size_t>(positions[row]) * size;
  for (int head : warp_range(turned, lanes)) {
    real* const to =
        head < heads ? q + (row * heads + head) * size : k + (row * kv_heads + head - heads) * size;
    rotate_head<width>(joined + head * size, cos_sin, size / 2, 1, lanes, to);
  }
  copy_row<width>(joined + turned * size, kv_heads * size, v + row * kv_heads * size);
}

void rotary_forward(Tensor qkv, const int32_t* positions, AccumTensor table, HeadShape shape, Tensor q,
                    Tensor k, Tensor v, cudaStream_t stream) {
  const int width = width_for(shape.head_size / 2, qkv.data, table.data, q.data, k.data, v.data);
  launch(width == 1 ? rotary_forward_kernel<1> : rotary_forward_kernel<pack_width>,
         block_a_row(qkv.rows, qkv.columns / width / 2), moves(2 * real_bytes * qkv.size()), stream, qkv.data,
         positions, table.data, shape.heads, shape.kv_heads, shape.head_size, q.data, k.data, v.data);
}

template <int width>
__global__ void rotary_backward_kernel(In<real> d_q, In<real> d_k, In<real> d_v, In<int32_t> positions,
                                       In<accum> table, int heads, int kv_heads, int size, Out<real> d_qkv) {
  const size_t row = blockIdx.x;
  const int turned = heads + kv_heads, lanes = lanes_for(size / 2 / width);
  real* joined = d_qkv + row * (turned + kv_heads) * size;
  const accum* cos_sin = table + static_cast<size_t>(positions[row]) * size;
  for (int head : warp_range(turned, lanes)) {
    const real* const from =
        head < heads ? d_q + (row * heads + head) * size : d_k + (row * kv_heads + head - heads) * size;
    rotate_head<width>(from, cos_sin, size / 2, -1, lanes, joined + head * size);
  }
  copy_row<width>(d_v + row * kv_heads * size, kv_heads * size, joined + turned * size);
}

void rotary_backward(Tensor d_q, Tensor d_k, Tensor d_v, const int32_t* positions, AccumTensor table,
                     HeadShape shape, Tensor d_qkv, cudaStream_t stream) {
  const int width = width_for(shape.head_size / 2, d_q.data, d_k.data, d_v.data, table.data, d_qkv.data);
  launch(width == 1 ? rotary_backward_kernel<1> : rotary_backward_kernel<pack_width>,
         block_a_row(d_qkv.rows, d_qkv.columns / width / 2), moves(2 * real_bytes * d_qkv.size()), stream,
         d_q.data, d_k.data, d_v.data, positions, table.data, shape.heads, shape.kv_heads, shape.head_size,
         d_qkv.data);
}

// ---- SwiGLU -----------------------------------------------------------------------------------------------

__device__ inline accum times_sigmoid(accum x, accum gate) { return divide_fast(x, 1 + exp_fast(-gate)); }

template <int width>
__global__ void swiglu_forward_kernel(In<real> gate_up, int f, Out<real> out) {
  const size_t row = blockIdx.x;
  const real *gates = gate_up + row * 2 * f, *ups = gates + f;
  for (int j : block_range(f, width)) {
    const Pack<width> gate = load<width>(gates + j), up = load<width>(ups + j);
    Pack<width> product;
    for (int e = 0; e < width; ++e) product[e] = times_sigmoid(gate[e], gate[e]) * up[e];
    store(out + row * f + j, product);
  }
}

void swiglu_forward(Tensor gate_up, Tensor out, cudaStream_t stream) {
  const int width = width_for(out.columns, gate_up.data, out.data);
  launch(width == 1 ? swiglu_forward_kernel<1> : swiglu_forward_kernel<pack_width>,
         block_a_row(out.rows, out.columns / width), moves(3 * real_bytes * out.size()), stream, gate_up.data,
         out.columns, out.data);
}

// silu'(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g))).
template <int width>
__global__ void swiglu_backward_kernel(In<real> d_out, In<real> gate_up, int f, Out<real> d_gate_up) {
  const size_t row = blockIdx.x;
  const real *gates = gate_up + row * 2 * f, *ups = gates + f;
  real *d_gates = d_gate_up + row * 2 * f, *d_ups = d_gates + f;
  for (int j : block_range(f, width)) {
    const Pack<width> gate = load<width>(gates + j), up = load<width>(ups + j),
                      d = load<width>(d_out + row * f + j);
    Pack<width> d_gate, d_up;
    for (int e = 0; e < width; ++e) {
      const accum sigmoid = times_sigmoid(1, gate[e]);
      d_gate[e] = d[e] * up[e] * sigmoid * (1 + gate[e] * (1 - sigmoid));
      d_up[e] = d[e] * gate[e] * sigmoid;
    }
    store(d_gates + j, d_gate);
    store(d_ups + j, d_up);
  }
}

void swiglu_backward(Tensor d_out, Tensor gate_up, Tensor d_gate_up, cudaStream_t stream) {
  const int width = width_for(d_out.columns, d_out.data, gate_up.data, d_gate_up.data);
  launch(width == 1 ? swiglu_backward_kernel<1> : swiglu_backward_kernel<pack_width>,
         block_a_row(d_out.rows, d_out.columns / width), moves(5 * real_bytes * d_out.size()), stream,
         d_out.data, gate_up.data, d_out.columns, d_gate_up.data);
}

// ---- Cross-entropy ----------------------------------------------------------------------------------------

// A block goes through the logits in chunks that its cache holds, so that memory is read once,
// for the largest logit and for the sum: when a chunk has a larger one, the sum so far is scaled down (online
// softmax; Milakov and Gimelshein, 2018).
template <int width>
__global__ void cross_entropy_statistics_kernel(In<real> logits, In<int32_t> targets, int first_token,
                                                int vocabulary, Out<accum> statistics) {
  const size_t row = blockIdx.x, rows = gridDim.x;
  const real* row_logits = logits + row * vocabulary;
  constexpr int logits_a_chunk = 8192;
  accum largest = -INFINITY, sum = 0;  // of a thread's own logits, relative to the block's largest
  for (int first = 0; first < vocabulary; first += logits_a_chunk) {
    const int count = std::min(logits_a_chunk, vocabulary - first);
    const accum before = largest;
    largest = std::max(before, block_max_of<width>(row_logits + first, count));
    sum *= exp(before - largest);  // 0 at first
    for (int j : block_range(count, width)) {
      const Pack<width> logit = load<width>(row_logits + first + j);
      for (int e = 0; e < width; ++e) sum += exp_fast(logit[e] - largest);
    }
  }
  sum = block_sum(sum);
  if (is_first_thread()) {
    const int target = targets[row] - first_token;
    const bool here = targets[row] != ignored_target && 0 <= target && target < vocabulary;
    statistics[row] = largest;
    statistics[rows + row] = sum;
    statistics[2 * rows + row] = here ? accum(row_logits[target]) : accum(0);
  }
}

void cross_entropy_statistics(Tensor logits, const int32_t* targets, int first_token, AccumTensor statistics,
                              cudaStream_t stream) {
  const int width = width_for(logits.columns, logits.data);
  launch(width == 1 ? cross_entropy_statistics_kernel<1> : cross_entropy_statistics_kernel<pack_width>,
         block_a_row(logits.rows, logits.columns / width), moves(logits.bytes()), stream, logits.data,
         targets, first_token, logits.columns, statistics.data);
}

__global__ void cross_entropy_rescale_kernel(In<accum> largest, size_t rows, Out<accum> statistics) {
  for (size_t row : grid_range(rows)) {
    statistics[rows + row] *= exp(statistics[row] - largest[row]);
    statistics[row] = largest[row];
  }
}

void cross_entropy_rescale(const accum* largest, AccumTensor statistics, cudaStream_t stream) {
  launch(cross_entropy_rescale_kernel, elementwise_grid(statistics.columns),
         moves(5 * accum_bytes * statistics.columns), stream, largest, statistics.columns, statistics.data);
}

// One block in all.
__global__ void cross_entropy_loss_kernel(In<accum> statistics, In<int32_t> targets, int rows, accum scale,
                                          Out<accum> loss) {
  accum sum = 0;
  for (int row : block_range(rows)) {
    const accum largest = statistics[row], of_target = statistics[2 * rows + row];
    const accum term = log(statistics[rows + row]) + largest - of_target;
    sum += targets[row] == ignored_target ? accum(0) : term;
  }
  sum = block_sum(sum);
  if (is_first_thread()) loss[0] = scale * sum;
}

void cross_entropy_loss(AccumTensor statistics, const int32_t* targets, double scale, accum* loss,
                        cudaStream_t stream) {
  launch(cross_entropy_loss_kernel, dim3(1), little, stream, statistics.data, targets, statistics.columns,
         scale, loss);
}

// In place: a logit is read once more, and its gradient takes its place.
template <int width>
__global__ void cross_entropy_backward_kernel(Out<real> logits, In<int32_t> targets, int first_token,
                                              int vocabulary, accum scale, const LossScale* loss_scale,
                                              In<accum> statistics) {
  const size_t row = blockIdx.x, rows = gridDim.x;
  if (loss_scale != nullptr) scale *= loss_scale->factor;
  const accum largest = statistics[row], row_scale = targets[row] == ignored_target ? accum(0) : scale;
  const accum factor = row_scale / statistics[rows + row];
  const int target = targets[row] - first_token;
  real* row_logits = logits + row * vocabulary;
  for (int j : block_range(vocabulary, width)) {
    Pack<width> logit = load<width>(row_logits + j);
    for (int e = 0; e < width; ++e) {
      logit[e] = factor * exp_fast(logit[e] - largest) - (j + e == target ? row_scale : accum(0));
    }
    store(row_logits + j, logit);
  }
}

void cross_entropy_backward(Tensor logits, const int32_t* targets, int first_token, double scale,
                            const LossScale* loss_scale, AccumTensor statistics, cudaStream_t stream) {
  const int width = width_for(logits.columns, logits.data);
  launch(width == 1 ? cross_entropy_backward_kernel<1> : cross_entropy_backward_kernel<pack_width>,
         block_a_row(logits.rows, logits.columns / width), moves(2 * real_bytes * logits.size()), stream,
         logits.data, targets, first_token, logits.columns, scale, loss_scale, statistics.data);
}

// ---- Elementwise ------------------------------------------------------------------------------------------

template <int width>
__global__ void residual_add_kernel(const real* x, const real* branch, size_t size, real* out) {
  for (size_t i : grid_range(size, width)) {
    Pack<width> sum = load<width>(x + i);
    sum += load<width>(branch + i);
    store(out + i, sum);
  }
}

void residual_add(Tensor x, Tensor branch, Tensor out, cudaStream_t stream) {
  const int width = width_for(out.size(), x.data, branch.data, out.data);
  launch(width == 1 ? residual_add_kernel<1> : residual_add_kernel<pack_width>, elementwise_grid(out.size()),
         moves(3 * real_bytes * out.size()), stream, x.data, branch.data, out.size(), out.data);
}

template <int width>
__global__ void accumulate_kernel(In<accum> term, Out<accum> sum, size_t size) {
  for (size_t i : grid_range(size, width)) {
    Pack<width> total = load<width>(sum + i);
    total += load<width>(term + i);
    store(sum + i, total);
  }
}

void accumulate(const accum* term, accum* sum, size_t size, cudaStream_t stream) {
  const int width = width_for(size, term, sum);
  launch(width == 1 ? accumulate_kernel<1> : accumulate_kernel<pack_width>, elementwise_grid(size),
         moves(3 * accum_bytes * size), stream, term, sum, size);
}

void accumulate(AccumTensor term, Gradient gradient, cudaStream_t stream) {
  const AccumTensor sum = gradient.sum;
  if (gradient.add) return accumulate(term.data, sum.data, sum.size(), stream);
  CUDA_CHECK(cudaMemcpyAsync(sum.data, term.data, sum.bytes(), cudaMemcpyDeviceToDevice, stream));
}

template <int width>
__global__ void round_to_real_kernel(In<accum> x, Out<real> out, size_t size) {
  for (size_t i : grid_range(size, width)) store(out + i, load<width>(x + i));
}

void round_to_real(const accum* x, real* out, size_t size, cudaStream_t stream) {
  const int width = width_for(size, x, out);
  launch(width == 1 ? round_to_real_kernel<1> : round_to_real_kernel<pack_width>, elementwise_grid(size),
         moves((accum_bytes + real_bytes) * size), stream, x, out, size);
}

// Element j of the row lies in part j / part_columns, and each part has `rows` rows.
template <int width, class T>
__global__ void split_columns_kernel(In<T> x, int64_t rows, int columns, int part_columns, Out<T> packed) {
  const int64_t row = blockIdx.x;
  for (int j : block_range(columns, width)) {
    const int64_t part = j / part_columns;
    store(packed + (part * rows + row) * part_columns + j % part_columns, load<width>(x + row * columns + j));
  }
}

template <int width>
__global__ void join_columns_kernel(In<real> packed, int64_t rows, int columns, int part_columns,
                                    Out<real> x) {
  const int64_t row = blockIdx.x;
  for (int j : block_range(columns, width)) {
    const int64_t part = j / part_columns;
    store(x + row * columns + j, load<width>(packed + (part * rows + row) * part_columns + j % part_columns));
  }
}

template <class T>
void split_columns(Matrix<T> x, int parts, T* packed, cudaStream_t stream) {
  const int columns = static_cast<int>(x.columns), width = width_for(columns / parts, x.data, packed);
  launch(width == 1 ? split_columns_kernel<1, T> : split_columns_kernel<pack_width, T>,
         block_a_row(x.rows, columns / width), moves(2 * x.bytes()), stream, x.data, x.rows, columns,
         columns / parts, packed);
}

void join_columns(const real* packed, int parts, Tensor x, cudaStream_t stream) {
  const int columns = static_cast<int>(x.columns), width = width_for(columns / parts, x.data, packed);
  launch(width == 1 ? join_columns_kernel<1> : join_columns_kernel<pack_width>,
         block_a_row(x.rows, columns / width), moves(2 * x.bytes()), stream, packed, x.rows, columns,
         columns / parts, x.data);
}

template void split_columns(Tensor, int, real*, cudaStream_t);
#if PRECISION == 16
template void split_columns(AccumTensor, int, accum*, cudaStream_t);
#endif

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
  launch(fill_normal_kernel, elementwise_grid(size), moves(real_bytes * size), stream, weights, first, size,
         slice.columns, slice.first_row, slice.first_column, slice.global_columns, key.word[0], key.word[1],
         standard_deviation);
}

__global__ void fill_constant_kernel(real* weights, size_t size, accum value) {
  for (size_t i : grid_range(size)) weights[i] = real(value);
}

void fill_constant(real* weights, size_t size, double value, cudaStream_t stream) {
  launch(fill_constant_kernel, elementwise_grid(size), moves(real_bytes * size), stream, weights, size,
         value);
}

// ---- Optimizer --------------------------------------------------------------------------------------------

// The number of blocks is the same on every device, and with it the order of the sum.
template <int width>
__global__ void sum_of_squares_kernel(const accum* x, size_t size, double* parts) {
  double sum = 0;
  for (size_t i : grid_range(size, width)) {
    const Pack<width> pack = load<width>(x + i);
    for (int e = 0; e < width; ++e) sum += static_cast<double>(pack[e]) * pack[e];
  }
  sum = block_sum(sum);
  if (is_first_thread()) parts[blockIdx.x] = sum;
}

// One block in all.
__global__ void add_parts_kernel(const double* parts, int count, double* sum) {
  double total = 0;
  for (int i : block_range(count)) total += parts[i];
  total = block_sum(total);
  if (is_first_thread()) sum[0] += total;
}

void sum_of_squares(const accum* x, size_t size, double* parts, double* sum, cudaStream_t stream) {
  launch(width_for(size, x) == 1 ? sum_of_squares_kernel<1> : sum_of_squares_kernel<pack_width>,
         dim3(norm_parts), moves(accum_bytes * size), stream, x, size, parts);
  launch(add_parts_kernel, dim3(1), little, stream, parts, norm_parts, sum);
}

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

__global__ void step_factors_kernel(double* norm_squared, double max_norm, double lr, double beta1,
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
  launch(step_factors_kernel, dim3(1), little, stream, norm_squared, max_norm, adamw.lr, adamw.beta1,
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
                                  Out<accum> moment2, const StepFactors* factors, size_t size) {
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

void adamw_step(const AdamW& adamw, real* weights, accum* master, const accum* gradients, accum* moment1,
                accum* moment2, const StepFactors* factors, size_t size, cudaStream_t stream) {
  const int width = width_for(size, weights, master, gradients, moment1, moment2);
  launch(width == 1 ? adamw_step_kernel<1> : adamw_step_kernel<pack_width>, elementwise_grid(size),
         moves(adamw_bytes * size), stream, adamw.beta1, adamw.beta2, 1 - adamw.beta1, 1 - adamw.beta2,
         1 - adamw.lr * adamw.weight_decay, weights, master, gradients, moment1, moment2, factors, size);
}

template <int width>
__global__ void sgd_step_kernel(accum lr, accum weight_decay, real* weights, accum* master,
                                In<accum> gradients, const StepFactors* factors, size_t size) {
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

__global__ void sign_step_kernel(accum rate, double target, real* weights, accum* master, In<accum> sums,
                                 const StepFactors* factors, size_t size) {
  if (factors->gradient < 0) return;
  for (size_t i : grid_range(size)) {
    const double missing = target - sums[i];
    master[i] += missing > 0 ? rate : missing < 0 ? -rate : accum(0);
    weights[i] = real(master[i]);
  }
}

void sign_step(double rate, double target, real* weights, accum* master, const accum* sums,
               const StepFactors* factors, size_t size, cudaStream_t stream) {
  launch(sign_step_kernel, elementwise_grid(size), moves(sign_bytes * size), stream, rate, target, weights,
         master, sums, factors, size);
}

}  // namespace pentatron
