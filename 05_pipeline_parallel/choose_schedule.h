// From the options to a schedule: one that has a name (orders.h), or one from a file, checked before anything
// runs.
#pragma once

#include <limits>

#include "orders.h"
#include "workbench/schedule_file.h"
#include "workbench/simulate.h"

namespace pentatron {

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
// as --pp-max-in-flight allows.
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
