// Ranges of work on a stream. Nsight always sees their names (NVTX). While a trace is taken, they are
// also recorded; clock/timeline.h makes a table, a picture or a Chrome trace of them (Perfetto opens it). On
// a GPU two events time each range; the stand-in counts its time (cpu/cuda/README.md).
//
// Recording is a property of the process, because a kernel launch anywhere in it opens a range.
#pragma once

#include <cuda_runtime.h>

#include <string>
#include <vector>

#include "clock/cost.h"
#include "clock/timeline.h"

namespace pentatron::trace {

// Until `stop`, every range is recorded. Streams appear under the names given to them.
void start();
void stop();
void name_stream(cudaStream_t stream, std::string name);

inline thread_local Position here;  // this thread's; a range stores a copy

// The work that is issued to `stream` while the range exists, and its cost. `name` outlives the trace.
class Range {
 public:
  Range(cudaStream_t stream, const char* name, const Cost& cost = little);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
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
