// The watchdog, as those see it who tell it what they do. NCCL has no timeouts, but no run hangs: every
// process has a watchdog that knows which operations are under way, and which call the host is in. When
// nothing moves for too long, it says which rank holds up the others, and ends all of them
// (watchdog/watchdog.cu).
#pragma once

#include <nccl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pentatron {

class Watchdog {
 public:
  virtual ~Watchdog() = default;
  virtual void set_timeout(double seconds) = 0;

  // A communicator that it knows. An asynchronous error in it ends the run. `number`: what its members have
  // in common; `members`: ranks of the world.
  struct Watched;
  virtual Watched* add(const std::string& name, uint64_t number, const std::vector<int>& members,
                       ncclComm_t communicator) = 0;
  virtual void remove(Watched* communicator) = 0;

  // Called before and after a group of operations is issued to `stream`; and, in between, for each of them.
  // `operation` must outlive this object. `peer`: its rank in the communicator, or -1.
  virtual void begin(cudaStream_t stream) = 0;
  virtual void note(const char* operation, Watched* communicator, size_t elements, int peer) = 0;
  virtual void end(cudaStream_t stream) = 0;

  // Exists while the host is in a call that may wait for other ranks: of MPI, or where NCCL connects them.
  class Call {
   public:
    Call(Watchdog& watchdog, const char* name) : watchdog_(watchdog) { watchdog_.begin_call(name); }
    ~Call() { watchdog_.end_call(); }
    Call(const Call&) = delete;

   private:
    Watchdog& watchdog_;
  };

 protected:
  virtual void begin_call(const char* name) = 0;
  virtual void end_call() = 0;
};

std::unique_ptr<Watchdog> start_watchdog(int rank, int ranks);  // MPI must have started

// End the process where mpirun, or NCCL, is none with which programs work (watchdog/installation.cu).
void require_all_ranks(int ranks);
void check_versions();
// Of a file of NCCL, as CUDART_VERSION: 12030 for 12.3. 0 if it does not say, or can't be read.
int cuda_of_nccl(const std::string& library);
// Ends every rank after a call of this one has failed. Perhaps other ranks have died: the watchdog names
// those that do not answer.
void end_after_failure();

}  // namespace pentatron
