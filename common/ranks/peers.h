// The processes that run a program together, as far as starting, logging and ending need them. No MPI here:
// 01 has no peers, and the command line is read without them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "device/device_config.h"

namespace pentatron {

// Calls, elements of the buffers they worked on (the whole of what is reduced or gathered), and the bytes
// that this rank sent under the ring algorithm.
struct Traffic {
  int64_t calls = 0, elements = 0;
  double sent_bytes = 0;
};
using TrafficByOperation = std::map<std::string, Traffic>;  // "all_reduce", ...
inline double sent_bytes(const TrafficByOperation& traffic) {
  double sum = 0;
  for (const auto& [operation, t] : traffic) sum += t.sent_bytes;
  return sum;
}

// By default there is one process.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual int rank() const { return 0; }
  virtual int ranks() const { return 1; }
  // Called by all, in the same order: the largest and the sum of each value; everybody's text (on rank 0
  // only). At the first one modelled clocks meet (device/cuda.h).
  virtual std::vector<double> largest(const std::vector<double>& values) const { return values; }
  virtual std::vector<double> sum(const std::vector<double>& values) const { return values; }
  virtual std::vector<std::string> gather(const std::string& text) const { return {text}; }

  // What this rank has communicated since counting began.
  virtual void begin_counting() {}
  virtual TrafficByOperation traffic() const { return {}; }
};

inline Peers single_process;

struct CommunicationConfig : DeviceConfig {
  double timeout = 300;  // seconds after which a stream that has not moved ends the run
  // Modelled links between ranks, such as "5us,50GB/s", and nodes; empty and 0: those of the modelled GPU.
  std::string link, link_between_nodes;
  int ranks_per_node = 0;
};

}  // namespace pentatron
