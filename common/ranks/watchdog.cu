#include <algorithm>
#include <cstdio>
#include <set>
#include <sstream>
#include <vector>

#include "device/cuda.h"
#include "ranks/mpi_wait.h"
#include "ranks/watchdog.h"

namespace pentatron {
namespace {

constexpr int tag_question = 1, tag_answer = 2;
constexpr double patience = 5;  // seconds to wait for the other ranks' answers
constexpr double grace = 15;    // seconds for a lower rank to end the run

MPI_Comm watchdogs = MPI_COMM_NULL;
std::atomic<bool> watching = false, call_has_failed = false;

bool arrived(int source, int tag, MPI_Status& status) {
  int flag = 0;
  MPI_Iprobe(source, tag, watchdogs, &flag, &status);
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
  const auto has_messages_on_several = [](const RankState& state) {
    std::set<uint64_t> communicators;
    for (const UnfinishedOperation& o : state.unfinished) {
      if (o.peer >= 0) communicators.insert(o.communicator);
    }
    return communicators.size() > 1;
  };
  text = "no rank holds up the others: they wait for each other\n";
  if (std::ranges::any_of(states, has_messages_on_several))
    text += "messages of one group, on one communicator, would not: --pp-messages grouped\n";
  return text;
}

}  // namespace

Watchdog::Watchdog(int rank, int ranks) : rank_(rank), ranks_(ranks) {
  MPI_Request copied;
  MPI_CHECK(MPI_Comm_idup(MPI_COMM_WORLD, &watchdogs, &copied));
  wait(copied);
  CUDA_CHECK(cudaGetDevice(&device_));
  for (Slot& slot : slots_) {
    for (std::atomic<cudaEvent_t>* const place : {&slot.reached, &slot.done}) {
      cudaEvent_t event;
      CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      *place = event;
    }
  }
  watching = true;
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  stop_.notify_one();
  thread_.join();
  watching = false;
  for (Slot& slot : slots_) cudaEventDestroy(slot.reached), cudaEventDestroy(slot.done);
  MPI_Comm_free(&watchdogs);
}

void Watchdog::begin(cudaStream_t stream) {
  first_of_group_ = issued_.load(std::memory_order_relaxed);
  Slot& slot = slots_[first_of_group_ % kept];
  slot.sequence = -1;  // being written
  CUDA_CHECK(cudaEventRecord(slot.reached, stream));
}

void Watchdog::note(const char* operation, Watched* communicator, size_t elements, int peer,
                    cudaStream_t stream) {
  const int64_t sequence = issued_.load(std::memory_order_relaxed);
  Slot& slot = slots_[sequence % kept];
  slot.sequence = -1;
  slot.first = first_of_group_;
  slot.operation = operation;
  slot.communicator = communicator;
  slot.number = communicator->issued.fetch_add(1);
  slot.elements = elements;
  slot.peer = peer;
  slot.issued = now();
  CUDA_CHECK(cudaEventRecord(slot.done, stream));
  slot.sequence = sequence;
  issued_.store(sequence + 1);
}

double Watchdog::now() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
}

Watchdog::Waiting Watchdog::oldest_unfinished() const {
  const int64_t issued = issued_;
  for (int64_t i = std::max<int64_t>(0, issued - kept); i < issued; ++i) {
    if (cudaEventQuery(slots_[i % kept].done) == cudaErrorNotReady) return {.operation = i};
  }
  if (call_ != nullptr) return {.call = calls_};
  return {};
}

bool Watchdog::reached(const Slot& slot) const {
  const bool overwritten = slot.first + kept <= issued_;  // the first one of a very long group
  return overwritten || cudaEventQuery(slots_[slot.first % kept].reached) == cudaSuccess;
}

Watchdog::Watched* Watchdog::add(const std::string& name, uint64_t number, const std::vector<int>& members,
                                 ncclComm_t communicator) {
  std::lock_guard lock(mutex_);
  return &communicators_.emplace_back(name, number, members, communicator);
}

void Watchdog::remove(Watched* communicator) {
  std::lock_guard lock(mutex_);
  communicator->communicator = nullptr;
}

void Watchdog::end_after_failure() {
  call_has_failed = true;
  if (watching) std::this_thread::sleep_for(std::chrono::duration<double>(2 * patience));
  end_all_ranks(1);
}

// What NCCL says if it could not reach another rank. Other errors end the run here.
std::string Watchdog::error() {
  std::lock_guard lock(mutex_);
  for (const auto& [name, number, members, communicator, issued] : communicators_) {
    if (communicator == nullptr) continue;
    ncclResult_t error = ncclSuccess;
    ncclCommGetAsyncError(communicator, &error);
    if (error == ncclSuccess || error == ncclInProgress) continue;
    const std::string text = ncclGetErrorString(error) + std::string(": ") + ncclGetLastError(communicator);
    if (error == ncclSystemError || error == ncclRemoteError) return text;
    std::fprintf(stderr, "watchdog of %s: %s\n%s", rank_name(rank_).c_str(), text.c_str(), report().c_str());
    std::fflush(stderr);
    end_all_ranks(1);
  }
  return {};
}

void Watchdog::watch() {
  CUDA_CHECK(cudaSetDevice(device_));  // a new thread would allocate memory on device 0
  Waiting oldest;
  double since = now();
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      if (stop_.wait_for(lock, std::chrono::milliseconds(100), [this] { return stopping_; })) return;
    }
    answer_questions();
    std::string reason = error();
    const Waiting seen = oldest_unfinished();
    if (seen != oldest || seen == Waiting()) {
      oldest = seen;
      since = now();
    }
    if (now() - since > timeout_) {
      std::ostringstream text;
      text << "nothing has moved for " << timeout_ << " s";
      reason = text.str();
    }
    if (call_has_failed) reason = "a call has failed";
    if (!reason.empty() && !asked_by_lower_rank_) ask_and_abort(reason);
    if (asked_by_lower_rank_ && now() - asked_ > grace) end_all_ranks(1);  // this host is cut off
  }
}

// The last operations of this rank, the newest last, one a line.
std::string Watchdog::report() const {
  constexpr int64_t shown = 6;
  const int64_t issued = issued_;
  char line[256];
  std::snprintf(line, sizeof line, "%s: %lld operations issued\n", rank_name(rank_).c_str(),
                static_cast<long long>(issued));
  std::string text = line;
  for (int64_t i = std::max<int64_t>(0, issued - shown); i < issued; ++i) {
    const Slot& slot = slots_[i % kept];
    if (slot.sequence != i) continue;
    const bool finished = cudaEventQuery(slot.done) == cudaSuccess;
    const std::string peer =
        slot.peer < 0 ? "" : ", peer " + rank_name(slot.communicator.load()->members[slot.peer]);
    std::snprintf(line, sizeof line, "  #%lld %s on %s, %zu elements%s: %s %.1f s\n",
                  static_cast<long long>(i), slot.operation.load(), slot.communicator.load()->name.c_str(),
                  slot.elements.load(), peer.c_str(), finished ? "finished, issued before" : "waiting since",
                  now() - slot.issued);
    text += line;
  }
  if (const char* const call = call_) {
    std::snprintf(line, sizeof line, "  the host has been in %s for %.1f s\n", call, now() - called_);
    text += line;
  }
  return text;
}

RankState Watchdog::state() {
  RankState state{true, call_ != nullptr, {}, {}};
  {
    std::lock_guard lock(mutex_);
    for (const Watched& w : communicators_) state.communicators[w.number] = {w.members, w.issued};
  }
  const int64_t issued = issued_;
  for (int64_t i = std::max<int64_t>(0, issued - kept); i < issued; ++i) {
    const Slot& slot = slots_[i % kept];
    if (slot.sequence != i || cudaEventQuery(slot.done) != cudaErrorNotReady) continue;
    const Watched& in = *slot.communicator.load();
    state.unfinished.push_back(
        {in.number, slot.number, slot.peer < 0 ? -1 : in.members[slot.peer], reached(slot)});
  }
  return state;
}

std::string Watchdog::answer() { return to_text(state()) + "\n" + report(); }

void Watchdog::answer_questions() {
  MPI_Status status;
  while (arrived(MPI_ANY_SOURCE, tag_question, status)) {
    MPI_Recv(nullptr, 0, MPI_BYTE, status.MPI_SOURCE, tag_question, watchdogs, MPI_STATUS_IGNORE);
    if (status.MPI_SOURCE < rank_ && !asked_by_lower_rank_) {  // the lower rank reports for all
      asked_by_lower_rank_ = true;
      asked_ = now();
    }
    const std::string text = answer();
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Isend(text.data(), static_cast<int>(text.size()), MPI_CHAR, status.MPI_SOURCE, tag_answer, watchdogs,
              &request);
    wait_at_most(request, patience);
  }
}

void Watchdog::ask_and_abort(const std::string& reason) {
  for (int peer = 0; peer < ranks_; ++peer) {
    MPI_Request request;
    if (peer != rank_) MPI_Isend(nullptr, 0, MPI_BYTE, peer, tag_question, watchdogs, &request);
  }
  std::vector<std::string> reports(ranks_);
  std::vector<RankState> states(ranks_);
  reports[rank_] = report();
  states[rank_] = state();
  const double deadline = now() + patience;
  for (int answers = 1; answers < ranks_ && now() < deadline;) {
    MPI_Status status;
    answer_questions();
    if (asked_by_lower_rank_) return;
    if (!arrived(MPI_ANY_SOURCE, tag_answer, status)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      continue;
    }
    int length = 0;
    MPI_Get_count(&status, MPI_CHAR, &length);
    std::string text(length, ' ');
    MPI_Recv(text.data(), length, MPI_CHAR, status.MPI_SOURCE, tag_answer, watchdogs, MPI_STATUS_IGNORE);
    states[status.MPI_SOURCE] = rank_state(text.substr(0, text.find('\n')));
    reports[status.MPI_SOURCE] = text.substr(text.find('\n') + 1);
    ++answers;
  }

  std::ostringstream text;
  text << "watchdog of " << rank_name(rank_) << ": " << reason << ". The last operations of all ranks:\n";
  for (int peer = 0; peer < ranks_; ++peer) {
    if (!states[peer].answers) text << rank_name(peer) << ": does not answer\n";
    text << reports[peer];
  }
  text << verdict(states);
  const bool all_answer = std::ranges::all_of(states, &RankState::answers);
  if (!call_has_failed || !all_answer) std::fputs(text.str().c_str(), stderr);
  std::fflush(stderr);
  std::this_thread::sleep_for(std::chrono::seconds(1));  // after MPI_Abort mpirun passes on no more output
  end_all_ranks(1);
}

}  // namespace pentatron
