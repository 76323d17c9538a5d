// The tokens of one micro-batch on the device, and how they get there.
#pragma once

#include <cstdint>
#include <vector>

#include "device/tensor.h"
#include "model/config.h"
#include "model/data.h"

namespace pentatron {

// Rows are batch x sequence; all arrays are [rows].
struct Batch {
  const int32_t* tokens;
  const int32_t* targets;        // the next token, or ignored_target (kernels.h)
  const int32_t* positions;      // in the sequence, for the rotary embedding
  const int32_t* by_token;       // rows sorted by token (kernels.h, embedding_backward)
  double inverse_target_tokens;  // 1 / targets of the global batch that are not ignored
  double inverse_micro_batches;  // 1 / micro-batches of the global batch
  bool last;                     // of this step's micro-batches
  int number = 0;                // of them, for a trace
};

// Holds micro-batches: what the host writes, pinned, and its copy on the device.
class BatchBuffer {
 public:
  explicit BatchBuffer(int64_t rows, int64_t micro_batches = 1);

  // The host's side of micro-batch i, [rows] each; written before `upload`, and not again before `upload` has
  // run.
  std::span<int32_t> tokens(int64_t i = 0) { return array(i, 0); }
  std::span<int32_t> targets(int64_t i = 0) { return array(i, 1); }
  std::span<int32_t> positions(int64_t i = 0) { return array(i, 2); }

  // Sorts the rows of micro-batch i by token and issues the copy; the batch may be used by what `stream` runs
  // after it. micro_batches: of the global batch; last: of this rank's step.
  Batch upload(double target_tokens, int64_t micro_batches, bool last, cudaStream_t stream, int64_t i = 0);

 private:
  static constexpr int arrays = 4;
  int64_t begin(int64_t micro_batch, int array) const { return (micro_batch * arrays + array) * rows_; }
  std::span<int32_t> array(int64_t micro_batch, int array) {
    return {host_.data() + begin(micro_batch, array), static_cast<size_t>(rows_)};
  }

  int64_t rows_;
  PinnedArray<int32_t> host_;    // [micro-batches, arrays, rows]: tokens, targets, positions, by_token
  DeviceArray<int32_t> device_;  // likewise
};

// How many micro-batches of a step each of `ranks` ranks takes; throws UsageError where they
// can't be shared out evenly.
int micro_batches_of_a_rank(const TrainingConfig& config, int ranks);

std::vector<int32_t> all_positions(const TrainingConfig& config);  // 0, 1, ... of a sequence

// The micro-batches of each step's global batch that this rank takes: part `rank` of `ranks`, and of every
// sequence the tokens at `positions` (none: all). All ranks' together are the same in every layout.
class BatchLoader {
 public:
  BatchLoader(const TokenData& data, const TrainingConfig& config, int rank = 0, int ranks = 1,
              const std::vector<int32_t>& positions = {});

  int micro_batches() const { return micro_batches_; }

  // All micro-batches of a step. The previous step's must have been consumed: the caller has waited for its
  // loss.
  std::vector<Batch> load(int64_t step, cudaStream_t stream);

 private:
  const TokenData& data_;
  const TrainingConfig& config_;
  int rank_, ranks_;
  std::vector<int32_t> positions_;
  int micro_batches_;
  BatchBuffer buffer_;
};

}  // namespace pentatron
