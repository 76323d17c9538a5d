// Pipeline schedules as data. A pure function makes a list of instructions for each rank. The executor
// (pipeline.h) runs this list on a GPU, the simulator (simulate.h) checks and times it, and draw_schedule.h
// draws it. These three treat all schedules alike.
//
//   afab          all forward, all backward: GPipe (Huang et al., 2018)
//   1f1b          one forward, one backward: PipeDream-Flush (Narayanan et al., 2021)
//   interleaved   1f1b with v chunks of layers on a rank: Megatron-LM (Narayanan et al., 2021)
//   zb-h1         1f1b with backward split in two: zero bubble (Qi et al., 2023)
//   a file        any other order (schedule_file.h)
//
// There are p ranks, m micro-batches, and v model chunks on each rank. Rank k holds the stages k, p + k,
// 2p + k, ... of all p * v.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "program/options.h"

namespace pentatron {

enum class Action {
  forward,
  backward,         // input gradient and weight gradient together
  input_gradient,   // the stage before waits for it
  weight_gradient,  // no rank waits for it
  receive_activation,
  send_activation,
  receive_gradient,
  send_gradient
};

struct Instruction {
  Action action;
  int micro_batch;
  int chunk;  // of the model, on this rank
  bool operator==(const Instruction&) const = default;
};
using Instructions = std::vector<Instruction>;

struct Schedule {
  std::string name;      // of an order above, or the path of a file
  bool splits_backward;  // input gradient and weight gradient are two instructions
  int p, m, v;           // ranks, micro-batches, model chunks a rank
  std::vector<Instructions> ranks;

  int stages() const { return p * v; }
  int stage(int rank, int chunk) const { return chunk * p + rank; }
};

constexpr int action_count = 8;
inline std::string to_string(Action action) {
  constexpr std::array<const char*, action_count> names = {
      "forward",         "backward",         "input_gradient", "weight_gradient", "receive_activation",
      "send_activation", "receive_gradient", "send_gradient"};
  return names[static_cast<int>(action)];
}
inline std::string to_string(const Instruction& i) {
  return to_string(i.action) + " of micro-batch " + std::to_string(i.micro_batch) + ", chunk " +
         std::to_string(i.chunk);
}

inline bool is_message(Action action) { return action >= Action::receive_activation; }
inline bool is_send(Action action) {
  return action == Action::send_activation || action == Action::send_gradient;
}

// The compute instructions of one micro-batch, in order.
inline std::vector<Action> compute_actions(const Schedule& s) {
  if (s.splits_backward) return {Action::forward, Action::input_gradient, Action::weight_gradient};
  return {Action::forward, Action::backward};
}

// A rank has four streams for messages: {activations, gradients} x {in, out}. Each stream has a communicator
// of the two ranks of an edge. So no message waits for one of another kind.
constexpr int message_streams = 4;
inline int stream_of(Action message) {
  return static_cast<int>(message) - static_cast<int>(Action::receive_activation);
}

// Whether the message uses the edge to the next rank, not the edge from the rank before.
inline bool towards_next(Action message) {
  return message == Action::send_activation || message == Action::receive_gradient;
}
// The rank at the other end of the message. Stage p is on rank 0, so the edges form a ring. With two ranks,
// 0 -> 1 and 1 -> 0 are two edges.
inline int peer_of(const Schedule& s, int rank, Action message) {
  return (rank + (towards_next(message) ? 1 : s.p - 1)) % s.p;
}

// The message that `compute` needs first (receive_before), and the message that sends its result
// (send_after). None: at the ends of the pipeline, for weight gradients, and with one rank, which has
// the tensor already.
inline std::optional<Action> receive_before(const Schedule& s, int rank, const Instruction& compute) {
  const int stage = s.stage(rank, compute.chunk);
  if (s.p == 1 || compute.action == Action::weight_gradient) return {};
  if (compute.action == Action::forward && stage > 0) return Action::receive_activation;
  if (compute.action != Action::forward && stage < s.stages() - 1) return Action::receive_gradient;
  return {};
}
inline std::optional<Action> send_after(const Schedule& s, int rank, const Instruction& compute) {
  const int stage = s.stage(rank, compute.chunk);
  if (s.p == 1 || compute.action == Action::weight_gradient) return {};
  if (compute.action == Action::forward && stage < s.stages() - 1) return Action::send_activation;
  if (compute.action != Action::forward && stage > 0) return Action::send_gradient;
  return {};
}

// ---- The schedules: what rank k computes, in which order -----------------------------------------------

// A rank's n-th forward or backward. The first p micro-batches go through its first chunk, then through its
// second, and so on; then the next p follow. Backward visits the chunks from last to first. With one chunk,
// it is micro-batch n.
inline Instruction nth(Action action, int n, int p, int v) {
  const int turn = n / p % v;
  return {action, n / (p * v) * p + n % p, action == Action::forward ? turn : v - 1 - turn};
}

// Warm-up: `warm_up` forwards. Steady state: one forward and one backward in turn. Then the backwards that
// are left.
inline Instructions in_turn(int p, int m, int v, int warm_up, Action backward) {
  const int count = m * v;
  warm_up = std::min(warm_up, count);
  Instructions list;
  for (int n = 0; n < count + warm_up; ++n) {
    if (n < count) list.push_back(nth(Action::forward, n, p, v));
    if (n >= warm_up) list.push_back(nth(backward, n - warm_up, p, v));
  }
  return list;
}

// Every rank keeps all m micro-batches. The bubble is (p - 1)(T_F + T_B + T_W), where a micro-batch takes T_F
// forward, T_B for the input gradient and T_W for the weight gradient.
inline Instructions afab(int p, int m) { return in_turn(p, m, 1, m, Action::backward); }

// Rank k has one warm-up forward for each rank behind it, and keeps p - k micro-batches. The same bubble.
inline Instructions one_f_one_b(int p, int m, int k) { return in_turn(p, m, 1, p - k - 1, Action::backward); }

// The last rank waits for p - 1 chunks, each 1/v of a rank's layers. So the bubble is 1/v of that of 1f1b,
// and there are v times as many messages. The last rank's warm-up is p forwards in each of its first v - 1
// chunks; each rank before it adds two. Needs m to be a multiple of p.
inline Instructions interleaved(int p, int m, int v, int k) {
  const int warm_up = v == 1 ? p - k - 1 : 2 * (p - k - 1) + (v - 1) * p;
  return in_turn(p, m, v, warm_up, Action::backward);
}

// The order of 1f1b, but rank k computes weight gradients k micro-batches late. So the stage before gets its
// gradient sooner, and late weight gradients fill the bubble at the end. Every rank keeps p micro-batches.
// The bubble is (p - 1) max(T_F + T_B - T_W, T_F, T_B).
inline Instructions zb_h1(int p, int m, int k) {
  Instructions list;
  for (const Instruction& i : in_turn(p, m, 1, p - k - 1, Action::input_gradient)) {
    list.push_back(i);
    if (i.action == Action::input_gradient && i.micro_batch >= k)
      list.push_back({Action::weight_gradient, i.micro_batch - k, 0});
  }
  for (int i = std::max(m - k, 0); i < m; ++i) list.push_back({Action::weight_gradient, i, 0});
  return list;
}

inline Instructions compute_order(PpSchedule kind, int p, int m, int v, int k) {
  if (kind == PpSchedule::afab) return afab(p, m);
  if (kind == PpSchedule::one_f_one_b) return one_f_one_b(p, m, k);
  if (kind == PpSchedule::interleaved) return interleaved(p, m, v, k);
  return zb_h1(p, m, k);
}

// Adds the messages to a rank's compute instructions. A send follows the instruction that makes its tensor.
// A receive is posted one compute instruction ahead of the one that needs it, so that the transfer runs
// during computation. Messages start in order, but this receive never delays a later send: the receive before
// it on its stream belongs to an instruction that comes before the send's. (A gradient is received into the
// memory of its micro-batch, so its receive is not posted ahead of that micro-batch's forward.)
inline Instructions with_messages(const Schedule& s, int rank, const Instructions& compute) {
  Instructions list;
  const auto add = [&](std::optional<Action> message, size_t n) {
    if (message) list.push_back({*message, compute[n].micro_batch, compute[n].chunk});
  };
  const auto add_receive = [&](size_t n) {
    if (n < compute.size()) add(receive_before(s, rank, compute[n]), n);
  };
  add_receive(0);
  for (size_t n = 0; n < compute.size(); ++n) {
    const bool same = n + 1 < compute.size() && compute[n + 1].micro_batch == compute[n].micro_batch &&
                      compute[n + 1].chunk == compute[n].chunk;
    if (!same) add_receive(n + 1);
    list.push_back(compute[n]);
    add(send_after(s, rank, compute[n]), n);
    if (same) add_receive(n + 1);
  }
  return list;
}

// The lists of all ranks, of a schedule that has a name. m >= 1; v is 1 unless interleaved.
inline Schedule make_schedule(PpSchedule kind, int p, int m, int v) {
  Schedule s = {std::string(to_string(kind)), kind == PpSchedule::zb_h1, p, m, v, {}};
  for (int k = 0; k < p; ++k) s.ranks.push_back(with_messages(s, k, compute_order(kind, p, m, v, k)));
  return s;
}

// ---- What an executor needs to know --------------------------------------------------------------------

// The most micro-batches that a rank keeps at once for backward, in one chunk, or added over all chunks.
struct InFlight {
  int until_input_gradient = 0, until_weight_gradient = 0;  // equal if backward is not split
};
inline InFlight peak_in_flight(const Instructions& list, std::optional<int> chunk = {}) {
  InFlight now, peak;
  for (const Instruction& i : list) {
    if (chunk && i.chunk != *chunk) continue;
    if (i.action == Action::forward) ++now.until_input_gradient, ++now.until_weight_gradient;
    if (i.action == Action::backward || i.action == Action::input_gradient) --now.until_input_gradient;
    if (i.action == Action::backward || i.action == Action::weight_gradient) --now.until_weight_gradient;
    peak.until_input_gradient = std::max(peak.until_input_gradient, now.until_input_gradient);
    peak.until_weight_gradient = std::max(peak.until_weight_gradient, now.until_weight_gradient);
  }
  return peak;
}

// The number of buffers in which a chunk receives activations. The input gradient reads a buffer last. So
// there is one buffer for each micro-batch in flight until then, and one more to receive ahead.
inline int input_buffers(const Instructions& list, int chunk) {
  return peak_in_flight(list, chunk).until_input_gradient + 1;
}

// Which of a chunk's buffers each micro-batch has. [micro-batches] each.
struct Buffers {
  std::vector<int> number;
  std::vector<int> before;  // the micro-batch that had this buffer before in the step; -1: none
};

// Micro-batches may leave in another order than they came. So the free buffers form a queue: `take` takes the
// buffer that is free for longest. At first all `count` are free; then the n-th take has the buffer of free
// number n - count.
inline Buffers assign_buffers(const Schedule& s, int rank, int chunk, int count, Action take, Action free) {
  std::vector<int> taken, freed;  // micro-batches
  for (const Instruction& i : s.ranks[rank]) {
    if (i.chunk == chunk && i.action == take) taken.push_back(i.micro_batch);
    if (i.chunk == chunk && i.action == free) freed.push_back(i.micro_batch);
  }
  Buffers buffers = {std::vector<int>(s.m, 0), std::vector<int>(s.m, -1)};
  for (int n = 0; n < std::ssize(taken); ++n) {
    int &number = buffers.number[taken[n]], &before = buffers.before[taken[n]];
    if (n >= count) before = freed[n - count];
    number = n < count ? n : buffers.number[before];
  }
  return buffers;
}

// The buffers for received activations, and those for what a micro-batch in flight keeps.
inline Buffers assign_inputs(const Schedule& s, int rank, int chunk) {
  return assign_buffers(s, rank, chunk, input_buffers(s.ranks[rank], chunk), Action::receive_activation,
                        compute_actions(s)[1]);
}
inline Buffers assign_flights(const Schedule& s, int rank, int chunk) {
  return assign_buffers(s, rank, chunk, peak_in_flight(s.ranks[rank], chunk).until_weight_gradient,
                        Action::forward, compute_actions(s).back());
}

// The micro-batch whose weight gradients a chunk computes last in a step.
inline int last_micro_batch(const Instructions& list, int chunk) {
  const auto last = std::find_if(list.rbegin(), list.rend(), [&](const Instruction& i) {
    return i.chunk == chunk && !is_message(i.action);
  });
  return last->micro_batch;
}

// Messages that a rank sends in a step. Each has micro-batch size x sequence x d_model elements.
inline int messages_sent(const Instructions& list) {
  return static_cast<int>(
      std::count_if(list.begin(), list.end(), [](const Instruction& i) { return is_send(i.action); }));
}

// Returns `first`, [stages + 1]: stage s gets the layers [first[s], first[s + 1]). The most expensive stage
// is as cheap as possible; costs are in units of a layer. Each stage gets one layer; then each further layer
// goes to the stage that is cheapest so far. No split has a smaller maximum: it would have no room for the
// layer that made the maximum here. Among equals, the later stage gets it, because it keeps fewer
// micro-batches. Needs layers >= stages.
inline std::vector<int> split_layers(int layers, int stages, double embedding_cost, double head_cost) {
  std::vector<double> cost(stages, 1);
  cost.front() += embedding_cost;
  cost.back() += head_cost;
  std::vector<int> count(stages, 1), first(stages + 1, 0);
  for (int layer = stages; layer < layers; ++layer) {
    const auto cheapest = std::min_element(cost.rbegin(), cost.rend());
    *cheapest += 1;
    ++count[cost.rend() - cheapest - 1];
  }
  for (int s = 0; s < stages; ++s) first[s + 1] = first[s] + count[s];
  return first;
}

}  // namespace pentatron
