// Test cases on several ranks. After each case the ranks agree on a verdict, outside of what is being tested,
// so that a failure on one of them cannot make them drift apart. A case that exceeds its time limit (one rank
// waits for another that has failed, say) ends the run on all ranks and counts as failed.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../runner.h"
#include "mpi_tests.h"
#include "ranks/mpi_wait.h"
#include "ranks/watch.h"

namespace {

using pentatron::wait;
using Clock = std::chrono::steady_clock;

constexpr double kTimeLimit = 120;    // s, of a case
constexpr double kRankZeroFirst = 3;  // s: the others leave the message and the abort to rank 0

MPI_Comm verdicts = MPI_COMM_NULL;
int my_rank = 0, all_ranks = 1;

double time_limit() {
  const char* seconds = std::getenv("TEST_CASE_TIMEOUT");
  return seconds != nullptr ? std::atof(seconds) : kTimeLimit;
}

struct RunningCase {
  std::mutex mutex;
  std::condition_variable never;  // is notified: it looks ten times a second
  std::string name;               // empty between cases
  Clock::time_point deadline;
};

RunningCase& running_case() {
  static RunningCase* const running = new RunningCase;
  return *running;
}

Clock::time_point in_seconds(double seconds) {
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

void watch() {
  for (;;) {
    std::unique_lock lock(running_case().mutex);
    running_case().never.wait_for(lock, std::chrono::milliseconds(100));
    const auto grace = std::chrono::duration<double>(my_rank == 0 ? 0 : kRankZeroFirst);
    if (running_case().name.empty() || Clock::now() < running_case().deadline + grace) continue;
    std::printf("[rank %d] time limit exceeded: %s\n", my_rank, running_case().name.c_str());
    runner::count(runner::failed);
    std::printf("%s\n", runner::counts().c_str());
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, runner::kFailed);
  }
}

template <class T>
std::vector<T> gather_from_all(T value, MPI_Datatype type) {
  std::vector<T> all(all_ranks);
  MPI_Request request;
  MPI_Iallgather(&value, 1, type, all.data(), 1, type, verdicts, &request);
  wait(request);
  return all;
}

}  // namespace

namespace runner {

void start(int* argc, char*** argv) {
  int level = 0;
  setenv("NCCL_ALGO", "Ring", 0);  // what is compared to the bit has to be added in a fixed order
  MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &my_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &all_ranks);
  pentatron::require_all_ranks(all_ranks);
  MPI_Comm_dup(MPI_COMM_WORLD, &verdicts);
  std::thread(watch).detach();
}

void finish() { MPI_Finalize(); }
bool has_ranks() { return true; }
int rank() { return my_rank; }
int ranks() { return all_ranks; }

void case_begins(const std::string& name) {
  std::lock_guard lock(running_case().mutex);
  running_case().name = name;
  running_case().deadline = in_seconds(time_limit());
}

Verdict case_ends(const std::string& name, Verdict mine) {
  const std::vector<int> all = gather_from_all<int>(mine, MPI_INT);
  std::lock_guard lock(running_case().mutex);
  running_case().name.clear();
  std::string failed_on;
  for (int rank = 0; rank < all_ranks; ++rank) {
    if (all[rank] == failed) failed_on += " " + std::to_string(rank);
  }
  if (!failed_on.empty() && my_rank == 0) {
    std::printf("failed on rank%s: %s\n", failed_on.c_str(), name.c_str());
    std::fflush(stdout);
  }
  return static_cast<Verdict>(*std::max_element(all.begin(), all.end()));
}

}  // namespace runner

namespace mpi_tests {

int rank() { return my_rank; }
int ranks() { return all_ranks; }

void barrier() {
  MPI_Request request;
  MPI_Ibarrier(verdicts, &request);
  wait(request);
}

std::vector<double> all_gather(double value) { return gather_from_all(value, MPI_DOUBLE); }

void set_time_limit(double seconds) {
  std::lock_guard lock(running_case().mutex);
  running_case().deadline = in_seconds(seconds);
}

}  // namespace mpi_tests
