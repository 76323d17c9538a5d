// Operations: work on a stream that has a name and a cost. The profiler Nsight always sees the names (NVTX).
// While a trace is taken, operations are also recorded; clock/timeline.h makes a table, a picture or a Chrome
// trace of them (Perfetto opens it). On a GPU two events time each operation. The stand-in counts its time by
// its cost (cpu/cuda/README.md), so it refuses a kernel that is launched outside of an operation.
//
// Recording is a property of the process, because a kernel launch anywhere in it is an operation.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "clock/cost.h"
#include "clock/timeline.h"

namespace pentatron::trace {

// Until `stop`, every operation is recorded. Streams appear under the names given to them.
void start();
void stop();
void name_stream(cudaStream_t stream, std::string name);

inline thread_local Position here;  // this thread's; an operation stores a copy

// An operation: the work that is issued to `stream` while this object exists. `name` outlives the trace.
class Operation {
 public:
  Operation(cudaStream_t stream, const char* name, const Cost& cost = shortest_kernel);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  const char* name() const { return name_; }

 private:
  cudaStream_t stream_;
  const char* name_;
  int interval_ = -1;  // index of the recorded interval, -1 while nothing is recorded
};

// Returns a kernel's name without namespaces and parameters.
const char* kernel_name(const void* kernel);

// Waits for the device, and returns what was recorded since the last call. Times are seconds since `start`.
std::vector<Interval> take();

}  // namespace pentatron::trace
