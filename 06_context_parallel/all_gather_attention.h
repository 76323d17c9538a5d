// Attention after an all-gather of all keys and values, as in Llama 3 (Grattafiori et al., 2024): simpler
// than a ring, but the memory for keys and values does not fall with c. Types (04's note) on the context
// axis: k, v of own rows V -> of all rows R; their gradients P -> V.
//
//   forward    all-gather of k, v, beside attention to the rank's own keys; then to those of the other ranks
//   backward   the same again; d_q adds up at home, and a reduce-scatter sums d_k, d_v for their owners
#pragma once

#include "context_blocks.h"

namespace pentatron {

class AllGatherAttention : public AttentionByRank {
 public:
  AllGatherAttention(const TrainingConfig& training, CpLayout layout, Communicator& context, int tensor_ranks)
      : AttentionByRank(training, layout, context, tensor_ranks) {
    const ContextPart part = context_part(training, ranks_, tensor_ranks);
    gathered_ = KeysValues<real>::allocate(memory_, ranks_ * part.rows, part.columns.kv);
    d_gathered_ = KeysValues<accum>::allocate(memory_, ranks_ * part.rows, part.columns.kv);
  }

  void forward(const Blas& blas, AttentionShape shape, const AttentionTensors& t) override {
    const cudaStream_t compute = blas.stream();
    const AccumTensor out = accumulator(t.out, blocks_.accumulator_memory());
    begin_gather(t, compute);
    for (int step = 0; step < ranks_; ++step) {
      if (step == 1) wait_stream(compute, context_.stream());  // only its own keys are here before
      if (const auto visible = visible_block(layout_, shape, context_.rank(), origin(step)))
        blocks_.forward(blas, *visible, t, keys_values(step, t), out);
    }
    round_to(t.out, out, compute);
  }

  void backward(const Blas& blas, AttentionShape shape, const AttentionTensors& t,
                const AttentionGradients& g) override {
    const cudaStream_t compute = blas.stream();
    attention_dots(t.out, g.d_out, g.d_out_dot_out, compute);
    const AccumTensor d_q = accumulator(g.d_q, blocks_.accumulator_memory());
    zero(d_q, compute);
    begin_gather(t, compute);
    for (int step = 0; step < ranks_; ++step) {
      if (step == 1) wait_stream(compute, context_.stream());
      const KeysValues<accum> d_part = d_gathered_.part(origin(step), ranks_);
      zero(d_part.k, compute);  // the sum has all parts, also those whose keys no query saw
      zero(d_part.v, compute);
      if (const auto visible = visible_block(layout_, shape, context_.rank(), origin(step)))
        blocks_.backward(blas, *visible, t, g, keys_values(step, t), d_q, d_part);
    }
    wait_stream(context_.stream(), compute);
    const KeysValues<accum> sums = d_gathered_.part(context_.rank(), ranks_);
    const KeysValues<accum> own = {accumulator(g.d_k, sums.k), accumulator(g.d_v, sums.v)};
    {
      const Communicator::Group together(context_);
      context_.reduce_scatter(d_gathered_.k.data, own.k.data, own.k.size());
      context_.reduce_scatter(d_gathered_.v.data, own.v.data, own.v.size());
    }
    wait_stream(compute, context_.stream());
    round_to(g.d_q, d_q, compute);
    round_to(g.d_k, own.k, compute);
    round_to(g.d_v, own.v, compute);
  }

 private:
  KeysValues<real> keys_values(int step, const AttentionTensors& t) const {
    return step == 0 ? KeysValues<real>{t.k, t.v} : gathered_.part(origin(step), ranks_);
  }

  void begin_gather(const AttentionTensors& t, cudaStream_t compute) {
    wait_stream(context_.stream(), compute);  // k and v are made, and nothing reads gathered_ any more
    const Communicator::Group together(context_);
    context_.all_gather(t.k.data, gathered_.k.data, t.k.size());
    context_.all_gather(t.v.data, gathered_.v.data, t.v.size());
  }

  KeysValues<real> gathered_;     // [ranks * rows, kv_heads*head_size], R
  KeysValues<accum> d_gathered_;  // likewise, P
};

}  // namespace pentatron
