// What the stand-in needs of the device, in two versions: device_cpu.cc, where the host reaches device memory
// directly, and device_cuda.cu, where it copies through pinned buffers.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>

#if __has_include(<cuda_cpu.h>)
#include <cuda_cpu.h>
#endif

namespace nccl_mpi {

// While one exists, ThreadSanitizer takes no notice of what this thread does: it sees neither an order nor a
// race in it. For MPI, whose inner locks would order threads that nothing in the program orders, and for
// bookkeeping that streams, the host and communicators share.
#if __has_include(<cuda_cpu.h>)
using Unseen = cuda_cpu::HiddenFromThreadSanitizer;
#else
struct Unseen {
  Unseen() {}
  ~Unseen() {}
};
#endif

// A point at which streams stop until the host lets them go on.
class Hold {
 public:
  Hold();
  cudaError_t stop(cudaStream_t stream);  // the stream's next operation begins after release()
  void release();                         // what this thread did before, the streams see

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// Whether these bytes are allocated device memory.
bool is_device_memory(const void* pointer, size_t bytes);

// Device memory as the host sees it, for one thread: a few ranges at a time, at most `capacity` bytes
// together.
class DeviceWindow {
 public:
  explicit DeviceWindow(size_t capacity);
  ~DeviceWindow();
  DeviceWindow(const DeviceWindow&) = delete;

  std::byte* read(const void* device, size_t bytes);  // what is there: valid after load(), until store()
  std::byte* write(void* device, size_t bytes);       // what is put there reaches the device in store()
  void load();
  void store();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace nccl_mpi
