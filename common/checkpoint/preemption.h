// Preemption: a cluster takes its machines back. It sends SIGTERM or SIGUSR1 (Slurm some time before a job's
// limit) to mpirun, which passes it on, or to one rank. Then all ranks agree on a step, save, and end with a
// status of their own, which tells a script that the run can go on (--resume). A second signal ends at once.
#pragma once

namespace pentatron {

inline constexpr int exit_preempted = 75;  // EX_TEMPFAIL of sysexits.h: try again later

void listen_for_preemption();  // from now on such a signal is noted, and no longer ends the process
bool is_preempted();           // this process has got a signal

}  // namespace pentatron
