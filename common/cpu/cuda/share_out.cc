// The cores of the stand-in device: helpers that take pieces of whatever a stream is computing.
//
// Nobody ever waits for a helper that has not begun: the stream's thread works through the pieces itself, and
// helpers join in when they get to run. On a machine with other work to do, a team that had to assemble first
// (OpenMP's) would wait for its slowest member at the end of every kernel.
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

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

int whole_number(const char* variable, int otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atoi(text);
}

// Ranks on one machine, which MPICH's launcher counts, share its cores out among them.
unsigned cores_from_environment() {
  const int here = static_cast<int>(std::thread::hardware_concurrency());
  const int cores = whole_number("CUDA_CPU_CORES", here / std::max(1, whole_number("MPI_LOCALNRANKS", 1)));
  return static_cast<unsigned>(std::max(1, cores));
}

// Read before main: the first use of a static variable inside a function orders the threads that use it, and
// ThreadSanitizer would miss a forgotten event between a stream's first operation and another's.
const unsigned core_count = cores_from_environment();

}  // namespace

namespace cuda_cpu {

unsigned cores() { return core_count; }

void share_out(size_t pieces, Pieces body) {
  Job job{body, pieces};
  // ThreadSanitizer would take what one helper does for two streams to be in order, and miss a forgotten
  // event.
  if (under_thread_sanitizer || pieces < 2 || core_count < 2) {
    job.work();
    return;
  }
  static Helpers* const helpers = new Helpers(core_count - 1);
  if (!helpers->run(job)) job.work();
}

}  // namespace cuda_cpu
