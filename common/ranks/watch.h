// No run hangs. NCCL has no timeouts, so every process has a thread that watches the operations issued so
// far, and the call that the host is in. When the oldest unfinished one stays the same for too long, the
// thread asks all ranks for their last operations. It prints them, says which rank holds up the others
// (watchdog/suspects.h), and aborts every rank.
#pragma once

#include <nccl.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "device/tensor.h"

namespace pentatron {

struct RankState;

class Watchdog {
 public:
  Watchdog(int rank, int ranks);  // starts the thread; MPI must have started
  ~Watchdog();

  void set_timeout(double seconds) { timeout_ = seconds; }

  // A communicator and how many operations this rank has issued to it.
  struct Watched {
    std::string name;
    uint64_t number;           // what its members have in common
    std::vector<int> members;  // ranks of the world
    ncclComm_t communicator;   // null when it has been removed
    std::atomic<int64_t> issued = 0;
  };
  // An asynchronous error in one of these communicators ends the run. What `add` returns lives as long as
  // this object.
  Watched* add(const std::string& name, uint64_t number, const std::vector<int>& members,
               ncclComm_t communicator);
  void remove(Watched* communicator);

  // Called before and after a group of operations is issued to `stream`; and, in between, for each of them.
  // `operation` must outlive this object. `peer`: its rank in the communicator, or -1.
  void begin(cudaStream_t stream);
  void note(const char* operation, Watched* communicator, size_t elements, int peer);
  void end(cudaStream_t stream);

  // Exists while the host is in a call that may wait for other ranks: of MPI, or where NCCL connects them.
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

// End the process where mpirun, or NCCL, is none with which programs work (watchdog/installation.cu).
void require_all_ranks(int ranks);
void check_versions();
// Of a file of NCCL, as CUDART_VERSION: 12030 for 12.3. 0 if it does not say, or can't be read.
int cuda_of_nccl(const std::string& library);
// Ends every rank after a call of this one has failed. Perhaps other ranks have died: the watchdog names
// those that do not answer.
void end_after_failure();

}  // namespace pentatron
