// How a program refuses an impossible request, and how it ends when a call fails. No CUDA here.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace pentatron {

inline constexpr int exit_bad_usage = 2;

// An impossible request. main() prints the line once, on stderr, and ends with `status`.
struct UsageError : std::runtime_error {
  explicit UsageError(const std::string& line);
  // "--layers: -3 is not valid; expected a whole number from 1 to 1000"
  UsageError(const std::string& option, const std::string& value, const std::string& expected);
  int status = exit_bad_usage;
};

// A request that is right, but can't be met: a dry run that does not fit.
struct RunError : UsageError {
  explicit RunError(const std::string& line, int to_end_with = 1) : UsageError(line) { status = to_end_with; }
};

// The values, one after the other. A double is as short as possible: 0.003, 1e-08.
template <class... Values>
std::string text(const Values&... values) {
  std::ostringstream out;
  (out << ... << values);
  return out.str();
}

// Throws UsageError unless `good`. `expected`: what would be valid, in parts.
template <class Given, class... Expected>
void require(bool good, const std::string& option, const Given& given, const Expected&... expected) {
  if (!good) throw UsageError(option, text(given), text(expected...));
}

// A call failed. Prints the call, the error's text, file:line and rank, and ends the process with status 1.
[[noreturn]] void fail(const char* call, const char* text, const char* file, int line);

// World calls this once. `hosts`: of each rank. fail() names `rank`, and then calls end_other_ranks.
void at_failure(int rank, const std::vector<std::string>& hosts, void (*end_other_ranks)());

// "rank 3", or "rank 3 (node-b)" where the ranks are on several hosts: for all messages.
std::string rank_name(int rank);

}  // namespace pentatron
