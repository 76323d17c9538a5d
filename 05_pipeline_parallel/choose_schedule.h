// From the options to a schedule: one with a name (orders.h) or from a file, checked before anything runs.
#pragma once

#include "options/parallel_options.h"
#include "orders.h"
#include "ranks/peers.h"

namespace pentatron {

// What the workbench does for a program. parse_schedule (schedule_file.cc): `text` is that of the file
// `name`. Throws UsageError unless each rank has each instruction of the m micro-batches once, and those of a
// micro-batch in their order. checked (simulate.cc) returns a schedule that can run, and throws UsageError
// otherwise. draw_schedule.cc: the picture, and the same on stdout beside all schedules' numbers.
Schedule parse_schedule(const std::string& name, const std::string& text, int p, int m);
const Schedule& checked(const Schedule& schedule);
bool completes_from_the_end(const Schedule& schedule);  // each rank the gradients of its last stage first
std::string draw_schedule(const Schedule& schedule);
void show_schedule(const PipelineOptions& options, int m);

// The schedule that the options ask for, of p ranks and m micro-batches.
inline Schedule chosen_schedule(const PipelineOptions& options, int p, int m) {
  if (options.pp_schedule == PpSchedule::from_file)
    return parse_schedule(options.pp_schedule_file, options.pp_schedule_text, p, m);
  return make_schedule(options.pp_schedule, p, m, options.vpp);
}

// What else to choose where p ranks and m micro-batches do not fit a schedule; "" where they do.
inline std::string instead_of(PpSchedule kind, int p, int m) {
  if (kind == PpSchedule::interleaved && m % p != 0)
    return text("1f1b, or micro-batches in multiples of the ", p, " ranks; there are ", m);
  if (kind == PpSchedule::dualpipe && (p % 2 != 0 || m % 2 != 0))
    return text("dualpipe-v, or even numbers of ranks and micro-batches; there are ", p, " and ", m);
  return "";
}

// Sets the options that depend on the number of ranks (pp, vpp). Throws UsageError if the ranks, the m
// micro-batches or the layers fit no schedule, or a schedule cannot run. (--vpp has been checked.)
inline void complete_pipeline_options(const TrainingConfig& training, PipelineOptions& options, int ranks,
                                      int m) {
  if (options.pp == 0) options.pp = ranks;
  if (options.pp == 1 && !is_v_shaped(options.pp_schedule)) options.vpp = 1;  // nothing to interleave
  require(options.pp == ranks || options.show_schedule, "--pp", options.pp, "the number of ranks, ", ranks,
          ", unless with --show-schedule");
  const int p = options.pp;
  const std::string other = instead_of(options.pp_schedule, p, m);
  require(other.empty(), "--pp-schedule", schedule_name(options), other);
  const auto check_layers = [&, layers = training.model.layers](int chunks) {
    require(layers >= p * chunks, "--layers", layers, "at least ", p * chunks, ", one a stage: ", p,
            " ranks x ", chunks, " chunks");
  };
  check_layers(options.vpp / copies_of(options.pp_schedule));  // before lists that could be huge are made
  const Schedule schedule = chosen_schedule(options, p, m);
  check_layers(schedule.v / schedule.copies);  // a file has its own number of chunks
  require(!schedule.splits_backward || training.recompute != Recompute::full, "--recompute", "full",
          "none or selective with ", schedule.name,
          ", whose weight gradients need what full recomputation throws away");
  checked(schedule);
}

// With --show-schedule, rank 0 draws it, and the program does not train.
inline bool show_pictures(const OptionsWith<PipelineOptions>& options, const Peers& peers) {
  const int micro_batches = options.global_batch_size / options.micro_batch_size;
  const bool shows = options.technique.show_schedule;
  if (shows && peers.rank() == 0) show_schedule(options.technique, micro_batches);
  return shows;
}

}  // namespace pentatron
