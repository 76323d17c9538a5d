// Runs the tests and ends with "N passed, N failed", counted in test cases. A case that checks nothing,
// because it does not apply to this build, is neither: it was skipped.
#define CATCH_CONFIG_RUNNER
#include <iostream>
#include <string>

#include "catch.h"

namespace {

#if __has_include(<catch2/catch_all.hpp>)
using Listener = Catch::EventListenerBase;
#else
using Listener = Catch::TestEventListenerBase;
#endif

int passed = 0, failed = 0, skipped = 0;

struct Counter : Listener {
  using Listener::Listener;
  void testCaseStarting(const Catch::TestCaseInfo& info) override { name_ = info.name; }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    const Catch::Counts& checks = stats.totals.assertions;
    ++(checks.failed > 0 ? failed : checks.total() == 0 ? skipped : passed);
    if (checks.total() == 0) std::cout << "skipped in this build: " << name_ << '\n';
  }

 private:
  std::string name_;
};

CATCH_REGISTER_LISTENER(Counter)

}  // namespace

int main(int argc, char** argv) {
  Catch::Session session;
  if (const int bad_usage = session.applyCommandLine(argc, argv)) return bad_usage;
  session.run();
  const bool none = passed + failed + skipped == 0;
  if (none) say_that_no_test_matches(argc > 1 ? argv[1] : "");
  if (skipped > 0) std::cout << skipped << " skipped\n";
  std::cout << passed << " passed, " << failed << " failed" << std::endl;
  return none ? kNoTestMatches : failed == 0 ? 0 : 1;
}
