// Attention, softmax(q k^T / sqrt(head size)) v, of a block of queries over a block of keys, forward and
// backward. Query heads are grouped: heads / kv_heads of them share one key and value head. A block is a
// whole causal sequence or a part of one; attention_merge (merge.h) combines the results of parts.
//
// There are three kinds. Naive attention stores the scores and uses cuBLAS products (attention.cu). Tiled
// attention never stores them (attention_tiled.cu), and neither do tiles on tensor cores, which compute the
// same faster (tensor_cores/attention.cu). Besides the output, each forward keeps `lse`, the logarithm of
// each row's sum of exponentials. From it backward gets the probabilities, exp(score - lse).
#pragma once

#include <algorithm>
#include <tuple>

#include "device/tensor.h"
#include "kernels/config.h"
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
  int queries, keys;  // in each sequence; neither is zero
  int stride;         // rows in memory from one sequence to the next, of queries and of keys
  HeadShape head;
  bool diagonal;  // true: query i sees the keys j <= i; false: it sees every key

  auto device_pointers() { return std::tie(); }  // none: a kernel takes it as an argument
  // Blocks of threads that have a tile of `rows` (queries or keys) of a head of a sequence each.
  dim3 tiles(int rows, int heads, int tile) const {
    return dim3(static_cast<unsigned>((rows + tile - 1) / tile) * heads * batch);
  }
};

// Where a block of threads works, on tensor cores. Its tile is the tile-th of those that take longest.
struct Place {
  int tile, head, sequence;
};
// The place of the block that is the number-th to begin. A long block that began last would work alone. So of
// 32 pairs of sequence and head all blocks that take longest come first, then all that are second. More pairs
// at a time would compete for the L2 cache. The last section has the rest of them. Backward takes turns in
// this order: the tiles of a pair begin one after the other, and so do the heads of a tile.
constexpr Place place_of(int number, int tiles, int heads, int sequences) {
  constexpr int section = 32;
  const int pairs = sequences * heads, last = std::max(pairs / section, 1) - 1;
  const int before = std::min(number / (section * tiles), last) * section;  // pairs
  const int here = before < last * section ? section : pairs - before, in_section = number - before * tiles;
  const int pair = before + in_section % here;
  return {in_section / here, pair % heads, pair / heads};
}

inline AttentionBlock whole_sequences(AttentionShape shape) {
  return {shape.batch, shape.sequence, shape.sequence, shape.sequence, shape.head, true};
}

// Tensor cores: a block of threads has so many queries, forward, or keys, backward. size: of a head.
constexpr int tensor_core_tile(int size, bool backward) { return !backward ? 128 : size == 64 ? 96 : 64; }

// Cost of `count` products of queries, keys and head size; the half above a diagonal is not counted.
inline Cost attention_cost(const AttentionBlock& b, int count, Cost::Unit unit, bool backward) {
  const double pairs = double(b.batch) * b.head.heads * b.queries * b.keys / (b.diagonal ? 2 : 1);
  const double rows = double(b.head.heads) * b.queries + double(b.head.kv_heads) * b.keys;
  const int tile = tensor_core_tile(b.head.head_size, backward);
  const double tiles = b.tiles(backward ? b.keys : b.queries, b.head.heads, tile).x;
  return {
      .bytes = 2 * real_bytes * b.batch * rows * b.head.head_size,  // q, out, k, v
      .flops = count * 2 * pairs * b.head.head_size,
      .unit = unit,
      .backward = backward,
      .head_size = b.head.head_size,
      .blocks = b.diagonal ? (tiles + b.batch * b.head.heads) / 2 : tiles};  // the i-th has i parts of a head
}

// Naive attention's probabilities. kept: every sequence's, for backward; otherwise one's, computed again.
struct Scores {
  Tensor memory;  // at least [heads*queries, keys], times batch if kept; none unless attention is naive
  bool kept;
};

// What backward needs beside its results.
struct BackwardMemory {
  Tensor d_scores = {};        // naive: at least [heads*queries, keys]
  Matrix<int32_t> turns = {};  // on tensor cores, [1, backward_turns]
  // On tensor cores sums as q, k and v, where results are not `accum`; of k and v where heads are in groups.
  AccumTensor d_q = {}, d_k = {}, d_v = {};
};
BackwardMemory backward_memory(Attention kind, DeviceArena& arena, AttentionShape shape);
// The turns alone, where results are `accum`.
Matrix<int32_t> turns_of_backward(Attention kind, DeviceArena& arena, AttentionShape shape);

// out = attention(q, k, v) over this block's keys alone, and lse its log-sum-exp. Result: `real` or `accum`.
template <class Result>
void attention_forward(Attention kind, const Blas& blas, const AttentionBlock& block,
                       Tensor q /*[rows, heads*head_size]*/, Tensor k /*[rows, kv_heads*head_size]*/,
                       Tensor v /*as k*/, Scores scores, Matrix<Result> out /*as q*/,
                       AccumTensor lse /*[rows, heads]*/);

// dots = D = rowsum(d_out * out) of each head, for backward. `out` is the result over all keys.
void attention_dots(Tensor out /*[rows, heads*head_size]*/, Tensor d_out, AccumTensor dots /*[rows, heads]*/,
                    cudaStream_t stream);

// Computes this block's part of d_q, d_k and d_v, and adds it to them (`add`) or assigns it. lse and D are
// those of all keys, P = exp(score - lse) the probabilities (FlashAttention-2; Dao, 2023, section 3.1):
//   dV = P^T dO,   dS = P * (dO V^T - D),   dQ = dS K,   dK = dS^T Q
template <class Result>
void attention_backward(Attention kind, const Blas& blas, const AttentionBlock& block, Tensor q, Tensor k,
                        Tensor v, Scores scores, AccumTensor lse, Tensor d_out, AccumTensor dots,
                        const BackwardMemory& memory, bool add, Matrix<Result> d_q, Matrix<Result> d_k,
                        Matrix<Result> d_v);

// ---- The kinds in tiles. Arguments are as above.

template <class Result>
void tiled_forward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, Matrix<Result> out,
                   AccumTensor lse, cudaStream_t stream);
template <class Result>
void tiled_backward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, AccumTensor lse, Tensor d_out,
                    AccumTensor dots, bool add, Matrix<Result> d_q, Matrix<Result> d_k, Matrix<Result> d_v,
                    cudaStream_t stream);

// On tensor cores, in 16 bits with sums in float, heads have 64 or 128 features. d_q, and of heads in groups
// d_k and d_v, are summed up in `memory` unless Result is `accum`; the order of the sums is fixed.
constexpr bool has_tensor_core_attention = PRECISION == 16;
template <class Result>
void tensor_core_forward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, Matrix<Result> out,
                         AccumTensor lse, cudaStream_t stream);
template <class Result>
void tensor_core_backward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, AccumTensor lse,
                          Tensor d_out, AccumTensor dots, const BackwardMemory& memory, bool add,
                          Matrix<Result> d_q, Matrix<Result> d_k, Matrix<Result> d_v, cudaStream_t stream);

// Throws UsageError unless the build has 16 bits and the GPU compute capability 8.0, or the run is dry.
void require_tensor_cores();
// For tests: also true on the CPU, which emulates the instructions.
bool can_run_tensor_core_attention();

// How far they are from the tiled kernels in a small block of random numbers: the largest difference of out,
// d_q, d_k and d_v, each over its largest element. Rounding alone makes less than this tolerance.
constexpr double tensor_core_tolerance = 0.03;
double tensor_core_error(int head_size, cudaStream_t stream);

}  // namespace pentatron
