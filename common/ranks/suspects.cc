#include "ranks/suspects.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

namespace pentatron {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(UnfinishedOperation, communicator, number, peer, reached)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(WatchedCommunicator, members, issued)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankState, answers, in_call, communicators, unfinished)

namespace {

// Whether a rank's stream has come to this operation of a communicator, or passed it.
bool has_come(const RankState& rank, uint64_t communicator, int64_t number) {
  const auto found = rank.communicators.find(communicator);
  if (found == rank.communicators.end() || found->second.issued <= number) return false;
  return std::none_of(rank.unfinished.begin(), rank.unfinished.end(), [&](const UnfinishedOperation& o) {
    return o.communicator == communicator && o.number == number && !o.reached;
  });
}

std::set<int> waits_for(int rank, const std::vector<RankState>& ranks) {
  const RankState& state = ranks[rank];
  std::set<int> others;
  for (const UnfinishedOperation& o : state.unfinished) {
    if (!o.reached) continue;
    const std::vector<int> all = state.communicators.at(o.communicator).members;
    for (const int other : o.peer >= 0 ? std::vector{o.peer} : all) {
      if (other != rank && !has_come(ranks[other], o.communicator, o.number)) others.insert(other);
    }
  }
  for (int other = 0; state.in_call && other < static_cast<int>(ranks.size()); ++other) {
    if (other != rank && !ranks[other].in_call) others.insert(other);
  }
  return others;
}

}  // namespace

std::vector<int> suspects(const std::vector<RankState>& ranks) {
  std::vector<int> silent;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    if (!ranks[rank].answers) silent.push_back(rank);
  }
  if (!silent.empty()) return silent;
  std::set<int> waited_for, waiting;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const std::set<int> others = waits_for(rank, ranks);
    if (!others.empty()) waiting.insert(rank);
    waited_for.insert(others.begin(), others.end());
  }
  std::vector<int> found;
  std::set_difference(waited_for.begin(), waited_for.end(), waiting.begin(), waiting.end(),
                      std::back_inserter(found));
  return found;
}

std::string to_text(const RankState& state) { return nlohmann::json(state).dump(); }
RankState rank_state(const std::string& text) { return nlohmann::json::parse(text); }

}  // namespace pentatron
