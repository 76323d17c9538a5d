// What all seven programs do around their training loop: start, refuse bad input, time the steps, log, and
// say at the end what was used.
#pragma once

#include <chrono>
#include <optional>
#include <string_view>

#include "data.h"
#include "log.h"
#include "memory.h"
#include "optimizer.h"
#include "options.h"
#include "parameters.h"
#include "totals.h"

namespace pentatron {

// The exit status of a program: 0; 2 after bad input, with one line on stderr. Options are parsed, then
// `train` is called.
int run_program(int argc, char** argv, std::string_view description, void (*train)(const Options& options));

constexpr ElementSizes element_sizes = {sizeof(real), sizeof(accum), has_master_weights};

size_t free_device_memory();  // bytes

// Elements of the model, and floating-point operations of training on one token, forward and backward,
// nothing counted that is computed again: 6 N + 12 L d s, N without the embedding table, attention not halved
// for causality.
double flops_per_token(const ModelConfig& model, int sequence_length);

// A run from its first step to its summary. Takes the time of steps, writes the log and the trace.
class Run {
 public:
  Run(const Options& options, const TokenData& data, const Parameters& parameters);

  void begin_step();
  void end_step(int64_t step, const StepTotals& totals);  // after totals.wait()
  void finish(const std::vector<RankMemory>& memory /*[ranks]*/);

 private:
  const Options& options_;
  int64_t parameters_;
  RunLog log_;
  std::chrono::steady_clock::time_point begin_;
  double seconds_ = 0, final_loss_ = 0;
};

}  // namespace pentatron
