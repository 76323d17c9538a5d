// Data parallelism: every rank holds the whole model and computes the gradients of its own micro-batches. An
// all-reduce sums them over the n ranks: each sends 2 (n-1)/n of the gradients' size, in one of three ways:
//
//   naive     one all-reduce after backward, while nothing else runs
//   overlap   one for each unit, when its gradients are complete; backward of the next unit hides it
//   bucket    one for each bucket of equal size: few calls, so that latency costs little, but early ones, so
//             that backward hides them (Li et al., "PyTorch Distributed", 2020, arXiv 2006.15704)
//
// Only a step's last micro-batch synchronises. Those before it add to the same gradients.
#pragma once

#include "model/batch.h"
#include "model/memory.h"
#include "model/seams.h"
#include "options.h"
#include "ranks/comm.h"

namespace pentatron {

class DataParallel : public UnitHooks {
 public:
  // Sums the gradients of `group` over the ranks of `data`. group.allocate() has been called. `compute`: the
  // stream that writes the gradients.
  DataParallel(const DataParallelOptions& options, ParameterGroup& group, Communicator& data,
               cudaStream_t compute)
      : sync_(options.dp_sync),
        bucket_(std::max<size_t>(1, static_cast<size_t>(options.bucket_mb * 1e6) / sizeof(accum))),
        group_(group),
        all_(group.flat_gradients()),
        unsent_(all_.size()),
        data_(data),
        compute_(compute) {}

  // Backward calls this when it has issued all work that writes this unit's gradients. `last`: the step's
  // last micro-batch; nothing is summed before it.
  void after_gradients(int unit, bool last) override {
    if (!last || group_.size(unit) == 0) return;
    accum* const gradients = group_.gradients(unit);
    if (sync_ == DpSync::overlap) sum(gradients, group_.size(unit));
    if (sync_ == DpSync::bucket) {
      // Backward completes the flat gradients from their end to their beginning. So a bucket is complete when
      // the unit at its beginning is.
      const size_t complete = gradients - all_.data;
      while (unsent_ >= complete + bucket_) {
        unsent_ -= bucket_;
        sum(all_.data + unsent_, bucket_);
      }
    }
  }

  // After the last micro-batch: sums what has not been summed, and lets `compute` wait for all sums. Work
  // issued to `compute` after this call reads the global gradient.
  void finish_gradient_sync() override {
    if (sync_ == DpSync::naive) sum(all_.data, all_.size());
    if (sync_ == DpSync::bucket && unsent_ > 0) sum(all_.data, unsent_);
    unsent_ = all_.size();
    wait_stream(compute_, data_.stream());
  }

 private:
  // Sums gradients [size] over the ranks, in place, on the communication stream. That stream first waits for
  // all work issued to `compute` so far, which writes them.
  void sum(accum* gradients, size_t size) {
    wait_stream(data_.stream(), compute_);
    data_.all_reduce(gradients, gradients, size);
  }

  DpSync sync_;
  size_t bucket_;  // elements
  ParameterGroup& group_;
  AccumTensor all_;  // [1, gradients of all units, end to end]
  size_t unsent_;    // elements at the beginning of `all_` whose sum has not been issued
  Communicator& data_;
  cudaStream_t compute_;
};

// What predict_memory (memory.h) needs of one of `ranks` data ranks.
inline RankShare data_parallel_share(RankShare share, const DataParallelOptions&, int ranks) {
  share.micro_batches = micro_batches_of_a_rank(share.config, ranks);
  share.replicas *= ranks;
  return share;
}

}  // namespace pentatron
