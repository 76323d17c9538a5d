// The ranks of a run, as far as starting, logging and ending a program need them: `Peers`, which the World
// (comm.h) is for several processes. No MPI here: 01 is one process.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace pentatron {

// What one kind of operation amounts to: calls, elements of the whole buffers that were reduced or
// gathered, and bytes that this rank sent by the ring algorithm.
struct Traffic {
  int64_t calls = 0, elements = 0;
  double sent_bytes = 0;
  void operator+=(const Traffic& t) { calls += t.calls, elements += t.elements, sent_bytes += t.sent_bytes; }
};
using TrafficByOperation = std::map<std::string, Traffic>;  // "all_reduce", ...
inline double sent_bytes(const TrafficByOperation& traffic) {
  double sum = 0;
  for (const auto& [operation, t] : traffic) sum += t.sent_bytes;
  return sum;
}

// The defaults are those of a single process.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual int rank() const { return 0; }
  virtual int ranks() const { return 1; }
  // How many ranks do what this one does: itself, and in a folded world (comm.h) those that are absent.
  virtual int stands_for() const { return 1; }
  // All ranks call these, in the same order. `largest` and `sum` reduce each value over the ranks, absent
  // ones included, and `exclusive_or` over those that are there. `gather` returns the texts of all ranks on
  // rank 0. `largest` also sets all modelled clocks to the latest (device/cuda.h).
  virtual std::vector<double> largest(const std::vector<double>& values) const { return values; }
  virtual std::vector<double> sum(const std::vector<double>& values) const { return values; }
  virtual std::vector<uint32_t> exclusive_or(const std::vector<uint32_t>& values) const { return values; }
  virtual std::vector<std::string> gather(const std::string& text) const { return {text}; }
  // Returns nothing if the `words` of all ranks are empty. Else rank 0 gets the first rank's that are not,
  // and the others a line that refers to rank 0.
  virtual std::string first_fault(const std::string& words) const { return words; }
  // Where ranks differ that should not. A rank has a line "THING<tab>PART<tab>CONTENT" for each part of a
  // thing that it has, and ranks that have the same part should have the same content. Returns
  // nothing, or, as first_fault does, the first thing that is not the same and who has what.
  virtual std::string difference(const std::string& /*lines*/) const { return {}; }
  virtual bool all_arrive(double /*seconds*/) const { return true; }  // a barrier that gives up: false
  virtual void end_all(int /*status*/) const {}
  // On rank 0 of several hosts: their ranks and GPUs, a line a host. Likewise for all ranks to call.
  virtual std::string hosts() const { return {}; }

  // Device memory in bytes that CUDA, its libraries and NCCL take, beside the tensors: estimates, measured on
  // an H200 with CUDA 13.0. The context, with all kernels that are loaded at the start, comes first.
  static constexpr size_t context_alone = 768 << 20;
  virtual size_t context_bytes() const { return context_alone; }
  virtual size_t library_bytes(int /*channels_to_come*/) const { return context_bytes(); }

  // What this rank has communicated since the last begin_counting().
  virtual void begin_counting() {}
  virtual TrafficByOperation traffic() const { return {}; }
};

inline Peers single_process;
// The ranks that this process trains with: itself, or all of the World that exists (comm.h).
inline Peers* peers_now = &single_process;
inline Peers& peers() { return *peers_now; }

}  // namespace pentatron
