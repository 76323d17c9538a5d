// A communicator: a queue of operations that the host fills, and the thread that carries them out.
//
// When the host issues an operation, its streams are told to say so when they come to it, and then to stop.
// The thread takes the operation when all its streams have come and when its turn to start has come, carries
// it out, and lets the streams go on. Nothing here makes the host or another stream wait, or come after the
// operation in ThreadSanitizer's eyes, except where NCCL would.
#pragma once

#include <mpi.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap.h"
#include "device_access.h"
#include "engine.h"
#include "nccl.h"

namespace nccl_mpi {

// Lets a thread sleep until something has changed. What has changed is told by an atomic variable of its own:
// the bell orders nothing.
class Bell {
 public:
  void ring();
  template <class Condition>
  void wait_until(Condition condition) {
    for (;;) {
      const int rings = rings_.load();
      if (condition()) return;
      wait_for_ring_after(rings);
    }
  }

 private:
  void wait_for_ring_after(int rings);

  std::atomic<int> rings_ = 0;
};

// The order in which this process's operations start: that in which they were issued, over all
// communicators.
class LaunchOrder {
 public:
  uint64_t issue(Bell& bell);  // the number of the next operation; the bell rings when its turn comes
  bool is_next(uint64_t number);
  int64_t last_start();                             // in nanoseconds of the streams' clock
  void started(uint64_t number, int64_t time = 0);  // or given up
  bool is_serial() const { return is_serial_; }     // the next one starts when the one before has ended

 private:
  std::mutex mutex_;
  std::map<uint64_t, Bell*> waiting_;  // issued and not started
  uint64_t issued_ = 0;
  int64_t last_start_ = 0;
  const bool is_serial_ = std::getenv("NCCL_CPU_SERIAL_LAUNCHES") != nullptr;
};

// One or several calls of the program that are carried out as one.
struct Operation {
  std::vector<Call> calls;
  Hold hold;
  uint64_t number = 0;            // in the launch order
  std::atomic<int64_t> came = 0;  // the last stream, by its clock
  std::atomic<int> missing = 0;   // streams that have not come, and the host until it has issued all
  Bell* bell = nullptr;           // of the communicator's thread
};

}  // namespace nccl_mpi

struct ncclComm {
 public:
  // Makes the members' MPI communicator its own.
  ncclComm(const nccl_mpi::Members& members, const nccl_mpi::Network& network, int channels);
  ~ncclComm();  // after finish()
  ncclComm(const ncclComm&) = delete;

  // Streams must differ. Not from several host threads at a time.
  ncclResult_t issue(std::vector<nccl_mpi::Call> calls, const std::vector<cudaStream_t>& streams);
  void finish();  // waits for what was issued, then ends the thread
  void abort();   // ends the thread and frees the streams

  int ranks() const { return static_cast<int>(world_ranks.size()); }
  ncclResult_t error() const { return error_.load(std::memory_order_relaxed); }

  const MPI_Comm mpi;
  const std::vector<int> world_ranks;
  const int rank;
  const int device;

 private:
  // An element of the queue. The last one is always empty: the host fills it and appends a new empty one.
  struct Entry {
    std::shared_ptr<nccl_mpi::Operation> operation;
    Entry* next = nullptr;
    std::atomic<bool> filled = false;
  };

  void append(std::shared_ptr<nccl_mpi::Operation> operation);
  void run();
  bool run_next();
  void drop_current();
  void give_up_rest();

  Entry* last_;     // the host's end of the queue
  Entry* current_;  // the thread's
  nccl_mpi::Bell& bell_;
  std::atomic<bool> aborted_ = false, closing_ = false;
  std::atomic<ncclResult_t> error_ = ncclSuccess;
  int64_t idle_since_ = 0;  // the end of the operation before, by the streams' clock
  nccl_mpi::Engine engine_;
  std::thread thread_;
};

namespace nccl_mpi {

// What went wrong last, for ncclGetLastError. Returns `result`.
ncclResult_t fail(ncclResult_t result, const std::string& text);
const char* last_failure();

}  // namespace nccl_mpi
