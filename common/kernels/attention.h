// Attention, softmax(q k^T / sqrt(head size)) v, of a block of queries over a block of keys, forward and
// backward, for grouped queries: heads / kv_heads query heads share a key and value head. A block is a whole
// causal sequence, or a part of one that was cut up; the results of the parts merge into that of the whole.
//
// It is computed in two ways: naive, with the scores in memory, by cuBLAS products (here), or in tiles whose
// scores never leave the chip (attention_tiled.h). Both need of forward, beside its output, only `lse`, the
// logarithm of each row's sum of exponentials: the probabilities are exp(score - lse).
#pragma once

#include "device/tensor.h"
#include "kernels/config.h"
#include "kernels/kernels.h"
#include "kernels/matmul.h"

namespace pentatron {

struct AttentionShape {
  int batch;     // sequences
  int sequence;  // tokens of each
  HeadShape head;

  // Rows of the scores of one sequence: (head, query).
  int64_t score_rows() const { return static_cast<int64_t>(head.heads) * sequence; }
};

// Queries over keys, as many in every sequence of a batch. The matrices that belong to a block begin at its
// first row of the first sequence; q, out, lse and their gradients lie alike, and so do k, v and theirs.
struct AttentionBlock {
  int batch;                     // sequences
  int queries, keys;             // of each; none is zero
  int query_stride, key_stride;  // rows from a sequence to the next one, in memory
  HeadShape head;
  bool diagonal;  // key j is visible to query i where j <= i; otherwise every key is
};
inline AttentionBlock whole_sequences(AttentionShape shape) {
  return {shape.batch, shape.sequence, shape.sequence, shape.sequence, shape.sequence, shape.head, true};
}

// So many products of queries, keys and head size; the half above a diagonal is left out.
inline Cost attention_cost(const AttentionBlock& b, int count, Cost::Unit unit, bool backward) {
  const double pairs = double(b.batch) * b.head.heads * b.queries * b.keys / (b.diagonal ? 2 : 1);
  const double rows = double(b.head.heads) * b.queries + double(b.head.kv_heads) * b.keys;
  return {.bytes = 2 * real_bytes * b.batch * rows * b.head.head_size,  // q, out, k, v
          .flops = count * 2 * pairs * b.head.head_size,
          .unit = unit,
          .backward = backward};
}

// Where the naive way has its probabilities: for every sequence (kept for backward) or for one at a time
// (computed again in backward).
struct Scores {
  Tensor memory;  // at least heads*queries x keys, times batch when kept; none where attention is tiled
  bool kept;
};

// out = attention(q, k, v) over the keys of this block alone, and its lse. Result is `real` or `accum`.
template <class Result>
void attention_forward(Attention kind, const Blas& blas, const AttentionBlock& block,
                       Tensor q /*[rows, heads*head_size]*/, Tensor k /*[rows, kv_heads*head_size]*/,
                       Tensor v /*as k*/, Scores scores, Matrix<Result> out /*as q*/,
                       AccumTensor lse /*[rows, heads]*/);

// (out, lse) = what they are of their own keys and those of a further block together. An lse of -infinity
// stands for no key at all: its `out` is not looked at.
void attention_merge(const AttentionBlock& block, AccumTensor block_out /*[rows, heads*head_size]*/,
                     AccumTensor block_lse /*[rows, heads]*/, AccumTensor out, AccumTensor lse,
                     cudaStream_t stream);

// dots = D = rowsum(d_out * out) of each head, over all keys; blocks need it for backward.
void attention_dots(Tensor out /*[rows, heads*head_size]*/, Tensor d_out, AccumTensor dots /*[rows, heads]*/,
                    cudaStream_t stream);

// This block's part of d_q, d_k and d_v, added to what they are (`add`) or assigned. With lse and D of all
// keys and P the probabilities,
//   dV = P^T dO,   dS = P * (dO V^T - D),   dQ = dS K,   dK = dS^T Q       (FlashAttention-2, Dao 2023,
//   section 3.1).
template <class Result>
void attention_backward(Attention kind, const Blas& blas, const AttentionBlock& block, Tensor q, Tensor k,
                        Tensor v, Scores scores, AccumTensor lse, Tensor d_out, AccumTensor dots,
                        Tensor d_scores /*at least heads*queries x keys; none where attention is tiled*/,
                        bool add, Matrix<Result> d_q, Matrix<Result> d_k, Matrix<Result> d_v);

}  // namespace pentatron
