// Waits for MPI that leave the core to others, and the end of all ranks. MPICH's own waits spin. With more
// ranks than cores that is forty times slower than this.
#pragma once

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "device/errors.h"

#define MPI_CHECK(call) pentatron::check_mpi((call), #call, __FILE__, __LINE__)

namespace pentatron {

inline void check_mpi(int status, const char* call, const char* file, int line) {
  if (status == MPI_SUCCESS) return;
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  fail(call, text, file, line);
}

// Returns whether the request completes within `seconds`. It tests the request again and again. In
// between it yields at first, then sleeps, longer each time.
inline bool wait_at_most(MPI_Request& request, double seconds) {
  using namespace std::chrono;
  const auto begin = steady_clock::now();
  for (int tries = 0;; ++tries) {
    int done = 0;
    MPI_CHECK(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    if (done) return true;
    const auto waited = steady_clock::now() - begin;
    if (waited > duration<double>(seconds)) return false;
    if (tries < 20)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::clamp<nanoseconds>(waited / 8, 20us, 200us));
  }
}

inline void wait(MPI_Request& request) { wait_at_most(request, 1e9); }

// Ends every rank; on a host that is cut off from mpirun, where MPI_Abort waits for ever, this process alone.
inline void end_all_ranks(int status) {
  constexpr unsigned patience = 5;  // seconds
  alarm(patience);
  MPI_Abort(MPI_COMM_WORLD, status);
}

}  // namespace pentatron
