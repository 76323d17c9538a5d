// Streams, events and errors. A stream is a thread that runs the operations in its queue, one after the
// other.
//
// The order that this code makes between threads is exactly CUDA's, so that ThreadSanitizer sees a forgotten
// event: what the host did before it enqueues comes before the operation; a stream's operations follow each
// other; and whoever waits for a latch (an event, or the end of a stream's work) comes after what was done
// before it was opened. A stream never takes a lock that another thread takes, as that would order them by
// accident and hide races.
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string_view>
#include <thread>
#include <vector>

#include "cuda_cpu.h"

#ifdef __SANITIZE_THREAD__
extern "C" {
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
void __tsan_read_range(const void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
}
#endif

using cuda_cpu::HiddenFromThreadSanitizer;
using cuda_cpu::Latch;
using cuda_cpu::remember;

namespace {

using Clock = std::chrono::steady_clock;
using Work = std::function<cudaError_t()>;

constexpr uint32_t kClosed = 0, kOpen = 1, kClosedWithSleepers = 2;
constexpr int kYieldsBeforeSleeping = 50;  // some 20 µs: waking a sleeper costs about as much

// A queue's element. The last one is always empty: the host fills it, appends a new empty one, and opens
// `filled`.
struct Operation {
  Work work;
  Operation* next = nullptr;
  Latch filled;
};

// What one cudaEventRecord makes. The event and every stream that waits hold it.
struct Recording {
  Latch reached;
  Clock::time_point time;  // written before `reached` opens
};

// A shared pointer whose count orders nothing between threads.
class RecordingPointer {
 public:
  RecordingPointer() = default;
  explicit RecordingPointer(std::shared_ptr<Recording> recording) : recording_(std::move(recording)) {}
  RecordingPointer(const RecordingPointer& other) { *this = other; }
  RecordingPointer& operator=(const RecordingPointer& other) {
    HiddenFromThreadSanitizer hidden;
    recording_ = other.recording_;
    return *this;
  }
  ~RecordingPointer() {
    HiddenFromThreadSanitizer hidden;
    recording_.reset();
  }
  Recording* operator->() const { return recording_.get(); }
  explicit operator bool() const { return recording_ != nullptr; }

 private:
  std::shared_ptr<Recording> recording_;
};

thread_local constinit bool on_stream_thread = false;
thread_local constinit cudaError_t last_error = cudaSuccess;

// An error inside a stream, if there was one: it stays.
std::atomic<cudaError_t> device_error{cudaSuccess};

bool launch_blocking() {
  static const bool blocking = [] {
    const char* value = std::getenv("CUDA_LAUNCH_BLOCKING");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return blocking;
}

}  // namespace

struct CUstream_st {
  explicit CUstream_st(Operation* empty) : last(empty) {}

  std::mutex host_side;            // held by host threads that enqueue, never by the stream's thread
  Operation* last;                 // the empty one at the end of the queue
  uint64_t enqueued = 0;           // operations
  std::atomic<uint64_t> done = 0;  // operations
  Latch finished;
};

struct CUevent_st {
  explicit CUevent_st(bool timed) : timed(timed) {}

  std::mutex host_side;
  RecordingPointer latest;  // null if never recorded
  const bool timed;
};

namespace {

// The handles that exist. Only host threads look here.
struct Handles {
  std::shared_mutex mutex;
  std::set<cudaStream_t> streams;
  std::set<cudaEvent_t> events;
};

Handles& handles() {
  static Handles* const handles = new Handles;  // never destroyed: streams may outlive main
  return *handles;
}

bool exists(cudaStream_t stream) {
  std::shared_lock lock(handles().mutex);
  return handles().streams.contains(stream);
}

bool exists(cudaEvent_t event) {
  std::shared_lock lock(handles().mutex);
  return handles().events.contains(event);
}

cudaError_t perform(const Work& work) {
  const cudaError_t error = work();
  if (error != cudaSuccess) device_error.store(error, std::memory_order_relaxed);
  return error;
}

void append(cudaStream_t stream, Work work) {
  auto* const empty = new Operation;
  std::lock_guard lock(stream->host_side);
  Operation* const operation = stream->last;
  operation->work = std::move(work);
  operation->next = empty;
  stream->last = empty;
  ++stream->enqueued;
  operation->filled.open();
}

// The stream's thread: runs operations until an empty function ends it.
void run_stream(cudaStream_t stream, Operation* operation) {
  on_stream_thread = true;
  for (;;) {
    operation->filled.wait();
    if (!operation->work) break;
    perform(operation->work);
    stream->done.store(stream->done.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    Operation* const next = operation->next;
    delete operation;
    operation = next;
  }
  delete operation->next;
  delete operation;
  stream->finished.open();
}

void append_latch(cudaStream_t stream, Latch& latch) {
  append(stream, [&latch] {
    latch.open();
    return cudaSuccess;
  });
}

cudaError_t synchronize(cudaStream_t stream) {
  Latch reached;
  append_latch(stream, reached);
  reached.wait();
  return device_error.load(std::memory_order_relaxed);
}

RecordingPointer latest_recording(cudaEvent_t event) {
  std::lock_guard lock(event->host_side);
  return event->latest;
}

}  // namespace

namespace cuda_cpu {

void Latch::open() {
  // The waiter may be gone with the latch as soon as it is open; a wake-up of nobody does no harm.
  if (state_.exchange(kOpen, std::memory_order_release) == kClosedWithSleepers) {
    syscall(SYS_futex, &state_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }
}

bool Latch::is_open() const { return state_.load(std::memory_order_acquire) == kOpen; }

void Latch::wait() {
  for (int i = 0; i < kYieldsBeforeSleeping; ++i) {
    if (is_open()) return;
    sched_yield();
  }
  while (!is_open()) {
    uint32_t expected = kClosed;
    state_.compare_exchange_strong(expected, kClosedWithSleepers, std::memory_order_relaxed);
    syscall(SYS_futex, &state_, FUTEX_WAIT_PRIVATE, kClosedWithSleepers, nullptr, nullptr, 0);
  }
}

#ifdef __SANITIZE_THREAD__
HiddenFromThreadSanitizer::HiddenFromThreadSanitizer() {
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
HiddenFromThreadSanitizer::~HiddenFromThreadSanitizer() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
}
void declare_read(const void* address, size_t bytes) { __tsan_read_range(address, bytes); }
void declare_write(void* address, size_t bytes) { __tsan_write_range(address, bytes); }
#else
HiddenFromThreadSanitizer::HiddenFromThreadSanitizer() = default;
HiddenFromThreadSanitizer::~HiddenFromThreadSanitizer() = default;
void declare_read(const void*, size_t) {}
void declare_write(void*, size_t) {}
#endif

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t enqueue(cudaStream_t stream, Work work, bool always_asynchronous) {
  if (on_stream_thread) return cudaErrorNotPermitted;  // a host function may not call CUDA
  if (!exists(stream)) return cudaErrorInvalidResourceHandle;
  if (cudaError_t error = device_error.load(std::memory_order_relaxed); error != cudaSuccess) return error;
  if (!launch_blocking() || always_asynchronous) {
    append(stream, std::move(work));
    return cudaSuccess;
  }
  if (cudaError_t error = synchronize(stream); error != cudaSuccess) return error;
  return perform(work);
}

cudaError_t wait_for_all_streams() {
  if (on_stream_thread) return cudaErrorNotPermitted;
  std::vector<cudaStream_t> streams;
  {
    std::shared_lock lock(handles().mutex);
    streams.assign(handles().streams.begin(), handles().streams.end());
  }
  std::deque<Latch> latches(streams.size());
  for (size_t i = 0; i < streams.size(); ++i) append_latch(streams[i], latches[i]);
  for (Latch& latch : latches) latch.wait();
  return device_error.load(std::memory_order_relaxed);
}

}  // namespace cuda_cpu

// ---- Streams ----------------------------------------------------------------------------------------------

cudaError_t cudaDeviceSynchronize() { return remember(cuda_cpu::wait_for_all_streams()); }

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  if (stream == nullptr || flags > cudaStreamNonBlocking) return remember(cudaErrorInvalidValue);
  auto* const first = new Operation;
  *stream = new CUstream_st(first);
  std::thread(run_stream, *stream, first).detach();
  std::lock_guard lock(handles().mutex);
  handles().streams.insert(*stream);
  return cudaSuccess;
}

// CUDA lets a destroyed stream finish on its own; here the host waits for it.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  if (on_stream_thread) return remember(cudaErrorNotPermitted);
  {
    std::lock_guard lock(handles().mutex);
    if (handles().streams.erase(stream) == 0) return remember(cudaErrorInvalidResourceHandle);
  }
  append(stream, nullptr);
  stream->finished.wait();
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (on_stream_thread) return remember(cudaErrorNotPermitted);
  if (!exists(stream)) return remember(cudaErrorInvalidResourceHandle);
  return remember(synchronize(stream));
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (!exists(stream)) return remember(cudaErrorInvalidResourceHandle);
  std::lock_guard lock(stream->host_side);
  if (stream->done.load(std::memory_order_relaxed) < stream->enqueued) return remember(cudaErrorNotReady);
  stream->done.load(std::memory_order_acquire);  // only now does the host come after the stream's work
  return remember(device_error.load(std::memory_order_relaxed));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  if (!exists(event)) return remember(cudaErrorInvalidResourceHandle);
  if (flags != cudaEventWaitDefault) return remember(cudaErrorInvalidValue);
  const RecordingPointer recording = latest_recording(event);
  if (!recording) return exists(stream) ? cudaSuccess : remember(cudaErrorInvalidResourceHandle);
  const auto work = [recording] {
    recording->reached.wait();
    return cudaSuccess;
  };
  return remember(cuda_cpu::enqueue(stream, work, true));
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* user_data) {
  if (function == nullptr) return remember(cudaErrorInvalidValue);
  const auto work = [function, user_data] {
    function(user_data);
    return cudaSuccess;
  };
  return remember(cuda_cpu::enqueue(stream, work, true));
}

// ---- Events -----------------------------------------------------------------------------------------------

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventCreate(cudaEvent_t* event, unsigned flags) {
  return cudaEventCreateWithFlags(event, flags);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (event == nullptr || flags > (cudaEventBlockingSync | cudaEventDisableTiming)) {
    return remember(cudaErrorInvalidValue);
  }
  *event = new CUevent_st((flags & cudaEventDisableTiming) == 0);
  std::lock_guard lock(handles().mutex);
  handles().events.insert(*event);
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  std::lock_guard lock(handles().mutex);
  if (handles().events.erase(event) == 0) return remember(cudaErrorInvalidResourceHandle);
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  if (!exists(event)) return remember(cudaErrorInvalidResourceHandle);
  const RecordingPointer recording(std::make_shared<Recording>());
  const auto work = [recording] {
    recording->time = Clock::now();
    recording->reached.open();
    return cudaSuccess;
  };
  if (cudaError_t error = cuda_cpu::enqueue(stream, work, true); error != cudaSuccess) return remember(error);
  std::lock_guard lock(event->host_side);
  event->latest = recording;
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (on_stream_thread) return remember(cudaErrorNotPermitted);
  if (!exists(event)) return remember(cudaErrorInvalidResourceHandle);
  if (const RecordingPointer recording = latest_recording(event)) recording->reached.wait();
  return remember(device_error.load(std::memory_order_relaxed));
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  if (!exists(event)) return remember(cudaErrorInvalidResourceHandle);
  const RecordingPointer recording = latest_recording(event);
  if (recording && !recording->reached.is_open()) return remember(cudaErrorNotReady);
  return remember(device_error.load(std::memory_order_relaxed));
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  if (milliseconds == nullptr) return remember(cudaErrorInvalidValue);
  if (!exists(start) || !exists(end) || !start->timed || !end->timed)
    return remember(cudaErrorInvalidResourceHandle);
  const RecordingPointer first = latest_recording(start), second = latest_recording(end);
  if (!first || !second) return remember(cudaErrorInvalidResourceHandle);
  if (!first->reached.is_open() || !second->reached.is_open()) return remember(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(second->time - first->time).count();
  return cudaSuccess;
}

// ---- Errors -----------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError() {
  const cudaError_t error = device_error.load(std::memory_order_relaxed);
  return error != cudaSuccess ? error : last_error;
}

namespace {

struct ErrorText {
  cudaError_t error;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrorTexts[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidPitchValue, "cudaErrorInvalidPitchValue", "invalid pitch argument"},
    {cudaErrorInvalidDevicePointer, "cudaErrorInvalidDevicePointer", "invalid device pointer"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorText* find_text(cudaError_t error) {
  const auto* found = std::find_if(std::begin(kErrorTexts), std::end(kErrorTexts),
                                   [error](const ErrorText& entry) { return entry.error == error; });
  return found == std::end(kErrorTexts) ? nullptr : found;
}

}  // namespace

const char* cudaGetErrorName(cudaError_t error) {
  const ErrorText* text = find_text(error);
  return text != nullptr ? text->name : "unrecognized error code";
}

const char* cudaGetErrorString(cudaError_t error) {
  const ErrorText* text = find_text(error);
  return text != nullptr ? text->text : "unrecognized error code";
}
