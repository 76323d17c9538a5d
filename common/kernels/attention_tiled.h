// Attention in tiles: a block of threads takes some queries, goes through the keys some at a time, and never
// has more scores than those of one tile. The softmax is made online: a running maximum, and sums that are
// scaled down when it grows (Milakov and Gimelshein, 2018). Backward makes the probabilities again from lse
// (FlashAttention and FlashAttention-2; Dao, 2022 and 2023). So memory is linear in the sequence, and tiles
// above the diagonal cost nothing.
//
// The arguments are those of attention.h.
#pragma once

#include "kernels/attention.h"

namespace pentatron {

template <class Result>
void tiled_forward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, Matrix<Result> out,
                   AccumTensor lse, cudaStream_t stream);

template <class Result>
void tiled_backward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, AccumTensor lse, Tensor d_out,
                    AccumTensor dots, bool add, Matrix<Result> d_q, Matrix<Result> d_k, Matrix<Result> d_v,
                    cudaStream_t stream);

}  // namespace pentatron
