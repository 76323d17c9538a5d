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
#include <climits>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_cpu.h"

#ifdef __SANITIZE_THREAD__
extern "C" {
// What libraries do to memory is not looked at: a thread that calls MPI for itself may pass on the messages
// of another one, and OpenBLAS lends its work space to one thread after the other. The stand-ins declare what
// they read and write.
const char* __tsan_default_options() { return "ignore_noninstrumented_modules=1"; }
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

using cuda_cpu::Activity;
using cuda_cpu::HiddenFromThreadSanitizer;
using cuda_cpu::Latch;
using cuda_cpu::remember;

namespace {

using Work = std::function<cudaError_t()>;

constexpr uint32_t kClosed = 0, kOpen = 1, kClosedWithSleepers = 2;

// One of the GPU's work queues, which takes operations in the order of their issue. An operation leaves it
// when it begins. So one that waits, for its stream or for an event, holds up all that were issued after it
// to the streams of this queue. A queue orders operations but takes no time.
struct WorkQueue {
  std::mutex host_side;
  std::shared_ptr<Latch> last_begun;  // of the operation that was issued last
  int streams = 0;
};

// An element of a stream's list. The last one is always empty: the host fills it, appends a new empty one,
// and opens `filled`.
struct Operation {
  Work work;
  int64_t issued = 0, nanoseconds = 0;
  std::shared_ptr<Latch> begun_before, begun;  // in the work queue; null if no other stream can share it
  bool waits = false;                          // for an event: it begins when that has been reached
  pentatron::trace::Label label;
  Operation* next = nullptr;
  Latch filled;
};

// What one cudaEventRecord makes. The event and every stream that waits hold it.
struct Recording {
  Latch reached;
  int64_t time = 0;  // written, as the next one, before `reached` opens
  Activity::Id last = 0;
};

// What a work queue makes streams wait for orders nothing that a program may rely on.
void wait_in_queue(const Operation& operation) {
  HiddenFromThreadSanitizer hidden;
  if (operation.begun_before) operation.begun_before->wait();
}
void leave_queue(const Operation& operation) {
  HiddenFromThreadSanitizer hidden;
  if (operation.begun) operation.begun->open();
}

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
thread_local constinit cudaStream_t current_stream = nullptr;  // whose operation this thread runs
thread_local constinit cuda_cpu::Description description{.label = {}, .is_said = false};
pentatron::trace::Label (*labeller)(const char* name) = nullptr;
thread_local constinit cudaError_t last_error = cudaSuccess;

// A thread of the host has its own clock: what one thread waits for does not delay another one.
thread_local constinit int64_t host_clock = 0;
std::atomic<bool> dry_run = false;

pentatron::DeviceProfile& mutable_profile() {
  static auto* const profile = new pentatron::DeviceProfile(pentatron::load_profile("h100"));
  return *profile;
}

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
  CUstream_st(Operation* empty, int64_t time, WorkQueue* queue)
      : queue(queue), last_operation(empty), clock(time) {}

  WorkQueue* const queue;          // null if there is no limit
  std::mutex host_side;            // held by host threads that enqueue, never by the stream's thread
  Operation* last_operation;       // the empty one at the end of the queue
  uint64_t enqueued = 0;           // operations
  std::atomic<uint64_t> done = 0;  // operations
  Latch finished;

  // Of the stream's thread, or of a host that runs an operation itself.
  int64_t clock = 0;
  std::vector<Activity> log;
  Activity::Id last = 0, waited_for = 0;  // the last one of the log; what the next one waited for
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
  std::vector<Activity> of_destroyed_streams;
  std::deque<WorkQueue> queues;
};

Handles& handles() {
  static Handles* const handles = new Handles;  // never destroyed: streams may outlive main
  return *handles;
}

// CUDA_DEVICE_MAX_CONNECTIONS; 0, no limit, where it is not set: then this machine hides nothing by chance.
int work_queues() {
  static const int queues = [] {
    const char* const value = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    return value == nullptr ? 0 : std::clamp(std::atoi(value), 1, 32);
  }();
  return queues;
}

// The work queue with the fewest streams. handles().mutex is held.
WorkQueue* queue_of_new_stream() {
  if (work_queues() == 0) return nullptr;
  std::deque<WorkQueue>& queues = handles().queues;
  if (queues.empty()) queues.resize(work_queues());
  WorkQueue& queue =
      *std::min_element(queues.begin(), queues.end(),
                        [](const WorkQueue& a, const WorkQueue& b) { return a.streams < b.streams; });
  ++queue.streams;
  return &queue;
}

bool exists(cudaStream_t stream) {
  std::shared_lock lock(handles().mutex);
  return handles().streams.contains(stream);
}

bool exists(cudaEvent_t event) {
  std::shared_lock lock(handles().mutex);
  return handles().events.contains(event);
}

cudaError_t check_stream(cudaStream_t stream) {
  if (on_stream_thread) return cudaErrorNotPermitted;  // a host function may not call CUDA
  if (!exists(stream)) return cudaErrorInvalidResourceHandle;
  return device_error.load(std::memory_order_relaxed);
}

void log_on(cudaStream_t stream, Activity activity) {
  static std::atomic<Activity::Id> ids = 0;
  activity.id = stream->last = ids.fetch_add(1, std::memory_order_relaxed) + 1;
  activity.waited_for = std::exchange(stream->waited_for, 0);
  activity.stream = stream;
  stream->log.push_back(std::move(activity));
}

// An operation begins when its stream has come to it and the host has issued it, and ends when its time, and
// what it waits for, has passed.
cudaError_t perform(cudaStream_t stream, const Operation& operation) {
  const cudaStream_t outer = std::exchange(current_stream, stream);
  stream->clock = std::max(stream->clock, operation.issued);
  wait_in_queue(operation);
  if (!operation.waits) leave_queue(operation);
  const cudaError_t error = operation.work();
  if (operation.waits) leave_queue(operation);
  if (error != cudaSuccess) device_error.store(error, std::memory_order_relaxed);
  const int64_t begin = stream->clock;
  stream->clock += operation.nanoseconds;
  if (operation.label.name != nullptr)
    log_on(stream, {.label = operation.label, .begin = begin, .end = stream->clock});
  current_stream = outer;
  return error;
}

// Returns the number of the operation in its stream, from 1.
uint64_t append(cudaStream_t stream, Work work, int64_t nanoseconds = 0,
                const pentatron::trace::Label& label = {}, bool waits = false) {
  auto* const empty = new Operation;
  std::lock_guard lock(stream->host_side);
  Operation* const operation = stream->last_operation;
  operation->waits = waits;
  std::unique_lock<std::mutex> queue_lock;
  if (WorkQueue* const queue = stream->queue) {
    HiddenFromThreadSanitizer hidden;
    queue_lock = std::unique_lock(queue->host_side);
    operation->begun = std::make_shared<Latch>();
    operation->begun_before = std::exchange(queue->last_begun, operation->begun);
  }
  operation->work = std::move(work);
  operation->issued = host_clock;
  operation->nanoseconds = nanoseconds;
  operation->label = label;
  operation->next = empty;
  stream->last_operation = empty;
  const uint64_t number = ++stream->enqueued;
  operation->filled.open();
  return number;
}

// The stream's thread: runs operations until an empty function ends it.
void run_stream(cudaStream_t stream, Operation* operation) {
  on_stream_thread = true;
  for (;;) {
    operation->filled.wait();
    if (!operation->work) {
      wait_in_queue(*operation);
      leave_queue(*operation);
      break;
    }
    perform(stream, *operation);
    stream->done.store(stream->done.load(std::memory_order_relaxed) + 1, std::memory_order_release);
    Operation* const next = operation->next;
    delete operation;
    operation = next;
  }
  delete operation->next;
  delete operation;
  stream->finished.open();
}

// A place in a stream to which the host comes, and the stream's time there.
struct Reached {
  Latch latch;
  int64_t time = 0;
  bool takes_log = false;
  std::vector<Activity> log = {};  // of the stream, up to there
};

// Notes `reached` when the stream has done all that it was given so far. Returns the number of the operation
// that ends this. A stream that has nothing to do is there already: its thread sleeps on.
uint64_t reach(cudaStream_t stream, Reached& reached) {
  const auto arrive = [stream, &reached] {
    reached.time = stream->clock;
    if (reached.takes_log) reached.log.swap(stream->log);
    reached.latch.open();
    return cudaSuccess;
  };
  {
    std::lock_guard lock(stream->host_side);
    if (stream->done.load(std::memory_order_acquire) == stream->enqueued) {
      arrive();
      return stream->enqueued;
    }
  }
  return append(stream, arrive);
}

// The host waits, and so does its clock.
cudaError_t synchronize(cudaStream_t stream) {
  Reached reached;
  const uint64_t number = reach(stream, reached);
  reached.latch.wait();
  // The stream counts the operation after it: whoever queries the stream next must find it done.
  while (stream->done.load(std::memory_order_acquire) < number) sched_yield();
  cuda_cpu::advance_clock(reached.time);
  return device_error.load(std::memory_order_relaxed);
}

// Waits until all streams have done what they were given so far. Returns their times then, and their logs if
// it is to take them.
std::deque<Reached> reach_all_streams(bool take_logs) {
  std::vector<cudaStream_t> streams;
  {
    std::shared_lock lock(handles().mutex);
    streams.assign(handles().streams.begin(), handles().streams.end());
  }
  std::deque<Reached> places(streams.size());
  std::vector<uint64_t> numbers;
  for (size_t i = 0; i < streams.size(); ++i) {
    places[i].takes_log = take_logs;
    numbers.push_back(reach(streams[i], places[i]));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    places[i].latch.wait();
    while (streams[i]->done.load(std::memory_order_acquire) < numbers[i]) sched_yield();
  }
  return places;
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

cudaError_t enqueue(cudaStream_t stream, Work work) {
  const cudaError_t error = check_stream(stream);
  if (error == cudaSuccess) append(stream, std::move(work));
  return error;
}

cudaError_t enqueue_timed(cudaStream_t stream, Work work, int64_t nanoseconds, const char* name) {
  if (cudaError_t error = check_stream(stream); error != cudaSuccess) return error;
  pay_for_launch();
  if (is_dry_run()) work = [] { return cudaSuccess; };
  pentatron::trace::Label label = description.label;
  if (label.name == nullptr && name != nullptr && labeller != nullptr) label = labeller(name);
  if (!launch_blocking()) {
    append(stream, std::move(work), nanoseconds, label);
    return cudaSuccess;
  }
  if (cudaError_t error = synchronize(stream); error != cudaSuccess) return error;
  std::lock_guard lock(stream->host_side);
  while (stream->done.load(std::memory_order_acquire) < stream->enqueued) sched_yield();
  Operation operation;
  operation.work = std::move(work);
  operation.issued = clock();
  operation.nanoseconds = nanoseconds;
  operation.label = label;
  const cudaError_t error = perform(stream, operation);
  advance_clock(stream->clock);
  return error;
}

cudaError_t enqueue_described(cudaStream_t stream, Work work) {
  return enqueue_timed(stream, std::move(work), description.nanoseconds);
}

cudaError_t wait_for_all_streams() {
  if (on_stream_thread) return cudaErrorNotPermitted;
  for (const Reached& place : reach_all_streams(false)) advance_clock(place.time);
  return device_error.load(std::memory_order_relaxed);
}

// ---- Virtual time -----------------------------------------------------------------------------------------

const pentatron::DeviceProfile& profile() { return mutable_profile(); }
void set_profile(const pentatron::DeviceProfile& profile) { mutable_profile() = profile; }
void set_dry_run() {
  dry_run = true;
  set_memory_limit(static_cast<size_t>(profile().memory_bytes));
}
bool is_dry_run() { return dry_run.load(std::memory_order_relaxed); }

int64_t nanoseconds(double seconds) { return std::llround(seconds * 1e9); }

int64_t clock() { return current_stream != nullptr ? current_stream->clock : host_clock; }

void advance_clock(int64_t time) {
  if (current_stream != nullptr) {
    current_stream->clock = std::max(current_stream->clock, time);
  } else {
    host_clock = std::max(host_clock, time);
  }
}

void pay_for_launch() { advance_clock(clock() + nanoseconds(profile().launch_seconds)); }

void set_labeller(pentatron::trace::Label (*label_of)(const char* name)) { labeller = label_of; }

Description describe(const Description& next) { return std::exchange(description, next); }
bool is_described() { return description.is_said; }

void log_activity(Activity activity) { log_on(current_stream, std::move(activity)); }

// It waits for all streams, which the program did not ask for.
std::vector<Activity> take_activities() {
  HiddenFromThreadSanitizer hidden;
  const std::deque<Reached> places = reach_all_streams(true);
  std::vector<Activity> all;
  {
    std::lock_guard lock(handles().mutex);
    all.swap(handles().of_destroyed_streams);
  }
  for (const Reached& place : places) all.insert(all.end(), place.log.begin(), place.log.end());
  return all;
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
  std::lock_guard lock(handles().mutex);
  *stream = new CUstream_st(first, cuda_cpu::clock(), queue_of_new_stream());
  std::thread(run_stream, *stream, first).detach();
  handles().streams.insert(*stream);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least == nullptr || greatest == nullptr) return remember(cudaErrorInvalidValue);
  *least = 0, *greatest = -5;
  return cudaSuccess;
}

// Streams take no multiprocessor from each other here, so the priority changes nothing.
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  if (priority > 0 || priority < -5) return remember(cudaErrorInvalidValue);
  return cudaStreamCreateWithFlags(stream, flags);
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
  std::lock_guard lock(handles().mutex);
  if (stream->queue != nullptr) --stream->queue->streams;
  handles().of_destroyed_streams.insert(handles().of_destroyed_streams.end(), stream->log.begin(),
                                        stream->log.end());
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
    if (recording->time > cuda_cpu::clock()) current_stream->waited_for = recording->last;
    cuda_cpu::advance_clock(recording->time);
    return cudaSuccess;
  };
  if (const cudaError_t error = check_stream(stream); error != cudaSuccess) return remember(error);
  append(stream, work, 0, {}, /*waits=*/true);
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* user_data) {
  if (function == nullptr) return remember(cudaErrorInvalidValue);
  const auto work = [function, user_data] {
    function(user_data);
    return cudaSuccess;
  };
  return remember(cuda_cpu::enqueue(stream, work));
}

// ---- Events -----------------------------------------------------------------------------------------------

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (event == nullptr || (flags != cudaEventDefault && flags != cudaEventDisableTiming)) {
    return remember(cudaErrorInvalidValue);
  }
  *event = new CUevent_st(flags == cudaEventDefault);
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
    recording->time = cuda_cpu::clock();
    recording->last = current_stream->last;
    recording->reached.open();
    return cudaSuccess;
  };
  if (cudaError_t error = cuda_cpu::enqueue(stream, work); error != cudaSuccess) return remember(error);
  std::lock_guard lock(event->host_side);
  event->latest = recording;
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (on_stream_thread) return remember(cudaErrorNotPermitted);
  if (!exists(event)) return remember(cudaErrorInvalidResourceHandle);
  if (const RecordingPointer recording = latest_recording(event)) {
    recording->reached.wait();
    cuda_cpu::advance_clock(recording->time);
  }
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
  *milliseconds = static_cast<float>(static_cast<double>(second->time - first->time) * 1e-6);
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
