// Attention, softmax(q k^T / sqrt(head size)) v, of a block of queries over a block of keys, forward and
// backward. Query heads are grouped: heads / kv_heads of them share one key and value head. A block is a
// whole causal sequence or a part of one; attention_merge (merge.h) combines the results of parts.
//
// There are three kinds. Naive attention stores the scores and uses cuBLAS products (attention.cu). The two
// in tiles never store them, and are faster: tensor_cores/attention_tiles.h has them, and chooses. Besides
// the output, each forward keeps `lse`, the logarithm of each row's sum of exponentials. From it backward
// gets the probabilities, exp(score - lse).
#pragma once

#include <algorithm>
#include <memory>
#include <tuple>

#include "device/tensor.h"
#include "kernels/attention_kind.h"
#include "kernels/matmul.h"
#include "kernels/rotary.h"

namespace pentatron {

struct AttentionShape {
  int batch;     // sequences
  int sequence;  // tokens of each
  HeadShape head;

  // Rows of the scores of one sequence: (head, query).
  int64_t score_rows() const { return static_cast<int64_t>(head.heads) * sequence; }
};

// A block of queries and a block of keys, of equal sizes in every sequence of a batch. Each query sees one of
// the keys at least. The matrices passed with it begin at the block's first row of the first sequence.
struct AttentionBlock {
  int batch;          // sequences
  int queries, keys;  // each sequence has so many; neither is zero
  int stride;         // rows in memory from one sequence to the next, of queries and of keys
  HeadShape head;
  bool diagonal;  // true: query i sees the keys j <= i; false: it sees every key

  auto device_pointers() { return std::tie(); }  // none: a kernel takes it as an argument
};

inline AttentionBlock whole_sequences(AttentionShape shape) {
  return {shape.batch, shape.sequence, shape.sequence, shape.sequence, shape.head, true};
}

// Naive attention's probabilities. kept: every sequence's, for backward; otherwise one's, computed again.
struct Scores {
  Tensor memory;  // at least [heads*queries, keys], times batch if kept; none unless attention is naive
  bool kept;
};

// What backward needs beside its results.
struct BackwardMemory {
  Tensor d_scores = {};              // naive: at least [heads*queries, keys]
  std::shared_ptr<void> other = {};  // on tensor cores: a type of their own (tensor_cores/attention_tiles.h)
};
// sums_in_results: the results are `accum`.
BackwardMemory backward_memory(Attention kind, DeviceArena& arena, AttentionShape shape,
                               bool sums_in_results = false);
// Bytes of what it allocates for tensor cores; 0 of other kinds.
size_t tensor_core_bytes(Attention kind, AttentionShape shape, bool sums_in_results = false);

// What attention works on. Result: `real`, or `accum` where results of several blocks are summed up.
template <class Result>
struct AttentionTensorsOf {
  Tensor q, k, v;      // [rows, heads*head_size]; k, v [rows, kv_heads*head_size]; q, k after rotary_forward
  Matrix<Result> out;  // as q
  AccumTensor lse;     // [rows, heads]: log-sum-exp of each row's scores
  Scores scores;
};
using AttentionTensors = AttentionTensorsOf<real>;

// Buffers for attention's backward.
template <class Result>
struct AttentionGradientsOf {
  Tensor d_out;               // [rows, heads*head_size]
  Matrix<Result> d_q;         // as q
  Matrix<Result> d_k, d_v;    // as k, v
  BackwardMemory memory;      // see backward_memory
  AccumTensor d_out_dot_out;  // [rows, heads]: see attention_dots
};
using AttentionGradients = AttentionGradientsOf<real>;

// t.out = attention(q, k, v) over this block's keys alone, and t.lse its log-sum-exp.
template <class Result>
void attention_forward(Attention kind, const Blas& blas, const AttentionBlock& block,
                       const AttentionTensorsOf<Result>& t);

// dots = D = rowsum(d_out * out) of each head, for backward. `out` is the result over all keys.
void attention_dots(Tensor out /*[rows, heads*head_size]*/, Tensor d_out, AccumTensor dots /*[rows, heads]*/,
                    cudaStream_t stream);

// Computes this block's part of d_q, d_k and d_v, and adds it to them (`add`) or assigns it. lse and D are
// those of all keys, P = exp(score - lse) the probabilities (FlashAttention-2; Dao, 2023, section 3.1):
//   dV = P^T dO,   dS = P * (dO V^T - D),   dQ = dS K,   dK = dS^T Q
// It does not read t.out, which D stands for.
template <class Result>
void attention_backward(Attention kind, const Blas& blas, const AttentionBlock& block,
                        const AttentionTensors& t, const AttentionGradientsOf<Result>& g, bool add);

// The naive kind of both.
template <class Result>
void naive_forward(const Blas& blas, const AttentionBlock& block, const AttentionTensorsOf<Result>& t);
template <class Result>
void naive_backward(const Blas& blas, const AttentionBlock& block, const AttentionTensors& t,
                    const AttentionGradientsOf<Result>& g, bool add);

// Throws UsageError unless the build has 16 bits and the GPU compute capability 8.0, or the run is dry.
void require_tensor_cores();

}  // namespace pentatron
