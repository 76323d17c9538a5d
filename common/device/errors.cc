#include "device/errors.h"

#include <algorithm>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>

namespace pentatron {
namespace {

int rank_in_messages = 0;
std::vector<std::string> host_of_rank;  // empty: all ranks are on one host
void (*end_other_ranks)() = nullptr;

// Replaces control characters of a value, so that the message stays one line.
std::string one_line(std::string words) {
  std::ranges::replace_if(
      words, [](unsigned char c) { return std::iscntrl(c) != 0; }, '?');
  return words;
}

}  // namespace

UsageError::UsageError(const std::string& line) : std::runtime_error(one_line(line)) {}

UsageError::UsageError(const std::string& option, const std::string& value, const std::string& expected)
    : UsageError(option + ": " + (value.empty() ? "\"\"" : value) + " is not valid; expected " + expected) {}

void at_failure(int rank, const std::vector<std::string>& hosts, void (*end)()) {
  rank_in_messages = rank;
  end_other_ranks = end;
  const bool one_host = std::adjacent_find(hosts.begin(), hosts.end(), std::not_equal_to()) == hosts.end();
  host_of_rank = one_host ? std::vector<std::string>() : hosts;
}

std::string rank_name(int rank) {
  const std::string name = "rank " + std::to_string(rank);
  return host_of_rank.empty() ? name : name + " (" + host_of_rank[rank] + ")";
}

void fail(const char* call, const char* text, const char* file, int line) {
  std::fprintf(stderr, "%s: %s failed: %s (%s:%d)\n", rank_name(rank_in_messages).c_str(), call, text, file,
               line);
  std::fflush(nullptr);
  if (end_other_ranks) {
    std::this_thread::sleep_for(std::chrono::seconds(1));  // after MPI_Abort mpirun passes on no more output
    end_other_ranks();
  }
  std::_Exit(1);  // streams may still hold work, so nothing is torn down
}

}  // namespace pentatron
