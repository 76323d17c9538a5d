// Pipeline schedules as data: for each rank a list of instructions. Pure functions make the lists (orders.h).
// The executor (pipeline.h) runs one of them on a GPU. The files in workbench/ check, time and draw all of
// them. None of these treats one schedule in another way than the others.
//
// There are p ranks, m micro-batches, and v model chunks on each rank. A chunk has the layers of one stage;
// which stage that is, is data, too: the placement.
#pragma once

#include <algorithm>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "options.h"

namespace pentatron {

// First what a rank computes, then its messages, in the order of their streams: stream_of and the simulator
// rely on it. Activations come first, because with two streams each direction of travel has one.
enum class Action {
  forward,
  backward,         // input gradient and weight gradient together
  input_gradient,   // the previous stage waits for it
  weight_gradient,  // no rank waits for it
  receive_activation,
  send_activation,
  receive_gradient,
  send_gradient
};

struct Instruction {
  Action action;
  int micro_batch;
  int chunk;  // a number among the rank's chunks, from 0
  bool operator==(const Instruction&) const = default;
};
using Instructions = std::vector<Instruction>;

struct ModelChunk {
  int rank, chunk;
  bool operator==(const ModelChunk&) const = default;
};
using Placement = std::vector<ModelChunk>;  // [copies of the model, stages]

// Rank k holds the stages k, p + k, 2p + k, ...
inline Placement looped(int p, int v) {
  Placement placement;
  for (int stage = 0; stage < p * v; ++stage) placement.push_back({stage % p, stage / p});
  return placement;
}
// Rank k holds the stages k and 2p - 1 - k. So rank 0 has both ends of the model, and the last rank hands
// the middle over to itself. With two copies of the model (dualpipe), these are stage k of the first copy and
// stage p - 1 - k of the second.
inline Placement v_shaped(int p) {
  Placement placement = looped(p, 1);
  for (int rank = p - 1; rank >= 0; --rank) placement.push_back({rank, 1});
  return placement;
}

struct Schedule {
  std::string name;      // the option's word, or the path of a file
  bool splits_backward;  // input gradient and weight gradient are two instructions
  int p, m, v;           // ranks, micro-batches, model chunks a rank
  Placement placement;
  std::vector<Instructions> ranks;
  int copies = 1;  // so many copies of the model; each has a part of the micro-batches, in their order

  int stages() const { return p * v / copies; }
  // Where a chunk stands in `placement`. `usual`: where it stands if the placement is looped.
  int index(int rank, int chunk) const {
    const int usual = chunk * p + rank;
    const ModelChunk wanted = {rank, chunk};
    if (placement[usual] == wanted) return usual;
    return static_cast<int>(std::ranges::find(placement, wanted) - placement.begin());
  }
  int stage(int rank, int chunk) const { return index(rank, chunk) % stages(); }
  int copy(int rank, int chunk) const { return index(rank, chunk) / stages(); }
  int copy_of(int micro_batch) const { return micro_batch * copies / m; }
};

inline bool is_message(Action action) { return action >= Action::receive_activation; }
inline bool is_send(Action action) {
  return action == Action::send_activation || action == Action::send_gradient;
}
inline bool is_of_gradient(Action message) {
  return message == Action::receive_gradient || message == Action::send_gradient;
}
// What the rank at the other end does: it receives what is sent, and sends what is received.
inline Action other_end(Action message) {
  if (is_of_gradient(message)) return is_send(message) ? Action::receive_gradient : Action::send_gradient;
  return is_send(message) ? Action::receive_activation : Action::send_activation;
}

// The compute instructions of one micro-batch, in order.
inline std::vector<Action> compute_actions(const Schedule& s) {
  if (s.splits_backward) return {Action::forward, Action::input_gradient, Action::weight_gradient};
  return {Action::forward, Action::backward};
}

// A rank has four streams for the messages of an edge: {activations, gradients} x {in, out}. Each stream has
// a communicator of the two ranks. So no message waits for one of another kind.
constexpr int message_streams = 4;
inline int stream_of(Action message) {
  return static_cast<int>(message) - static_cast<int>(Action::receive_activation);
}

// The chunk of the next stage, or with step -1 of the previous one; none at the ends of the model.
inline std::optional<ModelChunk> neighbour(const Schedule& s, int rank, int chunk, int step) {
  const int stage = s.stage(rank, chunk) + step;
  if (stage < 0 || stage >= s.stages()) return {};
  return s.placement[s.index(rank, chunk) + step];
}

// The message that `compute` needs first (receive_before): forward from the previous stage, backward from the
// next one. And the message that sends its result (send_after). None at the ends of the model, for weight
// gradients, and where the other stage is on the same rank, which hands the tensor over to itself.
inline std::optional<Action> receive_before(const Schedule& s, int rank, const Instruction& compute) {
  if (compute.action == Action::weight_gradient) return {};
  const bool forward = compute.action == Action::forward;
  const auto source = neighbour(s, rank, compute.chunk, forward ? -1 : 1);
  if (!source || source->rank == rank) return {};
  return forward ? Action::receive_activation : Action::receive_gradient;
}
inline std::optional<Action> send_after(const Schedule& s, int rank, const Instruction& compute) {
  if (compute.action == Action::weight_gradient) return {};
  const bool forward = compute.action == Action::forward;
  const auto target = neighbour(s, rank, compute.chunk, forward ? 1 : -1);
  if (!target || target->rank == rank) return {};
  return forward ? Action::send_activation : Action::send_gradient;
}

// ---- Messages -------------------------------------------------------------------------------------------

// Adds the messages to a rank's compute instructions. A send follows the instruction that makes its tensor.
// A receive is posted one compute instruction ahead of the one that needs it, so that the transfer runs
// during computation. Messages start in order, but this receive never delays a later send: it waits only for
// the receive that precedes it on its stream, which an earlier instruction than the send's needs. (A gradient
// is received into the memory of its micro-batch, so its receive is not posted ahead of that micro-batch's
// forward.)
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

// ---- What an executor needs to know --------------------------------------------------------------------

// The most micro-batches that a rank keeps at once for backward, in one chunk, or added over all chunks.
struct PeakInFlight {
  int until_input_gradient = 0, until_weight_gradient = 0;  // equal if backward is not split
};
inline PeakInFlight peak_in_flight(const Instructions& list, std::optional<int> chunk = {}) {
  PeakInFlight now, peak;
  for (const Instruction& i : list) {
    if (chunk && i.chunk != *chunk) continue;
    if (i.action == Action::forward) ++now.until_input_gradient;
    if (i.action == Action::forward) ++now.until_weight_gradient;
    if (i.action == Action::backward || i.action == Action::input_gradient) --now.until_input_gradient;
    if (i.action == Action::backward || i.action == Action::weight_gradient) --now.until_weight_gradient;
    peak.until_input_gradient = std::max(peak.until_input_gradient, now.until_input_gradient);
    peak.until_weight_gradient = std::max(peak.until_weight_gradient, now.until_weight_gradient);
  }
  return peak;
}

// The instruction that fills a chunk's input buffer: the receive, or, if the previous stage is on this rank,
// the forward, which copies.
inline Action fills_input(const Schedule& s, int rank, int chunk) {
  return receive_before(s, rank, {Action::forward, 0, chunk}).value_or(Action::forward);
}
// The number of buffers for a chunk's inputs. The input gradient reads a buffer last. So there is one buffer
// for each micro-batch in flight until then, and one more to receive ahead.
inline int input_buffers(const Schedule& s, int rank, int chunk) {
  const int ahead = fills_input(s, rank, chunk) == Action::forward ? 0 : 1;
  return peak_in_flight(s.ranks[rank], chunk).until_input_gradient + ahead;
}

// Which of a chunk's buffers each micro-batch has, from `take` to `free`. Micro-batches may leave in another
// order than they came. So the free buffers form a queue: `take` takes the buffer that is free for longest.
inline std::vector<int> assign_buffers(const Schedule& s, int rank, int chunk, int count, Action take,
                                       Action free) {
  std::vector<int> buffer_of(s.m, 0), queue(count);
  std::iota(queue.begin(), queue.end(), 0);
  size_t taken = 0;
  for (const Instruction& i : s.ranks[rank]) {
    if (i.chunk == chunk && i.action == take) buffer_of[i.micro_batch] = queue[taken++];
    if (i.chunk == chunk && i.action == free) queue.push_back(buffer_of[i.micro_batch]);
  }
  return buffer_of;
}

// The buffers for a chunk's inputs, and for the activations of its micro-batches in flight.
inline std::vector<int> assign_inputs(const Schedule& s, int rank, int chunk) {
  return assign_buffers(s, rank, chunk, input_buffers(s, rank, chunk), fills_input(s, rank, chunk),
                        compute_actions(s)[1]);
}
inline std::vector<int> assign_activations(const Schedule& s, int rank, int chunk) {
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

// Returns `first`, [stages + 1]: stage s gets the layers [first[s], first[s + 1]). The most expensive stage
// is as cheap as possible; costs are in units of a layer. Each stage gets one layer; then each further layer
// goes to the stage that is cheapest so far. No split has a smaller maximum: it would have no room for the
// layer that made the maximum here. Among equals, the later stage gets it, because it keeps fewer
// micro-batches. Needs layers >= stages.
inline std::vector<int> split_layers(int layers, int stages, double head_cost) {
  std::vector<double> cost(stages - 1, 1);
  cost.push_back(1 + head_cost);
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
