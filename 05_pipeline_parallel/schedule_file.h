// A schedule as a file (--pp-schedule FILE), and from the options to a schedule. Here are two ranks and two
// micro-batches. A line has what one rank computes; the program adds the messages.
//
//   F0 F1 B0 B1    # rank 0: F0 is the forward of micro-batch 0, B0 the backward
//   F0 B0 F1 B1    # rank 1
//
// If there is a W in the file, B is the input gradient alone, and W the weight gradient. A rank with several
// chunks begins its line with their stages. F0.1 is the forward of micro-batch 0 in its chunk 1:
//
//   0,3: F0 F0.1 B0.1 B0
//   1,2: F0 F0.1 B0.1 B0
#pragma once

#include <charconv>
#include <iterator>
#include <sstream>
#include <string_view>
#include <utility>

#include "orders.h"
#include "simulate.h"

namespace pentatron {

struct ScheduleLine {
  std::string place;   // file:line
  std::string stages;  // "0,3:", or empty
  std::vector<std::string> words;
};

// The lines of a file that have any words. `#` begins a comment.
inline std::vector<ScheduleLine> lines_of(const std::string& name, const std::string& text) {
  std::vector<ScheduleLine> lines;
  std::istringstream in(text);
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    std::istringstream words(line.substr(0, line.find('#')));
    ScheduleLine l = {
        name + ":" + std::to_string(number), "", {std::istream_iterator<std::string>(words), {}}};
    if (l.words.empty()) continue;
    if (l.words[0].back() == ':') {
      l.stages = l.words[0];
      l.words.erase(l.words.begin());
    }
    lines.push_back(l);
  }
  return lines;
}

// Sets v and the placement: each stage is on one rank, and all ranks have as many.
inline void read_stages(Schedule& s, const std::vector<ScheduleLine>& lines) {
  std::ptrdiff_t commas = -1;  // no line has stages
  for (const ScheduleLine& line : lines) {
    if (!line.stages.empty())
      commas = std::max(commas, std::count(line.stages.begin(), line.stages.end(), ','));
  }
  if (commas < 0) return;
  s.v = static_cast<int>(commas) + 1;
  s.places.assign(s.p * s.v, {-1, -1});
  for (int rank = 0; rank < s.p; ++rank) {
    std::istringstream in(lines[rank].stages);
    int chunk = 0, stage = -1;
    for (char after = 0; chunk < s.v; ++chunk) {
      const bool read = static_cast<bool>(in >> stage >> after);
      if (!read || after != (chunk + 1 < s.v ? ',' : ':') || stage < 0 || stage >= s.stages() ||
          s.places[stage].rank >= 0) {
        throw UsageError(
            "--pp-schedule", lines[rank].place + ": " + lines[rank].stages.substr(0, 20),
            "stages such as 0,3: with each of 0 to " + std::to_string(s.stages() - 1) + " on one rank");
      }
      s.places[stage] = {rank, chunk};
    }
  }
}

// What a rank computes. Each instruction of the m micro-batches comes once, and those of a micro-batch in
// their order.
inline Instructions read_line(const Schedule& s, const ScheduleLine& line) {
  const std::vector<Action> actions = compute_actions(s);
  const std::string_view letters = s.splits_backward ? "FBW" : "FB";  // of the actions
  const auto spelled = [&](size_t action, int i, int chunk) {
    return letters[action] + std::to_string(i) + (chunk > 0 ? "." + std::to_string(chunk) : "");
  };
  Instructions compute;
  std::vector done(s.v, std::vector<size_t>(s.m, 0));  // [chunks][micro-batches]: actions
  for (const std::string& word : line.words) {
    const auto check = [&](bool valid, const std::string& expected) {
      if (!valid) throw UsageError("--pp-schedule", line.place + ": " + word.substr(0, 20), expected);
    };
    const size_t action = letters.find(word[0]);
    int i = -1, chunk = 0;
    const char* const end = word.data() + word.size();
    const char* at = std::from_chars(word.data() + 1, end, i).ptr;
    if (s.v > 1 && at != end && *at == '.') at = std::from_chars(at + 1, end, chunk = -1).ptr;
    check(action != letters.npos && at == end && i >= 0 && i < s.m && chunk >= 0 && chunk < s.v,
          "F, B or W, and a micro-batch from 0 to " + std::to_string(s.m - 1) +
              (s.v > 1 ? ", and a chunk from .0 to ." + std::to_string(s.v - 1) : ""));
    size_t& next = done[chunk][i];
    check(action >= next, "it once in a line");
    check(action == next, spelled(next, i, chunk) + " before it");
    ++next;
    compute.push_back({actions[action], i, chunk});
  }
  for (int chunk = 0; chunk < s.v; ++chunk) {
    for (int i = 0; i < s.m; ++i) {
      const size_t next = done[chunk][i];
      if (next < actions.size())
        throw UsageError("--pp-schedule", line.place, spelled(next, i, chunk) + ", which is missing");
    }
  }
  return compute;
}

// `text` is that of the file `name`. Throws UsageError unless each rank has each instruction of the m
// micro-batches once, and those of a micro-batch in their order. It does not look for deadlocks.
inline Schedule parse_schedule(const std::string& name, const std::string& text, int p, int m) {
  const std::vector<ScheduleLine> lines = lines_of(name, text);
  if (std::ssize(lines) != p) {
    throw UsageError("--pp-schedule", name,
                     "a line with instructions for each of " + std::to_string(p) + " ranks; it has " +
                         std::to_string(lines.size()));
  }
  Schedule s = {name, false, p, m, 1, looped(p, 1), {}};
  read_stages(s, lines);
  for (const ScheduleLine& line : lines) {
    for (const std::string& word : line.words) s.splits_backward |= word[0] == 'W';
  }
  for (int rank = 0; rank < p; ++rank) s.ranks.push_back(with_messages(s, rank, read_line(s, lines[rank])));
  return s;
}

// The costs of --pp-costs, which are those of all layers of a rank, as costs of one chunk. Without the option
// forward, input gradient and weight gradient take 1 each.
inline Costs costs_of_chunk(const PipelineOptions& options, int p, int stages) {
  Costs c;
  if (!options.pp_costs.empty())
    c = {options.pp_costs[0], options.pp_costs[1], options.pp_costs[2], options.pp_costs[3]};
  const double share = static_cast<double>(p) / stages;
  c.forward *= share, c.input_gradient *= share, c.weight_gradient *= share;
  return c;
}

// zb-h1, or with --pp-costs the order made for them, if that is faster. It keeps p micro-batches, or as many
// as
// --pp-max-in-flight allows.
inline Schedule zb_h1_of(const PipelineOptions& options, int p, int m) {
  const Schedule fixed = make_schedule(PpSchedule::zb_h1, p, m, 1);
  if (options.pp_costs.empty()) return fixed;
  const Costs costs = costs_of_chunk(options, p, p);
  const int most = options.pp_max_in_flight > 0 ? options.pp_max_in_flight : p;
  Schedule made = fixed;
  const std::vector<Instructions> lists = zb_by_costs(p, m, costs, most);
  for (int k = 0; k < p; ++k) made.ranks[k] = with_messages(made, k, lists[k]);
  const bool grouped = options.pp_messages == PpMessages::grouped;
  const auto time = [&](const Schedule& s) {
    try {
      check_in_flight(s, most);
      return simulate(grouped ? with_grouped_messages(s) : s, costs).total;
    } catch (const ScheduleError&) {  // it keeps too many, or its messages stop it
      return std::numeric_limits<double>::infinity();
    }
  };
  return time(made) < time(fixed) ? made : fixed;
}

// The schedule of the options, for p ranks and m micro-batches.
inline Schedule make_schedule(const PipelineOptions& options, int p, int m) {
  const auto make = [&] {
    if (options.pp_schedule == PpSchedule::from_file)
      return parse_schedule(options.pp_schedule_file, options.pp_schedule_text, p, m);
    if (options.pp_schedule == PpSchedule::zb_h1) return zb_h1_of(options, p, m);
    return make_schedule(options.pp_schedule, p, m, options.vpp);
  };
  return options.pp_messages == PpMessages::grouped ? with_grouped_messages(make()) : make();
}

// Sets the options that depend on the number of ranks (pp, vpp). Throws UsageError if the ranks, the m
// micro-batches or the layers fit no schedule, or a schedule cannot run. (complete_options has checked that
// --vpp fits the schedule.)
inline void complete_pipeline_options(PipelineOptions& options, int ranks, int m) {
  if (options.pp == 0) options.pp = ranks;
  if (options.pp == 1 && !is_v_shaped(options.pp_schedule)) options.vpp = 1;  // nothing to interleave
  if (options.pp != ranks && !options.show_schedule) {
    throw UsageError("--pp", std::to_string(options.pp),
                     "the number of ranks, " + std::to_string(ranks) + ", unless with --show-schedule");
  }
  const int p = options.pp;
  if (options.pp_schedule == PpSchedule::interleaved && m % p != 0) {
    throw UsageError("--pp-schedule", "interleaved",
                     "1f1b, or micro-batches in multiples of the " + std::to_string(p) +
                         " ranks; there are " + std::to_string(m));
  }
  if (options.pp_schedule == PpSchedule::dualpipe && (p % 2 != 0 || m % 2 != 0)) {
    throw UsageError("--pp-schedule", "dualpipe",
                     "dualpipe-v, or even numbers of ranks and micro-batches; there are " +
                         std::to_string(p) + " and " + std::to_string(m));
  }
  const Schedule schedule = make_schedule(options, p, m);
  if (options.model.layers < schedule.stages()) {
    throw UsageError("--layers", std::to_string(options.model.layers),
                     "at least " + std::to_string(schedule.stages()) + ", one a stage: " + std::to_string(p) +
                         " ranks x " + std::to_string(schedule.stages() / p) + " chunks");
  }
  if (schedule.splits_backward && options.recompute == Recompute::full) {
    throw UsageError("--recompute", "full",
                     "none or selective with " + schedule.name +
                         ", whose weight gradients need what full recomputation throws away");
  }
  try {
    checked(schedule);
    if (options.pp_max_in_flight > 0) check_in_flight(schedule, options.pp_max_in_flight);
  } catch (const ScheduleError& error) {
    throw UsageError("--pp-schedule: " + schedule.name + ": " + error.what());
  }
}

}  // namespace pentatron
