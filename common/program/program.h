// What all seven programs do around their training loop: start, refuse bad input, time the steps, log, and
// say at the end what was used.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "model/data.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/parameters.h"
#include "program/log.h"
#include "program/options.h"
#include "program/totals.h"

namespace pentatron {

// Calls `train` and returns the program's exit status: 0; 2 after bad input, with one line on stderr.
int run_program(const std::function<void()>& train);

class World;  // ranks/comm.h
// As run_program, on all ranks: after bad input rank 0 prints its line, once, and every rank returns 2.
int run_program_on_ranks(int argc, char** argv, const std::function<void(World& world)>& train);

constexpr ElementSizes element_sizes = {sizeof(real), sizeof(accum), has_master_weights};

size_t free_device_memory();  // bytes
// Throws UsageError when the prediction is more than `available` bytes.
void require_memory(const MemoryPrediction& predicted, size_t available);

// Dense bf16 peak of one device in FLOP/s as its vendor gives it, 0 where it is not known or another
// precision is used.
double peak_flops();

// Elements of the model, and floating-point operations of training on one token, forward and backward,
// nothing counted that is computed again: 6 N + 12 L d s, N without the embedding table and without the
// experts that a token is not sent to, attention not halved for causality.
double flops_per_token(const Options& options);

// A run from its first step to its summary. Takes the time of steps, writes the log and the trace.
class Run {
 public:
  Run(const Options& options, const TokenData& data, const Parameters& parameters,
      Peers& peers = single_process);

  void begin_step(int64_t step);
  void end_step(int64_t step, const StepTotals& totals);  // after totals.wait()
  // Prints and logs the summary. `layout`: the degree of each dimension.
  void summarize(const MemoryPrediction& predicted,
                 const std::vector<std::pair<std::string, int>>& layout = {});
  void show_sample(const std::string& text) const;

 private:
  const Options& options_;
  const Peers& peers_;
  int64_t parameters_;
  std::optional<RunLog> log_;  // on rank 0
  bool is_modelled() const;
  trace::Overlap overlap_of_step(double from, double to);

  std::chrono::steady_clock::time_point wall_begin_;
  double wall_seconds_ = 0, final_loss_ = 0, sent_bytes_ = 0;
  double origin_ = 0, begin_ = 0;  // s, of now(): of the trace, of the step
  // Modelled time only: of the run, of its last step (s since origin_), and what a trace wants.
  trace::Overlap overlap_;
  double step_begin_ = 0, step_end_ = 0;
  std::vector<trace::Interval> last_step_, all_;
};

}  // namespace pentatron
