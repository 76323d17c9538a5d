// The two numbers of a step that leave the device: its loss and its squared gradient norm. They lie side
// by side: one collective sums both over the ranks, and one copy brings both to the host.
#pragma once

#include <cmath>

#include "device/tensor.h"

namespace pentatron {

class StepTotals {
 public:
  explicit StepTotals(cudaStream_t stream)
      : stream_(stream), device_(size, Purpose::optimizer), host_(size) {}

  void reset() { CUDA_CHECK(cudaMemsetAsync(device_.data(), 0, size * sizeof(double), stream_)); }
  void add_loss(AccumTensor micro_batch_loss /*[1, 1]*/);

  static constexpr int size = 2;
  double* data() const { return device_.data(); }  // on the device: [loss, squared gradient norm]
  double* loss() const { return device_.data(); }
  double* norm_squared() const { return device_.data() + 1; }

  // Copies both numbers and waits for the stream, once a step. Then host_loss() and host_norm() can be
  // read.
  void wait();
  double host_loss() const { return host_[0]; }
  double host_norm() const { return std::sqrt(host_[1]); }

 private:
  cudaStream_t stream_;
  DeviceArray<double> device_;
  PinnedArray<double> host_;
};

}  // namespace pentatron
