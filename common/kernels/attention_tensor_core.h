// Attention in tiles on tensor cores, in bfloat16 with sums in float (FlashAttention-2; Dao, 2023): what
// attention_tiled.h does, and what is to replace it where speed counts. That one is its reference.
//
// The arguments are those of attention.h.
#pragma once

#include "kernels/attention.h"

namespace pentatron {

constexpr bool has_tensor_core_attention = PRECISION == 16;

// Throws UsageError where programs can't use it: it takes bfloat16 and a GPU of compute capability 8.0 or
// later.
void require_tensor_cores();
// Tests can use it on the CPU, too, which emulates it.
bool can_run_tensor_core_attention();

template <class Result>
void tensor_core_forward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, Matrix<Result> out,
                         AccumTensor lse, cudaStream_t stream);

template <class Result>
void tensor_core_backward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, AccumTensor lse,
                          Tensor d_out, AccumTensor dots, bool add, Matrix<Result> d_q, Matrix<Result> d_k,
                          Matrix<Result> d_v, cudaStream_t stream);

}  // namespace pentatron
