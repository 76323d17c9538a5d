// The orders of the schedules: what rank k computes, in which order. Each is a pure function of p ranks, m
// micro-batches and v chunks.
//
//   afab          all forward, all backward: GPipe (Huang et al., 2018)
//   1f1b          one forward, one backward: PipeDream-Flush (Narayanan et al., 2021)
//   interleaved   1f1b with v chunks of layers on a rank: Megatron-LM (Narayanan et al., 2021)
//   zb-h1         1f1b with backward split in two: zero bubble (Qi et al., 2023)
//   zb-v          the same with two chunks in a V (Qi et al., 2023, section 6)
//   dualpipe      micro-batches enter at both ends, and there are two copies of the model (DeepSeek-AI, 2024)
//   dualpipe-v    forward beside backward, in a V: dualpipe cut in half (Qi et al., 2025)
#pragma once

#include <limits>

#include "schedule.h"

namespace pentatron {

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

// An order for these costs instead of one by numbers: those of all ranks. It always adds the instruction that
// can begin first: rather an input gradient than a forward, rather a forward than a weight gradient. No rank
// keeps more than `most` micro-batches. (List scheduling; Qi et al., section 3, search from such an order
// on.)
inline std::vector<Instructions> zb_by_costs(int p, int m, const Costs& costs, int most) {
  constexpr double never = std::numeric_limits<double>::infinity();  // or not known yet
  struct Rank {
    Instructions list;
    int forwards = 0, input_gradients = 0, weight_gradients = 0;  // in the list
    double time = 0;
    std::vector<double> activation, gradient;  // [micro-batches]: when they come
  };
  std::vector<Rank> ranks(p);
  for (Rank& r : ranks) r.activation = r.gradient = std::vector(m, never);
  ranks[0].activation.assign(m, 0);
  for (int left = 3 * m * p; left > 0; --left) {
    double begin = never;
    Instruction next = {};
    int rank = 0;
    const auto propose = [&](int k, bool possible, Action action, int i, const std::vector<double>* needs) {
      if (!possible) return;
      const double time = needs == nullptr ? ranks[k].time : std::max(ranks[k].time, (*needs)[i]);
      if (time < begin) begin = time, rank = k, next = {action, i, 0};
    };
    for (int k = 0; k < p; ++k) {
      const Rank& r = ranks[k];
      const bool has_room = r.forwards - r.weight_gradients < most;
      propose(k, r.input_gradients < m, Action::input_gradient, r.input_gradients, &r.gradient);
      propose(k, r.forwards < m && has_room, Action::forward, r.forwards, &r.activation);
      propose(k, r.weight_gradients < r.input_gradients, Action::weight_gradient, r.weight_gradients,
              nullptr);
    }
    Rank& r = ranks[rank];
    r.list.push_back(next);
    r.time = begin + costs.of(next.action);
    if (next.action == Action::weight_gradient) ++r.weight_gradients;
    if (next.action == Action::forward) {
      ++r.forwards;
      if (rank == p - 1) r.gradient[next.micro_batch] = r.time;
      if (rank < p - 1) ranks[rank + 1].activation[next.micro_batch] = r.time + costs.transfer;
    }
    if (next.action == Action::input_gradient) {
      ++r.input_gradients;
      if (rank > 0) ranks[rank - 1].gradient[next.micro_batch] = r.time + costs.transfer;
    }
  }
  std::vector<Instructions> lists;
  for (const Rank& r : ranks) lists.push_back(r.list);
  return lists;
}

// A list that grows, of a rank with two chunks, each for m micro-batches. Each instruction takes the next
// micro-batch of its action and chunk; where none is left, nothing is added.
class GrowingList {
 public:
  explicit GrowingList(int m) : m_(m) {}
  int left(Action action, int chunk) const { return m_ - next_[static_cast<int>(action)][chunk]; }
  void add(Action action, int chunk) {
    if (left(action, chunk) == 0) return;
    list_.push_back({action, next_[static_cast<int>(action)][chunk]++, chunk});
  }
  void forward(int chunk) { add(Action::forward, chunk); }
  void backward(int chunk) {
    add(Action::input_gradient, chunk);
    add(Action::weight_gradient, chunk);
  }
  void input_gradient(int chunk) { add(Action::input_gradient, chunk); }  // the weight gradient comes later
  // Of the chunk that has more of them to make.
  void late_weight_gradient() {
    const auto late = [&](int chunk) {
      return left(Action::weight_gradient, chunk) - left(Action::input_gradient, chunk);
    };
    add(Action::weight_gradient, late(1) >= late(0) ? 1 : 0);
  }
  const Instructions& list() const { return list_; }

 private:
  int m_;
  Instructions list_;
  std::array<std::array<int, 2>, 4> next_ = {};  // [actions][chunks]: micro-batch
};

// Two chunks in a V: the last rank begins chunk 1 without a message, and rank 0 has the loss. If T_F = T_B =
// T_W, the bubble is p - 1 chunks, half of zb-h1's. No rank keeps more than p micro-batches (2p chunks), as
// in 1f1b. With fewer than 2p - 1 micro-batches the bubble is larger.
inline Instructions zb_v(int p, int m, int k) {
  GrowingList o(m);
  for (int i = 0; i < 2 * (p - k) - 1; ++i) o.forward(0);  // until the first micro-batch is back here
  for (int i = 0; i < k; ++i) {
    o.forward(1);
    o.forward(0);
  }
  for (int i = 0; i < p - k; ++i) {  // until the first gradient is back
    o.forward(1);
    o.backward(1);
  }
  while (o.left(Action::forward, 1) > 0) {
    o.forward(0);
    o.backward(0);
    o.forward(1);
    o.backward(1);
  }
  for (int i = 0; i < k; ++i) {  // the ranks before wait for these
    o.input_gradient(1);
    o.input_gradient(0);
  }
  while (o.left(Action::input_gradient, 0) > 0) {
    o.input_gradient(0);
    o.add(Action::weight_gradient, 0);
  }
  while (o.left(Action::weight_gradient, 0) + o.left(Action::weight_gradient, 1) > 0)
    o.late_weight_gradient();
  return o.list();
}

// The steady state is pairs of a forward in one chunk and a backward in the other. DeepSeek-V3 runs a pair at
// once, so that the messages of one hide behind the products of the other. Here they run one after
// the other. A rank keeps half a micro-batch more than zb-v. The eight loops are the published steps; full
// from m >= 2p on.
inline Instructions dualpipe_v(int p, int m, int k) {
  GrowingList o(m);
  const int behind = p - k - 1;
  for (int i = 0; i < 2 * behind; ++i) o.forward(0);
  for (int i = 0; i <= k; ++i) {
    o.forward(0);
    o.forward(1);
  }
  for (int i = 0; i < behind; ++i) {
    o.backward(1);
    o.forward(1);
  }
  for (int i = 0; i <= m - 2 * p + k; ++i) {
    o.forward(0);
    o.backward(1);
    o.forward(1);
    o.backward(0);
  }
  for (int i = 0; i < behind; ++i) {
    o.backward(1);
    o.forward(1);
    o.backward(0);
  }
  for (int i = 0; i <= k; ++i) o.backward(1 - i % 2);
  for (int i = k + 1; i <= 2 * k + 1; ++i) o.input_gradient(1 - i % 2);
  for (int i = 0; i < behind; ++i) {
    o.late_weight_gradient();
    o.input_gradient(0);
  }
  for (int i = 0; i <= k; ++i) o.late_weight_gradient();
  return o.list();
}

// Two dualpipe-v of half as many ranks, put end to end: one fills from rank 0 on and one from rank p - 1, and
// what the first half of the ranks does in one direction, the second half does in the other. Each stage is
// on two ranks, which sum its gradients. Needs p and m to be even; full from m >= 2p on.
inline Instructions dualpipe(int p, int m, int k) {
  Instructions list = dualpipe_v(p / 2, m / 2, std::min(k, p - 1 - k));
  for (Instruction& i : list) {
    if (k >= p / 2) i.chunk = 1 - i.chunk;
    if (i.chunk == 1) i.micro_batch += m / 2;  // those of the second copy
  }
  return list;
}

inline Instructions compute_order(PpSchedule kind, int p, int m, int v, int k) {
  if (kind == PpSchedule::afab) return afab(p, m);
  if (kind == PpSchedule::one_f_one_b) return one_f_one_b(p, m, k);
  if (kind == PpSchedule::interleaved) return interleaved(p, m, v, k);
  if (kind == PpSchedule::zb_v) return zb_v(p, m, k);
  if (kind == PpSchedule::dualpipe) return dualpipe(p, m, k);
  if (kind == PpSchedule::dualpipe_v) return dualpipe_v(p, m, k);
  return zb_h1(p, m, k);
}

// The lists of all ranks, of a schedule that has a name. m >= 1; v is 2 in a V and for dualpipe, else 1
// unless interleaved.
inline Schedule make_schedule(PpSchedule kind, int p, int m, int v) {
  const bool is_dual = kind == PpSchedule::dualpipe, is_v = is_v_shaped(kind);
  Schedule s = {.name = std::string(to_string(kind)),
                .splits_backward = is_v || is_dual || kind == PpSchedule::zb_h1,
                .p = p,
                .m = m,
                .v = v,
                .places = is_dual ? both_ways(p)
                          : is_v  ? v_shaped(p)
                                  : looped(p, v),
                .ranks = {},
                .copies = is_dual ? 2 : 1};
  for (int k = 0; k < p; ++k) s.ranks.push_back(with_messages(s, k, compute_order(kind, p, m, v, k)));
  return s;
}

}  // namespace pentatron
