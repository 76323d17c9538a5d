// Preemption: a cluster takes its machines back. It sends SIGTERM or SIGUSR1 (Slurm some time before a job's
// limit) to mpirun, which passes it on, or to one rank. Then all ranks agree on a step, save, and end with a
// status of their own, which tells a script that the run can go on (--resume). A second signal ends at once.
#pragma once

#include <csignal>

namespace pentatron {

inline constexpr int exit_preempted = 75;  // EX_TEMPFAIL of sysexits.h: try again later

// While it exists, if `listens`, such a signal is noted. Otherwise it ends the process, as always.
class Preemption {
 public:
  explicit Preemption(bool listens);
  ~Preemption();
  Preemption(const Preemption&) = delete;
  Preemption& operator=(const Preemption&) = delete;

  static bool asked();  // this process has got a signal

 private:
  const bool listens_;
  struct sigaction before_[2] = {};
};

}  // namespace pentatron
