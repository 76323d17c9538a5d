// Attention in tiles. A block of threads takes some queries and loops over the keys, one tile at a time. It
// holds only one tile's scores. The softmax is online: a running maximum, and sums that are scaled down when
// it grows (Milakov and Gimelshein, 2018). Backward recomputes the probabilities from lse (FlashAttention and
// FlashAttention-2; Dao, 2022 and 2023). So memory is linear in the sequence. Tiles above the diagonal are
// skipped. README.md derives this.
//
// Arguments are as in attention.h.
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
