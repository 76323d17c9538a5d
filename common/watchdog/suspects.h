// Which ranks hold up the others when nothing moves, found from what every rank knows of its own operations.
// The watchdog collects this; here is neither MPI nor CUDA.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace pentatron {

// An operation to which a rank's stream has come, and that is not complete.
struct WaitingOperation {
  uint64_t communicator;  // a number that its members have in common
  int64_t number;         // of the operation in its communicator, from 0
  int peer;               // rank of the world, or -1: all members
};

struct WatchedCommunicator {
  std::vector<int> members;  // ranks of the world
  int64_t come;              // operations to which the rank's stream has come
};

struct RankState {
  bool answers = false;
  bool in_call = false;  // the host is in a call that waits for all ranks
  std::map<uint64_t, WatchedCommunicator> communicators = {};
  std::vector<WaitingOperation> waiting = {};
  std::string report = {};  // lines for the user
};

// The ranks for which others wait, and which wait for nobody themselves; or, if some ranks do not answer,
// those. Empty if ranks wait for each other in a circle. A rank waits for another if it has come to an
// operation to which the other one has not, or if its host is in a call and the other's is not. It waits for
// NCCL if all have come to an operation that does not end.
std::vector<int> suspects(const std::vector<RankState>& ranks);

// To send a state to another rank, and back.
std::string to_text(const RankState& state);
RankState rank_state(const std::string& text);

}  // namespace pentatron
