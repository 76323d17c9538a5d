// What a run prints: a line every few steps, and the memory table at the end. With --log-json it also
// writes its options, every step and a summary, one JSON object a line. It takes plain numbers, so this file
// knows neither CUDA nor ranks.
#pragma once

#include <cstdint>
#include <fstream>
#include <iosfwd>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "clock/timeline.h"
#include "model/memory.h"
#include "options/readable.h"
#include "ranks/peers.h"

namespace pentatron {

struct StepRecord {
  int64_t step;      // from 1
  double loss;       // nats per token of the global batch
  double grad_norm;  // before clipping
  double lr;
  int64_t tokens;                               // of the global batch
  double seconds;                               // that the step took, by the wall clock
  size_t memory_peak;                           // bytes, the largest of all ranks
  size_t comm_bytes;                            // sent by a rank in this step, the largest of all ranks
  bool computed = true;                         // false in a dry run, which has no loss and no norm
  std::optional<trace::Overlap> modelled = {};  // time on the modelled GPU, the mean of all ranks
  struct Scale {
    double factor;    // of the next step's gradients
    int64_t skipped;  // steps so far whose gradients overflowed
  };
  std::optional<Scale> scale = {};  // in fp16
};

struct RankMemory {
  MemoryPrediction predicted;
  MemoryBytes measured;           // at the peak
  size_t libraries = 0;           // that CUDA and NCCL take: an estimate
  size_t measured_libraries = 0;  // 0 without a GPU of the rank's own
};

struct RankReport {
  RankMemory memory;
  TrafficByOperation communication;
  trace::Overlap overlap = {};   // modelled, of the steps from the second on, or of the only one
  int rank = 0, stands_for = 1;  // of the world (Peers)
};

// A report as text, to send it to another rank, and back.
std::string to_text(const RankReport& report);
RankReport rank_report(const std::string& text);

struct Summary {
  std::vector<std::pair<std::string, int>> layout;  // degree of each dimension
  int64_t parameters;                               // of the whole model
  double final_loss;
  double seconds;                 // of all steps
  std::vector<RankReport> ranks;  // that are there
};

class RunLog {
 public:
  struct Config {
    std::string json_path;  // empty: no log
    int steps, log_every;
    double flops_per_token;  // of the model, forward and backward, without recomputation
    double peak_flops;       // FLOP/s of a rank; 0: not known
    int ranks;
  };
  RunLog(std::ostream& out, const Config& config);  // throws UsageError if json_path cannot be written

  // The first line of the log. `options`: a JSON object.
  void begin(const std::string& options, const std::string& precision);
  void step(const StepRecord& record);
  void summary(const Summary& summary);             // the table on the terminal, and the last line of the log
  bool is_written() const { return json_.good(); }  // each line so far

 private:
  double mfu(double tokens, double seconds) const;
  void write_json(const std::string& line);  // if there is a log

  std::ostream& out_;
  const Config config_;
  std::ofstream json_;
  struct Steps {
    int number = 0;
    double tokens = 0, seconds = 0;
  };
  double first_loss_ = 0;  // of this run
  bool is_dry_run_ = false;
  Steps unshown_;  // since the last printed line
  Steps all_;      // of this run: those before --load are not logged
};

// Prints the bytes of each purpose, predicted and measured, of the rank that has most.
void print_memory_table(std::ostream& out, const std::vector<RankReport>& ranks);

}  // namespace pentatron
