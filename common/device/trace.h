// Ranges of work on a stream: named for Nsight (NVTX) always, and timed by two events each while a trace is
// being taken, which ends up as a Chrome trace (one row a stream; Perfetto opens it) or as a table of totals.
//
// Recording is a property of the process, because a kernel launch anywhere in it opens a range.
#pragma once

#include <cuda_runtime.h>

#include <iosfwd>
#include <string>
#include <vector>

namespace pentatron::trace {

// Until `stop`, every range is timed. Streams appear under the names given to them.
void start();
void stop();
void name_stream(cudaStream_t stream, std::string name);

// From construction to destruction: the work issued to `stream` in between. `name` must outlive the trace.
class Range {
 public:
  Range(cudaStream_t stream, const char* name);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
  const char* name() const { return name_; }

 private:
  cudaStream_t stream_;
  const char* name_;
  int interval_ = -1;  // index of the recorded interval, -1 while nothing is recorded
};

// A kernel's name without namespaces and parameters.
const char* kernel_name(const void* kernel);

// What was recorded since `start`; waits for the device. Times in seconds since the start.
struct Interval {
  std::string name, stream;
  double begin, end;
};
std::vector<Interval> intervals();

// Prints a row for each name: calls, seconds, share of all; and the share of the products (names that begin
// with "gemm").
void print_profile(std::ostream& out);

// The intervals as events of a Chrome trace, a JSON array: process = rank, thread = stream, times in
// microseconds.
std::string chrome_events(int rank);

// Writes the events of all ranks as one trace.
void write_chrome(const std::string& path, const std::vector<std::string>& events /*[ranks]*/);

}  // namespace pentatron::trace
