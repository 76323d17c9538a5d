// Data parallelism: every rank holds the whole model and computes the gradient of its own micro-batches; the
// global gradient is their sum. Three ways to make it, each sending 2 (n-1)/n of the gradients' size from
// every rank:
//
//   naive     one all-reduce after backward, while nothing else runs
//   overlap   one for each unit, as soon as its gradients are complete, while backward goes on below it
//   bucket    the same in buckets of equal size: few enough to use the link well, early enough to hide
//             (Li et al., "PyTorch Distributed", 2020)
//
// Only a step's last micro-batch synchronises: the ones before it add to the same gradients, and a sum of
// sums is a sum.
#pragma once

#include "model/seams.h"
#include "program/options.h"
#include "ranks/comm.h"

namespace pentatron {

class DataParallel : public UnitHooks {
 public:
  // Sums the gradients of a group, which has been allocated whole, over the ranks of `data`.
  DataParallel(DpSync sync, double bucket_mb, ParameterGroup& group, Communicator& data, cudaStream_t compute)
      : sync_(sync),
        bucket_(std::max<size_t>(1, static_cast<size_t>(bucket_mb * 1e6) / sizeof(accum))),
        group_(group),
        all_(group.flat_gradients()),
        unsent_(all_.size()),
        data_(data),
        compute_(compute) {}

  // Backward has issued everything that writes this unit's gradients.
  void after_gradients(int unit, bool last) override {
    if (!last || group_.size(unit) == 0) return;
    accum* const gradients = group_.gradients(unit);
    if (sync_ == DpSync::overlap) sum(gradients, group_.size(unit));
    if (sync_ == DpSync::bucket) {
      // Backward fills the flat gradients from their end: a bucket is complete when all units above its
      // beginning are.
      const size_t complete = gradients - all_.data;
      while (unsent_ >= complete + bucket_) {
        unsent_ -= bucket_;
        sum(all_.data + unsent_, bucket_);
      }
    }
  }

  // After the last micro-batch: what has not been summed yet. Whatever `compute` does next has the global
  // gradient.
  void finish_gradient_sync() override {
    if (sync_ == DpSync::naive) sum(all_.data, all_.size());
    if (sync_ == DpSync::bucket && unsent_ > 0) sum(all_.data, unsent_);
    unsent_ = all_.size();
    wait_stream(compute_, data_.stream());
  }

 private:
  // Over the ranks, in place, on the communication stream, once `compute` has done what it was given so far.
  void sum(accum* gradients, size_t size) {
    wait_stream(data_.stream(), compute_);
    data_.all_reduce(gradients, gradients, size);
  }

  DpSync sync_;
  size_t bucket_;  // elements
  ParameterGroup& group_;
  AccumTensor all_;  // [1, gradients of all units, one unit after the other]
  size_t unsent_;    // elements at the beginning of `all_` that have not been summed
  Communicator& data_;
  cudaStream_t compute_;
};

}  // namespace pentatron
