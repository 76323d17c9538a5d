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

#include "schedule.h"

namespace pentatron {

// A rank's n-th forward or backward; with one chunk, of micro-batch n. Else the first p micro-batches go
// through its first chunk, then its second, and so on; then the next p. Backward begins at the last chunk.
inline Instruction nth(Action action, int n, int p, int v) {
  const int chunk = n / p % v;
  return {action, n / (p * v) * p + n % p, action == Action::forward ? chunk : v - 1 - chunk};
}

// Warm-up: `warm_up` forwards. Steady state: one forward, one backward. Then the backwards that are left.
inline Instructions with_warm_up(int p, int m, int v, int warm_up, Action backward) {
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
inline Instructions afab(int p, int m) { return with_warm_up(p, m, 1, m, Action::backward); }

// Rank k has one warm-up forward for each rank behind it, and keeps p - k micro-batches. The same bubble.
inline Instructions one_f_one_b(int p, int m, int k) {
  return with_warm_up(p, m, 1, p - k - 1, Action::backward);
}

// The last rank waits for p - 1 chunks, each 1/v of a rank's layers. So the bubble is 1/v of that of 1f1b,
// and there are more than v times as many messages. The last rank's warm-up is p forwards in each of its
// first v - 1 chunks; each rank before it adds two. Needs m to be a multiple of p.
inline Instructions interleaved(int p, int m, int v, int k) {
  const int warm_up = v == 1 ? p - k - 1 : 2 * (p - k - 1) + (v - 1) * p;
  return with_warm_up(p, m, v, warm_up, Action::backward);
}

// The order of 1f1b, but rank k computes weight gradients k micro-batches late. So the previous stage gets
// its gradient sooner, and late weight gradients fill the bubble at the end, in any order. Every rank keeps p
// micro-batches. The bubble is (p - 1) max(T_F + T_B - T_W, T_F, T_B).
inline Instructions zb_h1(int p, int m, int k) {
  Instructions list;
  for (const Instruction& i : with_warm_up(p, m, 1, p - k - 1, Action::input_gradient)) {
    list.push_back(i);
    if (i.action == Action::input_gradient && i.micro_batch >= k)
      list.push_back({Action::weight_gradient, i.micro_batch - k, 0});
  }
  for (int i = std::max(m - k, 0); i < m; ++i) list.push_back({Action::weight_gradient, i, 0});
  return list;
}

// The list of a rank with two chunks, to which instructions are added. Each chunk has m micro-batches. A
// letter adds an instruction, as in the pictures: F forward, B input gradient, W weight gradient, and small
// letters for chunk 1. It takes the next micro-batch of this action and chunk; if none is left, it adds
// nothing. L adds a weight gradient to the chunk that is later with them.
class GrowingList {
 public:
  explicit GrowingList(int m) : m_(m) { left_.fill(m); }
  int left(char letter) const { return left_[letters_.find(letter)]; }
  void add(int times, std::string_view letters) {
    for (int i = 0; i < times; ++i) {
      for (const char letter : letters) add(letter);
    }
  }
  const Instructions& list() const { return list_; }

 private:
  void add(char letter) {
    if (letter == 'L') letter = left('w') - left('b') >= left('W') - left('B') ? 'w' : 'W';
    constexpr Action actions[] = {Action::forward, Action::input_gradient, Action::weight_gradient};
    const int n = static_cast<int>(letters_.find(letter));
    if (left_[n] > 0) list_.push_back({actions[n % 3], m_ - left_[n]--, n / 3});
  }

  static constexpr std::string_view letters_ = "FBWfbw";
  const int m_;
  std::array<int, 6> left_;  // [letters]: micro-batches
  Instructions list_;
};

// Two chunks in a V: the last rank begins chunk 1 without a message, and rank 0 has the loss. If T_F = T_B =
// T_W, no rank waits between its first and its last instruction, and the bubble is half of zb-h1's. It is
// (p - 1) T_B of a chunk, for T_F at most T_B, and T_W from T_B / 2 to T_B. (Both from m >= 2p - 1 on.) No
// rank keeps more than p micro-batches (2p chunks), as in 1f1b.
inline Instructions zb_v(int p, int m, int k) {
  GrowingList o(m);
  o.add(2 * (p - k) - 1, "F");  // until the first micro-batch is back here
  o.add(k, "fF");
  o.add(p - k, "fbw");  // until the first gradient is back
  o.add(o.left('f'), "FBWfbw");
  o.add(k, "Bb");  // other ranks wait for these, most of all for B: its micro-batch is older
  o.add(o.left('B'), "BW");
  o.add(o.left('w'), "w");
  o.add(o.left('W'), "W");
  return o.list();
}

// In the steady state a forward in one chunk stands beside a backward in the other. (DeepSeek-V3 computes
// both at once; we don't.) A rank keeps half a micro-batch more than zb-v. The eight steps are those of
// DeepSeek's dualpipe.py, where chunk 0 goes down the V and chunk 1 comes up. With m >= 2p all have their
// length.
inline Instructions dualpipe_v(int p, int m, int k) {
  GrowingList o(m);
  const int behind = p - k - 1;
  // 1. Forwards go down, until the first micro-batch is back here.
  o.add(2 * behind, "F");
  // 2. Forwards go down and come up, until the first gradient is here.
  o.add(k + 1, "Ff");
  // 3. Chunk 1 has its first backwards. No rank waits for a forward down.
  o.add(behind, "bwf");
  // 4. The main step: each forward stands beside a backward of the other chunk.
  o.add(m - 2 * p + k + 1, "FbwfBW");
  // 5. All micro-batches have gone down; the last ones come up.
  o.add(behind, "bwfBW");
  // 6. Only backwards are left. In the second half weight gradients are put off, because other ranks wait
  // for b and B.
  for (int i = 0; i <= k; ++i) o.add(1, i % 2 == 0 ? "bw" : "BW");
  for (int i = k + 1; i <= 2 * k + 1; ++i) o.add(1, i % 2 == 0 ? "b" : "B");
  // 7. The last gradients of chunk 0 come; late weight gradients fill the time between them.
  o.add(behind, "LB");
  // 8. The weight gradients that are left.
  o.add(k + 1, "L");
  return o.list();
}

// Two dualpipe-v of half as many ranks, put end to end: one fills from rank 0 on and one from rank p - 1, and
// what the first half of the ranks does in one direction, the second half does in the other. Each stage is
// on two ranks, which sum its gradients. Needs p and m to be even; full from m >= 2p on.
inline Instructions dualpipe(int p, int m, int k) {
  Instructions list = dualpipe_v(p / 2, m / 2, std::min(k, p - 1 - k));
  for (Instruction& i : list) {
    if (k >= p / 2) i.chunk = 1 - i.chunk;
    if (i.chunk == 1) i.micro_batch += m / 2;  // the second copy has these
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

// The lists of all ranks, of a schedule that has a name. m >= 1; v is chunks_of(kind), unless interleaved.
inline Schedule make_schedule(PpSchedule kind, int p, int m, int v) {
  const bool is_dual = kind == PpSchedule::dualpipe, is_v = is_v_shaped(kind);
  Schedule s = {.name = to_string(kind),
                .splits_backward = is_v || is_dual || kind == PpSchedule::zb_h1,
                .p = p,
                .m = m,
                .v = v,
                .placement = is_v || is_dual ? v_shaped(p) : looped(p, v),
                .ranks = {},
                .copies = copies_of(kind)};
  for (int k = 0; k < p; ++k) s.ranks.push_back(with_messages(s, k, compute_order(kind, p, m, v, k)));
  return s;
}

}  // namespace pentatron
