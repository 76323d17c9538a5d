// Which rank the watchdog names, from states as ranks would report them.
#include "catch.h"
#include "device/errors.h"
#include "watchdog/suspects.h"

using namespace pentatron;

namespace {

constexpr uint64_t kData = 7;

// A rank whose stream has come to `come` operations of a communicator of all `ranks`, and may wait in the
// last.
RankState rank_of(int ranks, int64_t come, bool waits) {
  std::vector<int> members(ranks);
  for (int i = 0; i < ranks; ++i) members[i] = i;
  RankState state{true, false, {{kData, {members, come}}}};
  if (waits) state.waiting = {{kData, come - 1, -1}};
  return state;
}

// Ranks of a pipeline: communicator k connects the ranks k and k + 1, and has had one message.
std::vector<RankState> pipeline(int ranks) {
  std::vector<RankState> states(ranks);
  for (int rank = 0; rank < ranks; ++rank) {
    states[rank].answers = true;
    for (const int edge : {rank - 1, rank}) {
      if (edge >= 0 && edge + 1 < ranks) states[rank].communicators[edge] = {{edge, edge + 1}, 1};
    }
  }
  return states;
}

// `rank` has come to one message more on an edge, and waits for the rank at its other end.
void let_wait(RankState& state, int edge, int peer) {
  state.waiting.push_back({static_cast<uint64_t>(edge), state.communicators.at(edge).come++, peer});
}

}  // namespace

TEST_CASE("a rank is named with its host where there are several", "[02][watchdog]") {
  at_failure(0, {"node-a", "node-a"}, nullptr);
  CHECK(rank_name(1) == "rank 1");
  at_failure(0, {"node-a", "node-b", "node-a"}, nullptr);
  CHECK(rank_name(1) == "rank 1 (node-b)");
  CHECK(rank_name(2) == "rank 2 (node-a)");
  at_failure(0, {}, nullptr);
  CHECK(rank_name(0) == "rank 0");
}

TEST_CASE("suspects: a rank that stops calling", "[02][watchdog]") {
  const RankState waits = rank_of(4, 2, true);
  CHECK(suspects({waits, rank_of(4, 1, false), waits, waits}) == std::vector{1});
  CHECK(suspects({waits, waits, waits, waits}).empty());  // all have come: it is under way
}

TEST_CASE("suspects: a rank that does not answer is named alone", "[02][watchdog]") {
  std::vector<RankState> states = pipeline(4);
  let_wait(states[3], 2, 2);
  let_wait(states[1], 1, 2);
  let_wait(states[0], 0, 1);
  states[2] = {};
  CHECK(suspects(states) == std::vector{2});
}

TEST_CASE("suspects: the end of a chain of waiting ranks is named alone", "[05][watchdog]") {
  std::vector<RankState> states = pipeline(4);
  let_wait(states[3], 2, 2);
  let_wait(states[0], 0, 1);
  let_wait(states[1], 1, 2);
  CHECK(suspects(states) == std::vector{2});  // who counts operations accuses rank 0, too
}

TEST_CASE("suspects: ranks that wait for each other", "[05][watchdog]") {
  std::vector<RankState> states = pipeline(3);
  let_wait(states[0], 0, 1);
  let_wait(states[1], 1, 2);
  states[2].communicators[0] = states[0].communicators[0];
  states[2].communicators[0].members = {0, 2};
  states[2].waiting = {{0, 5, 0}};
  CHECK(suspects(states).empty());
}

// Rank 1 has come to rank 0's message, and has one that rank 2 has come to: NCCL does not begin the one
// before the other. (Rank 1 has not come to rank 2's next message, and is not to blame.)
TEST_CASE("suspects: a rank whose message waits for another one", "[05][watchdog]") {
  std::vector<RankState> states = pipeline(3);
  let_wait(states[1], 1, 2);
  let_wait(states[2], 1, 1);
  let_wait(states[2], 1, 1);
  CHECK(suspects(states).empty());
  states[1].waiting.clear();
  CHECK(suspects(states) == std::vector{1});
}

TEST_CASE("suspects: a rank whose host is in no call while others wait for all", "[02][watchdog]") {
  std::vector<RankState> states(3, rank_of(3, 1, false));
  states[0].in_call = states[2].in_call = true;
  CHECK(suspects(states) == std::vector{1});
}

TEST_CASE("suspects: a state as text", "[02][watchdog]") {
  const RankState state = rank_of(3, 2, true), copy = rank_state(to_text(state));
  CHECK(to_text(copy) == to_text(state));
  CHECK(copy.communicators.at(kData).members == std::vector{0, 1, 2});
  CHECK(copy.waiting.at(0).number == 1);
}
