#include <cmath>

#include "kernels/pack.h"
#include "kernels/rotary.h"

namespace pentatron {

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
__global__ void rotary_forward_kernel(In<real> qkv /*[rows, q | k | v]*/, In<int32_t> positions /*[rows]*/,
                                      In<accum> table /*[positions, size]*/, int heads, int kv_heads,
                                      int size, Out<real> q /*[rows, heads*size]*/,
                                      Out<real> k /*[rows, kv_heads*size]*/, Out<real> v /*as k*/) {
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

// A block a row: turns each head of d_q and d_k back, and copies d_v, to their places in d_qkv.
template <int width>
__global__ void rotary_backward_kernel(In<real> d_q /*[rows, heads*size]*/,
                                       In<real> d_k /*[rows, kv_heads*size]*/, In<real> d_v /*as d_k*/,
                                       In<int32_t> positions /*[rows]*/,
                                       In<accum> table /*[positions, size]*/, int heads, int kv_heads,
                                       int size, Out<real> d_qkv /*[rows, q | k | v]*/) {
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

}  // namespace pentatron
