// Rotary positions (Su et al., 2021; rotate-half as in Llama).
#pragma once

#include <vector>

#include "device/tensor.h"

namespace pentatron {

struct HeadShape {
  int heads, kv_heads, head_size;  // this rank's
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

}  // namespace pentatron
