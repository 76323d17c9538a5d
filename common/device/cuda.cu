#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <string_view>

#include "device/cuda.h"

namespace pentatron {

void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status != cudaSuccess) fail(call, cudaGetErrorString(status), file, line);
}

static constexpr const char* work_queues = "CUDA_DEVICE_MAX_CONNECTIONS";

// A program with more streams than there can be queues runs all the same.
void check_work_queues(int streams) {
  const char* const given = std::getenv(work_queues);
  const int needed = std::min(streams, 32);
  require(given == nullptr || std::atoi(given) >= needed, work_queues, given ? given : "", "at least ",
          needed, ", one for each stream of this program");
}

// A GPU has 8 otherwise, and 32 at most.
void set_work_queues() { setenv(work_queues, "32", 0); }

cudaDeviceProp this_device() {
  int device = 0;
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties;
}

int largest_block_memory() {
  int device = 0, bytes = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

// Without a GPU, what follows is cpu/cuda/device.cc: there it is modelled.
#ifndef CUDA_CPU

void configure_device(const DeviceConfig& config) {
  require(config.gpu.empty(), "--gpu", config.gpu, "no modelled GPU in a CUDA build");
  require(!config.dry_run, "--dry-run", "yes", "no dry run in a CUDA build");
}
bool is_dry_run() { return false; }
std::string modelled_gpu() { return {}; }
double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
void advance_clock(double) {}

double peak_flops(int element_bytes) {
  const cudaDeviceProp device = this_device();
  const std::string_view name = device.name;
  const auto has = [&](const char* part) { return name.find(part) != name.npos; };
  if (element_bytes != 2) return 0;
  if (has("A100")) return 312e12;
  if (!has("H100") && !has("H200")) return 0;
  if (has("PCIe")) return 756e12;
  return has("NVL") ? 835e12 : 989.4e12;
}

#endif

}  // namespace pentatron
