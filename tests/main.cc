// Runs test cases and ends with "N passed, N failed". A case that checks nothing, because it does not apply
// to this build or this number of ranks, is neither: it was skipped. On several ranks (mpirun -n 4 mpi_tests
// [filter]) every rank runs every case, failures appear with their rank, and rank 0 says all else.
// TEST_TIMES=FILE: appends how long each case took, in seconds, a tab, and its name (run.sh).
// TEST_NUMBER=N: the line before the last one is N, so who asked knows that all cases came to their end.
#define CATCH_CONFIG_RUNNER
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "catch.h"
#include "runner.h"

namespace {

using Clock = std::chrono::steady_clock;
#if __has_include(<catch2/catch_all.hpp>)
using Listener = Catch::EventListenerBase;
#else
using Listener = Catch::TestEventListenerBase;
#endif

int passed = 0, failed = 0, skipped = 0;
std::string times;  // the file; empty: none

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
    name_ = info.name;
    begin_ = Clock::now();
    runner::case_begins(name_);
  }

#if __has_include(<catch2/catch_all.hpp>)
  void assertionEnded(const Catch::AssertionStats& stats) override { report(stats); }
#else
  bool assertionEnded(const Catch::AssertionStats& stats) override {
    report(stats);
    return false;
  }
#endif

  // Catch's own report would appear once a rank.
  void report(const Catch::AssertionStats& stats) {
    const Catch::AssertionResult& result = stats.assertionResult;
    if (result.isOk() || !runner::has_ranks()) return;
    const auto line = result.getSourceInfo();
    std::string text = text_of(result);
    for (const Catch::MessageInfo& info : stats.infoMessages) text += "\n    " + info.message;
    std::printf("[rank %d] %s:%zu: %s\n", runner::rank(), line.file, line.line, text.c_str());
    std::fflush(stdout);
  }

  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    Listener::testCaseEnded(stats);
    const Catch::Counts& checks = stats.totals.assertions;
    const runner::Verdict verdict = runner::case_ends(name_, checks.failed > 0    ? runner::failed
                                                             : checks.total() > 0 ? runner::passed
                                                                                  : runner::skipped);
    runner::count(verdict);
    if (runner::rank() > 0) return;
    if (verdict == runner::skipped) {
      const std::string where = runner::ranks() == 1 ? " rank" : " ranks";
      std::cout << "skipped "
                << (runner::has_ranks() ? "on " + std::to_string(runner::ranks()) + where : "in this build")
                << ": " << name_ << std::endl;
    }
    if (times.empty()) return;
    const std::chrono::duration<double> seconds = Clock::now() - begin_;
    std::ofstream(times, std::ios::app) << seconds.count() << '\t' << name_ << '\n';
  }

 private:
  std::string name_;
  Clock::time_point begin_;
};

CATCH_REGISTER_LISTENER(Verdicts)

}  // namespace

void runner::count(Verdict verdict) {
  ++(verdict == runner::failed ? ::failed : verdict == runner::passed ? ::passed : ::skipped);
}

std::string runner::counts() {
  return std::to_string(::passed) + " passed, " + std::to_string(::failed) + " failed";
}

int main(int argc, char** argv) {
  if (const char* const file = std::getenv("TEST_TIMES")) times = file;
  unsetenv("TEST_TIMES");  // tests start programs like this one
  const char* const given = std::getenv("TEST_NUMBER");
  const std::string number = given == nullptr ? "" : given;
  unsetenv("TEST_NUMBER");  // nobody else is to know it
  runner::start(&argc, &argv);
  std::vector<const char*> arguments(argv, argv + argc);
  if (runner::has_ranks()) arguments.insert(arguments.end(), {"--out", "/dev/null"});
  Catch::Session session;
  if (const int bad_usage = session.applyCommandLine(static_cast<int>(arguments.size()), arguments.data()))
    return bad_usage;
  session.run();
  const bool none = passed + failed + skipped == 0;
  if (runner::rank() == 0) {
    if (none) {  // a filter may be wrong, or its test may be in another program or precision
      const std::string filter = argc > 1 ? argv[1] : "";
      std::cout << "no test here is called " << filter << "; make test T='" << filter
                << "' looks everywhere, and names the nearest\n";
    }
    if (skipped > 0) std::cout << skipped << " skipped\n";
    if (!number.empty()) std::cout << number << '\n';
    std::cout << runner::counts() << std::endl;
  }
  runner::finish();
  return none ? runner::kNoTestMatches : failed == 0 ? 0 : runner::kFailed;
}
