#include "checkpoint/preemption.h"

#include <atomic>
#include <csignal>
#include <ctime>

namespace pentatron {
namespace {

// When the first signal came, in s; 0: none has. (A lock would not be safe in a handler.)
std::atomic<std::time_t> first = 0;
static_assert(std::atomic<std::time_t>::is_always_lock_free);

// One request may come twice, from mpirun and from whoever signals all processes of a job. So what follows
// at once is not a second one.
void note(int signal) {
  const std::time_t now = std::time(nullptr);
  std::time_t none = 0;
  if (first.compare_exchange_strong(none, now) || now - none < 2) return;
  std::signal(signal, SIG_DFL);
  std::raise(signal);  // ends the process when this function returns
}

}  // namespace

void listen_for_preemption() {
  for (const int signal : {SIGTERM, SIGUSR1}) std::signal(signal, note);
}

bool is_preempted() { return first != 0; }

}  // namespace pentatron
