// Plays a schedule without a GPU, by NCCL's rules. It finds out whether ranks wait for each other forever,
// and computes when each instruction begins and ends.
//
//   compute    runs in the order of the list. Each instruction waits for the receive that it needs.
//   messages   start in the order of the list, over all streams of a rank. A message waits until the one
//              before it on its stream is complete. A send also waits until its tensor is computed, a receive
//              until its buffer is free. Both complete `transfer` after both have started (rendezvous).
//   groups     grouped messages start together, when each of them can, and are over when all are complete.
#pragma once

#include <limits>
#include <map>

#include "validate.h"

namespace pentatron {

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

class Simulator {
 public:
  // `costs`: [stages], or one for all. `streams`: each rank's streams for messages. 4, or 2 (one for each
  // direction of travel), or 1 for all. Throws ScheduleError.
  Simulator(const Schedule& schedule, std::vector<Costs> costs, int streams = message_streams)
      : s_(schedule), costs_(std::move(costs)), streams_(schedule.grouped_messages ? 1 : streams) {}

  // Throws ScheduleError.
  Simulation run() {
    for (int rank = 0; rank < s_.p; ++rank) {
      const Instructions& list = s_.ranks[rank];
      ranks_[rank].times.assign(list.size(), {never, never});
      for (size_t n = 0; n < list.size(); ++n)
        (is_message(list[n].action) ? ranks_[rank].messages : ranks_[rank].computes).push_back(n);
    }
    play();
    Simulation result = {};
    for (int rank = 0; rank < s_.p; ++rank) {
      double work = 0;
      for (int chunk = 0; chunk < s_.v; ++chunk)
        work += s_.m / s_.copies *
                (cost(rank, {Action::forward, 0, chunk}) + cost(rank, {Action::backward, 0, chunk}));
      result.work = std::max(result.work, work);
      result.total = std::max(result.total, ranks_[rank].computed);
      result.times.push_back(ranks_[rank].times);
      for (size_t n = 0; n < s_.ranks[rank].size(); ++n) result.times[rank][n].end = end(rank, n);
      result.in_flight.push_back(peak_in_flight(s_.ranks[rank]));
    }
    return result;
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();  // also: not known yet

  struct Rank {
    std::vector<Interval> times;                 // [instructions]; of a message in a group: its own end
    std::vector<size_t> computes, messages;      // where they are in the list
    size_t next_compute = 0, next_message = 0;   // index in computes, in messages
    double computed = 0, started = 0;            // end of the last compute, begin of the last message
    std::map<std::pair<int, int>, size_t> last;  // message on each stream: its index; by peer and stream
  };

  // When an instruction can begin, and the reason if that is never.
  struct Wait {
    double until = 0;
    const char* reason = "";
  };

  // A message costs what the stage does from which the edge leads to the next one.
  double cost(int rank, const Instruction& i) const {
    const int stage = s_.stage(rank, i.chunk) - (is_message(i.action) && !towards_next(i.action) ? 1 : 0);
    return costs_[stage % costs_.size()].of(i.action);
  }

  Interval& time(int rank, const Instruction& i) { return ranks_[rank].times[valid_.index(rank, i)]; }

  // The instructions [first, second) of a list are one group of messages, or one other instruction.
  std::pair<size_t, size_t> group_of(int rank, size_t index) const {
    const Instructions& list = s_.ranks[rank];
    std::pair<size_t, size_t> group = {index, index + 1};
    if (!s_.grouped_messages || !is_message(list[index].action)) return group;
    while (group.first > 0 && is_message(list[group.first - 1].action)) --group.first;
    while (group.second < list.size() && is_message(list[group.second].action)) ++group.second;
    return group;
  }

  // When an instruction is over, with its group.
  double end(int rank, size_t index) const {
    double latest = 0;
    const auto [first, last] = group_of(rank, index);
    for (size_t n = first; n < last; ++n) latest = std::max(latest, ranks_[rank].times[n].end);
    return latest;
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
      const std::vector<Interval>& times = ranks_[rank].times;
      const auto first = std::ranges::find(times, never, &Interval::begin);
      if (first == times.end()) continue;
      const auto [stuck, wait] = wait_of(rank, first - times.begin());
      waiting += (waiting.empty() ? " " : "; ") + located(s_, rank, stuck, wait.reason);
    }
    if (!waiting.empty()) throw ScheduleError("deadlock:" + waiting);
  }

  bool compute_next(int rank) {
    Rank& r = ranks_[rank];
    if (r.next_compute == r.computes.size()) return false;
    const size_t n = r.computes[r.next_compute];
    const double begin = std::max(r.computed, wait_of(rank, n).second.until);
    if (begin == never) return false;
    r.computed = begin + cost(rank, s_.ranks[rank][n]);
    r.times[n] = {begin, r.computed};
    ++r.next_compute;
    return true;
  }

  bool start_next(int rank) {
    Rank& r = ranks_[rank];
    if (r.next_message == r.messages.size()) return false;
    const auto [first, last] = group_of(rank, r.messages[r.next_message]);
    const double begin = std::max(r.started, wait_of(rank, first).second.until);
    if (begin == never) return false;
    for (size_t n = first; n < last; ++n) {
      const Instruction& i = s_.ranks[rank][n];
      Interval &mine = r.times[n], &other = time(peer_of(s_, rank, i).rank, valid_.partner(rank, i));
      mine.begin = r.started = begin;
      mine.end = other.end =
          std::max(mine.begin, other.begin) + cost(rank, i);  // never, until both have begun
      r.last[stream(rank, i)] = n;
    }
    r.next_message += last - first;
    return true;
  }

  // With fewer streams than four for an edge, all edges share them.
  std::pair<int, int> stream(int rank, const Instruction& message) const {
    const int peer = streams_ == message_streams ? peer_of(s_, rank, message).rank : 0;
    return {peer, stream_of(message.action) * streams_ / message_streams};
  }

  // The longest wait in the group of an instruction, and where it is.
  std::pair<size_t, Wait> wait_of(int rank, size_t index) {
    const auto [first, last] = group_of(rank, index);
    std::pair<size_t, Wait> longest = {first, {}};
    for (size_t n = first; n < last; ++n) {
      const Instruction& i = s_.ranks[rank][n];
      const Wait wait = is_message(i.action) ? message_wait(rank, i) : compute_wait(rank, i);
      if (wait.until > longest.second.until) longest = {n, wait};
    }
    return longest;
  }

  Wait compute_wait(int rank, const Instruction& i) {
    if (const auto receive = receive_before(s_, rank, i)) {
      return {end(rank, valid_.index(rank, {*receive, i.micro_batch, i.chunk})),
              "what it needs is never received"};
    }
    const auto source = source_of(s_, rank, i);  // on this rank
    if (!source) return {};
    return {time(rank, {i.action, i.micro_batch, source->chunk}).end, "what it needs is computed later"};
  }

  Wait message_wait(int rank, const Instruction& i) {
    const auto last = ranks_[rank].last.find(stream(rank, i));
    const std::vector<Action> compute = compute_actions(s_);
    Wait wait;
    const auto add = [&](double until, const char* reason) {
      if (until > wait.until) wait = {until, reason};
    };
    if (last != ranks_[rank].last.end())
      add(end(rank, last->second), "the message before it on its stream is never complete");
    if (is_send(i.action)) {
      const Action producer = i.action == Action::send_activation ? compute[0] : compute[1];
      add(time(rank, {producer, i.micro_batch, i.chunk}).end, "its tensor is never computed");
    }
    if (const auto use = valid_.last_use(rank, i)) add(time(rank, *use).end, "its buffer is never free");
    return wait;
  }

  const Schedule& s_;
  const ValidSchedule valid_ = ValidSchedule(s_);
  const std::vector<Costs> costs_;
  const int streams_;
  std::vector<Rank> ranks_ = std::vector<Rank>(s_.p);
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
