// Tensor parallelism (Shoeybi et al., "Megatron-LM", 2019): t ranks split the heads of attention, the columns
// of the MLP and the vocabulary. Inside such a region each rank has the whole input and its own part of the
// weights, and computes a partial sum of the output. The ranks communicate only at a region's borders:
//
//            forward                                backward
//   f        identity                               all-reduce       a region's input
//   f-bar    all-reduce                             identity         its output (g in the paper of 2019)
//
// Sequence parallelism (Korthikanti et al., "Reducing Activation Recomputation", 2022) also splits the rows
// of tokens outside the regions. An all-reduce becomes a reduce-scatter and an all-gather, which together
// send as much. A region's input is kept split: backward gathers it again for weight gradients (figure 5):
//
//   g        all-gather (again in backward)         reduce-scatter   a region's input
//   g-bar    reduce-scatter                         all-gather       its output
//
// This file only communicates: activations, their gradients, and partial weight gradients.
// common/model/parameters.h declares how weights are split. In forward nothing else can run meanwhile, unless
// the products at the borders are made in chunks (--tp-overlap, overlapped_region.cu).
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/rescale.h"
#include "model/memory.h"
#include "model/seams.h"
#include "options.h"
#include "ranks/comm.h"

namespace pentatron {

// TensorRegion (seams.h) explains the interface and its shapes. All ranks make the same calls in one order.
class TensorParallel : public TensorRegion {
 public:
  // For micro-batches of `rows` tokens, which all ranks of `tensor` work on; `compute` runs the model.
  TensorParallel(const TrainingConfig& training, const TensorParallelOptions& options, int64_t rows,
                 Communicator& tensor, cudaStream_t compute)
      : sequence_parallel_(options.sequence_parallel && tensor.ranks() > 1),
        tensor_(tensor),
        compute_(compute) {
    if (tensor_.ranks() == 1) return;
    largest_ = memory_.matrix<accum>(1, rows);
    if (!sequence_parallel_) return;
    gathered_ = memory_.matrix<real>(rows, training.model.d_model);
    entered_ = memory_.matrix<real>(rows, training.model.d_model);
  }

  int64_t rows_outside(int64_t rows) const override {
    return sequence_parallel_ ? rows / tensor_.ranks() : rows;
  }

  // ---- The borders of a region: f and f-bar, g and g-bar

  Tensor enter(Tensor x) override { return gather(x); }

  Tensor leave(Tensor partial) override {
    const Tensor sum = begin_sum(partial);
    wait_stream(compute_, tensor_.stream());
    return sum;
  }

  Tensor leave_backward(Tensor d_out) override { return gather(d_out); }

  // The communication stream sums d_in while the compute stream runs weight gradients (`meanwhile`).
  Tensor enter_backward(Tensor d_in, const std::function<void()>& meanwhile) override {
    const Tensor sum = begin_sum(d_in);
    meanwhile();
    // The weight gradients that read entered_ are issued; the next gather into it waits for them.
    entered_used_.record(compute_);
    wait_stream(compute_, tensor_.stream());
    return sum;
  }

 protected:  // a test calls begin_sum() by itself
  // x [outside, d], V -> [rows, d], R: all ranks' rows in the order of the ranks. Without sequence
  // parallelism x itself, I -> R.
  Tensor gather(Tensor x) {
    if (!sequence_parallel_) return x;
    wait_stream(tensor_.stream(), compute_);
    tensor_.all_gather(x.data, gathered_.data, x.size());
    wait_stream(compute_, tensor_.stream());
    return gathered_.row_range(0, x.rows * tensor_.ranks());
  }

  // Starts the sum of `partial` [rows, d], P, over the ranks, in place. Returns the sum of all rows, I, or,
  // with sequence parallelism, of this rank's, V. The caller makes the compute stream wait for it.
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

 public:
  // ---- A region's input again, for the weight gradients (with sequence parallelism)

  // The communication stream gathers x while the compute stream makes the input gradient. It need not wait
  // for x, because enter(x) has done so; it waits until the last reader of entered_ is done.
  void prefetch_entered(Tensor x) override {
    if (!sequence_parallel_) return;
    wait_event(tensor_.stream(), entered_used_);
    tensor_.all_gather(x.data, entered_.data, x.size());
    entered_came_.record(tensor_.stream());
    prefetched_ = x.data;
  }

  // The rows of all ranks, which compute may read. They are gathered now, unless prefetch_entered(x) has
  // begun.
  Tensor entered(Tensor x) override {
    if (!sequence_parallel_) return x;
    if (prefetched_ != x.data) {  // gather now: the compute stream may still read entered_
      wait_stream(tensor_.stream(), compute_);
      prefetch_entered(x);
    }
    prefetched_ = nullptr;
    wait_event(compute_, entered_came_);
    return entered_.row_range(0, x.rows * tensor_.ranks());
  }

  // ---- Sums over what the ranks hold

  // Vocabulary-parallel loss: max-reduce maxima, rescale local sums, sum-reduce the sums and target logits.
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

  // Sums the partial gradients (P -> I) of weights that all tensor ranks hold: each rank has the gradient of
  // its rows (outside the regions, with sequence parallelism) or of its part of a region (inside). Call it
  // once a step, after the last micro-batch and before the gradient norm.
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

 protected:
  // Whether the gradient of such a weight is P: the sum over the ranks is its value.
  bool is_partial(TensorSplit split) const {
    return split == TensorSplit::replicated_inside ||
           (split == TensorSplit::replicated_outside && sequence_parallel_);
  }

  bool sequence_parallel_;
  Communicator& tensor_;
  cudaStream_t compute_;
  DeviceArena memory_{Purpose::communication};
  AccumTensor largest_;  // [1, rows]: the largest logits over all ranks
  Tensor gathered_;      // [rows, d]: a region's input in forward, the gradient of its output in backward
  Tensor entered_;       // [rows, d]: a region's input in backward
  const real* prefetched_ = nullptr;   // the x that is being gathered into entered_
  Event entered_came_, entered_used_;  // entered_ is complete; its last reader is done
};

// The region of the options: with --tp-overlap one that makes products in chunks.
std::unique_ptr<TensorParallel> make_tensor_parallel(const TrainingConfig& training,
                                                     const TensorParallelOptions& options, int64_t rows,
                                                     Communicator& tensor, cudaStream_t compute);

// What predict_memory (memory.h) needs of one of `ranks` tensor ranks: its columns, and the buffers above.
inline RankShare tensor_parallel_share(RankShare share, const TensorParallelOptions& options, int ranks) {
  if (ranks == 1) return share;
  share.columns = columns_of(share.config.model, ranks);
  size_t& buffers = share.added[Purpose::communication];
  buffers += share.rows * sizeof(accum);
  if (options.sequence_parallel) {
    share.outside = share.rows / ranks;
    buffers += 2 * share.rows * share.columns.d * sizeof(real);
  }
  return share;
}

// Throws UsageError unless heads, kv heads, MLP width and vocabulary are multiples of `ranks` and, with
// sequence parallelism, `rows`, the rows of a micro-batch. `rows_option` names the options that set these.
inline void check_tensor_parallel(const ModelConfig& m, const TensorParallelOptions& options, int ranks,
                                  int64_t rows,
                                  const std::string& rows_option = "--micro-batch-size x --seq-len") {
  const auto check = [&](const std::string& option, int64_t size, const char* with = "") {
    require(size % ranks == 0, option, size, "a multiple of the tensor ranks (", ranks, ")", with);
  };
  check("--heads", m.heads);
  check("--kv-heads", m.kv_heads);
  check("--d-ff", m.d_ff);
  check("--vocab-size", m.vocab_size);
  if (options.sequence_parallel) check(rows_option, rows, " with --sequence-parallel");
}
inline void fit_to_ranks(const Options& all, const TensorParallelOptions& options, int ranks) {
  check_tensor_parallel(all.model, options, ranks, all.rows());
}

}  // namespace pentatron
