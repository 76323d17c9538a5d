// The watchdog is a thread of every process. It watches the operations issued so far, and the call that the
// host is in. When the oldest unfinished one stays the same for too long, the thread asks all ranks for their
// last operations. It prints them, says which rank holds up the others (suspects.h), and aborts every rank.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <iomanip>
#include <mutex>
#include <optional>
#include <set>
#include <sstream>
#include <thread>

#include "device/tensor.h"
#include "ranks/mpi_wait.h"
#include "ranks/watch.h"
#include "watchdog/suspects.h"

namespace pentatron {

// A communicator and how many operations this rank has issued to it.
struct Watchdog::Watched {
  std::string name;
  uint64_t number;
  std::vector<int> members;
  ncclComm_t communicator;  // null when it has been removed
  std::atomic<int64_t> issued = 0;
};

namespace {

constexpr int tag_question = 1, tag_answer = 2;
constexpr double patience = 5;  // seconds to wait for the other ranks' answers
constexpr double grace = 15;    // seconds for a lower rank to end the run

MPI_Comm watchdogs = MPI_COMM_NULL;
std::atomic<bool> watching = false, call_has_failed = false;

bool arrived(int tag, MPI_Status& status) {
  int flag = 0;
  MPI_Iprobe(MPI_ANY_SOURCE, tag, watchdogs, &flag, &status);
  return flag != 0;
}

// Which ranks hold up the others.
std::string verdict(const std::vector<RankState>& states) {
  std::string text;
  for (const int rank : suspects(states)) {
    text += rank_name(rank) + " holds up the others: ";
    text += states[rank].answers ? "they wait for it, and it waits for no rank\n"
                                 : "it is stopped, or its host is gone\n";
  }
  if (!text.empty()) return text;
  text = "no rank holds up the others: they wait for each other\n";
  for (const RankState& state : states) {
    std::set<uint64_t> communicators;  // with messages
    for (const WaitingOperation& o : state.waiting) {
      if (o.peer >= 0) communicators.insert(o.communicator);
    }
    if (communicators.size() > 1)
      return text + "messages on several communicators need an NCCL that was built with CUDA 12.3 or later\n";
  }
  return text;
}

class WatchdogThread : public Watchdog {
 public:
  WatchdogThread(int rank, int ranks);
  ~WatchdogThread() override;

  void set_timeout(double seconds) override { timeout_ = seconds; }
  // What `add` returns lives as long as this object.
  Watched* add(const std::string& name, uint64_t number, const std::vector<int>& members,
               ncclComm_t communicator) override;
  void remove(Watched* communicator) override;
  void begin(cudaStream_t stream) override;
  void note(const char* operation, Watched* communicator, size_t elements, int peer) override;
  void end(cudaStream_t stream) override;

 private:
  void begin_call(const char* name) override {
    called_ = now();
    call_ = name;
  }
  void end_call() override {
    call_ = nullptr;
    ++calls_;
  }

  // One operation. The host writes slots and never reads what the thread finds out. The host must learn
  // about the device only by events and synchronisation; otherwise a forgotten one could go unnoticed.
  struct Slot {
    std::atomic<int64_t> sequence = -1;
    std::atomic<const char*> operation = nullptr;
    std::atomic<const Watched*> communicator = nullptr;
    std::atomic<int64_t> number = 0;  // in the communicator
    std::atomic<size_t> elements = 0;
    std::atomic<int> peer = -1;      // of a send or receive, in the communicator
    std::atomic<double> issued = 0;  // seconds since the start
    std::atomic<int64_t> first = 0;  // of its group
    Event reached, done;
  };
  static constexpr int64_t kept = 64;  // operations

  void watch(const std::stop_token& stop);
  std::string waits_for() const;
  RankState state();
  std::string error();
  void answer_questions();
  void ask_and_abort(const std::string& reason);
  double now() const;

  int rank_, ranks_, device_ = 0;
  std::atomic<double> timeout_ = 300;  // seconds
  std::array<Slot, kept> slots_;
  std::atomic<int64_t> issued_ = 0;
  int64_t noted_ = 0;                        // issued, or in the open group
  std::atomic<const char*> call_ = nullptr;  // the call that the host is in
  std::atomic<double> called_ = 0;           // when it began; seconds since the start
  std::atomic<int64_t> calls_ = 0;           // calls that the host has returned from
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::optional<double> asked_;  // when a lower rank asked, which reports for all; seconds since the start
  std::mutex mutex_;             // guards communicators_
  std::deque<Watched> communicators_;
  std::condition_variable_any stopped_;
  std::jthread thread_;
};

WatchdogThread::WatchdogThread(int rank, int ranks) : rank_(rank), ranks_(ranks) {
  MPI_Request copied;
  MPI_CHECK(MPI_Comm_idup(MPI_COMM_WORLD, &watchdogs, &copied));
  wait(copied);
  CUDA_CHECK(cudaGetDevice(&device_));
  watching = true;
  thread_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

WatchdogThread::~WatchdogThread() {
  thread_ = {};  // stops it
  watching = false;
  MPI_Comm_free(&watchdogs);
}

void WatchdogThread::begin(cudaStream_t stream) {
  Slot& slot = slots_[noted_ % kept];
  slot.sequence = -1;  // being written
  slot.reached.record(stream);
}

void WatchdogThread::note(const char* operation, Watched* communicator, size_t elements, int peer) {
  Slot& slot = slots_[noted_++ % kept];
  slot.sequence = -1;
  slot.first = issued_.load();
  slot.operation = operation;
  slot.communicator = communicator;
  slot.number = communicator->issued.fetch_add(1);
  slot.elements = elements;
  slot.peer = peer;
  slot.issued = now();
}

void WatchdogThread::end(cudaStream_t stream) {
  for (int64_t i = std::max(issued_.load(), noted_ - kept); i < noted_; ++i) {
    slots_[i % kept].done.record(stream);
    slots_[i % kept].sequence = i;
  }
  issued_ = noted_;
}

double WatchdogThread::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

// What the run waits for, if anything: the oldest unfinished operation or, if there is none, a call of the
// host.
std::string WatchdogThread::waits_for() const {
  const int64_t issued = issued_;
  for (int64_t i = std::max<int64_t>(0, issued - kept); i < issued; ++i) {
    if (cudaEventQuery(slots_[i % kept].done) == cudaErrorNotReady) return "operation " + std::to_string(i);
  }
  return call_ != nullptr ? "call " + std::to_string(calls_) : "";
}

Watchdog::Watched* WatchdogThread::add(const std::string& name, uint64_t number,
                                       const std::vector<int>& members, ncclComm_t communicator) {
  std::lock_guard lock(mutex_);
  return &communicators_.emplace_back(name, number, members, communicator);
}

void WatchdogThread::remove(Watched* communicator) {
  std::lock_guard lock(mutex_);
  communicator->communicator = nullptr;
}

// What NCCL says of a communicator that has failed.
std::string WatchdogThread::error() {
  std::lock_guard lock(mutex_);
  for (const Watched& w : communicators_) {
    if (w.communicator == nullptr) continue;
    ncclResult_t error = ncclSuccess;
    const ncclResult_t answer = ncclCommGetAsyncError(w.communicator, &error);
    if (answer != ncclSuccess) error = answer;
    if (error != ncclSuccess && error != ncclInProgress)
      return ncclGetErrorString(error) + std::string(": ") + ncclGetLastError(w.communicator);
  }
  return {};
}

void WatchdogThread::watch(const std::stop_token& stop) {
  CUDA_CHECK(cudaSetDevice(device_));  // a new thread would allocate memory on device 0
  std::string oldest;
  double since = now();
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      stopped_.wait_for(lock, stop, std::chrono::milliseconds(100), [] { return false; });
    }
    if (stop.stop_requested()) return;
    answer_questions();
    std::string reason = error();
    const std::string seen = waits_for();
    if (seen != oldest || seen.empty()) {
      oldest = seen;
      since = now();
    }
    if (now() - since > timeout_) reason = text("nothing has moved for ", timeout_.load(), " s");
    if (call_has_failed) reason = "a call has failed";
    if (!reason.empty() && !asked_) ask_and_abort(reason);
    if (asked_ && now() - *asked_ > grace) end_all_ranks(1);  // this host is cut off
  }
}

// What this rank knows, and a report of its last operations, the newest last, one a line.
RankState WatchdogThread::state() {
  constexpr int64_t shown = 6;
  const char* const call = call_;
  const int64_t issued = issued_;
  RankState state = {.answers = true, .in_call = call != nullptr};
  {
    std::lock_guard lock(mutex_);
    for (const Watched& w : communicators_) state.communicators[w.number] = {w.members, w.issued};
  }
  std::ostringstream report;
  report << std::fixed << std::setprecision(1) << rank_name(rank_) << ": " << issued
         << " operations issued\n";
  for (int64_t i = std::max<int64_t>(0, issued - kept); i < issued; ++i) {
    const Slot& slot = slots_[i % kept];
    if (slot.sequence != i) continue;
    const Watched& in = *slot.communicator.load();
    const int peer = slot.peer < 0 ? -1 : in.members[slot.peer];
    const bool finished = cudaEventQuery(slot.done) == cudaSuccess;
    if (i >= issued - shown) {
      report << "  #" << i << ' ' << slot.operation.load() << " on " << in.name << ", " << slot.elements
             << " elements" << (peer < 0 ? "" : ", peer " + rank_name(peer))
             << (finished ? ": finished, issued before " : ": waiting since ") << now() - slot.issued
             << " s\n";
    }
    if (finished) continue;
    const bool overwritten = slot.first + kept <= issued_;  // the first one of a very long group
    if (overwritten || cudaEventQuery(slots_[slot.first % kept].reached) == cudaSuccess) {
      state.waiting.push_back({in.number, slot.number, peer});
    } else {
      --state.communicators[in.number].come;
    }
  }
  if (call) report << "  the host has been in " << call << " for " << now() - called_ << " s\n";
  state.report = report.str();
  return state;
}

void WatchdogThread::answer_questions() {
  MPI_Status status;
  while (arrived(tag_question, status)) {
    MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, tag_question, watchdogs, MPI_STATUS_IGNORE);
    if (status.MPI_SOURCE < rank_ && !asked_) asked_ = now();  // the lower rank reports for all
    const std::string text = to_text(state());
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Isend(text.data(), static_cast<int>(text.size()), MPI_CHAR, status.MPI_SOURCE, tag_answer, watchdogs,
              &request);
    wait_at_most(request, patience);
  }
}

void WatchdogThread::ask_and_abort(const std::string& reason) {
  for (int peer = 0; peer < ranks_; ++peer) {
    MPI_Request request;
    if (peer != rank_) MPI_Isend(nullptr, 0, MPI_BYTE, peer, tag_question, watchdogs, &request);
  }
  std::vector<RankState> states(ranks_);
  states[rank_] = state();
  const double deadline = now() + patience;
  for (int answers = 1; answers < ranks_ && now() < deadline;) {
    MPI_Status status;
    answer_questions();
    if (asked_) return;
    if (!arrived(tag_answer, status)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      continue;
    }
    int length = 0;
    MPI_Get_count(&status, MPI_CHAR, &length);
    std::string text(length, ' ');
    MPI_Recv(text.data(), length, MPI_CHAR, status.MPI_SOURCE, tag_answer, watchdogs, MPI_STATUS_IGNORE);
    states[status.MPI_SOURCE] = rank_state(text);
    ++answers;
  }

  std::ostringstream text;
  text << "watchdog of " << rank_name(rank_) << ": " << reason << ". The last operations of all ranks:\n";
  for (int peer = 0; peer < ranks_; ++peer)
    text << (states[peer].answers ? states[peer].report : rank_name(peer) + ": does not answer\n");
  text << verdict(states);
  const bool all_answer = std::ranges::all_of(states, &RankState::answers);
  if (!call_has_failed || !all_answer) std::fputs(text.str().c_str(), stderr);
  std::this_thread::sleep_for(std::chrono::seconds(1));  // after MPI_Abort mpirun passes on no more output
  end_all_ranks(1);
}

}  // namespace

std::unique_ptr<Watchdog> start_watchdog(int rank, int ranks) {
  return std::make_unique<WatchdogThread>(rank, ranks);
}

void end_after_failure() {
  call_has_failed = true;
  if (watching) std::this_thread::sleep_for(std::chrono::duration<double>(2 * patience));
  end_all_ranks(1);
}

}  // namespace pentatron
