// The cores of the stand-in device: helpers that take pieces of whatever a stream is computing.
//
// Nobody ever waits for a helper that has not begun: the stream's thread works through the pieces itself, and
// helpers join in when they get to run. On a machine with other work to do, a team that had to assemble first
// (OpenMP's) would wait for its slowest member at the end of every kernel.
#include <sched.h>

#include <atomic>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cuda_cpu.h"

namespace {

struct Job {
  cuda_cpu::Pieces body;
  size_t pieces;
  std::atomic<size_t> next = 0;

  void work() {
    for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) body.call(body.bound, i);
  }
};

class Helpers {
 public:
  explicit Helpers(unsigned count) {
    for (unsigned i = 0; i < count; ++i) std::thread([this] { help(); }).detach();
  }

  // False, and nothing done, if the helpers are busy with another stream's job.
  bool run(Job& job) {
    Job* idle = nullptr;
    if (!job_.compare_exchange_strong(idle, &job)) return false;
    posted_.fetch_add(1);
    if (asleep_.load() > 0) posted_.notify_all();
    job.work();
    job_.store(nullptr);
    while (visitors_.load() > 0) sched_yield();  // they hold pieces, or are about to see that there are none
    return true;
  }

 private:
  static constexpr int looks_before_sleep = 100;  // about 50 µs

  void help() {
    for (unsigned seen = 0;;) {
      for (int looks = 0; posted_.load() == seen; ++looks) {
        if (looks < looks_before_sleep) {
          sched_yield();
        } else {
          asleep_.fetch_add(1);
          posted_.wait(seen);
          asleep_.fetch_sub(1);
        }
      }
      seen = posted_.load();
      visitors_.fetch_add(1);  // from here on a job that is seen stays alive
      if (Job* job = job_.load()) job->work();
      visitors_.fetch_sub(1);
    }
  }

  std::atomic<Job*> job_ = nullptr;
  std::atomic<unsigned> posted_ = 0;
  std::atomic<int> visitors_ = 0, asleep_ = 0;
};

unsigned cores_from_environment() {
  const char* given = std::getenv("CUDA_CPU_CORES");
  const int cores =
      given != nullptr ? std::atoi(given) : static_cast<int>(std::thread::hardware_concurrency());
  return cores < 1 ? 1 : static_cast<unsigned>(cores);
}

}  // namespace

namespace cuda_cpu {

unsigned cores() {
  static const unsigned count = cores_from_environment();
  return count;
}

void share_out(size_t pieces, Pieces body) {
  static Helpers* const helpers = new Helpers(cores() - 1);
  Job job{body, pieces};
  // ThreadSanitizer would take what one helper does for two streams to be in order, and miss a forgotten
  // event.
  const bool alone = pieces < 2 || cores() < 2 || under_thread_sanitizer;
  if (alone || !helpers->run(job)) job.work();
}

}  // namespace cuda_cpu
