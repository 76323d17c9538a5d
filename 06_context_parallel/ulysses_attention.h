// Ulysses (Jacobs et al., 2023, arXiv 2309.14509): heads do not mix, so each of c ranks may compute all
// tokens of a c-th of the heads. An all-to-all changes what a rank has, and a second one changes it back:
//
//   by tokens   [own tokens, all heads]     everything outside of attention
//   by heads    [all tokens, own heads]     attention, as on one rank
//
//   forward     q, k, v to heads            attention             out to tokens
//   backward    d_out to heads              attention's backward  d_q, d_k, d_v to tokens
//
// Both forms have as many elements, so the second takes the place of the first. What backward needs again, q,
// k, v and lse, stays by heads; out goes home, because the next product reads it.
//
// The tokens by heads may be those of one rank of a ring. Then the ring computes attention of these heads
// (ulysses_ring_attention.h).
#pragma once

#include <vector>

#include "kernels/columns.h"
#include "ring_attention.h"

namespace pentatron {

class UlyssesAttention : public AttentionCore {
 public:
  // `training` describes whole sequences and all heads. This rank has one of `tensor_ranks` parts of the
  // heads. `context`: the ranks that exchange tokens for heads; they are all context ranks, or with a ring
  // the parts of one of its ranks, one after the other.
  UlyssesAttention(const TrainingConfig& training, CpLayout layout, Communicator& context, int tensor_ranks,
                   RingAttention* ring = nullptr)
      : AttentionCore(training.attention),
        context_(context),
        ranks_(context.ranks()),
        whole_(training.attention),
        inner_(ring ? *ring : whole_) {
    const int all = ranks_ * (ring ? ring->ranks() : 1);
    const auto& [rows, sequence, c] = context_part(training, all, tensor_ranks);
    for (int rank = 0; rank < ranks_; ++rank) {
      if (ring) runs_.push_back({{0, rank * sequence, static_cast<size_t>(sequence)}});
      if (!ring) runs_.push_back(runs_of(context_positions(layout, training.sequence_length, rank, ranks_)));
    }
    q_ = memory_.matrix<real>(rows, c.q);
    k_ = memory_.matrix<real>(rows, c.kv);
    v_ = memory_.matrix<real>(rows, c.kv);
    dots_ = memory_.matrix<accum>(rows, c.heads);
    context_.all_to_all(k_.data, v_.data, 1);  // connects all pairs of ranks before the first step
    CUDA_CHECK(cudaStreamSynchronize(context_.stream()));
  }

  std::pair<int64_t, int64_t> score_shape(AttentionShape shape) const override {
    return inner_.score_shape(by_heads(shape));
  }
  BackwardMemory backward_memory(DeviceArena& arena, AttentionShape shape) const override {
    return inner_.backward_memory(arena, by_heads(shape));
  }

  void forward(const Blas& blas, AttentionShape shape, const AttentionTensors& t) override {
    const cudaStream_t compute = blas.stream();
    to_heads<real>(shape, {{t.q, q_}, {t.k, k_}, {t.v, v_}}, compute);
    inner_.forward(blas, by_heads(shape), by_heads(t));
    to_tokens(shape, {{t.out, q_}}, compute);
  }

  void backward(const Blas& blas, AttentionShape shape, const AttentionTensors& t,
                const AttentionGradients& g) override {
    const cudaStream_t compute = blas.stream();
    attention_dots(t.out, g.d_out, g.d_out_dot_out, compute);  // both are by tokens
    to_heads<real>(shape, {{g.d_out, q_}}, compute);
    to_heads<accum>(shape, {{g.d_out_dot_out, dots_}}, compute);
    AttentionTensors all = by_heads(t);
    all.out = {};  // it is by tokens
    inner_.backward(blas, by_heads(shape), all,
                    {by_heads(g.d_out), by_heads(g.d_q), by_heads(g.d_k), by_heads(g.d_v), g.memory,
                     by_heads(g.d_out_dot_out)});
    to_tokens(shape, {{g.d_q, q_}, {g.d_k, k_}, {g.d_v, v_}}, compute);
  }

 private:
  AttentionShape by_heads(AttentionShape s) const {
    const HeadShape own = {s.head.heads / ranks_, s.head.kv_heads / ranks_, s.head.head_size};
    return {s.batch, s.sequence * ranks_, own};
  }
  // The same memory by heads: x [rows, columns] -> [ranks * rows, columns / ranks].
  template <class T>
  Matrix<T> by_heads(Matrix<T> x) const {
    return {x.data, x.rows * ranks_, x.columns / ranks_};
  }

  AttentionTensors by_heads(const AttentionTensors& t) const {
    return {by_heads(t.q), by_heads(t.k), by_heads(t.v), by_heads(t.out), by_heads(t.lse), t.scores};
  }

  // A matrix to exchange, and memory of its size for the columns of each rank, one rank's after the other.
  template <class T>
  struct Exchanged {
    Matrix<T> x, packed;
  };
  enum class To { heads, tokens };
  template <class T>
  void to_heads(AttentionShape shape, const std::vector<Exchanged<T>>& all, cudaStream_t compute) {
    for (const auto& [x, packed] : all) split_columns(x, ranks_, packed.data, compute);
    exchange(To::heads, shape, all, compute);
  }
  void to_tokens(AttentionShape shape, const std::vector<Exchanged<real>>& all, cudaStream_t compute) {
    exchange(To::tokens, shape, all, compute);
    for (const auto& [x, packed] : all) join_columns(packed.data, ranks_, x, compute);
  }

  // One all-to-all between packed columns and matrices by heads. Consecutive tokens of a sequence are one
  // message, because they are neighbours in both. So all rows arrive in the order of the sequence.
  template <class T>
  void exchange(To to, AttentionShape shape, const std::vector<Exchanged<T>>& all, cudaStream_t compute) {
    std::vector<Communicator::Part<T>> packed_parts, parts_by_heads;
    for (const auto& [x, packed] : all) {
      const int64_t columns = x.columns / ranks_;
      for (int64_t i = 0; i < ranks_ * shape.batch; ++i) {  // sequence i % batch, of rank i / batch
        const int rank = static_cast<int>(i / shape.batch);
        const int64_t here = i * shape.sequence, there = i % shape.batch * shape.sequence * ranks_;
        for (const Run& run : runs_[context_.rank()])
          packed_parts.push_back({packed.data + (here + run.row) * columns, run.count * columns, rank});
        for (const Run& run : runs_[rank])
          parts_by_heads.push_back({x.data + (there + run.position) * columns, run.count * columns, rank});
      }
    }
    wait_stream(context_.stream(), compute);
    to == To::heads ? context_.all_to_all_v(packed_parts, parts_by_heads)
                    : context_.all_to_all_v(parts_by_heads, packed_parts);
    wait_stream(compute, context_.stream());
  }

  // Consecutive tokens in a rank's part of a sequence: the row there and the position of the first.
  struct Run {
    int64_t row, position;
    size_t count;
  };
  static std::vector<Run> runs_of(const std::vector<int32_t>& positions) {
    std::vector<Run> runs;
    for (int64_t row = 0; row < std::ssize(positions); ++row) {
      const bool goes_on = row > 0 && positions[row] == positions[row - 1] + 1;
      goes_on ? void(++runs.back().count) : runs.push_back({row, positions[row], 1});
    }
    return runs;
  }

  Communicator& context_;
  const int ranks_;
  AttentionCore whole_;
  AttentionCore& inner_;                // a ring, or `whole_` if this rank has all tokens by heads
  std::vector<std::vector<Run>> runs_;  // [ranks]
  DeviceArena memory_{Purpose::communication};
  Tensor q_, k_, v_;  // [ranks, rows, columns / ranks]: columns of q, k, v, or their gradients
  AccumTensor dots_;  // likewise
};

}  // namespace pentatron
