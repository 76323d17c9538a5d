#include "device/errors.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

namespace pentatron {
namespace {

int rank_in_messages = 0;
void (*end_other_ranks)() = nullptr;

// Replaces control characters of a value, so that the message stays one line.
std::string one_line(std::string words) {
  std::replace_if(
      words.begin(), words.end(), [](unsigned char c) { return std::iscntrl(c) != 0; }, '?');
  return words;
}

}  // namespace

UsageError::UsageError(const std::string& line) : std::runtime_error(one_line(line)) {}

UsageError::UsageError(const std::string& option, const std::string& value, const std::string& expected)
    : UsageError(option + ": " + (value.empty() ? "\"\"" : value) + " is not valid; expected " + expected) {}

void at_failure(int rank, void (*end)()) { rank_in_messages = rank, end_other_ranks = end; }

void fail(const char* call, const char* text, const char* file, int line) {
  std::fprintf(stderr, "rank %d: %s failed: %s (%s:%d)\n", rank_in_messages, call, text, file, line);
  std::fflush(nullptr);
  if (end_other_ranks) {
    std::this_thread::sleep_for(std::chrono::seconds(1));  // after MPI_Abort mpirun passes on no more output
    end_other_ranks();
  }
  std::_Exit(1);  // streams may still hold work, so nothing is torn down
}

}  // namespace pentatron
