#include "simulate.h"

#include <deque>
#include <limits>
#include <map>
#include <tuple>

namespace pentatron {
namespace {

constexpr const char* action_names[] = {"forward",          "backward",           "input_gradient",
                                        "weight_gradient",  "receive_activation", "send_activation",
                                        "receive_gradient", "send_gradient"};
constexpr int action_count = std::size(action_names);
std::string to_string(const Instruction& i) {
  return text(action_names[static_cast<int>(i.action)], " of micro-batch ", i.micro_batch, ", chunk ",
              i.chunk);
}

// The other end of a message.
ModelChunk peer_of(const Schedule& s, int rank, const Instruction& message) {
  const bool next = message.action == Action::send_activation || message.action == Action::receive_gradient;
  return *neighbour(s, rank, message.chunk, next ? 1 : -1);
}

class Simulator {
 public:
  // Throws ScheduleError.
  Simulator(const Schedule& schedule, const Costs& costs, int streams)
      : s_(schedule), costs_(costs), streams_(streams) {
    for (int rank = 0; rank < s_.p; ++rank) issue(rank);
  }

  // A rank's compute instructions run one after the other, and its messages start one after the other. The
  // loop runs an operation when all times that it depends on are known. Throws ScheduleError.
  Simulation run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int rank = 0; rank < s_.p; ++rank) {
        while (run_next(rank, false) || run_next(rank, true)) moved = true;
      }
    }
    refuse_deadlock();
    Simulation result = {};
    for (int rank = 0; rank < s_.p; ++rank) {
      result.work = std::max(result.work, ranks_[rank].work);
      result.total = std::max(result.total, ranks_[rank].free_at[false]);
      std::vector<Interval>& times = result.times.emplace_back();
      for (const Operation& o : ranks_[rank].operations) times.push_back({o.begin, o.end});
      result.in_flight.push_back(peak_in_flight(s_.ranks[rank]));
    }
    return result;
  }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();  // also: not known yet

  // What one instruction does.
  struct Operation {
    std::vector<size_t> needs;  // operations of this rank, which are over before this one begins
    double begin = never, end = never;
  };
  struct Rank {
    std::vector<Operation> operations;  // in the order of the list
    size_t next[2] = {};                // operation that computes, that is a message
    double free_at[2] = {};             // when these may begin
    double work = 0;
  };
  struct Message {
    int rank;
    size_t n;  // in the list
  };

  [[noreturn]] void fail(int rank, size_t n, const std::string& reason) const {
    throw ScheduleError(s_, located(rank, n, reason));
  }
  std::string located(int rank, size_t n, const std::string& reason) const {
    const Instructions& list = s_.ranks[rank];
    return text("rank ", rank, ", instruction ", n, " (",
                n < list.size() ? to_string(list[n]) : "end of the list", "): ", reason);
  }

  size_t number(const Instruction& i) const {
    return (i.chunk * s_.m + i.micro_batch) * action_count + static_cast<int>(i.action);
  }

  // What an instruction waits for on its rank, beside its stream and a buffer.
  std::vector<Instruction> needs_of(int rank, const Instruction& instruction) const {
    const auto [action, i, chunk] = instruction;
    const Action input_gradient = compute_actions(s_)[1];  // or all of backward
    if (action == Action::receive_activation || action == Action::receive_gradient) return {};
    if (action == Action::send_activation) return {{Action::forward, i, chunk}};
    if (action == Action::send_gradient || action == Action::weight_gradient)
      return {{input_gradient, i, chunk}};
    std::vector<Instruction> needs;
    if (action != Action::forward) needs.push_back({Action::forward, i, chunk});
    const auto receive = receive_before(s_, rank, instruction);
    const auto source = neighbour(s_, rank, chunk, action == Action::forward ? -1 : 1);
    if (receive) needs.push_back({*receive, i, chunk});
    if (source && !receive) needs.push_back({action, i, source->chunk});  // on this rank
    return needs;
  }

  // The host issues a rank's whole list at once. An instruction can only wait for what was issued before.
  void issue(int rank) {
    const Instructions& list = s_.ranks[rank];
    std::vector<std::vector<Action>> actions(s_.v);  // [chunks]: of a micro-batch
    size_t due = 0;                                  // instructions
    for (int chunk = 0; chunk < s_.v; ++chunk) {
      for (const Action compute : compute_actions(s_)) {
        const Instruction i = {compute, 0, chunk};
        if (const auto receive = receive_before(s_, rank, i)) actions[chunk].push_back(*receive);
        actions[chunk].push_back(compute);
        if (const auto send = send_after(s_, rank, i)) actions[chunk].push_back(*send);
      }
      due += actions[chunk].size() * s_.m / s_.copies;
    }
    if (list.size() < due)
      fail(rank, list.size(), std::to_string(due - list.size()) + " instructions are missing");
    std::vector<Operation>& operations = ranks_[rank].operations;
    operations.resize(list.size());
    constexpr size_t none = -1;
    std::vector<size_t> issued(s_.v * s_.m * action_count, none);  // [instructions]: operation
    std::map<std::pair<int, int>, size_t> last_on_stream;          // operation
    std::vector<std::vector<size_t>> received(s_.v), used(s_.v);   // [chunks]: inputs, by operation
    for (size_t n = 0; n < list.size(); ++n) {
      const auto [action, i, chunk] = list[n];
      if (i < 0 || i >= s_.m || chunk < 0 || chunk >= s_.v || s_.copy_of(i) != s_.copy(rank, chunk) ||
          std::ranges::find(actions[chunk], action) == actions[chunk].end() ||
          issued[number(list[n])] != none)
        fail(rank, n, "it is one too many");
      Operation& o = operations[n];
      issued[number(list[n])] = n;
      for (const Instruction& need : needs_of(rank, list[n])) {
        if (issued[number(need)] == none) fail(rank, n, "the " + to_string(need) + " has to come first");
        o.needs.push_back(issued[number(need)]);
      }
      if (is_message(action)) {
        const auto [last, is_first] = last_on_stream.try_emplace(stream(rank, list[n]), n);
        if (!is_first) o.needs.push_back(last->second);
        last->second = n;
      }
      if (action == Action::backward || action == Action::input_gradient) used[chunk].push_back(n);
      if (action == Action::receive_activation) received[chunk].push_back(n);
    }
    // A receive waits until its buffer is free.
    for (int chunk = 0; chunk < s_.v; ++chunk) {
      const size_t buffers = input_buffers(s_, rank, chunk);
      for (size_t n = buffers; n < received[chunk].size(); ++n) {
        const size_t receive = received[chunk][n], use = used[chunk][n - buffers];
        if (use > receive) fail(rank, receive, "no buffer is free");
        operations[receive].needs.push_back(use);
      }
    }
  }

  // With fewer streams than four for an edge, all edges share them.
  std::pair<int, int> stream(int rank, const Instruction& message) const {
    const int peer = streams_ == message_streams ? peer_of(s_, rank, message).rank : 0;
    return {peer, stream_of(message.action) * streams_ / message_streams};
  }

  // Runs the next operation that computes, or the next message, if it is known when that begins.
  bool run_next(int rank, bool messages) {
    Rank& r = ranks_[rank];
    const Instructions& list = s_.ranks[rank];
    size_t& next = r.next[messages];
    while (next < list.size() && is_message(list[next].action) != messages) ++next;
    if (next == list.size()) return false;
    Operation& o = r.operations[next];
    double begin = r.free_at[messages];
    for (const size_t need : o.needs) begin = std::max(begin, r.operations[need].end);
    if (begin == never) return false;
    o.begin = r.free_at[messages] = begin;
    if (messages) {
      start({rank, next});
    } else {
      r.work += costs_.of(list[next].action);
      o.end = r.free_at[messages] = begin + costs_.of(list[next].action);
    }
    ++next;
    return true;
  }

  // Starts a message. If the other end has started, both ends are complete after the transfer.
  void start(const Message& mine) {
    const Instruction& i = s_.ranks[mine.rank][mine.n];
    const ModelChunk peer = peer_of(s_, mine.rank, i);
    const bool send = is_send(i.action), gradient = is_of_gradient(i.action);
    const int from = send ? mine.rank : peer.rank, to = send ? peer.rank : mine.rank;
    std::deque<Message>& waiting = started_[{from, to, gradient}];
    if (waiting.empty() || waiting.front().rank == mine.rank) return waiting.push_back(mine);
    const Message other = waiting.front();
    waiting.pop_front();
    const Instruction& came = s_.ranks[other.rank][other.n];
    if (came != Instruction{other_end(i.action), i.micro_batch, peer.chunk})
      fail(to, send ? other.n : mine.n, text("what comes is rank ", from, "'s ", to_string(send ? i : came)));
    const double end = std::max(operation(mine).begin, operation(other).begin) + costs_.transfer;
    operation(mine).end = operation(other).end = end;
  }
  Operation& operation(const Message& message) { return ranks_[message.rank].operations[message.n]; }

  // What the first operation that never begins waits for has begun: a message at whose other end nobody is.
  void refuse_deadlock() const {
    std::string waiting;
    for (int rank = 0; rank < s_.p; ++rank) {
      const std::vector<Operation>& operations = ranks_[rank].operations;
      const auto stuck = std::ranges::find(operations, never, &Operation::begin);
      if (stuck == operations.end()) continue;
      const size_t n = stuck - operations.begin();
      waiting += (waiting.empty() ? " " : "; ") +
                 located(rank, n,
                         is_message(s_.ranks[rank][n].action)
                             ? "the message before it on its stream is never complete"
                             : "what it needs is never received");
    }
    if (!waiting.empty()) throw ScheduleError(s_, "deadlock:" + waiting);
  }

  const Schedule& s_;
  const Costs costs_;
  const int streams_;
  std::vector<Rank> ranks_ = std::vector<Rank>(s_.p);
  std::map<std::tuple<int, int, bool>, std::deque<Message>> started_;  // from rank, to rank, gradients
};

}  // namespace

Simulation simulate(const Schedule& schedule, const Costs& costs, int streams) {
  return Simulator(schedule, costs, streams).run();
}

const Schedule& checked(const Schedule& schedule) {
  simulate(schedule);
  return schedule;
}

}  // namespace pentatron
