// Compute and links that take as long as a test wants, asleep, so that a busy machine changes little.
#pragma once

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "device/tensor.h"
#include "device/trace.h"
#include "model/seams.h"

namespace pentatron {

// `seconds` has to stay where it is.
inline void pause(cudaStream_t stream, const double* seconds) {
  const trace::Range range(stream, "pause");
  const auto sleep = [](void* s) {
    std::this_thread::sleep_for(std::chrono::duration<double>(*static_cast<const double*>(s)));
  };
  CUDA_CHECK(cudaLaunchHostFunc(stream, sleep, const_cast<double*>(seconds)));
}

// Attention that takes so many seconds longer.
class SlowAttention : public AttentionCore {
 public:
  SlowAttention(Attention kind, double forward, double backward)
      : AttentionCore(kind), forward_(forward), backward_(backward) {}
  void forward(const Blas& blas, AttentionShape shape, const AttentionTensors& t) override {
    AttentionCore::forward(blas, shape, t);
    pause(blas.stream(), &forward_);
  }
  void backward(const Blas& blas, AttentionShape shape, const AttentionTensors& t,
                const AttentionGradients& g) override {
    AttentionCore::backward(blas, shape, t, g);
    pause(blas.stream(), &backward_);
  }

 private:
  const double forward_, backward_;
};

// While it lives, communicators are made with a modelled link.
class SlowLink {
 public:
  // On which a message of so many bytes takes so many seconds.
  SlowLink(double bytes, double seconds) {
    setenv("NCCL_CPU_LINK", ("1us," + std::to_string(bytes / seconds) + "B/s").c_str(), true);
  }
  // On which an all-reduce of `elements` among so many ranks takes so many seconds.
  static SlowLink of_all_reduce(double elements, double seconds, int ranks) {
    return SlowLink(2.0 * (ranks - 1) / ranks * elements * sizeof(accum), seconds);
  }
  ~SlowLink() { unsetenv("NCCL_CPU_LINK"); }
  SlowLink(const SlowLink&) = delete;
};

}  // namespace pentatron
