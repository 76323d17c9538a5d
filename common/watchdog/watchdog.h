// No run hangs. NCCL has no timeouts, so every process has a thread that watches the operations issued so
// far, and the call that the host is in. When the oldest unfinished one stays the same for too long, the
// thread asks all ranks for their last operations. It prints them, says which rank holds up the others
// (suspects.h), and aborts every rank.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ranks/watch.h"
#include "watchdog/suspects.h"

namespace pentatron {

// A communicator and how many operations this rank has issued to it.
struct Watch::Watched {
  std::string name;
  uint64_t number;
  std::vector<int> members;
  ncclComm_t communicator;  // null when it has been removed
  std::atomic<int64_t> issued = 0;
};

class Watchdog : public Watch {
 public:
  Watchdog(int rank, int ranks);  // starts the thread
  ~Watchdog() override;

  void set_timeout(double seconds) override { timeout_ = seconds; }
  Watched* add(const std::string& name, uint64_t number, const std::vector<int>& members,
               ncclComm_t communicator) override;
  void remove(Watched* communicator) override;
  void begin(cudaStream_t stream) override;
  void note(const char* operation, Watched* communicator, size_t elements, int peer) override;
  void end(cudaStream_t stream) override;

 private:
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
    cudaEvent_t reached = nullptr, done = nullptr;
  };
  static constexpr int64_t kept = 64;  // operations

  void call_begins(const char* name) override;
  void call_ends() override;
  void watch(const std::stop_token& stop);
  std::string waits_for() const;
  bool reached(const Slot& slot) const;  // its stream has come to it
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

}  // namespace pentatron
