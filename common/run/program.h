// What all programs do around their training loop: start, refuse bad input, time the steps, write the
// log, and print at the end what the run has used.
#pragma once

#include <chrono>
#include <cmath>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "device/cuda.h"
#include "kernels/matmul.h"
#include "model/batch.h"
#include "model/data.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/parameters.h"
#include "run/log.h"
#include "run/parse_options.h"
#include "run/run_trace.h"
#include "run/totals.h"

namespace pentatron {

// Calls `program` and returns the exit status, the same on all ranks: 0; after one line on stderr 2 (bad
// input), or a RunError's.
int run_program(const std::function<void()>& program);

// Throws RunError on all ranks if one could not write what an option asks for.
void require_written(const std::string& option, const std::string& what, bool written);

// main() of 01: reads the options, and calls `train`. (That of the other stages is in parallel_program.h.)
int run_program(int argc, char** argv, std::string_view description, void (*train)(const Options&));

size_t free_device_memory();  // bytes, and no more than this rank's part of a GPU that several share
// Throws UsageError when a GPU, a modelled one, too, has not enough memory for the prediction and for what
// CUDA and NCCL take; else returns it. All ranks call this when their communicators exist; those that a rank
// makes later will have `channels_to_come`. All throw if one lacks memory: the message has the largest need
// and the smallest memory of any rank.
MemoryPrediction require_memory(const MemoryPrediction& predicted, int channels_to_come = 0);

// Floating-point operations of training on one token, forward and backward: 6 N + 12 L d s. N leaves out
// the embedding table, and what a token does not use. Recomputed operations do not count.
// Attention is not halved for causality.
double flops_per_token(const TrainingConfig& training);

// A run from its first step to its summary: it times and logs the steps, and says when they are saved. A step
// is logged when the next one has been issued: then the device has work while the host waits for the loss.
// What it does with traces is in run_trace.h, and with signals in checkpoint/preemption.h.
class Run {
 public:
  Run(const Options& options, const TokenData& data, const Parameters& parameters, StepTotals& totals,
      Checkpoint& checkpoint);

  // Ends a step, all of whose work has been issued: sends its totals, and saves a checkpoint if one is due.
  // Then begins the next one, and returns true; or, after the last one or if a signal has asked the run to
  // end, logs and saves what is not yet, and returns false. The same on all ranks.
  bool next_step();
  int64_t step() const { return step_; }  // from 0
  // Prints and logs the summary. `layout`: the degree of each dimension. Throws RunError if ranks
  // should hold the same weights and do not, or if a signal has ended the run.
  void summarize(const MemoryPrediction& predicted,
                 const std::vector<std::pair<std::string, int>>& layout = {});
  void show_sample(const std::string& text) const;

 private:
  void end_step();
  // Waits for the oldest step that has not been logged, and logs it. Throws RunError if its loss or norm is
  // NaN or infinite on a rank. (In fp16 the loss scale takes care of that.)
  void log_step();
  [[noreturn]] void end_at(int64_t step, bool is_finite);  // a step with NaN or infinity

  const Options& options_;
  Peers& peers_ = peers();
  const Parameters& trained_;
  StepTotals& totals_;
  Checkpoint& checkpoint_;
  int64_t step_;
  bool preempted_ = false;
  std::optional<RunLog> log_;  // on rank 0

  // What is known of a step when it has been issued: bytes at the memory's peak, and those sent so far.
  struct Issued {
    int64_t step;
    double memory, sent;
  };
  std::deque<Issued> issued_;  // not logged: two at most

  std::chrono::steady_clock::time_point wall_begin_;
  double wall_seconds_ = 0, final_loss_ = NAN, sent_bytes_ = 0;
  double begin_ = 0;  // now(), in s, when the last step ended that has been logged
  RunTrace trace_{options_};
};

// The text that a trained model writes: options.sample tokens after token 10, a line break in bytes, each
// from a forward pass over the last tokens; (options.seed, position) decides it. Numbers, if tokens are not
// bytes (common/tokens.py makes text of them).
//   head       the head's matrix: its rows on this rank are this rank's part of the vocabulary
//   forward    returns this rank's logits, [rows, its part of the vocabulary], or nothing if it has none
//   positions  of the rows of `forward`; empty: the whole sequence
//   peers      all of them call this; the sum of their parts is the whole
std::string write_sample(const Options& options, const Parameter& head,
                         const std::function<Tensor(const Batch&)>& forward, cudaStream_t stream,
                         const Peers& peers = single_process, std::vector<int32_t> positions = {});

}  // namespace pentatron
