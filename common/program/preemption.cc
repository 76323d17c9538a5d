#include "program/preemption.h"

#include <atomic>
#include <cstdint>
#include <ctime>

namespace pentatron {
namespace {

constexpr int signals[] = {SIGTERM, SIGUSR1};
constexpr int64_t same = 1'000'000'000;  // ns

// When the first signal came, by CLOCK_MONOTONIC in ns; 0: none has. (A lock would not be safe in a handler.)
std::atomic<int64_t> first = 0;
static_assert(std::atomic<int64_t>::is_always_lock_free);

// One request may come twice, from mpirun and from whoever signals all processes of a job. So what follows
// within a second is not a second one.
void note(int signal) {
  timespec time = {};
  clock_gettime(CLOCK_MONOTONIC, &time);
  const int64_t now = time.tv_sec * 1'000'000'000 + time.tv_nsec;
  int64_t none = 0;
  if (first.compare_exchange_strong(none, now) || now - none < same) return;
  std::signal(signal, SIG_DFL);
  std::raise(signal);  // ends the process when this function returns
}

}  // namespace

Preemption::Preemption(bool listens) : listens_(listens) {
  if (!listens_) return;
  first = 0;
  struct sigaction action = {};
  action.sa_handler = note;
  action.sa_flags = SA_RESTART;
  for (int i = 0; i < 2; ++i) sigaction(signals[i], &action, &before_[i]);
}

Preemption::~Preemption() {
  if (!listens_) return;
  for (int i = 0; i < 2; ++i) sigaction(signals[i], &before_[i], nullptr);
}

bool Preemption::asked() { return first != 0; }

}  // namespace pentatron
