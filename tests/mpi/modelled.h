// A modelled GPU and network for a test, and the modelled time of a step in nanoseconds.
#pragma once

#include <cuda_runtime.h>
#if __has_include(<cuda_cpu.h>)

#include <cuda_cpu.h>

#include <numeric>
#include <vector>

#include "clock/device_profile.h"
#include "modelled_link.h"
#include "mpi_tests.h"
#include "ranks/comm.h"

namespace pentatron {

// While it lives, time is that of this GPU: `unit`, on which the four products of a layer take a second and
// nothing else takes any, with links of its own.
class ModelledGpu {
 public:
  explicit ModelledGpu(double link_latency = 0, double link_bandwidth = 1e30, double flops = 1e30)
      : before_(cuda_cpu::profile()) {
    DeviceProfile unit = load_profile("unit");
    unit.link_latency = link_latency;
    unit.link_bandwidth = link_bandwidth;
    unit.flops_fp32 = flops;
    cuda_cpu::set_profile(unit);
  }
  ~ModelledGpu() { cuda_cpu::set_profile(before_); }
  ModelledGpu(const ModelledGpu&) = delete;

 private:
  const DeviceProfile before_;
};

constexpr int64_t second = 1'000'000'000;  // in nanoseconds

// What collectives of all ranks take, by the formulas of common/cpu/nccl/README.md.
class RingTime {
 public:
  RingTime() : ring_(network(), members()) {}
  int64_t all_reduce(double bytes) const { return nanoseconds(ring_.all_reduce(bytes)); }
  int64_t all_gather(double block_bytes) const { return nanoseconds(ring_.all_gather(block_bytes)); }
  int64_t reduce_scatter(double block_bytes) const { return nanoseconds(ring_.reduce_scatter(block_bytes)); }
  int64_t hop(double bytes) const { return nanoseconds(network().within_node.seconds(bytes)); }

 private:
  static int64_t nanoseconds(double seconds) {
    return mpi_tests::ranks() == 1 ? 0 : cuda_cpu::nanoseconds(seconds);
  }
  static nccl_mpi::Network network() {
    const DeviceProfile& gpu = cuda_cpu::profile();
    const nccl_mpi::Link link = {gpu.link_latency, gpu.link_bandwidth};
    return {true, link, link, 1 << 20};
  }
  static std::vector<int> members() {
    std::vector<int> all(mpi_tests::ranks());
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  nccl_mpi::Collectives ring_;
};

// From when all ranks begin to when the last one's host has waited for what it issued.
template <class Work>
int64_t modelled_time(const World& world, const Work& work) {
  world.largest({});
  const int64_t begin = cuda_cpu::clock();
  work();
  world.largest({});
  return cuda_cpu::clock() - begin;
}

}  // namespace pentatron

#endif
