// Plays a schedule without a GPU, by NCCL's rules. It computes when each instruction begins and ends, and
// refuses a schedule that cannot run: an instruction is missing or too early, a rank gets another message
// than it expects, or ranks wait for each other forever.
//
//   compute    runs in the order of the list. Each instruction waits for the receive that it needs.
//   messages   start in the order of the list, over all streams of a rank. A message waits until the one
//              before it on its stream is complete. A send also waits until its tensor is computed, a receive
//              until its buffer is free. NCCL has no tags: the n-th send meets the n-th receive at the other
//              end. Both complete `transfer` after both have started (rendezvous).
#pragma once

#include "../choose_schedule.h"

namespace pentatron {

// One line: the first violation with its rank and instruction, or for a deadlock each rank that waits.
struct ScheduleError : UsageError {
  ScheduleError(const Schedule& schedule, const std::string& why)
      : UsageError("--pp-schedule: " + schedule.name + ": " + why) {}
};

// The times of one chunk for one micro-batch, in any unit. `transfer`: of a message.
struct Costs {
  double forward = 1, input_gradient = 1, weight_gradient = 1, transfer = 0;

  double of(Action action) const {
    if (is_message(action)) return transfer;
    if (action == Action::forward) return forward;
    return (action == Action::weight_gradient ? 0 : input_gradient) +
           (action == Action::input_gradient ? 0 : weight_gradient);
  }
};

// When an instruction begins and ends. A message begins when this rank starts it, and ends when complete.
struct Interval {
  double begin, end;
};

struct Simulation {
  double total;                              // until the last rank is done
  double work;                               // how long the rank that has most to do computes
  std::vector<std::vector<Interval>> times;  // [ranks][instructions]
  std::vector<PeakInFlight> in_flight;       // [ranks], over all chunks

  double bubble() const { return total - work; }           // how long each rank is idle
  double bubble_ratio() const { return bubble() / work; }  // over work; a ratio r is r / (1 + r) of the total
};

// Plays the schedule with these costs. `streams`: each rank's streams for messages. 4, or 2 (one for each
// direction of travel), or 1 for all. Throws ScheduleError if it cannot run.
Simulation simulate(const Schedule& schedule, const Costs& costs = {}, int streams = message_streams);

}  // namespace pentatron
