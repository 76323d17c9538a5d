// What the CPU stand-ins have and CUDA has not: the pieces that they share with each other and show to tests.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "clock/device_profile.h"
#include "clock/timeline.h"

namespace cuda_cpu {

#ifdef __SANITIZE_THREAD__
inline constexpr bool under_thread_sanitizer = true;
#else
inline constexpr bool under_thread_sanitizer = false;
#endif

// ---- Kernels ----------------------------------------------------------------------------------------------

// What memory holds until it is written: repeated, it is a NaN in every floating-point format.
inline constexpr unsigned char nan_byte = 0xff;

// The block's dynamic shared memory: dynamicSmemBytes bytes, NaN when the block starts.
void* shared_memory();

// Another small piece of memory that the threads of a block share, for block reductions: `scratch_bytes`
// bytes, NaN when the block starts.
inline constexpr size_t scratch_bytes = 4096;
void* shared_scratch();

// ---- Streams ----------------------------------------------------------------------------------------------

// Puts work into a stream's queue, to be run by the stream's thread; it takes no time by itself. An error
// that the work returns is returned by every later call that waits.
cudaError_t enqueue(cudaStream_t stream, std::function<cudaError_t()> work);

// Likewise a kernel, copy or product, which takes so long. With CUDA_LAUNCH_BLOCKING=1 it is run here and
// now; in a dry run its work is left out.
cudaError_t enqueue_timed(cudaStream_t stream, std::function<cudaError_t()> work, int64_t nanoseconds,
                          const char* name = nullptr);

// A timed operation that takes as long as describe() said.
cudaError_t enqueue_described(cudaStream_t stream, std::function<cudaError_t()> work);

// Waits until all streams have done what they were given so far.
cudaError_t wait_for_all_streams();

// ---- Virtual time, in nanoseconds since the process began (README.md) -------------------------------------

// Of the GPU that is modelled; h100 until another one is set.
const pentatron::DeviceProfile& profile();
void set_profile(const pentatron::DeviceProfile& profile);

// From now on nothing is computed and no memory is touched, only counted.
void set_dry_run();
bool is_dry_run();

int64_t nanoseconds(double seconds);
// In an operation of a stream the stream's clock, elsewhere the host's.
int64_t clock();
void advance_clock(int64_t time);  // to this time, if it is later
// The host issues an operation.
void pay_for_launch();

// What this thread enqueues from now on, and how long each timed operation of it takes. Returns what was said
// before.
struct Description {
  pentatron::trace::Label label;
  int64_t nanoseconds = 0;
  bool is_said = true;  // false: nothing, as at first; then a kernel would take no time, and is refused
};
Description describe(const Description& description);
bool is_described();
// Labels what has a name of its own where nothing was described: copies. Null: nobody.
void set_labeller(pentatron::trace::Label (*label_of)(const char* name));

// An operation as it ran.
struct Activity {
  using Id = uint64_t;  // 0: none
  Id id = 0;
  Id waited_for = 0;  // what ended just before it could begin, on another stream
  cudaStream_t stream = nullptr;
  pentatron::trace::Label label;
  int64_t begin = 0, end = 0;
  std::vector<pentatron::trace::Message> messages = {};
};
// Adds to the log of the stream whose operation calls this.
void log_activity(Activity activity);
// Waits for what all streams were given so far, while the host's clock stands still, and returns what they
// did since the last call, by stream and time.
std::vector<Activity> take_activities();

// Remembers an error for cudaGetLastError, and returns it.
cudaError_t remember(cudaError_t error);

// One thread opens it, once; others sleep until then. To ThreadSanitizer, what came
// before open() happens before what comes after wait(), and nothing else: looking at a closed latch orders
// nothing.
class Latch {
 public:
  void open();
  bool is_open() const;
  void wait();

 private:
  std::atomic<uint32_t> state_{0};
};

// While one exists, ThreadSanitizer ignores what this thread does: no order between threads follows from it,
// and no race is looked for in it. For bookkeeping (reference counts) that must not hide a forgotten event.
class HiddenFromThreadSanitizer {
 public:
  HiddenFromThreadSanitizer();
  ~HiddenFromThreadSanitizer();
  HiddenFromThreadSanitizer(const HiddenFromThreadSanitizer&) = delete;
};

// Tell ThreadSanitizer that code it cannot see (BLAS, MPI) reads or writes these bytes.
void declare_read(const void* address, size_t bytes);
void declare_write(void* address, size_t bytes);

// ---- Cores ------------------------------------------------------------------------------------------------

// Cores that compute: the environment's CUDA_CPU_CORES, or an equal share of all for each rank of an MPI
// program.
unsigned cores();

// A reference to a callable that takes a piece's number and outlives the call.
struct Pieces {
  void (*call)(const void* bound, size_t piece);
  const void* bound;
};

// Calls body(i) for all i < pieces, on this thread and on those of other cores that are idle, and returns
// when all are done. Which thread takes which piece is left to chance.
void share_out(size_t pieces, Pieces body);

template <class Body>
void share_out(size_t pieces, const Body& body) {
  share_out(pieces, {[](const void* bound, size_t i) { (*static_cast<const Body*>(bound))(i); }, &body});
}

// ---- Memory -----------------------------------------------------------------------------------------------

// How much device memory there is, in bytes, from now on. At the start it is the environment's
// CUDA_CPU_MEMORY (such as 2GiB), or the machine's memory.
void set_memory_limit(size_t bytes);

// Whether [pointer, pointer + bytes) lies in one live allocation of device or pinned memory.
bool is_accessible(const void* pointer, size_t bytes);
// Whether the pointer lies in the device's address space, live or not.
bool is_device_address(const void* pointer);

// The memory behind a device or pinned pointer; any other pointer is returned as it is.
void* host_address(const void* pointer);

// The calls so far that waited for the whole device. A training step, after the first, makes none.
struct Counters {
  long allocations;         // cudaMalloc, cudaMallocHost
  long frees;               // cudaFree, cudaFreeHost
  long synchronous_copies;  // cudaMemcpy, cudaMemset
};
Counters counters();

}  // namespace cuda_cpu
