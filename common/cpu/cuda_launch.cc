// How a kernel's blocks are run. Ordinarily a block is one call of the kernel, and the blocks of a grid are
// shared out among the cores. In the test mode (CUDA_CPU_THREADS_PER_BLOCK) a block is several threads with a
// real barrier, and blocks run in random order, several at once, with nothing that orders them:
// ThreadSanitizer then sees races inside a block and between blocks.
#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "cuda_cpu.h"

namespace cuda_cpu {
namespace {

constexpr size_t kMaxSharedBytes = size_t{227} << 10;     // of a block, if the kernel asked for it
constexpr size_t kDefaultSharedBytes = size_t{48} << 10;  // of a block, otherwise
constexpr unsigned kMaxGridYZ = 65535, kMaxGridX = 2147483647u, kMaxBlock = 1024, kMaxBlockZ = 64;

// What the threads of a block share.
struct Block {
  std::unique_ptr<unsigned char[]> shared;
  size_t shared_capacity = 0;
  alignas(64) unsigned char scratch[scratch_bytes];

  // Fresh memory for the next block.
  void prepare(size_t shared_bytes) {
    if (shared_bytes > shared_capacity) {
      shared = std::make_unique<unsigned char[]>(shared_bytes);
      shared_capacity = shared_bytes;
    }
    std::memset(shared.get(), 0xff, shared_bytes);
    if constexpr (threads_per_block > 1) std::memset(scratch, 0xff, scratch_bytes);
  }
};

thread_local constinit Block* current_block = nullptr;

size_t count(dim3 d) { return size_t{d.x} * d.y * d.z; }

uint3 block_index(size_t i, dim3 grid) {
  const size_t xy = size_t{grid.x} * grid.y;
  return {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i % xy / grid.x),
          static_cast<unsigned>(i / xy)};
}

bool valid_dimensions(dim3 grid, dim3 block) {
  return count(grid) > 0 && grid.x <= kMaxGridX && grid.y <= kMaxGridYZ && grid.z <= kMaxGridYZ &&
         count(block) > 0 && block.x <= kMaxBlock && block.y <= kMaxBlock && block.z <= kMaxBlockZ &&
         count(block) <= kMaxBlock;
}

// The kernels that were allowed more than kDefaultSharedBytes, and how much.
struct SharedMemoryLimits {
  std::mutex mutex;
  std::map<const void*, size_t> bytes;
};

SharedMemoryLimits& shared_memory_limits() {
  static SharedMemoryLimits* const limits = new SharedMemoryLimits;
  return *limits;
}

size_t max_shared_bytes(const void* kernel) {
  SharedMemoryLimits& limits = shared_memory_limits();
  std::lock_guard lock(limits.mutex);
  const auto found = limits.bytes.find(kernel);
  return found == limits.bytes.end() ? kDefaultSharedBytes : found->second;
}

}  // namespace

void* shared_memory() { return current_block->shared.get(); }
void* shared_scratch() { return current_block->scratch; }

void run_grid(const void*, dim3 grid, dim3, size_t shared_bytes, BlockBody body) {
  const size_t blocks = count(grid);
#pragma omp parallel if (blocks > 1 && !under_thread_sanitizer)
  {
    static thread_local Block block;
    current_block = &block;
    gridDim = grid;
#pragma omp for schedule(static)
    for (size_t i = 0; i < blocks; ++i) {
      blockIdx = block_index(i, grid);
      block.prepare(shared_bytes);
      body.call(body.bound);
    }
  }
}

void synchronize_block() {}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, bool arguments_valid,
                   std::function<cudaError_t()> work) {
  if (kernel == nullptr) return remember(cudaErrorInvalidDeviceFunction);
  if (!valid_dimensions(config.gridDim, config.blockDim)) return remember(cudaErrorInvalidConfiguration);
  if (config.dynamicSmemBytes > kDefaultSharedBytes && config.dynamicSmemBytes > max_shared_bytes(kernel)) {
    return remember(cudaErrorInvalidValue);
  }
  if (!arguments_valid) return remember(cudaErrorInvalidDevicePointer);
  return remember(enqueue(config.stream, std::move(work)));
}

}  // namespace cuda_cpu

using cuda_cpu::remember;

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout) return cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<size_t>(value) > cuda_cpu::kMaxSharedBytes) {
    return remember(cudaErrorInvalidValue);
  }
  cuda_cpu::SharedMemoryLimits& limits = cuda_cpu::shared_memory_limits();
  std::lock_guard lock(limits.mutex);
  limits.bytes[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaFuncGetName(const char** name, const void* kernel) {
  Dl_info info;
  if (name == nullptr) return remember(cudaErrorInvalidValue);
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr)
    return remember(cudaErrorInvalidDeviceFunction);
  *name = info.dli_sname;
  return cudaSuccess;
}

// ---- The device -------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count) {
  if (count == nullptr) return remember(cudaErrorInvalidValue);
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : remember(cudaErrorInvalidDevice); }

cudaError_t cudaGetDevice(int* device) {
  if (device == nullptr) return remember(cudaErrorInvalidValue);
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (properties == nullptr) return remember(cudaErrorInvalidValue);
  if (device != 0) return remember(cudaErrorInvalidDevice);
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  *properties = {.name = {},
                 .totalGlobalMem = total,
                 .sharedMemPerBlock = cuda_cpu::kDefaultSharedBytes,
                 .sharedMemPerBlockOptin = cuda_cpu::kMaxSharedBytes,
                 .warpSize = 32,
                 .maxThreadsPerBlock = cuda_cpu::kMaxBlock,
                 .maxThreadsDim = {cuda_cpu::kMaxBlock, cuda_cpu::kMaxBlock, cuda_cpu::kMaxBlockZ},
                 .maxGridSize = {cuda_cpu::kMaxGridX, cuda_cpu::kMaxGridYZ, cuda_cpu::kMaxGridYZ},
                 .major = 0,
                 .minor = 0,
                 .multiProcessorCount = cores};
  std::snprintf(properties->name, sizeof properties->name, "CPU (%d cores)", cores);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (value == nullptr) return remember(cudaErrorInvalidValue);
  cudaDeviceProp properties;
  if (cudaError_t error = cudaGetDeviceProperties(&properties, device); error != cudaSuccess) return error;
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = properties.maxThreadsPerBlock;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = static_cast<int>(properties.sharedMemPerBlock);
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(properties.sharedMemPerBlockOptin);
      return cudaSuccess;
    case cudaDevAttrWarpSize:
      *value = properties.warpSize;
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = properties.multiProcessorCount;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = properties.major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = properties.minor;
      return cudaSuccess;
  }
  return remember(cudaErrorInvalidValue);
}
