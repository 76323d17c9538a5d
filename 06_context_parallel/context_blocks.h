// Context parallelism: c ranks split the tokens of every sequence. Only attention mixes tokens: a query needs
// the keys and values of all tokens before it. Three classes behind the seam AttentionCore bring them
// together: ring_attention.h, all_gather_attention.h and ulysses_attention.h. Here is what they share: which
// tokens a rank has, which keys its queries see, and attention of the queries to one rank's keys.
//
// If each rank has one chunk of a sequence, causality gives the first rank little work and the last one much.
// In the zigzag layout (Zhu, "zhuzilin/ring-flash-attention", 2024) a rank has an early and a late chunk, and
// all ranks have equal work.
#pragma once

#include <optional>
#include <type_traits>
#include <vector>

#include "kernels/merge.h"
#include "model/memory.h"
#include "model/seams.h"
#include "options.h"
#include "ranks/comm.h"

namespace pentatron {

// Which queries of one rank see which keys of another: in each sequence, all queries from row `first_query`
// on see the first `block.keys` keys; on the diagonal, only the keys up to their own.
struct VisibleBlock {
  int first_query;
  AttentionBlock block;
};

// The block of `rank`'s queries and `origin`'s keys that causality leaves, or nothing. `shape` is a rank's.
inline std::optional<VisibleBlock> visible_block(CpLayout layout, AttentionShape shape, int rank,
                                                 int origin) {
  const int all = shape.sequence, half = all / 2;
  const auto block = [&](int first_query, int keys, bool diagonal) {
    return VisibleBlock{first_query, {shape.batch, all - first_query, keys, all, shape.head, diagonal}};
  };
  if (origin == rank) return block(0, all, true);  // in a zigzag, too, positions ascend
  if (layout == CpLayout::contiguous)
    return origin < rank ? std::optional(block(0, all, false)) : std::nullopt;
  // If i < j, rank i's two chunks come before and after both of rank j's.
  return origin < rank ? block(0, half, false) : block(half, all, false);
}

// The positions of a sequence that a context rank holds, ascending. Contiguous: chunk `rank` of `ranks` equal
// chunks. Zigzag: chunks `rank` and 2 ranks - 1 - rank of 2 ranks equal chunks.
inline std::vector<int32_t> context_positions(CpLayout layout, int sequence, int rank, int ranks) {
  const bool zigzag = layout == CpLayout::zigzag && ranks > 1;
  const int block = sequence / (zigzag ? 2 * ranks : ranks);
  std::vector<int32_t> positions;
  for (int i = 0; i < block; ++i) positions.push_back(rank * block + i);
  for (int i = 0; zigzag && i < block; ++i) positions.push_back((2 * ranks - 1 - rank) * block + i);
  return positions;
}

// The same, but with Ulysses in a ring: `options.ulysses` neighbours have the parts of one rank of the ring.
inline std::vector<int32_t> positions_of_rank(const TrainingConfig& training,
                                              const ContextParallelOptions& options, int rank, int ranks) {
  const int u = options.cp_exchange == CpExchange::ulysses_ring && ranks > 1 ? options.ulysses : 1;
  const std::vector<int32_t> all =
      context_positions(options.cp_layout, training.sequence_length, rank / u, ranks / u);
  const int64_t size = std::ssize(all) / u, first = rank % u * size;
  return {all.begin() + first, all.begin() + first + size};
}

// How many of `ranks` context ranks exchange tokens for heads with each other.
inline int ranks_for_heads(const ContextParallelOptions& options, int ranks) {
  if (options.cp_exchange == CpExchange::ulysses_ring) return options.ulysses;
  return options.cp_exchange == CpExchange::ulysses ? ranks : 1;
}

// What a context rank has: rows of a micro-batch, tokens of each sequence, and one tensor rank's columns.
struct ContextPart {
  int64_t rows, sequence;
  Columns columns;
};
inline ContextPart context_part(const TrainingConfig& training, int ranks, int tensor_ranks) {
  const int64_t sequence = training.sequence_length / ranks;
  return {training.micro_batch_size * sequence, sequence, columns_of(training.model, tensor_ranks)};
}

// Keys and values of some rows, or their gradients.
template <class T>
struct KeysValues {
  Matrix<T> k, v;  // [rows, kv_heads*head_size]

  static KeysValues allocate(DeviceArena& memory, int64_t rows, int64_t columns) {
    return {memory.matrix<T>(rows, columns), memory.matrix<T>(rows, columns)};
  }
  // The rows of one of `ranks` that have equal parts of these rows.
  KeysValues part(int rank, int ranks) const {
    const int64_t rows = k.rows / ranks;
    return {k.row_range(rank * rows, rows), v.row_range(rank * rows, rows)};
  }
};

inline void zero(AccumTensor x, cudaStream_t stream) {
  CUDA_CHECK(cudaMemsetAsync(x.data, 0, x.bytes(), stream));
}

// Sums over blocks are in `accum` and rounded once, at the end; otherwise their error would grow with the
// ranks. Returns the matrix in which to sum up `result`: itself if its type is `accum`, otherwise `memory`.
template <class T>
AccumTensor accumulator(Matrix<T> result, AccumTensor memory) {
  if constexpr (std::is_same_v<T, accum>)
    return result;
  else
    return memory;
}
template <class T>
void round_to(Matrix<T> result, AccumTensor sums, cudaStream_t stream) {
  if constexpr (!std::is_same_v<T, accum>) round_to_real(sums.data, result.data, sums.size(), stream);
}

// Attention of a rank's queries, which stay at home, to the keys of one rank after the other.
class AttentionBlocks {
 public:
  AttentionBlocks(const TrainingConfig& training, int ranks, int tensor_ranks) : kind_(training.attention) {
    const auto& [rows, sequence, c] = context_part(training, ranks, tensor_ranks);
    out_ = memory_.matrix<accum>(rows, c.q);
    lse_ = memory_.matrix<accum>(rows, c.heads);
    if (!std::is_same_v<real, accum>) accumulator_ = memory_.matrix<accum>(rows, c.q);
    if (kind_ != Attention::naive) return;
    scores_ = memory_.matrix<real>(c.heads * sequence, sequence);
    d_scores_ = memory_.matrix<real>(c.heads * sequence, sequence);
  }

  // Where forward may sum up out, and backward d_q.
  AccumTensor accumulator_memory() const { return accumulator_; }
  Tensor d_scores() const { return d_scores_; }

  // Adds the keys that are visible to `out` and t.lse. The first block must be the diagonal: there every
  // query sees a key, and it begins the sums.
  void forward(const Blas& blas, const VisibleBlock& visible, const AttentionTensors& t, KeysValues<real> kv,
               AccumTensor out) const {
    const auto& [first, block] = visible;
    const bool merges = !block.diagonal;
    const AccumTensor block_out = from(merges ? out_ : out, first);
    const AccumTensor block_lse = from(merges ? lse_ : t.lse, first);
    attention_forward<accum>(kind_, blas, block,
                             {from(t.q, first), kv.k, kv.v, block_out, block_lse, {scores_, false}});
    if (merges)
      attention_merge(block, block_out, block_lse, from(out, first), from(t.lse, first), blas.stream());
  }

  // Adds to d_q, and to the gradients of these keys and values. t.lse and g.d_out_dot_out are of all keys.
  void backward(const Blas& blas, const VisibleBlock& visible, const AttentionTensors& t,
                const AttentionGradients& g, KeysValues<real> kv, AccumTensor d_q,
                KeysValues<accum> d_kv) const {
    const auto& [first, block] = visible;
    attention_backward<accum>(
        kind_, blas, block, {from(t.q, first), kv.k, kv.v, {}, from(t.lse, first), {scores_, false}},
        {from(g.d_out, first), from(d_q, first), d_kv.k, d_kv.v, g.memory, from(g.d_out_dot_out, first)},
        /*add=*/true);
  }

 private:
  template <class T>
  static Matrix<T> from(Matrix<T> x, int64_t first) {
    return x.row_range(first, x.rows - first);
  }

  const Attention kind_;
  DeviceArena memory_{Purpose::communication};
  AccumTensor out_, lse_;     // [rows, heads*head_size], [rows, heads]: one block has them, to be merged
  AccumTensor accumulator_;   // [rows, heads*head_size]
  Tensor scores_, d_scores_;  // [heads*sequence, sequence]: one block of one sequence has them
};

// What a ring and an all-gather share: attention to the keys of all ranks, one rank's after the other.
class AttentionByRank : public AttentionCore {
 public:
  // `training` describes whole sequences and all heads. This rank has one of `tensor_ranks` parts of the
  // heads.
  AttentionByRank(const TrainingConfig& training, CpLayout layout, Communicator& context, int tensor_ranks)
      : AttentionCore(training.attention),
        layout_(layout),
        context_(context),
        ranks_(context.ranks()),
        blocks_(training, ranks_, tensor_ranks) {}

  // The model keeps no scores, whatever --recompute says: before the last merge, a block's probabilities are
  // shares of that block alone. Backward computes them again from the lse of all keys.
  std::pair<int64_t, int64_t> score_shape(AttentionShape) const override { return {0, 0}; }

  BackwardMemory backward_memory(DeviceArena& arena, AttentionShape shape) const override {
    if (kind_ == Attention::naive) return {blocks_.d_scores()};
    return pentatron::backward_memory(kind_, arena, shape, /*sums_in_results=*/true);
  }

 protected:
  // The rank with whose keys a step computes: this one first, while those of others are on their way.
  int origin(int step) const { return (context_.rank() - step + ranks_) % ranks_; }

  const CpLayout layout_;
  Communicator& context_;
  const int ranks_;
  const AttentionBlocks blocks_;
  DeviceArena memory_{Purpose::communication};
};

}  // namespace pentatron
