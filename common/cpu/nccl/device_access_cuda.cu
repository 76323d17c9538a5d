// The device is a GPU: a stream that stops is a kernel of one thread that watches a flag in pinned memory,
// and data passes through a pinned buffer. All pinned memory is allocated before the first stream stops,
// because an allocation may wait for the device.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <thread>
#include <vector>

#include "device_access.h"

namespace nccl_mpi {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "NCCL over MPI: %s: %s\n", what, cudaGetErrorString(error));
  std::_Exit(1);
}

// A stream's flag goes from free to held (the host, when the operation is issued), to released (the host),
// and back to free (the kernel, as it ends).
enum Flag : unsigned { kFree, kHeld, kReleased };
constexpr size_t kFlags = 4096;  // streams that can be held at a time

class Flags {
 public:
  Flags() {
    check(cudaHostAlloc(&flags_, kFlags * sizeof(unsigned), cudaHostAllocPortable), "pinned memory");
    std::fill_n(flags_, kFlags, unsigned{kFree});
  }
  unsigned* take() {
    for (;; std::this_thread::yield()) {
      for (size_t tries = 0; tries < kFlags; ++tries) {
        unsigned* const flag = flags_ + next_.fetch_add(1) % kFlags;
        unsigned expected = kFree;
        if (std::atomic_ref(*flag).compare_exchange_strong(expected, kHeld)) return flag;
      }
    }
  }

 private:
  unsigned* flags_ = nullptr;
  std::atomic<size_t> next_ = 0;
};

Flags& flags() {
  static Flags* const flags = new Flags;  // never freed: streams may outlive main
  return *flags;
}

__global__ void wait_until_released(volatile unsigned* flag) {
  while (*flag != kReleased) __nanosleep(1000);
  __threadfence_system();
  *flag = kFree;
}

}  // namespace

struct Hold::State {
  std::vector<unsigned*> flags;
};

Hold::Hold() : state_(std::make_shared<State>()) {}

cudaError_t Hold::stop(cudaStream_t stream) {
  unsigned* const flag = flags().take();
  state_->flags.push_back(flag);
  wait_until_released<<<1, 1, 0, stream>>>(flag);
  return cudaGetLastError();
}

void Hold::release(Span, std::vector<Message>) {
  for (unsigned* flag : state_->flags) std::atomic_ref(*flag).store(kReleased);
}

// That of the day, which the hosts of a network share.
int64_t stream_clock() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void wait_until(int64_t time, const std::atomic<bool>& aborted) {
  constexpr int64_t longest = 10'000'000;  // ns: an abort is noticed
  for (int64_t left = time - stream_clock(); left > 0 && !aborted; left = time - stream_clock()) {
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(left, longest)));
  }
}

Network default_network() { return {}; }
void pay_for_launch() {}
bool is_dry_run() { return false; }

bool is_device_memory(const void* pointer, size_t bytes) {
  for (const char* byte :
       {static_cast<const char*>(pointer), static_cast<const char*>(pointer) + bytes - 1}) {
    cudaPointerAttributes attributes = {};
    if (cudaPointerGetAttributes(&attributes, byte) != cudaSuccess) {
      cudaGetLastError();
      return false;
    }
    if (attributes.type != cudaMemoryTypeDevice && attributes.type != cudaMemoryTypeManaged) return false;
  }
  return true;
}

struct DeviceWindow::State {
  struct Store {
    void* device;
    const std::byte* pinned;
    size_t bytes;
  };

  // A group of many operations takes more than the pinned buffer. The rest passes through ordinary memory,
  // which is slower; it can be allocated at any time.
  std::byte* take(size_t bytes) {
    constexpr size_t alignment = 256;
    if (used + bytes > capacity) return rest.emplace_back(bytes).data();
    std::byte* const taken = buffer + used;
    used = (used + bytes + alignment - 1) / alignment * alignment;
    return taken;
  }

  int device = 0;
  cudaStream_t stream = nullptr;
  std::byte* buffer = nullptr;
  size_t capacity = 0, used = 0;  // bytes
  std::deque<std::vector<std::byte>> rest;
  std::vector<Store> stores;
};

DeviceWindow::DeviceWindow(size_t capacity) : state_(std::make_unique<State>()) {
  flags();
  state_->capacity = capacity;
  check(cudaGetDevice(&state_->device), "cudaGetDevice");
  check(cudaStreamCreateWithFlags(&state_->stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  check(cudaHostAlloc(&state_->buffer, capacity, cudaHostAllocPortable), "pinned memory");
}

DeviceWindow::~DeviceWindow() {
  cudaStreamDestroy(state_->stream);
  cudaFreeHost(state_->buffer);
}

std::byte* DeviceWindow::read(const void* device, size_t bytes) {
  std::byte* const pinned = state_->take(bytes);
  check(cudaSetDevice(state_->device), "cudaSetDevice");
  check(cudaMemcpyAsync(pinned, device, bytes, cudaMemcpyDeviceToHost, state_->stream), "copy to the host");
  return pinned;
}

std::byte* DeviceWindow::write(void* device, size_t bytes) {
  std::byte* const pinned = state_->take(bytes);
  state_->stores.push_back({device, pinned, bytes});
  return pinned;
}

void DeviceWindow::load() { check(cudaStreamSynchronize(state_->stream), "copy to the host"); }

void DeviceWindow::store() {
  for (const State::Store& store : state_->stores) {
    check(cudaMemcpyAsync(store.device, store.pinned, store.bytes, cudaMemcpyHostToDevice, state_->stream),
          "copy to the device");
  }
  check(cudaStreamSynchronize(state_->stream), "copy to the device");
  state_->stores.clear();
  state_->rest.clear();
  state_->used = 0;
}

}  // namespace nccl_mpi
