#include <cmath>

#include "kernels/merge.h"
#include "kernels/pack.h"

namespace pentatron {

// One block a row of tokens. With w = sigmoid(block_lse - lse), the share of this block's keys,
//   out -= w (out - block_out),   lse = log(exp(lse) + exp(block_lse)).
template <int width>
__global__ void merge_kernel(In<accum> block_out /*[rows, heads*size]*/,
                             In<accum> block_lse /*[rows, heads]*/, int queries, int stride, int heads,
                             int size, Out<accum> out /*as block_out*/, Out<accum> lse /*as block_lse*/) {
  const size_t row = static_cast<size_t>(blockIdx.x / queries) * stride + blockIdx.x % queries;
  const int lanes = lanes_for(size / width);
  for (int head : warp_range(heads, lanes)) {
    const size_t at = row * heads + head;
    const accum before = lse[at], added = block_lse[at];
    const accum share = 1 / (1 + exp(before - added));
    for (int j : lane_range(size, width, lanes)) {
      const Pack<width> block = load<width>(block_out + at * size + j);
      Pack<width> sum = load<width>(out + at * size + j);
      for (int e = 0; e < width; ++e) sum[e] -= share * (sum[e] - block[e]);
      store(out + at * size + j, sum);
    }
    lane_barrier(lanes);                                                   // all have read the lse
    lse[at] = std::max(before, added) + log1p(exp(-abs(before - added)));  // each lane writes the same
  }
}

void attention_merge(const AttentionBlock& block, AccumTensor block_out, AccumTensor block_lse,
                     AccumTensor out, AccumTensor lse, cudaStream_t stream) {
  const int width = width_for(block.head.head_size, block_out.data, out.data);
  launch(width == 1 ? merge_kernel<1> : merge_kernel<pack_width>,
         block_a_row(int64_t{block.batch} * block.queries, out.columns / width),
         moves(3 * accum_bytes * block.batch * block.queries * out.columns), stream, block_out.data,
         block_lse.data, block.queries, block.stride, block.head.heads, block.head.head_size, out.data,
         lse.data);
}

template <int width>
__global__ void round_to_real_kernel(In<accum> x, Out<real> out /*both [size]*/, size_t size) {
  for (size_t i : grid_range(size, width)) store(out + i, load<width>(x + i));
}

void round_to_real(const accum* x, real* out, size_t size, cudaStream_t stream) {
  const int width = width_for(size, x, out);
  launch(width == 1 ? round_to_real_kernel<1> : round_to_real_kernel<pack_width>, elementwise_grid(size),
         moves((accum_bytes + real_bytes) * size), stream, x, out, size);
}

}  // namespace pentatron
