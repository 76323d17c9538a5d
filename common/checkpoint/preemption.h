// Preemption: a cluster takes its machines back. It sends SIGTERM or SIGUSR1 (Slurm some time before a job's
// limit) to mpirun, which passes it on, or to one rank. Then all ranks agree on a step, save, and end with a
// status of their own, which tells a script that the run can go on (--resume). A second signal ends at once.
#pragma once

#include <atomic>
#include <csignal>
#include <ctime>

namespace pentatron {

inline constexpr int exit_preempted = 75;  // EX_TEMPFAIL of sysexits.h: try again later

// When the first signal came to this process, in s; 0: none has. (A lock would not be safe in a handler.)
inline std::atomic<std::time_t> preempted_at = 0;
static_assert(std::atomic<std::time_t>::is_always_lock_free);
inline bool is_preempted() { return preempted_at != 0; }

// One request may come twice, from mpirun and from whoever signals all processes of a job. So what follows
// at once is not a second one.
inline void note_preemption(int signal) {
  const std::time_t now = std::time(nullptr);
  std::time_t none = 0;
  if (preempted_at.compare_exchange_strong(none, now) || now - none < 2) return;
  std::signal(signal, SIG_DFL);
  std::raise(signal);  // ends the process when this function returns
}

// From now on such a signal is noted, and no longer ends the process.
inline void listen_for_preemption() {
  for (const int signal : {SIGTERM, SIGUSR1}) std::signal(signal, note_preemption);
}

}  // namespace pentatron
