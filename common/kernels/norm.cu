#include <algorithm>

#include "kernels/norm.h"
#include "kernels/pack.h"

namespace pentatron {

// Reads before and branch, writes x and out; without a branch it reads x and writes out.
template <int width>
__global__ void rmsnorm_forward_kernel(const real* before /*[rows, d]*/,
                                       const real* branch /*[rows, d], or null*/, In<real> weight /*[d]*/,
                                       accum epsilon, int d, real* x /*[rows, d]*/,
                                       Out<real> out /*[rows, d]*/, Out<accum> rstd /*[rows]*/) {
  const size_t row = blockIdx.x, start = row * d;
  accum sum = 0;
  for (int j : block_range(d, width)) {
    Pack<width> value = load<width>(before + start + j);
    if (branch) {
      const Pack<width> added = load<width>(branch + start + j);
      for (int e = 0; e < width; ++e) value[e] = accum(real(value[e] + added[e]));  // what others will read
      store(x + start + j, value);
    }
    for (int e = 0; e < width; ++e) sum += value[e] * value[e];
  }
  const accum scale = 1 / sqrt(block_sum(sum) / d + epsilon);
  for (int j : block_range(d, width)) {  // a thread reads the elements that it has written
    const Pack<width> value = load<width>(x + start + j), weights = load<width>(weight + j);
    Pack<width> normed;
    for (int e = 0; e < width; ++e) normed[e] = value[e] * scale * weights[e];
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

// One block a band of rows, one warp a row. With n = x * rstd:
//   d_x = rstd * (d_out * weight - n * mean(d_out * weight * n)),   d_weight = sum over rows of d_out * n.
// Reads d_out and x, and d_x where it adds to it; writes d_x. What it reads twice is then in a cache. Two
// blocks share a multiprocessor. Were nvcc not told so, a thread would get too few registers for its loads.
template <int width>
__global__ void __launch_bounds__(threads_per_block, 2)
    rmsnorm_backward_kernel(In<real> d_out /*[rows, d]*/, In<real> x /*[rows, d]*/, In<real> weight /*[d]*/,
                            In<accum> rstd /*[rows]*/, bool add, int rows, int d, Out<real> d_x /*[rows, d]*/,
                            Out<accum> partials /*[bands, d]*/) {
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
__global__ void column_sums_kernel(In<accum> x /*[rows, columns]*/, int rows, int columns,
                                   Out<accum> sums /*[columns]*/) {
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
  const size_t memory_of_block = std::min<size_t>(100 << 10, largest_block_memory());
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

}  // namespace pentatron
