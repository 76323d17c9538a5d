#include "device/kernel.h"
#include "run/totals.h"

namespace pentatron {

__global__ void add_loss_kernel(const accum* term /*[1]*/, double* sum /*[1]*/) {
  for ([[maybe_unused]] int once : block_range(1)) sum[0] += term[0];
}

void StepTotals::add_loss(AccumTensor micro_batch_loss) {
  launch(add_loss_kernel, dim3(1), shortest_kernel, stream_, micro_batch_loss.data, data());
}

void StepTotals::send(const LossScale* scale) {
  sent_ = 1 - sent_;
  CUDA_CHECK(cudaMemcpyAsync(host_.data() + sent_ * size, device_, size * sizeof(double),
                             cudaMemcpyDeviceToHost, stream_));
  if (scale != nullptr) {
    CUDA_CHECK(cudaMemcpyAsync(host_scale_.data() + sent_, scale, sizeof(LossScale), cudaMemcpyDeviceToHost,
                               stream_));
  }
  const auto note_time = [](void* end) {
    *static_cast<End*>(end) = {now(), std::chrono::steady_clock::now()};
  };
  CUDA_CHECK(cudaLaunchHostFunc(stream_, note_time, &ended_[sent_]));
  copied_[sent_].record(stream_);
}

void StepTotals::receive() {
  received_ = 1 - received_;
  copied_[received_].synchronize();
}

}  // namespace pentatron
