// The two numbers of a step that leave the device: its loss and its squared gradient norm. They lie side
// by side: one collective sums both over the ranks, and one copy brings both to the host. In fp16 the loss
// scale goes with them. The host waits for them a step later, when it has issued the next step; so the device
// never waits for the host.
#pragma once

#include <chrono>
#include <cmath>

#include "device/tensor.h"
#include "kernels/loss.h"

namespace pentatron {

class StepTotals {
 public:
  explicit StepTotals(cudaStream_t stream) : stream_(stream), host_(2 * size), host_scale_(2) {}

  void reset() { CUDA_CHECK(cudaMemsetAsync(device_, 0, size * sizeof(double), stream_)); }
  void add_loss(AccumTensor micro_batch_loss /*[1, 1]*/);

  static constexpr int size = 2;
  double* data() const { return device_; }  // on the device: [loss, squared gradient norm]
  double* norm_squared() const { return device_ + 1; }

  // Begins to copy both numbers, once a step, and the scale if there is one.
  void send(const LossScale* scale = nullptr);
  // Waits for the older copy that was not waited for: host_loss() and host_norm() are then of its step.
  void receive();
  void wait() { send(), receive(); }
  // When the device had made the copy, by now() and by the wall clock. The host may look later.
  struct End {
    double time;
    std::chrono::steady_clock::time_point wall;
  };
  const End& ended() const { return ended_[received_]; }
  double host_loss() const { return host_[received_ * size]; }
  LossScale host_loss_scale() const { return host_scale_[received_]; }
  double host_norm() const { return std::sqrt(host_[received_ * size + 1]); }

 private:
  cudaStream_t stream_;
  DeviceArena memory_{Purpose::optimizer};
  double* device_ = memory_.matrix<double>(1, size).data;
  PinnedArray<double> host_;           // [2, size]
  PinnedArray<LossScale> host_scale_;  // [2]
  End ended_[2] = {};
  Event copied_[2];
  int sent_ = 1, received_ = 1;  // the halves of host_ used last
};

}  // namespace pentatron
