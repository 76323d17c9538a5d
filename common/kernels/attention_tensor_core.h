// Attention in tiles on tensor cores, in bfloat16 with sums in float (FlashAttention-2; Dao, 2023). It
// computes what attention_tiled.h computes, faster. The tiled kernels are the reference for its tests.
//
// Arguments are as in attention.h. Heads have 64 or 128 features.
#pragma once

#include "kernels/attention.h"

namespace pentatron {

constexpr bool has_tensor_core_attention = PRECISION == 16;

// Throws UsageError unless the build is bfloat16 and the GPU has compute capability 8.0 or later (or the run
// is a dry run).
void require_tensor_cores();
// For tests: also true on the CPU, which emulates the instructions.
bool can_run_tensor_core_attention();

// How far the kernels are from the tiled ones in a small block of random numbers: the largest difference of
// out, d_q, d_k and d_v, each over its largest element. Rounding alone makes less than this tolerance.
constexpr double tensor_core_tolerance = 0.03;
double tensor_core_error(int head_size, cudaStream_t stream);

template <class Result>
void tensor_core_forward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, Matrix<Result> out,
                         AccumTensor lse, cudaStream_t stream);

// d_q is summed up in memory.d_q unless Result is `accum`; the order of the sums is fixed.
template <class Result>
void tensor_core_backward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, AccumTensor lse,
                          Tensor d_out, AccumTensor dots, const BackwardMemory& memory, bool add,
                          Matrix<Result> d_q, Matrix<Result> d_k, Matrix<Result> d_v, cudaStream_t stream);

}  // namespace pentatron
