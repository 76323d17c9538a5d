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

// The processes that run a program together, as far as starting, logging and ending need them. By default
// there is one.
class Peers {
 public:
  virtual ~Peers() = default;
  virtual int rank() const { return 0; }
  virtual int ranks() const { return 1; }
  // Called by all, in the same order: the largest and the sum of each value; everybody's text (on rank 0
  // only).
  virtual std::vector<double> largest(const std::vector<double>& values) const { return values; }
  virtual std::vector<double> sum(const std::vector<double>& values) const { return values; }
  virtual std::vector<std::string> gather(const std::string& text) const { return {text}; }

  // What this rank has communicated since counting began.
  virtual void begin_counting() {}
  virtual double sent_bytes() const { return 0; }
  virtual std::vector<OperationCount> operation_counts() const { return {}; }
};

inline Peers single_process;

// Variables that CUDA, cuBLAS and NCCL read when they start; those that the user has set stay.
void set_environment();

// Calls `train` and returns the program's exit status: 0; 2 after bad input, with one line on stderr.
int run_program(const std::function<void()>& train);

constexpr ElementSizes element_sizes = {sizeof(real), sizeof(accum), has_master_weights};

size_t free_device_memory();  // bytes

// Dense bf16 peak of one device in FLOP/s as its vendor gives it, 0 where it is not known or another
// precision is used.
double peak_flops();

// Elements of the model, and floating-point operations of training on one token, forward and backward,
// nothing counted that is computed again: 6 N + 12 L d s, N without the embedding table and without the
// experts that a token is not sent to, attention not halved for causality.
double flops_per_token(const ModelConfig& model, int sequence_length);

// A run from its first step to its summary. Takes the time of steps, writes the log and the trace.
class Run {
 public:
  Run(const Options& options, const TokenData& data, const Parameters& parameters,
      Peers& peers = single_process);

  void begin_step();
  void end_step(int64_t step, const StepTotals& totals);  // after totals.wait()
  // Prints and logs the summary. `layout`: the degree of each dimension.
  void finish(const MemoryPrediction& predicted, const std::vector<std::pair<std::string, int>>& layout = {});
  void show_sample(const std::string& text) const;

 private:
  const Options& options_;
  const Peers& peers_;
  int64_t parameters_;
  std::optional<RunLog> log_;  // on rank 0
  std::chrono::steady_clock::time_point begin_;
  double seconds_ = 0, final_loss_ = 0, sent_bytes_ = 0;
};

}  // namespace pentatron
