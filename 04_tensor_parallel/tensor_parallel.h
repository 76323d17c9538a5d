// Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): t ranks share out the heads of attention, the
// columns of the MLP and the vocabulary. Inside such a region each rank computes its part from the whole
// input, and what it makes is a partial sum of the output; the tensor ranks meet at the borders alone, twice
// a layer and direction:
//
//            forward                                backward
//   f        identity                               all-reduce       a region's input
//   g        all-reduce                             identity         its output
//
// Sequence parallelism (Korthikanti et al., "Reducing Activation Recomputation", 2022) also splits what lies
// outside the regions, by rows of tokens. An all-reduce is a reduce-scatter and an all-gather, so this costs
// the same, but for the region's input, which is kept split and is gathered again for the weight gradients:
//
//   g-bar    all-gather (again in backward)         reduce-scatter   a region's input
//   g*       reduce-scatter                         all-gather       its output
//
// The split of the weights is declared (common/model/parameters.h); here is only what travels.
#pragma once

#include <string>

#include "kernels/kernels.h"
#include "model/seams.h"
#include "ranks/comm.h"

namespace pentatron {

class TensorParallel : public TensorRegion {
 public:
  // For micro-batches of `rows` tokens and a residual stream of width d.
  TensorParallel(bool sequence_parallel, int64_t rows, int64_t d, Communicator& tensor, cudaStream_t compute)
      : sequence_parallel_(sequence_parallel && tensor.ranks() > 1), tensor_(tensor), compute_(compute) {
    if (tensor_.ranks() == 1) return;
    largest_ = memory_.matrix<accum>(1, rows);
    if (!sequence_parallel_) return;
    gathered_ = memory_.matrix<real>(rows, d);
    regathered_ = memory_.matrix<real>(rows, d);
  }

  int64_t rows_outside(int64_t rows) const override {
    return sequence_parallel_ ? rows / tensor_.ranks() : rows;
  }

  // ---- The borders of a region

  Tensor enter(Tensor x) override { return gather(x); }

  Tensor leave(Tensor partial) override {
    const Tensor sum = begin_sum(partial);
    tensor_.release(compute_);
    return sum;
  }

  Tensor leave_backward(Tensor d) override { return gather(d); }

  // The sum travels on the communication stream, while the compute stream makes weight gradients.
  Tensor enter_backward(Tensor d, const std::function<void()>& meanwhile) override {
    const Tensor sum = begin_sum(d);
    meanwhile();
    regathered_used_.record(compute_);
    tensor_.release(compute_);
    return sum;
  }

  // Gathered while the compute stream makes the input gradient; x is an activation, which is there.
  void announce_regather(Tensor x) override {
    if (!sequence_parallel_) return;
    regathered_used_.make_wait(tensor_.stream());
    tensor_.all_gather(x.data, regathered_.data, x.size());
    regather_done_.record(tensor_.stream());
    announced_ = x.data;
  }

  Tensor regather(Tensor x) override {
    if (!sequence_parallel_) return x;
    if (announced_ != x.data) {
      tensor_.wait_for(compute_);
      announce_regather(x);
    }
    announced_ = nullptr;
    regather_done_.make_wait(compute_);
    return regathered_.row_range(0, x.rows * tensor_.ranks());
  }

  // ---- What the ranks have in common

  // Every rank's largest logits, sums and targets, instead of its logits: the largest of all, to which the
  // sums are then relative, and the sums of both.
  void combine(Statistics statistics) override {
    if (tensor_.ranks() == 1) return;
    const int64_t rows = statistics.columns;
    tensor_.wait_for(compute_);
    tensor_.all_reduce(statistics.data, largest_.data, rows, ncclMax);
    tensor_.release(compute_);
    cross_entropy_rescale(largest_.data, statistics, compute_);
    const Statistics sum_and_target = statistics.row_range(1, 2);
    tensor_.wait_for(compute_);
    tensor_.all_reduce(sum_and_target.data, sum_and_target.data, sum_and_target.size());
    tensor_.release(compute_);
  }

  // Once a step, when this rank has the gradients of all its micro-batches, and before their norm: weights
  // that all tensor ranks hold have on each of them the gradient of its rows (outside the regions, when those
  // are split) or of its part of the region (inside).
  void sum_partial_gradients(const Parameters& parameters) {
    if (tensor_.ranks() == 1) return;
    tensor_.wait_for(compute_);
    {
      const Communicator::Group together(tensor_);
      for (const Piece& piece : parameters.pieces()) {
        for (const Crossing& c : parameters.crossings(piece)) {
          if (!is_partial(c.parameter->tensor_split)) continue;
          accum* const gradients = piece.gradients + c.begin_in_piece;
          tensor_.all_reduce(gradients, gradients, c.size);
        }
      }
    }
    tensor_.release(compute_);
  }

 private:
  bool is_partial(TensorSplit split) const {
    return split == TensorSplit::held_inside || (split == TensorSplit::held_outside && sequence_parallel_);
  }

  // All rows, from each rank's; all of x without sequence parallelism.
  Tensor gather(Tensor x) {
    if (!sequence_parallel_) return x;
    tensor_.wait_for(compute_);
    tensor_.all_gather(x.data, gathered_.data, x.size());
    tensor_.release(compute_);
    return gathered_.row_range(0, x.rows * tensor_.ranks());
  }

  // In place, of all rows or, with sequence parallelism, of this rank's; the caller releases the compute
  // stream.
  Tensor begin_sum(Tensor partial) {
    if (tensor_.ranks() == 1) return partial;
    tensor_.wait_for(compute_);
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
  Statistics largest_;  // [1, rows]
  Tensor gathered_;     // [rows, d]: a region's input in forward, the gradient of its output in backward
  Tensor regathered_;   // [rows, d]: a region's input in backward
  const real* announced_ = nullptr;  // whose gathering is under way
  Event regather_done_, regathered_used_;
};

// Throws UsageError where the sizes can't be shared out over so many tensor ranks, and the tokens of one of
// `context_ranks` with sequence parallelism.
inline void check_tensor_parallel(const Options& options, int ranks, int context_ranks = 1) {
  const ModelConfig& m = options.model;
  const auto check = [&](const char* option, int64_t size, const std::string& with = "") {
    if (size % ranks == 0) return;
    throw UsageError(option, std::to_string(size),
                     "a multiple of the tensor ranks (" + std::to_string(ranks) + ")" + with);
  };
  check("--heads", m.heads);
  check("--kv-heads", m.kv_heads);
  check("--d-ff", m.d_ff);
  check("--vocab-size", m.vocab_size);
  if (!options.sequence_parallel) return;
  const std::string tokens = "--micro-batch-size x --seq-len";
  check((context_ranks > 1 ? tokens + " / --cp" : tokens).c_str(),
        int64_t{options.micro_batch_size} * options.sequence_length / context_ranks,
        " with --sequence-parallel");
}

}  // namespace pentatron
