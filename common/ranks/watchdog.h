// No run hangs. NCCL has no timeouts, so every process has a thread that watches the operations issued so
// far, and the call that the host is in. When the oldest unfinished one stays the same for too long, the
// thread asks all ranks for their last operations. It prints them, says which rank is behind, and aborts
// every rank.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace pentatron {

class Watchdog {
 public:
  // Starts the thread. MPI must have started.
  Watchdog(int rank, int ranks);
  ~Watchdog();

  void set_timeout(double seconds) { timeout_ = seconds; }

  // The thread checks these communicators: an asynchronous error in one ends the run.
  void add(ncclComm_t communicator);
  void remove(ncclComm_t communicator);

  // Notes an operation that has just been issued to `stream`. `operation` and `communicator` must outlive the
  // watchdog.
  void note(const char* operation, const char* communicator, size_t elements, int peer, cudaStream_t stream);

  // Exists while the host is in a call that may wait for other ranks: a call of MPI, or one in which
  // NCCL connects ranks.
  class Call {
   public:
    Call(Watchdog& watchdog, const char* name) : watchdog_(watchdog) {
      watchdog_.called_ = watchdog_.now();
      watchdog_.call_ = name;
    }
    ~Call() {
      watchdog_.call_ = nullptr;
      ++watchdog_.calls_;
    }
    Call(const Call&) = delete;

   private:
    Watchdog& watchdog_;
  };

 private:
  // One operation. The host writes slots and never reads what the thread finds out. The host must learn
  // about the device only by events and synchronisation; otherwise a forgotten one could go unnoticed.
  struct Slot {
    std::atomic<int64_t> sequence = -1;
    std::atomic<const char*> operation = nullptr, communicator = nullptr;
    std::atomic<size_t> elements = 0;
    std::atomic<int> peer = -1;      // of a send or receive
    std::atomic<double> issued = 0;  // seconds since the start
    std::atomic<cudaEvent_t> done = nullptr;
  };
  static constexpr int64_t kept = 64;  // operations

  void watch();
  // What the run waits for, if anything: the oldest unfinished operation or, if there is none, a call
  // of the host.
  struct Waiting {
    int64_t operation = -1, call = -1;  // numbers
    bool operator==(const Waiting&) const = default;
  };
  Waiting oldest_unfinished() const;
  std::string report() const;
  void check_for_errors();
  void answer_questions();
  void ask_and_abort();
  double now() const;

  int rank_, ranks_, device_ = 0;
  std::atomic<double> timeout_ = 300;  // seconds
  std::array<Slot, kept> slots_;
  std::atomic<int64_t> issued_ = 0;
  std::atomic<const char*> call_ = nullptr;  // the call that the host is in
  std::atomic<double> called_ = 0;           // when it began; seconds since the start
  std::atomic<int64_t> calls_ = 0;           // calls that the host has returned from
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  bool asked_by_lower_rank_ = false;
  std::mutex mutex_;  // guards communicators_ and stopping_
  std::vector<ncclComm_t> communicators_;
  bool stopping_ = false;
  std::condition_variable stop_;
  std::thread thread_;
};

}  // namespace pentatron
