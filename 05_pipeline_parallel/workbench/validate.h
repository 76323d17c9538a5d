// The rules that the lists of a schedule keep, whatever the time of an instruction is:
//
//   - a rank has each instruction of its micro-batches once, and those of a micro-batch in their order;
//   - a receive comes after the last use of its buffer;
//   - what a rank sends first, the other one receives first: NCCL has no tags.
//
// Whether ranks wait for each other forever, the simulator finds out (simulate.h).
#pragma once

#include <map>

#include "../schedule.h"

namespace pentatron {

// One line: the first violation with its rank and instruction, or for a deadlock each rank that waits.
struct ScheduleError : UsageError {
  using UsageError::UsageError;
};

inline std::string located(const Schedule& s, int rank, size_t index, const std::string& reason) {
  const Instructions& list = s.ranks[rank];
  return "rank " + std::to_string(rank) + ", instruction " + std::to_string(index) + " (" +
         (index < list.size() ? to_string(list[index]) : "end of the list") + "): " + reason;
}

// A schedule that keeps the rules, and where each instruction is.
class ValidSchedule {
 public:
  // `schedule` lives as long as this. Throws ScheduleError.
  explicit ValidSchedule(const Schedule& schedule) : s_(schedule), places_(s_.p), inputs_(s_.p) {
    for (int rank = 0; rank < s_.p; ++rank) check_actions(rank);
    for (int rank = 0; rank < s_.p; ++rank) check_buffers(rank);
    for (int rank = 0; rank < s_.p; ++rank) check_order_of_messages(rank);
  }

  size_t index(int rank, const Instruction& i) const { return places_[rank][number(i)]; }

  // The instruction after which the receive's buffer is free: the input gradient of the micro-batch that had
  // the buffer before. None if the buffer is new, and for gradients.
  std::optional<Instruction> last_use(int rank, const Instruction& receive) const {
    if (receive.action != Action::receive_activation) return {};
    const int before = inputs_[rank][receive.chunk].before[receive.micro_batch];
    if (before < 0) return {};
    return Instruction{compute_actions(s_)[1], before, receive.chunk};
  }

  // The same message at its other end.
  Instruction partner(int rank, const Instruction& message) const {
    const int action = static_cast<int>(message.action) + (is_send(message.action) ? -1 : 1);
    return {static_cast<Action>(action), message.micro_batch, peer_of(s_, rank, message).chunk};
  }

 private:
  [[noreturn]] void fail(int rank, size_t index, const std::string& reason) const {
    throw ScheduleError(located(s_, rank, index, reason));
  }

  size_t number(const Instruction& i) const {
    return (i.chunk * s_.m + i.micro_batch) * action_count + static_cast<int>(i.action);
  }

  // What a rank does for one micro-batch in one chunk, in order.
  std::vector<Action> actions_of(int rank, int chunk) const {
    std::vector<Action> actions;
    for (const Action compute : compute_actions(s_)) {
      const Instruction i = {compute, 0, chunk};
      if (const auto receive = receive_before(s_, rank, i)) actions.push_back(*receive);
      actions.push_back(compute);
      if (const auto send = send_after(s_, rank, i)) actions.push_back(*send);
    }
    return actions;
  }

  // Each micro-batch has all of actions_of in each chunk of its copy of the model, once and in order.
  void check_actions(int rank) {
    const Instructions& list = s_.ranks[rank];
    places_[rank].assign(s_.v * s_.m * action_count, list.size());
    std::vector<std::vector<Action>> required;                                  // [chunks]
    std::vector<std::vector<size_t>> done(s_.v, std::vector<size_t>(s_.m, 0));  // [chunks][micro-batches]
    for (int chunk = 0; chunk < s_.v; ++chunk) required.push_back(actions_of(rank, chunk));
    const auto is_here = [&](int i, int chunk) { return s_.copy_of(i) == s_.copy(rank, chunk); };
    for (size_t index = 0; index < list.size(); ++index) {
      const Instruction& i = list[index];
      if (i.micro_batch < 0 || i.micro_batch >= s_.m || i.chunk < 0 || i.chunk >= s_.v ||
          !is_here(i.micro_batch, i.chunk))
        fail(rank, index, "there is no such micro-batch or chunk");
      const std::vector<Action>& actions = required[i.chunk];
      size_t& next = done[i.chunk][i.micro_batch];
      if (next == actions.size()) fail(rank, index, "nothing is left to do for it");
      if (i.action != actions[next])
        fail(rank, index, "its " + to_string(actions[next]) + " has to come first");
      places_[rank][number(i)] = index;
      ++next;
    }
    for (int chunk = 0; chunk < s_.v; ++chunk) {
      for (int i = 0; i < s_.m; ++i) {
        const size_t next = done[chunk][i];
        if (is_here(i, chunk) && next < required[chunk].size())
          fail(rank, list.size(), to_string({required[chunk][next], i, chunk}) + " is missing");
      }
    }
  }

  // Otherwise the executor's wait would have no effect: the event of the last use is not recorded yet.
  void check_buffers(int rank) {
    const Instructions& list = s_.ranks[rank];
    for (int chunk = 0; chunk < s_.v; ++chunk) inputs_[rank].push_back(assign_inputs(s_, rank, chunk));
    for (size_t n = 0; n < list.size(); ++n) {
      const auto use = last_use(rank, list[n]);
      if (use && index(rank, *use) > n)
        fail(rank, n, "its buffer is still in use; the " + to_string(*use) + " has to come first");
    }
  }

  // On each communicator, the n-th receive gets what was sent n-th. (check_actions has checked that there are
  // as many sends as receives.)
  void check_order_of_messages(int rank) const {
    std::map<std::pair<int, Action>, size_t> sent;  // by peer and kind of message: how much of its list
    for (size_t index = 0; index < s_.ranks[rank].size(); ++index) {
      const Instruction& i = s_.ranks[rank][index];
      if (is_send(i.action) || !is_message(i.action)) continue;
      const int peer = peer_of(s_, rank, i).rank;
      const Instruction expected = partner(rank, i);
      const auto is_for_this = [&](const Instruction& other) {
        return is_send(other.action) && (s_.grouped_messages || other.action == expected.action) &&
               peer_of(s_, peer, other).rank == rank;
      };
      // Grouped messages have one communicator, and so one order: they are counted as if of one kind.
      size_t& next = sent[{peer, s_.grouped_messages ? Action::forward : i.action}];
      while (!is_for_this(s_.ranks[peer][next])) ++next;
      const Instruction& came = s_.ranks[peer][next++];
      if (came != expected)
        fail(rank, index, "what comes is rank " + std::to_string(peer) + "'s " + to_string(came));
    }
  }

  const Schedule& s_;
  std::vector<std::vector<size_t>> places_;   // [ranks][chunks, micro-batches, actions]: index in the list
  std::vector<std::vector<Buffers>> inputs_;  // [ranks][chunks]
};

}  // namespace pentatron
