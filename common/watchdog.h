// No run hangs. NCCL has no timeouts, so every process has a thread that looks at the operations issued so
// far; when the oldest unfinished one has not changed for a while, it asks all ranks for their last
// operations, prints them, says who is behind, and aborts every rank.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <array>
#include <atomic>
#include <chrono>
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

  // Communicators whose asynchronous errors end the run.
  void add(ncclComm_t communicator);
  void remove(ncclComm_t communicator);

  // Notes an operation that has just been issued to `stream`. `operation` and `communicator` must outlive the
  // watchdog.
  void note(const char* operation, const char* communicator, size_t elements, int peer, cudaStream_t stream);

 private:
  // The host writes slots and never reads what the thread found out: information from the device must reach
  // the host by events and synchronisation only, or a forgotten one could go unnoticed.
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
  int64_t oldest_unfinished() const;  // sequence number, or -1
  std::string report() const;
  void check_for_errors();
  void answer_questions();
  void ask_and_abort();
  double now() const;

  int rank_, ranks_;
  std::atomic<double> timeout_ = 300;  // seconds
  std::array<Slot, kept> slots_;
  std::atomic<int64_t> issued_ = 0;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  std::atomic<bool> stopping_ = false;
  bool asked_by_lower_rank_ = false;
  std::mutex mutex_;
  std::vector<ncclComm_t> communicators_;
  std::thread thread_;
};

}  // namespace pentatron
