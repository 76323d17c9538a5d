// Ring attention (Liu et al., 2023, arXiv 2310.01889): keys and values travel from rank to rank. Each rank
// computes with those that it has, while a hop sends them to the next rank.
//
//               rank 0  rank 1  rank 2
//   step 0      kv 0    kv 1    kv 2      forward: attention_merge adds each block's out and lse to those of
//   step 1      kv 2    kv 0    kv 1      the blocks before it
//   step 2      kv 1    kv 2    kv 0      backward: d_q adds up at home; the sums of d_k and d_v travel one
//   at the end  d_kv 0  d_kv 1  d_kv 2    step behind k and v, and make one hop more, to their owner
#pragma once

#include "context_blocks.h"
#include "kernels/elementwise.h"

namespace pentatron {

class RingAttention : public AttentionByRank {
 public:
  RingAttention(const TrainingConfig& training, CpLayout layout, Communicator& context, int tensor_ranks)
      : AttentionByRank(training, layout, context, tensor_ranks) {
    const auto& [rows, sequence, c] = context_part(training, ranks_, tensor_ranks);
    for (auto& buffer : travelling_) buffer = KeysValues<real>::allocate(memory_, rows, c.kv);
    for (auto& sums : sums_) sums = KeysValues<accum>::allocate(memory_, rows, c.kv);
    d_block_ = KeysValues<accum>::allocate(memory_, rows, c.kv);
    context_.connect(after(), before(), travelling_[0].k.data);
  }

  int ranks() const { return ranks_; }

  // t.out and t.lse of this rank's queries, over the keys of all ranks. It takes ranks - 1 hops, each beside
  // the block of its step.
  void forward(const Blas& blas, AttentionShape shape, const AttentionTensors& t) override {
    const cudaStream_t compute = blas.stream();
    const AccumTensor out = accumulator(t.out, blocks_.accumulator_memory());
    KeysValues<real> present = {t.k, t.v};
    for (int step = 0; step < ranks_; ++step) {
      wait_stream(context_.stream(), compute);  // compute has finished with the buffer that the hop fills
      const KeysValues<real> next = begin_hop(step, present);
      if (const auto visible = visible_block(layout_, shape, context_.rank(), origin(step)))
        blocks_.forward(blas, *visible, t, present, out);
      wait_stream(compute, context_.stream());
      present = next;
    }
    round_to(t.out, out, compute);
  }

  // g.d_q, g.d_k and g.d_v of this rank's rows. Keys and values make ranks - 1 hops, as in forward. The sums
  // of d_k and d_v make one more, home.
  void backward(const Blas& blas, AttentionShape shape, const AttentionTensors& t,
                const AttentionGradients& g) override {
    const cudaStream_t compute = blas.stream();
    if (t.out.data != nullptr) attention_dots(t.out, g.d_out, g.d_out_dot_out, compute);
    const AccumTensor d_q = accumulator(g.d_q, blocks_.accumulator_memory());
    zero(d_q, compute);
    KeysValues<real> present = {t.k, t.v};
    for (int step = 0; step < ranks_; ++step) {
      wait_stream(context_.stream(), compute);
      const KeysValues<real> next = begin_hop(step, present);
      begin_sums_hop(step);
      // From step 1 on not the buffer of the sums, because a hop is still filling that one.
      const KeysValues<accum> d_block = step == 0 ? sums_[0] : d_block_;
      zero(d_block.k, compute);  // a block adds to it
      zero(d_block.v, compute);
      const auto visible = visible_block(layout_, shape, context_.rank(), origin(step));
      if (visible) blocks_.backward(blas, *visible, t, g, present, d_q, d_block);
      wait_stream(compute, context_.stream());
      if (visible) add_to_sums(step, compute);
      present = next;
    }
    wait_stream(context_.stream(), compute);
    const KeysValues<accum> own = {accumulator(g.d_k, own_sums().k), accumulator(g.d_v, own_sums().v)};
    return_sums(own);
    wait_stream(compute, context_.stream());
    round_to(g.d_q, d_q, compute);
    round_to(g.d_k, own.k, compute);
    round_to(g.d_v, own.v, compute);
  }

 private:
  // Starts the hop, and returns the keys and values of step + 1. Compute may read them after its next wait
  // for the context stream. Both passes call it in each step, so it is what leaves out the last hop.
  KeysValues<real> begin_hop(int step, KeysValues<real> present) {
    if (step + 1 == ranks_) return present;  // one hop more would bring them home
    const KeysValues<real> next = travelling_[step % 2];
    hop(present, next);
    return next;
  }

  // Sends the sums to which this rank added in the step before, and receives those of this step's keys.
  void begin_sums_hop(int step) {
    if (step > 0) hop(sums_[(step - 1) % 2], sums_[step % 2]);
  }

  // Adds this step's block to the sums that came. In step 0 the block lies in the sums already.
  void add_to_sums(int step, cudaStream_t compute) {
    if (step == 0) return;
    const KeysValues<accum> sums = sums_[step % 2];
    accumulate(d_block_.k.data, sums.k.data, sums.k.size(), compute);
    accumulate(d_block_.v.data, sums.v.data, sums.v.size(), compute);
  }

  // Where the sums of this rank's own d_k and d_v arrive if `real` is narrower than `accum`.
  KeysValues<accum> own_sums() const { return sums_[ranks_ % 2]; }

  // The last hop: the sums go to the rank that owns their keys and values.
  void return_sums(KeysValues<accum> own) { hop(sums_[(ranks_ - 1) % 2], own); }

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

  KeysValues<real> travelling_[2];  // [rows, kv_heads*head_size]: compute reads one, a hop fills the other
  KeysValues<accum> sums_[2];       // likewise: a hop sends one and fills the other
  KeysValues<accum> d_block_;       // likewise: this rank's part, to be added to the sums that arrive
};

}  // namespace pentatron
