// A random order that p ranks can compute, as the text of a file for --pp-schedule. Micro-batches come in any
// order and leave in any other; every rank has the same two, because messages are not exchanged.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace pentatron::tests {

inline std::string random_schedule(int p, int m, bool splits_backward, std::mt19937& engine) {
  struct Rank {
    std::string line;
    int forwards = 0, backwards = 0;
    std::vector<int> late;  // weight gradients that can be computed
  };
  std::vector<int> come(m), leave(m);
  std::iota(come.begin(), come.end(), 0);
  std::shuffle(come.begin(), come.end(), engine);
  std::iota(leave.begin(), leave.end(), 0);
  std::shuffle(leave.begin(), leave.end(), engine);
  std::vector<Rank> ranks(p);
  const auto has = [&](const Rank& r, int i) {
    const auto end = come.begin() + r.forwards;
    return std::find(come.begin(), end, i) != end;
  };
  const int count = m * (splits_backward ? 3 : 2);  // instructions of a rank
  for (int left = p * count; left > 0;) {
    const int k = static_cast<int>(engine() % p);
    Rank& r = ranks[k];
    const int choice = static_cast<int>(engine() % 3);
    std::string word;
    if (choice == 0 && r.forwards < m && (k == 0 || ranks[k - 1].forwards > r.forwards)) {
      word = "F" + std::to_string(come[r.forwards++]);
    } else if (choice == 1 && r.backwards < m && has(r, leave[r.backwards]) &&
               (k == p - 1 || ranks[k + 1].backwards > r.backwards)) {
      r.late.push_back(leave[r.backwards]);
      word = "B" + std::to_string(leave[r.backwards++]);
    } else if (choice == 2 && splits_backward && !r.late.empty()) {
      std::swap(r.late[engine() % r.late.size()], r.late.back());
      word = "W" + std::to_string(r.late.back());
      r.late.pop_back();
    }
    if (word.empty()) continue;
    r.line += " " + word;
    --left;
  }
  std::string text;
  for (const Rank& r : ranks) text += r.line + "\n";
  return text;
}

}  // namespace pentatron::tests
