// When a rank's streams worked: how much communication was hidden behind compute, a table, a picture, a
// Chrome trace. No CUDA here.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>
#include <vector>

namespace pentatron::trace {

// Which part of a program's work this is.
struct Position {
  int64_t step = -1;  // from 0; -1, here and below: none
  int micro_batch = -1, layer = -1;
  char pass = 'o';  // f forward, b backward, w weight gradients, o optimizer and the rest
};

// Which operation of a run this is.
struct Label : Position {
  const char* name = nullptr;  // must live as long as the trace
  double bytes = 0;            // moved from and to memory, or sent by this rank
};

// A message to another rank, or from one.
struct Message {
  bool sent;
  uint64_t number;  // the same at both ends
  double bytes;
};

// An operation of a stream. Times in seconds.
struct Interval : Position {
  std::string name = {}, stream = {};
  double begin = 0, end = 0;
  double bytes = 0;                 // as of its label
  uint64_t id = 0, waited_for = 0;  // the operation on another stream for whose end this one waited; 0: none
  std::vector<uint64_t> sent = {}, received = {};  // messages; at both ends the same number
};

// The stream that computes, by its name; all others communicate.
inline const std::string compute_stream = "compute";

// The seconds of a step on one rank: of the step, of its compute, of its communication.
struct Overlap {
  double seconds = 0, compute = 0;
  struct Stream {
    double seconds = 0, hidden = 0;  // of communication; of these, while compute runs
    void operator+=(Stream other) { seconds += other.seconds, hidden += other.hidden; }
  };
  std::map<std::string, Stream> communication;  // by stream

  Stream all_communication() const;
  Overlap& operator+=(const Overlap& other);
};
Overlap overlap_of(const std::vector<Interval>& intervals, double from, double to);

// ---- To look at (pictures.cc)

// A row for each stream, `width` characters for [from, to). A character stands for what runs longest in its
// time: its pass, # communication (+ less than half of the time), . nothing.
std::string draw_timeline(const std::vector<Interval>& intervals, double from, double to, int width);

// Prints a row for each name: calls, time, share of all; and the share of products (names with "gemm"). The
// intervals are those of a step.
void print_profile(std::ostream& out, const std::vector<Interval>& intervals);

// The intervals as events of a Chrome trace, a JSON array: process = rank, thread = stream, times in
// microseconds. Arrows lead from a send to its receive, and from an operation to one that waited for it.
// stands_for: how many ranks do the same (Peers).
std::string chrome_events(const std::vector<Interval>& intervals, int rank, int stands_for = 1);

// Writes the events of all ranks as one trace. Returns whether it could.
bool write_chrome(const std::string& path, const std::vector<std::string>& events /*[ranks]*/);

}  // namespace pentatron::trace
