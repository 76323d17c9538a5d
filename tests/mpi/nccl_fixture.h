// Communicators, streams and arrays for the tests of NCCL over MPI.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <chrono>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "array.h"
#include "device/cuda.h"
#include "device/tensor.h"
#include "device_access.h"
#include "mpi_tests.h"

namespace mpi_tests {

using pentatron::PinnedArray;
using pentatron::Stream;

inline void require_nccl(ncclResult_t result) {
  INFO(ncclGetErrorString(result) << ": " << ncclGetLastError(nullptr));
  REQUIRE(result == ncclSuccess);
}

// A communicator of some ranks of the world, which are in `members` in the communicator's order. Null on the
// others. The first makes the id.
class Communicator {
 public:
  explicit Communicator(const std::vector<int>& members, ncclConfig_t* config = nullptr) {
    int mine = -1;
    for (size_t i = 0; i < members.size(); ++i) {
      if (members[i] == rank()) mine = static_cast<int>(i);
    }
    if (mine < 0) return;
    ncclUniqueId id = {};
    if (mine == 0) {
      require_nccl(ncclGetUniqueId(&id));
      for (size_t i = 1; i < members.size(); ++i) {
        MPI_Send(&id, sizeof id, MPI_BYTE, members[i], 0, MPI_COMM_WORLD);
      }
    } else {
      MPI_Recv(&id, sizeof id, MPI_BYTE, members[0], 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    require_nccl(ncclCommInitRankConfig(&comm_, static_cast<int>(members.size()), id, mine, config));
  }
  // Of all ranks.
  explicit Communicator(ncclConfig_t* config = nullptr) : Communicator(all(), config) {}
  ~Communicator() {
    if (comm_ != nullptr) ncclCommDestroy(comm_);
  }
  Communicator(const Communicator&) = delete;

  operator ncclComm_t() const { return comm_; }
  ncclComm_t release() { return std::exchange(comm_, nullptr); }  // somebody else destroys it
  void abort() { require_nccl(ncclCommAbort(std::exchange(comm_, nullptr))); }
  ncclResult_t error() const {
    ncclResult_t error = ncclSuccess;
    require_nccl(ncclCommGetAsyncError(comm_, &error));
    return error;
  }

 private:
  static std::vector<int> all() {
    std::vector<int> members(ranks());
    std::iota(members.begin(), members.end(), 0);
    return members;
  }

  ncclComm_t comm_ = nullptr;
};

inline bool is_done(cudaStream_t stream) { return cudaStreamQuery(stream) == cudaSuccess; }

// Whether the stream is done within some time, which is long for a test that expects it and short for one
// that does not.
inline bool is_done_within(cudaStream_t stream, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (!is_done(stream)) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

constexpr double kSoon = 20;     // s: enough on a busy machine
constexpr double kHolds = 0.15;  // s: what has not happened by then, does not happen

// Stops a stream until the host opens the gate.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) { CUDA_CHECK(hold_.stop(stream)); }
  ~Gate() { open(); }
  Gate(const Gate&) = delete;
  void open() {
    if (!std::exchange(open_, true)) hold_.release();
  }

 private:
  nccl_mpi::Hold hold_;
  bool open_ = false;
};

}  // namespace mpi_tests
