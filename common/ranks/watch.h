// What communicators say to whoever watches that no run hangs (watchdog/watchdog.h): each operation that this
// rank issues, and each call in which its host may wait for other ranks.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pentatron {

class Watch {
 public:
  virtual ~Watch() = default;
  virtual void set_timeout(double seconds) = 0;

  // An asynchronous error in one of these communicators ends the run. `number`: what its members have in
  // common; `members`: ranks of the world. What `add` returns lives as long as this object.
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
    Call(Watch& watch, const char* name) : watch_(watch) { watch_.call_begins(name); }
    ~Call() { watch_.call_ends(); }
    Call(const Call&) = delete;

   private:
    Watch& watch_;
  };

 protected:
  virtual void call_begins(const char* name) = 0;
  virtual void call_ends() = 0;
};

// End the process where mpirun, or NCCL, is none with which programs work (watchdog/installation.cu).
void require_all_ranks(int ranks);
void check_versions();
// The watchdog of this process. MPI must have started.
std::unique_ptr<Watch> start_watchdog(int rank, int ranks);
// Ends every rank after a call of this one has failed. Perhaps other ranks have died: the watchdog names
// those that do not answer.
void end_after_failure();

}  // namespace pentatron
