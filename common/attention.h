// Causal attention, softmax(q k^T / sqrt(head size)) v, of a block of queries over a block of keys, with its
// scores in memory ("naive"), forward and backward, for grouped queries: heads / kv_heads query heads share a
// key and value head.
//
// `lse`, the logarithm of each row's sum of exponentials, is what backward (and, for sequences cut into
// blocks, the merge of partial results) needs: the probabilities are exp(score - lse).
#pragma once

#include "kernels.h"
#include "matmul.h"
#include "tensor.h"

namespace pentatron {

struct AttentionShape {
  int batch;     // sequences
  int sequence;  // tokens of each
  HeadShape head;

  // Rows of the scores of one sequence: (head, query).
  int64_t score_rows() const { return static_cast<int64_t>(head.heads) * sequence; }
};

// Where the probabilities lie: for every sequence (kept for backward) or for one at a time (computed again in
// backward).
struct Scores {
  Tensor memory;  // [heads*sequence, sequence], times batch when kept
  bool kept;
};

// out = attention(q, k, v), and lse.
void attention_forward(const Blas& blas, AttentionShape shape, Tensor q /*[rows, heads*head_size]*/,
                       Tensor k /*[rows, kv_heads*head_size]*/, Tensor v /*as k*/, Scores scores,
                       Tensor out /*as q*/, Statistics lse /*[rows, heads]*/);

// d_q, d_k, d_v from d_out: with P the probabilities and D = rowsum(d_out * out),
//   dV = P^T dO,   dS = P * (dO V^T - D),   dQ = dS K,   dK = dS^T Q       (FlashAttention-2, Dao 2023,
//   section 3.1).
void attention_backward(const Blas& blas, AttentionShape shape, Tensor q, Tensor k, Tensor v, Scores scores,
                        Tensor out, Statistics lse, Tensor d_out,
                        Tensor d_scores /*[heads*sequence, sequence]*/,
                        Statistics d_out_dot_out /*[rows, heads]*/, Tensor d_q, Tensor d_k, Tensor d_v);

}  // namespace pentatron
