// A schedule as a file (--pp-schedule FILE), and from the options to a schedule. Here are two ranks and two
// micro-batches. A line has what one rank computes; the program adds the messages.
//
//   F0 F1 B0 B1    # rank 0: F0 is the forward of micro-batch 0, B0 the backward
//   F0 B0 F1 B1    # rank 1
//
// If there is a W in the file, B is the input gradient alone, and W the weight gradient.
#pragma once

#include <charconv>
#include <iterator>
#include <sstream>
#include <string_view>
#include <utility>

#include "simulate.h"

namespace pentatron {

// `text` is that of the file `name`. Throws UsageError unless each rank has each instruction of the m
// micro-batches once, and those of a micro-batch in their order. It does not look for deadlocks.
inline Schedule parse_schedule(const std::string& name, const std::string& text, int p, int m) {
  std::vector<std::pair<int, std::vector<std::string>>> lines;  // number in the file, words; no empty ones
  std::istringstream in(text);
  std::string line;
  bool splits_backward = false;
  for (int number = 1; std::getline(in, line); ++number) {
    std::istringstream words(line.substr(0, line.find('#')));
    lines.push_back({number, {std::istream_iterator<std::string>(words), {}}});
    for (const std::string& word : lines.back().second) splits_backward |= word[0] == 'W';
    if (lines.back().second.empty()) lines.pop_back();
  }
  if (std::ssize(lines) != p) {
    throw UsageError("--pp-schedule", name,
                     "a line with instructions for each of " + std::to_string(p) + " ranks; it has " +
                         std::to_string(lines.size()));
  }
  Schedule s = {name, splits_backward, p, m, 1, looped(p, 1), {}};
  const std::vector<Action> actions = compute_actions(s);
  const std::string_view letters = splits_backward ? "FBW" : "FB";  // of the actions
  for (int rank = 0; rank < p; ++rank) {
    const auto& [number, words] = lines[rank];
    const std::string place = name + ":" + std::to_string(number);
    const auto spelled = [&](size_t action, int i) { return letters[action] + std::to_string(i); };
    Instructions compute;
    std::vector<size_t> done(m, 0);  // [micro-batches]: actions
    for (const std::string& word : words) {
      const auto check = [&](bool valid, const std::string& expected) {
        if (!valid) throw UsageError("--pp-schedule", place + ": " + word.substr(0, 20), expected);
      };
      const size_t action = letters.find(word[0]);
      int i = -1;
      const char* const end = word.data() + word.size();
      const bool complete = std::from_chars(word.data() + 1, end, i).ptr == end;
      check(action != letters.npos && complete && i >= 0 && i < m,
            "F, B or W, and a micro-batch from 0 to " + std::to_string(m - 1));
      check(action >= done[i], "it once in a line");
      check(action == done[i], spelled(done[i], i) + " before it");
      ++done[i];
      compute.push_back({actions[action], i, 0});
    }
    for (int i = 0; i < m; ++i) {
      if (done[i] < actions.size())
        throw UsageError("--pp-schedule", place, spelled(done[i], i) + ", which is missing");
    }
    s.ranks.push_back(with_messages(s, rank, compute));
  }
  return s;
}

// The schedule of the options, for p ranks and m micro-batches.
inline Schedule make_schedule(const Options& options, int p, int m) {
  if (options.pp_schedule == PpSchedule::from_file)
    return parse_schedule(options.pp_schedule_file, options.pp_schedule_text, p, m);
  return make_schedule(options.pp_schedule, p, m, options.vpp);
}

// Sets the options that depend on the number of ranks (pp, vpp). Throws UsageError if the ranks, the m
// micro-batches or the layers fit no schedule. (options.cc has checked that only interleaved has --vpp > 1.)
inline void complete_pipeline_options(Options& options, int ranks, int m) {
  if (options.pp == 0) options.pp = ranks;
  if (options.pp == 1 && !is_v_shaped(options.pp_schedule)) options.vpp = 1;  // nothing to interleave
  if (options.pp != ranks && !options.show_schedule) {
    throw UsageError("--pp", std::to_string(options.pp),
                     "the number of ranks, " + std::to_string(ranks) + ", unless with --show-schedule");
  }
  const int p = options.pp, v = options.vpp;
  if (options.pp_schedule == PpSchedule::interleaved && m % p != 0) {
    throw UsageError("--pp-schedule", "interleaved",
                     "1f1b, or micro-batches in multiples of the " + std::to_string(p) +
                         " ranks; there are " + std::to_string(m));
  }
  if (options.model.layers < p * v) {
    throw UsageError("--layers", std::to_string(options.model.layers),
                     "at least " + std::to_string(p * v) + ", one a stage: " + std::to_string(p) +
                         " ranks x " + std::to_string(v) + " chunks (--vpp)");
  }
  const Schedule schedule = make_schedule(options, p, m);
  if (schedule.splits_backward && options.recompute == Recompute::full) {
    throw UsageError("--recompute", "full",
                     "none or selective with " + schedule.name +
                         ", whose weight gradients need what full recomputation throws away");
  }
  try {
    checked(schedule);
  } catch (const ScheduleError& error) {
    throw UsageError("--pp-schedule: " + schedule.name + ": " + error.what());
  }
}

}  // namespace pentatron
