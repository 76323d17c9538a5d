#include "watchdog/suspects.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

namespace pentatron {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WaitingOperation, communicator, number, peer)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WatchedCommunicator, members, come)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankState, answers, in_call, communicators, waiting, report)

namespace {

std::set<int> waits_for(int rank, const std::vector<RankState>& ranks) {
  const RankState& state = ranks[rank];
  std::set<int> others;
  for (const WaitingOperation& o : state.waiting) {
    const std::vector<int>& all = state.communicators.at(o.communicator).members;
    for (const int other : o.peer >= 0 ? std::vector{o.peer} : all) {
      const auto& theirs = ranks[other].communicators;
      const auto found = theirs.find(o.communicator);
      if (found == theirs.end() || found->second.come <= o.number) others.insert(other);  // it has not come
    }
  }
  for (int other = 0; state.in_call && other < std::ssize(ranks); ++other) {
    if (!ranks[other].in_call) others.insert(other);
  }
  return others;
}

}  // namespace

std::vector<int> suspects(const std::vector<RankState>& ranks) {
  std::vector<int> silent, found;
  std::set<int> waited_for, waiting;
  for (int rank = 0; rank < std::ssize(ranks); ++rank) {
    if (!ranks[rank].answers) silent.push_back(rank);
    const std::set<int> others = waits_for(rank, ranks);
    if (!others.empty() || !ranks[rank].waiting.empty()) waiting.insert(rank);
    waited_for.insert(others.begin(), others.end());
  }
  if (!silent.empty()) return silent;
  std::ranges::set_difference(waited_for, waiting, std::back_inserter(found));
  return found;
}

std::string to_text(const RankState& state) { return nlohmann::json(state).dump(); }
RankState rank_state(const std::string& text) { return nlohmann::json::parse(text); }

}  // namespace pentatron
