// What the stand-in needs of the device, in two versions: device_access_cpu.cc, where the host reaches device
// memory directly, and device_access_cuda.cu, where it copies through pinned buffers.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "clock/timeline.h"
#include "modelled_link.h"

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

using pentatron::trace::Message;

// When an operation ran, in nanoseconds of the streams' clock: from when its last rank had come.
struct Span {
  int64_t begin = 0, end = 0;
};

// A point at which streams stop until the host lets them go on.
class Hold {
 public:
  Hold();
  cudaError_t stop(cudaStream_t stream);  // the stream's next operation begins after release()
  // What this thread did before, the streams see; for them it is `span.end`.
  void release(Span span = {}, std::vector<Message> messages = {});

 private:
  struct State;
  std::shared_ptr<State> state_;
};

// The streams' clock: virtual where the device is the CPU, otherwise the one on the wall.
int64_t stream_clock();                                           // in an operation of a stream
void wait_until(int64_t time, const std::atomic<bool>& aborted);  // where that is real
Network default_network();                                        // that of the modelled GPU, if one is
void pay_for_launch();                                            // the host issues an operation
bool is_dry_run();                                                // no data is moved

// Whether these bytes are allocated device memory.
bool is_device_memory(const void* pointer, size_t bytes);

// Device memory as the host sees it, for one thread: a few ranges at a time. Up to `capacity` bytes together
// pass through pinned memory.
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
