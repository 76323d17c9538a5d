// Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): t ranks share out the heads of attention, the
// columns of the MLP and the vocabulary. Inside such a region each rank computes its part from the whole
// input, and what it makes is a partial sum of the output; the tensor ranks meet at the borders alone, twice
// a layer and direction:
//
//            forward                                backward
//   f        identity                               all-reduce       a region's input
//   f-bar    all-reduce                             identity         its output (g in the paper of 2019)
//
// Sequence parallelism (Korthikanti et al., "Reducing Activation Recomputation", 2022) also splits what lies
// outside the regions, by rows of tokens. An all-reduce is a reduce-scatter and an all-gather, so this costs
// the same, but for the region's input, which is kept split and is gathered again for the weight gradients
// (its figure 5):
//
//   g        all-gather (again in backward)         reduce-scatter   a region's input
//   g-bar    reduce-scatter                         all-gather       its output
//
// The split of the weights is declared (common/model/parameters.h); here is only what travels.
#pragma once

#include <string>

#include "kernels/kernels.h"
#include "model/memory.h"
#include "model/seams.h"
#include "program/options.h"
#include "ranks/comm.h"

namespace pentatron {

class TensorParallel : public TensorRegion {
 public:
  // For micro-batches of `rows` tokens.
  TensorParallel(const Options& options, int64_t rows, Communicator& tensor, cudaStream_t compute)
      : sequence_parallel_(options.sequence_parallel && tensor.ranks() > 1),
        tensor_(tensor),
        compute_(compute) {
    if (tensor_.ranks() == 1) return;
    largest_ = memory_.matrix<accum>(1, rows);
    if (!sequence_parallel_) return;
    gathered_ = memory_.matrix<real>(rows, options.model.d_model);
    entered_ = memory_.matrix<real>(rows, options.model.d_model);
  }

  int64_t rows_outside(int64_t rows) const override {
    return sequence_parallel_ ? rows / tensor_.ranks() : rows;
  }

  // ---- The borders of a region

  Tensor enter(Tensor x) override { return gather(x); }

  Tensor leave(Tensor partial) override {
    const Tensor sum = begin_sum(partial);
    wait_stream(compute_, tensor_.stream());
    return sum;
  }

  Tensor leave_backward(Tensor d_out) override { return gather(d_out); }

  // The sum travels on the communication stream, while the compute stream makes weight gradients.
  Tensor enter_backward(Tensor d_in, const std::function<void()>& meanwhile) override {
    const Tensor sum = begin_sum(d_in);
    meanwhile();
    entered_used_.record(compute_);
    wait_stream(compute_, tensor_.stream());
    return sum;
  }

  // Gathered while the compute stream makes the input gradient; x is an activation, which is there.
  void prefetch_entered(Tensor x) override {
    if (!sequence_parallel_) return;
    wait_event(tensor_.stream(), entered_used_);
    tensor_.all_gather(x.data, entered_.data, x.size());
    entered_came_.record(tensor_.stream());
    prefetched_ = x.data;
  }

  Tensor entered(Tensor x) override {
    if (!sequence_parallel_) return x;
    if (prefetched_ != x.data) {
      wait_stream(tensor_.stream(), compute_);
      prefetch_entered(x);
    }
    prefetched_ = nullptr;
    wait_event(compute_, entered_came_);
    return entered_.row_range(0, x.rows * tensor_.ranks());
  }

  // ---- What the ranks have in common

  // Every rank's largest logits, sums and targets, instead of its logits: the largest of all, to which the
  // sums are then relative, and the sums of both.
  void combine(AccumTensor statistics) override {
    if (tensor_.ranks() == 1) return;
    const int64_t rows = statistics.columns;
    wait_stream(tensor_.stream(), compute_);
    tensor_.all_reduce(statistics.data, largest_.data, rows, ncclMax);
    wait_stream(compute_, tensor_.stream());
    cross_entropy_rescale(largest_.data, statistics, compute_);
    const AccumTensor sum_and_target = statistics.row_range(1, 2);
    wait_stream(tensor_.stream(), compute_);
    tensor_.all_reduce(sum_and_target.data, sum_and_target.data, sum_and_target.size());
    wait_stream(compute_, tensor_.stream());
  }

  // Once a step, when this rank has the gradients of all its micro-batches, and before their norm: weights
  // that all tensor ranks hold have on each of them the gradient of its rows (outside the regions, when those
  // are split) or of its part of the region (inside).
  void sum_partial_gradients(const Parameters& parameters) {
    if (tensor_.ranks() == 1) return;
    wait_stream(tensor_.stream(), compute_);
    {
      const Communicator::Group together(tensor_);
      for (const Shard& shard : parameters.shards()) {
        for (const ParameterRange& range : parameters.ranges(shard)) {
          if (!is_partial(range.parameter->tensor_split)) continue;
          accum* const gradients = shard.gradients + range.begin_in_shard;
          tensor_.all_reduce(gradients, gradients, range.size);
        }
      }
    }
    wait_stream(compute_, tensor_.stream());
  }

 private:
  bool is_partial(TensorSplit split) const {
    return split == TensorSplit::held_inside || (split == TensorSplit::held_outside && sequence_parallel_);
  }

  // All rows, from each rank's; all of x without sequence parallelism.
  Tensor gather(Tensor x) {
    if (!sequence_parallel_) return x;
    wait_stream(tensor_.stream(), compute_);
    tensor_.all_gather(x.data, gathered_.data, x.size());
    wait_stream(compute_, tensor_.stream());
    return gathered_.row_range(0, x.rows * tensor_.ranks());
  }

  // In place, of all rows or, with sequence parallelism, of this rank's; the caller releases the compute
  // stream.
  Tensor begin_sum(Tensor partial) {
    if (tensor_.ranks() == 1) return partial;
    wait_stream(tensor_.stream(), compute_);
    if (!sequence_parallel_) {
      tensor_.all_reduce(partial.data, partial.data, partial.size());
      return partial;
    }
    const int64_t rows = partial.rows / tensor_.ranks();
    const Tensor own = partial.row_range(tensor_.rank() * rows, rows);
    tensor_.reduce_scatter(partial.data, own.data, own.size());
    return own;
  }

  bool sequence_parallel_;
  Communicator& tensor_;
  cudaStream_t compute_;
  DeviceArena memory_{Purpose::communication};
  AccumTensor largest_;  // [1, rows]
  Tensor gathered_;      // [rows, d]: a region's input in forward, the gradient of its output in backward
  Tensor entered_;       // [rows, d]: a region's input in backward
  const real* prefetched_ = nullptr;  // whose gathering is under way
  Event entered_came_, entered_used_;
};

// What each of so many tensor ranks has of what `share` says.
inline RankShare tensor_parallel_share(const Options& options, int ranks, RankShare share = {}) {
  if (ranks == 1) return share;
  const bool sequence_parallel = options.sequence_parallel;
  share.tensor_ranks = ranks;
  share.outside_ranks = sequence_parallel ? ranks : 1;
  const int64_t rows = rows_of(options, share).inside;
  share.buffers += {sequence_parallel ? 2 * rows * options.model.d_model : 0, rows};
  return share;
}

// Throws UsageError where the sizes can't be shared out over so many tensor ranks, and with sequence
// parallelism the rows of a micro-batch, which `rows_option` names.
inline void check_tensor_parallel(const Options& options, int ranks, int64_t rows,
                                  const std::string& rows_option = "--micro-batch-size x --seq-len") {
  const ModelConfig& m = options.model;
  const auto check = [&](const std::string& option, int64_t size, const std::string& with = "") {
    if (size % ranks == 0) return;
    throw UsageError(option, std::to_string(size),
                     "a multiple of the tensor ranks (" + std::to_string(ranks) + ")" + with);
  };
  check("--heads", m.heads);
  check("--kv-heads", m.kv_heads);
  check("--d-ff", m.d_ff);
  check("--vocab-size", m.vocab_size);
  if (options.sequence_parallel) check(rows_option, rows, " with --sequence-parallel");
}

}  // namespace pentatron
