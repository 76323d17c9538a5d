// Runs test cases on several ranks: `mpirun -n 4 mpi_tests [filter]`. After each case the ranks agree on a
// verdict, outside of what is being tested, so that a failure on one of them cannot make them drift apart.
// Failures appear with their rank; all else is said by rank 0, in the end "N passed, N failed". A case that
// exceeds its time limit (one rank waits for another that has failed, say) ends the run on all ranks and
// counts as failed. One that checks nothing on any rank, because it is for other numbers of ranks, was
// skipped.
#define CATCH_CONFIG_RUNNER

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "mpi_tests.h"
#include "ranks/mpi_wait.h"

namespace {

using pentatron::wait;

#if __has_include(<catch2/catch_all.hpp>)
using Listener = Catch::EventListenerBase;
#else
using Listener = Catch::TestEventListenerBase;
#endif

using Clock = std::chrono::steady_clock;

constexpr double kTimeLimit = 60;     // s, of a case
constexpr double kRankZeroFirst = 3;  // s: the others leave the message and the abort to rank 0
constexpr int kExitStatus = 1;

MPI_Comm verdicts = MPI_COMM_NULL;
int my_rank = 0, all_ranks = 1;
int passed = 0, failed = 0, skipped = 0;

double time_limit() {
  const char* seconds = std::getenv("TEST_CASE_TIMEOUT");
  return seconds != nullptr ? std::atof(seconds) : kTimeLimit;
}

// ---- The time limit ---------------------------------------------------------------------------------------

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
    std::printf("%d passed, %d failed\n", passed, failed + 1);
    std::fflush(nullptr);
    MPI_Abort(MPI_COMM_WORLD, kExitStatus);
  }
}

// ---- Verdicts ---------------------------------------------------------------------------------------------

std::string text_of(const Catch::AssertionResult& result) {
  std::string text;
  if (result.hasExpression())
    text += result.getExpressionInMacro() + " with " + result.getExpandedExpression();
  if (result.hasMessage()) text += " " + std::string(result.getMessage().data(), result.getMessage().size());
  return text;
}

struct Verdicts : Listener {
  using Listener::Listener;

  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    Listener::testCaseStarting(info);
    std::lock_guard lock(running_case().mutex);
    running_case().name = info.name;
    running_case().deadline = in_seconds(time_limit());
  }

#if __has_include(<catch2/catch_all.hpp>)
  void assertionEnded(const Catch::AssertionStats& stats) override { report(stats); }
#else
  bool assertionEnded(const Catch::AssertionStats& stats) override {
    report(stats);
    return false;
  }
#endif

  void report(const Catch::AssertionStats& stats) {
    const Catch::AssertionResult& result = stats.assertionResult;
    if (result.isOk()) return;
    const auto line = result.getSourceInfo();
    std::string text = text_of(result);
    for (const Catch::MessageInfo& info : stats.infoMessages) text += "\n    " + info.message;
    std::printf("[rank %d] %s:%zu: %s\n", my_rank, line.file, line.line, text.c_str());
    std::fflush(stdout);
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    Listener::testCaseEnded(stats);
    const Catch::Counts& checks = stats.totals.assertions;
    enum Verdict : int { kSkipped, kPassed, kFailed };
    const int mine = checks.failed > 0 ? kFailed : checks.total() > 0 ? kPassed : kSkipped;
    std::vector<int> all(all_ranks);
    MPI_Request request;
    MPI_Iallgather(&mine, 1, MPI_INT, all.data(), 1, MPI_INT, verdicts, &request);
    wait(request);
    std::lock_guard lock(running_case().mutex);
    const std::string name = std::exchange(running_case().name, {});
    std::string ranks;
    for (int rank = 0; rank < all_ranks; ++rank) {
      if (all[rank] == kFailed) ranks += " " + std::to_string(rank);
    }
    const int verdict = *std::max_element(all.begin(), all.end());
    ++(verdict == kFailed ? failed : verdict == kPassed ? passed : skipped);
    if (verdict == kSkipped && my_rank == 0)
      std::printf("skipped on %d rank%s: %s\n", all_ranks, all_ranks == 1 ? "" : "s", name.c_str());
    if (!ranks.empty() && my_rank == 0) {
      std::printf("failed on rank%s: %s\n", ranks.c_str(), name.c_str());
      std::fflush(stdout);
    }
  }
};

CATCH_REGISTER_LISTENER(Verdicts)

}  // namespace

namespace mpi_tests {

using pentatron::wait;

int rank() { return my_rank; }
int ranks() { return all_ranks; }

void barrier() {
  MPI_Request request;
  MPI_Ibarrier(verdicts, &request);
  wait(request);
}

std::vector<double> all_gather(double value) {
  std::vector<double> all(all_ranks);
  MPI_Request request;
  MPI_Iallgather(&value, 1, MPI_DOUBLE, all.data(), 1, MPI_DOUBLE, verdicts, &request);
  wait(request);
  return all;
}

void set_time_limit(double seconds) {
  std::lock_guard lock(running_case().mutex);
  running_case().deadline = in_seconds(seconds);
}

}  // namespace mpi_tests

int main(int argc, char** argv) {
  int level = 0;
  setenv("NCCL_ALGO", "Ring", 0);  // what is compared to the bit has to be added in a fixed order
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &my_rank);
  MPI_Comm_size(MPI_COMM_WORLD, &all_ranks);
  MPI_Comm_dup(MPI_COMM_WORLD, &verdicts);

  // Catch's own report would appear once a rank.
  std::vector<const char*> arguments(argv, argv + argc);
  for (const char* quiet : {"--out", "/dev/null"}) arguments.push_back(quiet);
  Catch::Session session;
  if (const int bad_usage = session.applyCommandLine(static_cast<int>(arguments.size()), arguments.data())) {
    return bad_usage;
  }
  std::thread(watch).detach();
  session.run();
  const bool none = passed + failed + skipped == 0;
  if (my_rank == 0) {
    if (none) say_that_no_test_matches(argc > 1 ? argv[1] : "");
    if (skipped > 0) std::cout << skipped << " skipped" << std::endl;
    std::cout << passed << " passed, " << failed << " failed" << std::endl;
  }
  MPI_Finalize();
  return none ? kNoTestMatches : failed == 0 ? 0 : kExitStatus;
}
