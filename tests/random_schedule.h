// A random order that p ranks can compute, as the text of a file for --pp-schedule. Micro-batches come in any
// order and leave in any other. Only messages have an order: a rank takes them as the other one sent them.
#pragma once

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "../05_pipeline_parallel/schedule.h"

namespace pentatron::tests {

// Each of p ranks has so many stages, any of them, and in any order.
inline Placement random_placement(int p, int chunks, std::mt19937& engine) {
  Placement placement = looped(p, chunks);
  std::shuffle(placement.begin(), placement.end(), engine);
  return placement;
}

inline std::string random_schedule(const Placement& placement, int m, bool splits_backward,
                                   std::mt19937& engine) {
  struct Task {
    char letter;
    int micro_batch, stage;
  };
  const int stages = static_cast<int>(placement.size());
  std::map<int, std::map<int, int>> stage_of;  // [ranks][chunks]
  for (int stage = 0; stage < stages; ++stage)
    stage_of[placement[stage].rank][placement[stage].chunk] = stage;
  std::map<int, std::string> words;  // [ranks]
  // What can be computed, by letter, and by the ranks from which and to which the tensor goes.
  std::map<std::tuple<char, int, int>, std::vector<Task>> ready;
  const auto add = [&](const Task& task, int from) {
    ready[{task.letter, from, placement[task.stage].rank}].push_back(task);
  };
  for (int i = 0; i < m; ++i) add({'F', i, 0}, placement[0].rank);
  while (!ready.empty()) {
    const auto next = std::next(ready.begin(), engine() % ready.size());
    const auto [letter, from, rank] = next->first;
    std::vector<Task>& tasks = next->second;
    const auto chosen = tasks.begin() + (from == rank ? engine() % tasks.size() : 0);
    const auto [_, i, stage] = *chosen;
    tasks.erase(chosen);
    if (tasks.empty()) ready.erase(next);
    const int chunk = placement[stage].chunk;
    words[rank] += " " + (letter + std::to_string(i)) + (chunk > 0 ? "." + std::to_string(chunk) : "");
    if (letter == 'F' && stage + 1 < stages) add({'F', i, stage + 1}, rank);
    if (letter == 'F' && stage + 1 == stages) add({'B', i, stage}, rank);
    if (letter == 'B' && stage > 0) add({'B', i, stage - 1}, rank);
    if (letter == 'B' && splits_backward) add({'W', i, stage}, rank);
  }
  std::string text;
  for (const auto& [rank, chunks] : stage_of) {
    for (const auto& [chunk, stage] : chunks) text += (chunk > 0 ? "," : "") + std::to_string(stage);
    text += ":" + words[rank] + "\n";
  }
  return text;
}

}  // namespace pentatron::tests
