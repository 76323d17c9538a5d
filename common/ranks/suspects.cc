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

// The ranks that have not come to this operation of `rank`.
std::set<int> missing(const UnfinishedOperation& o, int rank, const std::vector<RankState>& ranks) {
  std::set<int> others;
  const std::vector<int> all = ranks[rank].communicators.at(o.communicator).members;
  for (const int other : o.peer >= 0 ? std::vector{o.peer} : all) {
    if (other != rank && !has_come(ranks[other], o.communicator, o.number)) others.insert(other);
  }
  return others;
}

std::set<int> waits_for(int rank, const std::vector<RankState>& ranks) {
  const RankState& state = ranks[rank];
  std::set<int> others;
  for (const UnfinishedOperation& o : state.unfinished) {
    if (o.reached) others.merge(missing(o, rank, ranks));
  }
  for (int other = 0; state.in_call && other < static_cast<int>(ranks.size()); ++other) {
    if (other != rank && !ranks[other].in_call) others.insert(other);
  }
  return others;
}

// Whether all ranks of an operation have come to it, and it does not end: another operation holds it up.
bool has_complete_operation(int rank, const std::vector<RankState>& ranks) {
  const auto& unfinished = ranks[rank].unfinished;
  return std::any_of(unfinished.begin(), unfinished.end(), [&](const UnfinishedOperation& o) {
    return o.reached && missing(o, rank, ranks).empty();
  });
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
    if (!others.empty() || has_complete_operation(rank, ranks)) waiting.insert(rank);
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
