// Plays a schedule without a GPU, by NCCL's rules. It checks that every send meets its receive and that no
// rank waits forever, and computes when each instruction begins and ends.
//
//   compute    runs in the order of the list. Each instruction waits for the receive that it needs.
//   messages   start in the order of the list, over all streams of a rank. A message waits until the one
//              before it on its stream is complete. A send also waits until its tensor is computed, a receive
//              until its buffer is free. Both complete `transfer` after both have started (rendezvous).
#pragma once

#include <limits>
#include <map>

#include "schedule.h"

namespace pentatron {

// The times of one chunk for one micro-batch, in any unit. `transfer`: of its messages to the next stage and
// from there.
struct Costs {
  double forward = 1, input_gradient = 1, weight_gradient = 1, transfer = 0;

  double of(Action action) const {
    if (is_message(action)) return transfer;
    if (action == Action::forward) return forward;
    return (action == Action::weight_gradient ? 0 : input_gradient) +
           (action == Action::input_gradient ? 0 : weight_gradient);
  }
};

// When an instruction begins and ends. A message begins when this rank starts it, and ends when complete.
struct Interval {
  double begin, end;
};

struct Simulation {
  double total;                              // until the last rank is done
  double work;                               // how long the rank that has most to do computes
  std::vector<std::vector<Interval>> times;  // [ranks][instructions]
  std::vector<InFlight> in_flight;           // [ranks], over all chunks

  double bubble() const { return total - work; }           // how long each rank is idle
  double bubble_ratio() const { return bubble() / work; }  // over work; a ratio r is r / (1 + r) of the total
};

// One line: the first violation with its rank and instruction, or for a deadlock each rank that waits.
struct ScheduleError : UsageError {
  using UsageError::UsageError;
};

class Simulator {
 public:
  // `costs`: [stages], or one for all. `streams`: each rank's streams for messages. 4, or 2 (one for each
  // direction of travel), or 1 for all.
  Simulator(const Schedule& schedule, std::vector<Costs> costs, int streams = message_streams)
      : s_(schedule), costs_(std::move(costs)), streams_(streams), ranks_(schedule.p) {}

  // Throws ScheduleError.
  Simulation run() {
    for (int rank = 0; rank < s_.p; ++rank) check_actions(rank);
    for (int rank = 0; rank < s_.p; ++rank) check_buffers(rank);
    for (int rank = 0; rank < s_.p; ++rank) check_order_of_messages(rank);
    play();
    Simulation result = {};
    for (int rank = 0; rank < s_.p; ++rank) {
      double work = 0;
      for (int chunk = 0; chunk < s_.v; ++chunk)
        work += s_.m * (cost(rank, {Action::forward, 0, chunk}) + cost(rank, {Action::backward, 0, chunk}));
      result.work = std::max(result.work, work);
      result.total = std::max(result.total, ranks_[rank].computed);
      result.times.push_back(ranks_[rank].times);
      result.in_flight.push_back(peak_in_flight(s_.ranks[rank]));
    }
    return result;
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();  // also: not known yet

  struct Rank {
    std::vector<Interval> times;                // [instructions]
    std::vector<size_t> places;                 // [chunks, micro-batches, actions]: index in the list
    std::vector<Buffers> inputs;                // [chunks]
    size_t next_compute = 0, next_message = 0;  // index in the list
    double computed = 0, started = 0;           // end of the last compute, begin of the last message
    std::map<std::pair<int, int>, const Interval*> last;  // message on each stream; by peer and stream
  };

  // When an instruction can begin, and the reason if that is never.
  struct Wait {
    double until = 0;
    const char* reason = "";
  };

  // ---- What the lists must be ---------------------------------------------------------------------------

  [[noreturn]] void fail(int rank, size_t index, const std::string& reason) const {
    throw ScheduleError(located(rank, index, reason));
  }
  std::string located(int rank, size_t index, const std::string& reason) const {
    const Instructions& list = s_.ranks[rank];
    return "rank " + std::to_string(rank) + ", instruction " + std::to_string(index) + " (" +
           (index < list.size() ? to_string(list[index]) : "end of the list") + "): " + reason;
  }

  // A message costs what the stage does from which the edge leads to the next one.
  double cost(int rank, const Instruction& i) const {
    const int stage = s_.stage(rank, i.chunk) - (is_message(i.action) && !towards_next(i.action) ? 1 : 0);
    return costs_[stage % costs_.size()].of(i.action);
  }

  size_t& place(int rank, const Instruction& i) {
    return ranks_[rank].places[(i.chunk * s_.m + i.micro_batch) * action_count + static_cast<int>(i.action)];
  }
  Interval& time(int rank, const Instruction& i) { return ranks_[rank].times[place(rank, i)]; }

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

  // Each micro-batch has all of actions_of in each chunk, once and in order.
  void check_actions(int rank) {
    const Instructions& list = s_.ranks[rank];
    Rank& r = ranks_[rank];
    r.times.assign(list.size(), {never, never});
    r.places.assign(s_.v * s_.m * action_count, list.size());
    std::vector<std::vector<Action>> required;                                  // [chunks]
    std::vector<std::vector<size_t>> done(s_.v, std::vector<size_t>(s_.m, 0));  // [chunks][micro-batches]
    for (int chunk = 0; chunk < s_.v; ++chunk) required.push_back(actions_of(rank, chunk));
    for (size_t index = 0; index < list.size(); ++index) {
      const Instruction& i = list[index];
      if (i.micro_batch < 0 || i.micro_batch >= s_.m || i.chunk < 0 || i.chunk >= s_.v)
        fail(rank, index, "there is no such micro-batch or chunk");
      const std::vector<Action>& actions = required[i.chunk];
      size_t& next = done[i.chunk][i.micro_batch];
      if (next == actions.size()) fail(rank, index, "nothing is left to do for it");
      if (i.action != actions[next])
        fail(rank, index, "its " + to_string(actions[next]) + " has to come first");
      place(rank, i) = index;
      ++next;
    }
    for (int chunk = 0; chunk < s_.v; ++chunk) {
      for (int i = 0; i < s_.m; ++i) {
        const size_t next = done[chunk][i];
        if (next < required[chunk].size())
          fail(rank, list.size(), to_string({required[chunk][next], i, chunk}) + " is missing");
      }
    }
  }

  // The instruction after which the receive's buffer is free: the input gradient of the micro-batch that had
  // the buffer before. None if the buffer is new, and for gradients.
  std::optional<Instruction> last_use(int rank, const Instruction& receive) const {
    if (receive.action != Action::receive_activation) return {};
    const int before = ranks_[rank].inputs[receive.chunk].before[receive.micro_batch];
    if (before < 0) return {};
    return Instruction{compute_actions(s_)[1], before, receive.chunk};  // the input gradient
  }

  // A receive comes after the last use of its buffer in the list. Otherwise the executor's wait would
  // have no effect: the event of that use is not recorded yet.
  void check_buffers(int rank) {
    const Instructions& list = s_.ranks[rank];
    for (int chunk = 0; chunk < s_.v; ++chunk) ranks_[rank].inputs.push_back(assign_inputs(s_, rank, chunk));
    for (size_t index = 0; index < list.size(); ++index) {
      const auto use = last_use(rank, list[index]);
      if (use && place(rank, *use) > index)
        fail(rank, index, "its buffer is still in use; the " + to_string(*use) + " has to come first");
    }
  }

  // The same message at its other end.
  Instruction partner(int rank, const Instruction& message) const {
    const int action = static_cast<int>(message.action) + (is_send(message.action) ? -1 : 1);
    return {static_cast<Action>(action), message.micro_batch, peer_of(s_, rank, message).chunk};
  }

  // NCCL has no tags: the n-th receive gets what was sent n-th. (check_actions has checked that there are as
  // many sends as receives.)
  void check_order_of_messages(int rank) const {
    for (const Action receive : {Action::receive_activation, Action::receive_gradient}) {
      std::vector<size_t> sent(s_.p, 0);  // [ranks]: how much of its list
      for (size_t index = 0; index < s_.ranks[rank].size(); ++index) {
        const Instruction& i = s_.ranks[rank][index];
        if (i.action != receive) continue;
        const int peer = peer_of(s_, rank, i).rank;
        const Instruction expected = partner(rank, i);
        const auto next = [&] { return s_.ranks[peer][sent[peer]++]; };
        Instruction came = next();
        while (came.action != expected.action || peer_of(s_, peer, came).rank != rank) came = next();
        if (came != expected)
          fail(rank, index, "what comes is rank " + std::to_string(peer) + "'s " + to_string(came));
      }
    }
  }

  // ---- When each instruction runs -----------------------------------------------------------------------

  // The host issues a rank's whole list at once. The rank's compute instructions run one after the other, and
  // its messages start one after the other. The loop sets an instruction's times when all times that it
  // depends on are known. If no more can be set, ranks that are not done are in a deadlock.
  void play() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < s_.p; ++rank) {
        while (compute_next(rank) || start_next(rank)) moved = true;
      }
    }
    std::string waiting;
    for (int rank = 0; rank < s_.p; ++rank) {
      const Rank& r = ranks_[rank];
      const size_t size = r.times.size(), index = std::min(r.next_compute, r.next_message);
      if (index == size) continue;
      const Instruction& i = s_.ranks[rank][index];
      const Wait wait = is_message(i.action) ? message_wait(rank, i) : compute_wait(rank, i);
      waiting += (waiting.empty() ? " " : "; ") + located(rank, index, wait.reason);
    }
    if (!waiting.empty()) throw ScheduleError("deadlock:" + waiting);
  }

  bool compute_next(int rank) {
    Rank& r = ranks_[rank];
    if (!find(rank, false, r.next_compute)) return false;
    const Instruction& i = s_.ranks[rank][r.next_compute];
    const double begin = std::max(r.computed, compute_wait(rank, i).until);
    if (begin == never) return false;
    r.computed = begin + cost(rank, i);
    r.times[r.next_compute++] = {begin, r.computed};
    return true;
  }

  bool start_next(int rank) {
    Rank& r = ranks_[rank];
    if (!find(rank, true, r.next_message)) return false;
    const Instruction& i = s_.ranks[rank][r.next_message];
    const double begin = std::max(r.started, message_wait(rank, i).until);
    if (begin == never) return false;
    Interval &mine = r.times[r.next_message++], &other = time(peer_of(s_, rank, i).rank, partner(rank, i));
    mine.begin = r.started = begin;
    mine.end = other.end = std::max(mine.begin, other.begin) + cost(rank, i);  // never, until both have begun
    last_on_stream(rank, i) = &mine;
    return true;
  }

  // With fewer streams than four for an edge, all edges share them.
  const Interval*& last_on_stream(int rank, const Instruction& message) {
    const int peer = streams_ == message_streams ? peer_of(s_, rank, message).rank : 0;
    return ranks_[rank].last[{peer, stream_of(message.action) * streams_ / message_streams}];
  }

  // Moves `next` to the next message (or compute instruction, if not `message`). False if none is left.
  bool find(int rank, bool message, size_t& next) const {
    const Instructions& list = s_.ranks[rank];
    while (next < list.size() && is_message(list[next].action) != message) ++next;
    return next < list.size();
  }

  Wait compute_wait(int rank, const Instruction& i) {
    if (const auto receive = receive_before(s_, rank, i))
      return {time(rank, {*receive, i.micro_batch, i.chunk}).end, "what it needs is never received"};
    const auto source = source_of(s_, rank, i);  // on this rank
    if (!source) return {};
    return {time(rank, {i.action, i.micro_batch, source->chunk}).end, "what it needs is computed later"};
  }

  Wait message_wait(int rank, const Instruction& i) {
    const Interval* const last = last_on_stream(rank, i);
    const std::vector<Action> compute = compute_actions(s_);
    Wait wait;
    const auto add = [&](double until, const char* reason) {
      if (until > wait.until) wait = {until, reason};
    };
    if (last != nullptr) add(last->end, "the message before it on its stream is never complete");
    if (is_send(i.action)) {
      const Action producer = i.action == Action::send_activation ? compute[0] : compute[1];
      add(time(rank, {producer, i.micro_batch, i.chunk}).end, "its tensor is never computed");
    }
    if (const auto use = last_use(rank, i)) add(time(rank, *use).end, "its buffer is never free");
    return wait;
  }

  const Schedule& s_;
  const std::vector<Costs> costs_;
  const int streams_;
  std::vector<Rank> ranks_;
};

// Plays the schedule with these costs. Throws ScheduleError if it cannot run.
inline Simulation simulate(const Schedule& schedule, const Costs& costs = {}, int streams = message_streams) {
  return Simulator(schedule, {costs}, streams).run();
}
inline Simulation simulate(const Schedule& schedule, const std::vector<Costs>& costs_of_stages) {
  return Simulator(schedule, costs_of_stages).run();
}

// Returns the schedule if it can run. Otherwise throws ScheduleError.
inline const Schedule& checked(const Schedule& schedule) {
  simulate(schedule);
  return schedule;
}

}  // namespace pentatron
