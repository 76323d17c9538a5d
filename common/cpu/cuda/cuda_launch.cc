// How a kernel's blocks are run. Ordinarily a block is one call of the kernel, and the blocks of a grid are
// shared out among the cores, unless the kernel is too short for that to pay. In the test mode
// (CUDA_CPU_THREADS_PER_BLOCK) a block is several threads with a real barrier, and blocks run in random
// order, several at once, with nothing that orders them: ThreadSanitizer then sees races inside a block and
// between blocks.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <thread>
#include <unordered_map>
#include <vector>

#include "cuda_cpu.h"

using cuda_cpu::remember;
using cuda_cpu::scratch_bytes;

namespace {

constexpr size_t kDefaultSharedBytes = size_t{48} << 10;  // of a block, otherwise
constexpr unsigned kMaxGridX = 2147483647u, kMaxGridYZ = 65535, kMaxBlock = 1024, kMaxBlockZ = 64;
constexpr size_t kCacheLine = 64;     // bytes
constexpr size_t kBlocksAtOnce = 16;  // in the test mode

// Of a block, if the kernel asked for it: on Hopper 227 KiB.
size_t max_shared_bytes() {
  const char* const text = std::getenv("CUDA_CPU_SHARED_KIB");
  return size_t{text == nullptr ? 227u : static_cast<unsigned>(std::atoi(text))} << 10;
}

size_t count(dim3 d) { return size_t{d.x} * d.y * d.z; }

uint3 block_index(size_t i, dim3 grid) {
  if (grid.y == 1 && grid.z == 1) return {static_cast<unsigned>(i), 0, 0};  // most grids; divisions are slow
  const size_t xy = size_t{grid.x} * grid.y;
  return {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i % xy / grid.x),
          static_cast<unsigned>(i / xy)};
}

bool valid_dimensions(dim3 grid, dim3 block) {
  return count(grid) > 0 && grid.x <= kMaxGridX && grid.y <= kMaxGridYZ && grid.z <= kMaxGridYZ &&
         count(block) > 0 && block.x <= kMaxBlock && block.y <= kMaxBlock && block.z <= kMaxBlockZ &&
         count(block) <= kMaxBlock;
}

// Bytes that begin at a cache line, as many as asked for and no more, so that AddressSanitizer sees an access
// beyond.
class AlignedBytes {
 public:
  AlignedBytes() = default;
  AlignedBytes(const AlignedBytes&) = delete;
  ~AlignedBytes() { resize(0); }
  void resize(size_t bytes) {
    if (bytes == bytes_) return;
    ::operator delete (data_, std::align_val_t{kCacheLine});
    bytes_ = bytes;
    data_ = bytes == 0 ? nullptr : ::operator new (bytes, std::align_val_t{kCacheLine});
  }
  void fill(unsigned char value) {
    if (bytes_ > 0) std::memset(data_, value, bytes_);
  }
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

// The barrier of a block's threads. As on a GPU, threads that have returned from the kernel are not waited
// for.
class BlockBarrier {
 public:
  explicit BlockBarrier(unsigned threads) : threads_(threads) {}

  void wait() {
    std::unique_lock lock(mutex_);
    const long generation = generation_;
    ++arrived_;
    release_if_complete();
    changed_.wait(lock, [&] { return generation_ != generation; });
  }

  void leave() {
    std::lock_guard lock(mutex_);
    --threads_;
    release_if_complete();
  }

 private:
  void release_if_complete() {
    if (arrived_ == 0 || arrived_ < threads_) return;
    arrived_ = 0;
    ++generation_;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  unsigned threads_, arrived_ = 0;
  long generation_ = 0;
};

// What the threads of a block share.
struct Block {
  AlignedBytes shared;
  alignas(kCacheLine) unsigned char scratch[scratch_bytes];
  BlockBarrier* barrier = nullptr;
};

thread_local constinit Block* current_block = nullptr;

#ifndef CUDA_CPU_THREADS_PER_BLOCK

// ---- Ordinarily: a block is one call ----------------------------------------------------------------------

void run_range(size_t first, size_t last, dim3 grid, size_t shared_bytes, cuda_cpu::BlockBody body) {
  static thread_local Block block;
  block.shared.resize(shared_bytes);
  current_block = &block;
  gridDim = grid;
  for (size_t i = first; i < last; ++i) {
    blockIdx = block_index(i, grid);
    block.shared.fill(cuda_cpu::nan_byte);
    body.call(body.bound);
  }
}

// Calls the other cores only where that pays: not if the kernel, going by the time that its blocks took so
// far, is over sooner.
void run_blocks(const void* kernel, dim3 grid, dim3, size_t shared_bytes, cuda_cpu::BlockBody body) {
  using Clock = std::chrono::steady_clock;
  using Microseconds = std::chrono::duration<double, std::micro>;
  constexpr double kWorthSharing = 10;  // µs on one core
  constexpr size_t kPiecesPerCore = 4;  // so that all end at about the same time
  static thread_local std::unordered_map<const void*, double> block_times;  // µs on one core, by kernel

  const size_t blocks = count(grid);
  const auto known = block_times.try_emplace(kernel, std::numeric_limits<double>::infinity()).first;
  const bool worth = known->second * static_cast<double>(blocks) > kWorthSharing;
  const size_t pieces = worth ? std::min(blocks, kPiecesPerCore * cuda_cpu::cores()) : 1;

  const auto start = Clock::now();
  cuda_cpu::share_out(pieces, [&](size_t piece) {
    run_range(piece * blocks / pieces, (piece + 1) * blocks / pieces, grid, shared_bytes, body);
  });
  const double time = Microseconds(Clock::now() - start).count() / static_cast<double>(blocks);
  known->second = std::min(time, 2 * known->second);  // an interruption must not look like long work
}

#else

// ---- In the test mode: a block is several threads ---------------------------------------------------------

void run_block_on_threads(size_t i, dim3 grid, unsigned threads, size_t shared_bytes,
                          cuda_cpu::BlockBody body) {
  BlockBarrier barrier(threads);
  Block block;
  block.shared.resize(shared_bytes);
  block.shared.fill(cuda_cpu::nan_byte);
  std::memset(block.scratch, cuda_cpu::nan_byte, scratch_bytes);
  block.barrier = &barrier;

  std::vector<std::jthread> running;
  for (unsigned thread = 0; thread < threads; ++thread) {
    running.emplace_back([&, thread] {
      threadIdx = {thread, 0, 0};
      blockDim = {threads, 1, 1};
      blockIdx = block_index(i, grid);
      gridDim = grid;
      current_block = &block;
      body.call(body.bound);
      barrier.leave();
    });
  }
}

void run_blocks(const void*, dim3 grid, dim3 block, size_t shared_bytes, cuda_cpu::BlockBody body) {
  static std::atomic<unsigned> launches = 0;
  std::vector<size_t> order(count(grid));
  std::iota(order.begin(), order.end(), size_t{0});
  std::shuffle(order.begin(), order.end(), std::mt19937(launches.fetch_add(1, std::memory_order_relaxed)));

  const auto threads = static_cast<unsigned>(std::min<size_t>(count(block), cuda_cpu::threads_per_block));
  const size_t at_once = std::min(order.size(), kBlocksAtOnce);
  std::vector<std::jthread> running;
  for (size_t first = 0; first < at_once; ++first) {
    running.emplace_back([&, first] {
      for (size_t i = first; i < order.size(); i += at_once) {
        run_block_on_threads(order[i], grid, threads, shared_bytes, body);
      }
    });
  }
}

#endif

// ---- What a launch may ask for ----------------------------------------------------------------------------

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

namespace cuda_cpu {

void* shared_memory() { return current_block->shared.data(); }
void* shared_scratch() { return current_block->scratch; }

void run_grid(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, BlockBody body) {
  run_blocks(kernel, grid, block, shared_bytes, body);
}
void synchronize_block() { current_block->barrier->wait(); }

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, bool arguments_valid,
                   std::function<cudaError_t()> work) {
  if (kernel == nullptr) return remember(cudaErrorInvalidDeviceFunction);
  if (!valid_dimensions(config.gridDim, config.blockDim)) return remember(cudaErrorInvalidConfiguration);
  if (config.dynamicSmemBytes > kDefaultSharedBytes && config.dynamicSmemBytes > max_shared_bytes(kernel)) {
    return remember(cudaErrorInvalidValue);
  }
  if (!arguments_valid) return remember(cudaErrorInvalidDevicePointer);
  if (!is_described()) return remember(cudaErrorNotPermitted);  // no trace::Operation says what it costs
  return remember(enqueue_described(config.stream, std::move(work)));
}

}  // namespace cuda_cpu

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 ||
      static_cast<size_t>(value) > max_shared_bytes()) {
    return remember(cudaErrorInvalidValue);
  }
  SharedMemoryLimits& limits = shared_memory_limits();
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

namespace {

// CUDA_CPU_DEVICES: how many there are to choose from. All are this process's one memory.
int device_count() {
  const char* const text = std::getenv("CUDA_CPU_DEVICES");
  return text == nullptr ? 1 : std::max(1, std::atoi(text));
}
thread_local constinit int current_device = 0;

}  // namespace

cudaError_t cudaGetDeviceCount(int* count) {
  if (count == nullptr) return remember(cudaErrorInvalidValue);
  *count = device_count();
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  // A communicator's thread chooses device 0 while the first product sets variables: then it may read none.
  if (device != 0 && (device < 0 || device >= device_count())) return remember(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  if (device == nullptr) return remember(cudaErrorInvalidValue);
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (properties == nullptr) return remember(cudaErrorInvalidValue);
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  *properties = {
      .name = {}, .uuid = {}, .totalGlobalMem = total, .major = 0, .minor = 0, .multiProcessorCount = cores};
  std::snprintf(properties->name, sizeof properties->name, "CPU (%d cores)", cores);
  const char* const uuid = std::getenv("CUDA_CPU_UUID");
  const std::string unique = uuid != nullptr ? uuid : std::to_string(getpid()) + "/" + std::to_string(device);
  unique.copy(properties->uuid.bytes, sizeof properties->uuid.bytes);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (value == nullptr) return remember(cudaErrorInvalidValue);
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = kMaxBlock;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(max_shared_bytes());
      return cudaSuccess;
  }
  return remember(cudaErrorInvalidValue);
}
