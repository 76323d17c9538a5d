// Context parallelism: c ranks split the tokens of every sequence. Only attention mixes tokens: a query needs
// the keys and values of all tokens before it. In ring attention (Liu et al., 2023, arXiv 2310.01889) keys
// and values travel: each rank computes with those that it has, while a hop sends them to the next rank.
//
//               rank 0  rank 1  rank 2
//   step 0      kv 0    kv 1    kv 2      forward: attention_merge adds each block's out and lse to those of
//   step 1      kv 2    kv 0    kv 1      the blocks before it
//   step 2      kv 1    kv 2    kv 0      backward: d_q adds up at home; the sums of d_k and d_v travel one
//   at the end  d_kv 0  d_kv 1  d_kv 2    step behind k and v, and make one hop more, to their owner
//
// If each rank has one chunk of a sequence, causality gives the first rank little work and the last one much.
// In the zigzag layout (Zhu, "zhuzilin/ring-flash-attention", 2024) a rank has an early and a late chunk, and
// all ranks have equal work. The alternative to the ring is an all-gather of all keys and values, as in Llama
// 3 (Grattafiori et al., 2024): simpler, but its memory for keys and values does not fall with c.
#pragma once

#include <optional>
#include <string>
#include <type_traits>

#include "kernels/kernels.h"
#include "model/memory.h"
#include "model/seams.h"
#include "program/options.h"
#include "ranks/comm.h"

namespace pentatron {

// Which queries of one rank see which keys of another: in each sequence, all queries from row `first_query`
// on see the first `block.keys` keys; on the diagonal, only the keys up to their own.
struct VisibleBlock {
  int first_query;
  AttentionBlock block;
};

// The block of `rank`'s queries and `origin`'s keys that causality leaves, or nothing. `shape` is that of one
// rank's tokens.
inline std::optional<VisibleBlock> visible_block(CpLayout layout, AttentionShape shape, int rank,
                                                 int origin) {
  const int all = shape.sequence, half = all / 2;
  const auto block = [&](int first_query, int keys, bool diagonal) {
    return VisibleBlock{first_query, {shape.batch, all - first_query, keys, all, all, shape.head, diagonal}};
  };
  if (origin == rank) return block(0, all, true);  // in a zigzag, too, positions ascend
  if (layout == CpLayout::contiguous)
    return origin < rank ? std::optional(block(0, all, false)) : std::nullopt;
  // If i < j, rank i's two chunks come before and after both of rank j's.
  return origin < rank ? block(0, half, false) : block(half, all, false);
}

// The positions of a sequence that a context rank holds, ascending. Contiguous: chunk `rank` of `ranks` equal
// chunks. Zigzag: chunks `rank` and 2 ranks - 1 - rank of 2 ranks equal chunks.
inline std::vector<int32_t> context_positions(const Options& options, int rank, int ranks) {
  const bool zigzag = options.cp_layout == CpLayout::zigzag && ranks > 1;
  const int block = options.sequence_length / (zigzag ? 2 * ranks : ranks);
  std::vector<int32_t> positions;
  for (int i = 0; i < block; ++i) positions.push_back(rank * block + i);
  for (int i = 0; zigzag && i < block; ++i) positions.push_back((2 * ranks - 1 - rank) * block + i);
  return positions;
}

class RingAttention : public AttentionCore {
 public:
  // `options` describe whole sequences and all heads. This rank has one of `tensor_ranks` parts of the heads.
  RingAttention(const Options& options, Communicator& context, int tensor_ranks = 1)
      : AttentionCore(options.attention),
        layout_(options.cp_layout),
        exchange_(options.cp_exchange),
        context_(context),
        ranks_(context.ranks()) {
    if (one_rank()) return;
    const ModelConfig& m = options.model;
    const int64_t sequence = options.sequence_length / ranks_, rows = options.micro_batch_size * sequence;
    const int64_t heads = m.heads / tensor_ranks, q = heads * m.head_size();
    const int64_t kv = m.kv_heads / tensor_ranks * m.head_size();
    block_out_ = memory_.matrix<accum>(rows, q);
    block_lse_ = memory_.matrix<accum>(rows, heads);
    if (!std::is_same_v<real, accum>) wide_ = memory_.matrix<accum>(rows, q);
    if (kind_ == Attention::naive) {
      scores_ = memory_.matrix<real>(heads * sequence, sequence);
      d_scores_ = memory_.matrix<real>(heads * sequence, sequence);
    }
    if (exchange_ == CpExchange::all_gather) {
      gathered_ = allocate<real>(ranks_ * rows, kv);
      d_gathered_ = allocate<accum>(ranks_ * rows, kv);
    } else {
      for (auto& buffer : travelling_) buffer = allocate<real>(rows, kv);
      for (auto& sums : sums_) sums = allocate<accum>(rows, kv);
      d_block_ = allocate<accum>(rows, kv);
      context_.connect(after(), before(), travelling_[0].k.data);
    }
  }

  // The model keeps no scores, whatever --recompute says: before the last merge, a block's probabilities are
  // shares of that block alone. Backward computes them again from the lse of all keys.
  std::pair<int64_t, int64_t> score_shape(AttentionShape shape) const override {
    return one_rank() ? AttentionCore::score_shape(shape) : std::pair<int64_t, int64_t>{0, 0};
  }

  // d_q is summed up in `wide_`.
  BackwardMemory backward_memory(DeviceArena& arena, AttentionShape shape) const override {
    if (one_rank()) return AttentionCore::backward_memory(arena, shape);
    return {d_scores_, {}, allocate_turns(arena, shape)};
  }

  void forward(const Blas& blas, AttentionShape shape, const AttentionTensors& t) override {
    if (one_rank()) return AttentionCore::forward(blas, shape, t);
    const cudaStream_t compute = blas.stream();
    const AccumTensor out = wide(t.out, wide_);
    KeysValues<real> present = {t.k, t.v};
    for (int step = 0; step < ranks_; ++step) {
      wait_stream(context_.stream(), compute);  // compute has finished with the buffer that the hop fills
      const KeysValues<real> next = begin_exchange(step, present);
      if (const auto visible = visible_block(layout_, shape, context_.rank(), origin(step))) {
        forward_block(blas, *visible, step, t, present, out);
      }
      wait_stream(compute, context_.stream());
      present = next;
    }
    round_to(t.out, out, compute);
  }

  void backward(const Blas& blas, AttentionShape shape, const AttentionTensors& t,
                const AttentionGradients& g) override {
    if (one_rank()) return AttentionCore::backward(blas, shape, t, g);
    const cudaStream_t compute = blas.stream();
    attention_dots(t.out, g.d_out, g.d_out_dot_out, compute);
    const AccumTensor d_q = wide(g.d_q, wide_);
    zero(d_q, compute);
    KeysValues<real> present = {t.k, t.v};
    for (int step = 0; step < ranks_; ++step) {
      wait_stream(context_.stream(), compute);
      const KeysValues<real> next = begin_exchange(step, present);
      begin_sums_hop(step);
      const KeysValues<accum> d_block = gradients_of_block(step);
      zero(d_block.k, compute);  // a block adds to it; reduce-scatter also sums parts that saw nothing
      zero(d_block.v, compute);
      const auto visible = visible_block(layout_, shape, context_.rank(), origin(step));
      if (visible) backward_block(blas, *visible, t, g, present, d_q, d_block);
      wait_stream(compute, context_.stream());
      if (visible) add_to_sums(step, compute);
      present = next;
    }
    wait_stream(context_.stream(), compute);
    const KeysValues<accum> own = {wide(g.d_k, own_sums().k), wide(g.d_v, own_sums().v)};
    return_sums(own);
    wait_stream(compute, context_.stream());
    round_to(g.d_q, d_q, compute);
    round_to(g.d_k, own.k, compute);
    round_to(g.d_v, own.v, compute);
  }

 private:
  template <class T>
  struct KeysValues {  // or their gradients
    Matrix<T> k, v;    // [rows, kv_heads*head_size]
  };

  bool one_rank() const { return ranks_ == 1; }
  // The rank that owns the keys and values of this step.
  int origin(int step) const { return (context_.rank() - step + ranks_) % ranks_; }

  // ---- A block

  void forward_block(const Blas& blas, const VisibleBlock& visible, int step, const AttentionTensors& t,
                     KeysValues<real> kv, AccumTensor out) {
    const auto& [first, block] = visible;
    const bool merges = step > 0;  // in step 0, the diagonal, every query sees a key: it begins the sums
    const AccumTensor block_out = from(merges ? block_out_ : out, first);
    const AccumTensor block_lse = from(merges ? block_lse_ : t.lse, first);
    attention_forward(kind_, blas, block, from(t.q, first), kv.k, kv.v, {scores_, false}, block_out,
                      block_lse);
    if (merges)
      attention_merge(block, block_out, block_lse, from(out, first), from(t.lse, first), blas.stream());
  }

  void backward_block(const Blas& blas, const VisibleBlock& visible, const AttentionTensors& t,
                      const AttentionGradients& g, KeysValues<real> kv, AccumTensor d_q,
                      KeysValues<accum> d_kv) {
    const auto& [first, block] = visible;
    attention_backward(kind_, blas, block, from(t.q, first), kv.k, kv.v, {scores_, false}, from(t.lse, first),
                       from(g.d_out, first), from(g.d_out_dot_out, first), g.memory, true, from(d_q, first),
                       d_kv.k, d_kv.v);
  }

  template <class T>
  static Matrix<T> from(Matrix<T> x, int64_t first) {
    return x.row_range(first, x.rows - first);
  }

  // ---- What travels

  // Starts the hop (or, in step 0, the all-gather), and returns the keys and values of step + 1. Compute may
  // read them after its next wait for the context stream.
  KeysValues<real> begin_exchange(int step, KeysValues<real> present) {
    if (exchange_ == CpExchange::all_gather) {
      if (step == 0) {
        const Communicator::Group together(context_);
        context_.all_gather(present.k.data, gathered_.k.data, present.k.size());
        context_.all_gather(present.v.data, gathered_.v.data, present.v.size());
      }
      return part_of(gathered_, origin(step + 1));
    }
    if (step + 1 == ranks_) return present;  // one hop more would bring them home
    const KeysValues<real> next = travelling_[step % 2];
    hop(present, next);
    return next;
  }

  // Sends the sums to which this rank added in the step before, and receives those of this step's keys.
  void begin_sums_hop(int step) {
    if (exchange_ == CpExchange::ring && step > 0) hop(sums_[(step - 1) % 2], sums_[step % 2]);
  }

  // The buffer for d_k and d_v of this step's block. From step 1 on it is not that of the sums, because a hop
  // is still filling that one.
  KeysValues<accum> gradients_of_block(int step) const {
    if (exchange_ == CpExchange::all_gather) return part_of(d_gathered_, origin(step));
    return step == 0 ? sums_[0] : d_block_;
  }

  void add_to_sums(int step, cudaStream_t compute) {
    if (exchange_ == CpExchange::all_gather || step == 0) return;
    const KeysValues<accum> sums = sums_[step % 2];
    accumulate(d_block_.k.data, sums.k.data, sums.k.size(), compute);
    accumulate(d_block_.v.data, sums.v.data, sums.v.size(), compute);
  }

  // Where the sums of this rank's own d_k and d_v arrive if `real` is narrower than `accum`.
  KeysValues<accum> own_sums() const {
    return exchange_ == CpExchange::ring ? sums_[ranks_ % 2] : part_of(d_gathered_, context_.rank());
  }

  // Sends the sums to the rank that owns their keys and values: by a last hop or, after an all-gather, by a
  // reduce-scatter.
  void return_sums(KeysValues<accum> own) {
    if (exchange_ == CpExchange::ring) return hop(sums_[(ranks_ - 1) % 2], own);
    const Communicator::Group together(context_);
    context_.reduce_scatter(d_gathered_.k.data, own.k.data, own.k.size());
    context_.reduce_scatter(d_gathered_.v.data, own.v.data, own.v.size());
  }

  // Sends `present` to the next rank, and receives `next` from the one before. In a group, so that a rank
  // sends and receives at the same time; otherwise all ranks could wait in a circle.
  template <class T>
  void hop(KeysValues<T> present, KeysValues<T> next) {
    const Communicator::Group together(context_);
    context_.send(present.k.data, present.k.size(), after());
    context_.send(present.v.data, present.v.size(), after());
    context_.receive(next.k.data, next.k.size(), before());
    context_.receive(next.v.data, next.v.size(), before());
  }
  // This rank's neighbours in the ring.
  int after() const { return (context_.rank() + 1) % ranks_; }
  int before() const { return (context_.rank() + ranks_ - 1) % ranks_; }

  template <class T>
  KeysValues<T> part_of(KeysValues<T> all /*[ranks * rows]*/, int rank) const {
    const int64_t rows = all.k.rows / ranks_;
    return {all.k.row_range(rank * rows, rows), all.v.row_range(rank * rows, rows)};
  }

  // ---- Sums are in `accum` and rounded once, at the end; otherwise their error would grow with the ranks

  // The matrix in which to sum up `result`: `result` itself if it has the type `accum`, otherwise `memory`.
  template <class T>
  static AccumTensor wide(Matrix<T> result, AccumTensor memory) {
    if constexpr (std::is_same_v<T, accum>)
      return result;
    else
      return memory;
  }
  template <class T>
  static void round_to(Matrix<T> result, AccumTensor sums, cudaStream_t stream) {
    if constexpr (!std::is_same_v<T, accum>) round_to_real(sums.data, result.data, sums.size(), stream);
  }

  static void zero(AccumTensor x, cudaStream_t stream) {
    CUDA_CHECK(cudaMemsetAsync(x.data, 0, x.bytes(), stream));
  }

  template <class T>
  KeysValues<T> allocate(int64_t rows, int64_t columns) {
    return {memory_.matrix<T>(rows, columns), memory_.matrix<T>(rows, columns)};
  }

  CpLayout layout_;
  CpExchange exchange_;
  Communicator& context_;
  int ranks_;
  DeviceArena memory_{Purpose::communication};
  AccumTensor block_out_, block_lse_;  // [rows, heads*head_size], [rows, heads]: of one block, to be merged
  AccumTensor wide_;                   // [rows, heads*head_size]: out in forward, d_q in backward
  Tensor scores_, d_scores_;           // [heads*sequence, sequence]: of one block of one sequence
  // The ring:
  KeysValues<real> travelling_[2];  // [rows, kv_heads*head_size]: compute reads one, a hop fills the other
  KeysValues<accum> sums_[2];       // likewise: a hop sends one and fills the other
  KeysValues<accum> d_block_;       // likewise: this rank's part, to be added to the sums that arrive
  // All-gather:
  KeysValues<real> gathered_;     // [ranks * rows, kv_heads*head_size]
  KeysValues<accum> d_gathered_;  // likewise
};

// What predict_memory needs of one of `ranks` context ranks: its part of the tokens, in elements the buffers
// of RingAttention, and the rest as in `share`, which is a rank's without context parallelism.
inline RankShare context_parallel_share(const Options& options, int ranks, RankShare share = {}) {
  if (ranks == 1) return share;
  share.token_ranks = ranks;
  const int64_t rows = rows_of(options, share).inside, block = options.sequence_length / ranks;
  const Columns c = columns_of(options.model, share.tensor_ranks);
  const bool ring = options.cp_exchange == CpExchange::ring;
  share.buffers += Elements{2 * rows * c.kv * (ring ? 2 : ranks), 2 * rows * c.kv * (ring ? 3 : ranks)};
  share.buffers.accum += rows * (c.q * (std::is_same_v<real, accum> ? 1 : 2) + c.heads);
  if (options.attention == Attention::naive) share.buffers.real += 2 * c.heads * block * block;
  return share;
}

// Throws UsageError unless the sequence length is a multiple of `ranks`, in a zigzag of 2 `ranks`.
inline void check_context_parallel(const Options& options, int ranks) {
  const bool zigzag = options.cp_layout == CpLayout::zigzag;
  if (ranks == 1 || options.sequence_length % (zigzag ? 2 * ranks : ranks) == 0) return;
  throw UsageError("--seq-len", std::to_string(options.sequence_length),
                   zigzag ? "a multiple of twice the context ranks (2 x " + std::to_string(ranks) +
                                ") with --cp-layout zigzag"
                          : "a multiple of the context ranks (" + std::to_string(ranks) + ")");
}

}  // namespace pentatron
