#include "communicator.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string_view>

#include "device/errors.h"

namespace nccl_mpi {
namespace {

LaunchOrder& launch_order() {
  static LaunchOrder* const order = new LaunchOrder;  // never destroyed: threads may outlive main
  return *order;
}

int current_device() {
  int device = 0;
  cudaGetDevice(&device);
  return device;
}

// Bells are never destroyed: a stream may still be ringing one when its communicator is gone.
Bell& new_bell() {
  static std::mutex mutex;
  static auto* const bells = new std::deque<Bell>;
  std::lock_guard lock(mutex);
  return bells->emplace_back();
}

// A stream, or the host, has come to an operation. Whoever comes last rings. (Not `acquire`: the host does
// not come after the streams.)
void arrive(Operation& operation) {
  Bell* const bell = operation.bell;  // the operation may end at any moment after this
  if (operation.missing.fetch_sub(1, std::memory_order_release) == 1) bell->ring();
}

// In stream order.
void stream_arrives(void* operation) {
  const std::unique_ptr<std::shared_ptr<Operation>> owner(
      static_cast<std::shared_ptr<Operation>*>(operation));
  std::atomic<int64_t>& came = (*owner)->came;
  const int64_t time = stream_clock();
  for (int64_t last = came.load(std::memory_order_relaxed); last < time;) {
    if (came.compare_exchange_weak(last, time, std::memory_order_relaxed)) break;
  }
  arrive(**owner);
}

struct LastFailure {
  std::mutex mutex;
  std::string text;
};

LastFailure& last_failure_of_process() {
  static LastFailure* const failure = new LastFailure;
  return *failure;
}

}  // namespace

ncclResult_t fail(ncclResult_t result, const std::string& text) {
  Unseen unseen;
  LastFailure& last = last_failure_of_process();
  std::lock_guard lock(last.mutex);
  last.text = text;
  const char* debug = std::getenv("NCCL_DEBUG");
  if (debug != nullptr && *debug != '\0' && std::string_view(debug) != "VERSION") {
    int world_rank = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    std::fprintf(stderr, "%s: NCCL WARN %s\n", pentatron::rank_name(world_rank).c_str(), text.c_str());
  }
  return result;
}

const char* last_failure() {
  Unseen unseen;
  thread_local std::string copy;
  LastFailure& last = last_failure_of_process();
  std::lock_guard lock(last.mutex);
  copy = last.text;
  return copy.c_str();
}

void Bell::ring() {
  Unseen unseen;
  ++rings_;
  rings_.notify_all();
}

void Bell::wait_for_ring_after(int rings) {
  Unseen unseen;
  rings_.wait(rings);
}

uint64_t LaunchOrder::issue(Bell& bell) {
  Unseen unseen;
  std::lock_guard lock(mutex_);
  waiting_[++issued_] = &bell;
  return issued_;
}

bool LaunchOrder::is_next(uint64_t number) {
  Unseen unseen;
  std::lock_guard lock(mutex_);
  return waiting_.begin()->first == number;
}

int64_t LaunchOrder::last_start() {
  Unseen unseen;
  std::lock_guard lock(mutex_);
  return last_start_;
}

void LaunchOrder::started(uint64_t number, int64_t time) {
  Unseen unseen;
  std::lock_guard lock(mutex_);
  waiting_.erase(number);
  last_start_ = std::max(last_start_, time);
  if (!waiting_.empty()) waiting_.begin()->second->ring();
}

}  // namespace nccl_mpi

using nccl_mpi::launch_order;
using nccl_mpi::Operation;

ncclComm::ncclComm(const nccl_mpi::Members& members, const nccl_mpi::Network& network, int channels)
    : mpi(members.comm),
      world_ranks(members.world_ranks),
      rank(members.rank),
      device(nccl_mpi::current_device()),
      last_(new Entry),
      current_(last_),
      bell_(nccl_mpi::new_bell()),
      engine_(members, network, channels, aborted_),
      thread_([this] { run(); }) {}

ncclComm::~ncclComm() { delete last_; }

ncclResult_t ncclComm::issue(std::vector<nccl_mpi::Call> calls, const std::vector<cudaStream_t>& streams) {
  nccl_mpi::pay_for_launch();
  auto operation = std::make_shared<Operation>();
  operation->calls = std::move(calls);
  operation->bell = &bell_;
  operation->missing = static_cast<int>(streams.size()) + 1;
  for (cudaStream_t stream : streams) {
    auto owner = std::make_unique<std::shared_ptr<Operation>>(operation);
    cudaError_t error = cudaLaunchHostFunc(stream, nccl_mpi::stream_arrives, owner.get());
    if (error == cudaSuccess) {
      owner.release();  // stream_arrives has it
      error = operation->hold.stop(stream);
    }
    if (error == cudaSuccess) continue;
    operation->hold.release();
    return nccl_mpi::fail(ncclUnhandledCudaError, cudaGetErrorString(error));
  }
  append(std::move(operation));
  return ncclSuccess;
}

// The host keeps no share of the operation: it must not be the one who frees it, or it would come after what
// the last owner did.
void ncclComm::append(std::shared_ptr<Operation> operation) {
  operation->number = launch_order().issue(bell_);
  Operation& appended = *operation;
  Entry* const entry = last_;
  last_ = new Entry;
  entry->next = last_;
  entry->operation = std::move(operation);
  entry->filled.store(true, std::memory_order_release);
  nccl_mpi::arrive(appended);
}

void ncclComm::run() {
  cudaSetDevice(device);
  while (run_next()) continue;
  give_up_rest();
}

// Carries out the next operation. False when there will be none.
bool ncclComm::run_next() {
  const auto can_start = [this] {
    return current_->filled.load(std::memory_order_acquire) &&
           current_->operation->missing.load(std::memory_order_acquire) == 0 &&
           launch_order().is_next(current_->operation->number);
  };
  const auto ends = [this] {
    if (aborted_.load(std::memory_order_relaxed)) return true;
    return closing_.load(std::memory_order_relaxed) && !current_->filled.load(std::memory_order_acquire);
  };
  bell_.wait_until([&] { return can_start() || ends(); });
  if (ends()) return false;

  Operation& operation = *current_->operation;
  const int64_t start =
      std::max({operation.came.load(std::memory_order_relaxed), launch_order().last_start(), idle_since_});
  if (!launch_order().is_serial()) launch_order().started(operation.number, start);
  nccl_mpi::Span span;
  std::vector<nccl_mpi::Message> messages;
  try {
    span = engine_.run(operation.calls, start, &messages);
    idle_since_ = span.end;
    nccl_mpi::wait_until(span.end, aborted_);
  } catch (const nccl_mpi::Failure& failure) {
    if (!aborted_) error_ = nccl_mpi::fail(failure.result, failure.text);
    return false;
  }
  if (launch_order().is_serial()) launch_order().started(operation.number, span.end);
  operation.hold.release(span, std::move(messages));
  drop_current();
  return true;
}

void ncclComm::drop_current() {
  Entry* const done = current_;
  current_ = done->next;
  delete done;
}

// After an error the streams stay held until the host aborts, so that nobody computes with what did not
// arrive.
void ncclComm::give_up_rest() {
  bell_.wait_until([this] {
    return aborted_.load(std::memory_order_relaxed) || closing_.load(std::memory_order_relaxed);
  });
  while (current_->filled.load(std::memory_order_acquire)) {
    launch_order().started(current_->operation->number);
    current_->operation->hold.release();
    drop_current();
  }
}

void ncclComm::finish() {
  closing_ = true;
  bell_.ring();
  thread_.join();
}

void ncclComm::abort() {
  aborted_ = true;
  bell_.ring();
  if (thread_.joinable()) thread_.join();
}
