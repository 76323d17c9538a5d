// Runs the tests and ends with "N passed, N failed", counted in test cases.
#define CATCH_CONFIG_RUNNER
#include <iostream>

#include "catch.h"

namespace {

#if __has_include(<catch2/catch_all.hpp>)
using Listener = Catch::EventListenerBase;
#else
using Listener = Catch::TestEventListenerBase;
#endif

Catch::Counts test_cases;

struct Counter : Listener {
  using Listener::Listener;
  void testRunEnded(const Catch::TestRunStats& stats) override { test_cases = stats.totals.testCases; }
};

CATCH_REGISTER_LISTENER(Counter)

}  // namespace

int main(int argc, char** argv) {
  Catch::Session session;
  if (const int bad_usage = session.applyCommandLine(argc, argv)) return bad_usage;
  session.run();
  const auto passed = test_cases.passed + test_cases.failedButOk;
  std::cout << passed << " passed, " << test_cases.failed << " failed" << std::endl;
  return test_cases.failed == 0 ? 0 : 1;
}
