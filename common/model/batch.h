// Cuts a step's global batch into micro-batches, and copies each to the device through pinned memory.
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
  const int32_t* targets;        // the next token, or ignored_target (kernels/loss.h)
  const int32_t* positions;      // in the sequence, for the rotary embedding
  const int32_t* by_token;       // rows sorted by token (embedding_backward)
  double inverse_target_tokens;  // 1 / targets of the global batch that are not ignored
  double inverse_micro_batches;  // 1 / micro-batches of the global batch
  bool last;                     // true for the last micro-batch of the step on this rank
  int number = 0;                // the micro-batch's in its step, from 0; it labels traces
};

// Holds micro-batches on the device, and twice in pinned memory: one step's copies wait, the next is written.
class BatchBuffer {
 public:
  // positions: this rank's, of every sequence.
  BatchBuffer(const TrainingConfig& config, const std::vector<int32_t>& positions, int64_t micro_batches = 1);

  // Writes this rank's positions of micro-batch i, and the order of its rows by token, to pinned host memory,
  // for `upload`. The stream must have run the copy before this is called again for the same half;
  // next_step() changes the half.
  void write(std::span<const int32_t> tokens /*[batch, sequence_length]*/, std::span<const int32_t> targets,
             int64_t i = 0);

  // Issues the copy of micro-batch i to the device. Work that `stream` runs later may read the batch.
  // target_tokens (those not ignored) and micro_batches are counts of the global batch.
  Batch upload(double target_tokens, int64_t micro_batches, bool last, cudaStream_t stream, int64_t i = 0);
  void next_step() { half_ = 1 - half_; }

 private:
  static constexpr int arrays = 4;
  int64_t size() const { return arrays * rows_; }  // numbers of a micro-batch
  int64_t begin(int64_t micro_batch, int array) const { return micro_batch * size() + array * rows_; }
  std::span<int32_t> array(int64_t micro_batch, int array) {
    return {host_.data() + half_ * device_.columns + begin(micro_batch, array), static_cast<size_t>(rows_)};
  }

  std::vector<int32_t> positions_;
  int sequence_length_;
  int64_t rows_;
  int half_ = 0;               // the half of host_ that is written next
  PinnedArray<int32_t> host_;  // [2] of device_
  DeviceArena memory_{Purpose::activations};
  Matrix<int32_t> device_;  // [1, micro-batches of: tokens, targets, positions, by_token [rows]]
};

// Micro-batches of one step on each of `ranks` ranks. Throws UsageError if they do not divide evenly.
int micro_batches_of_a_rank(const TrainingConfig& config, int ranks);

std::vector<int32_t> all_positions(const TrainingConfig& config);  // 0, 1, ..., sequence_length - 1

// Loads this rank's micro-batches of a step: part `rank` of `ranks` of the global batch. Of every sequence it
// takes the tokens at `positions` (empty: all). The global batch is the same in every layout.
class BatchLoader {
 public:
  BatchLoader(const TokenData& data, const TrainingConfig& config, int rank = 0, int ranks = 1,
              const std::vector<int32_t>& positions = {});

  // Uploads and returns all micro-batches of `step`, which are valid until the next call. The host overwrites
  // those of the step before the last, so the caller must have waited for that step's loss.
  std::vector<Batch> load(int64_t step, cudaStream_t stream);

 private:
  const TokenData& data_;
  const TrainingConfig& config_;
  int rank_, ranks_;
  int micro_batches_;
  BatchBuffer buffer_;
};

}  // namespace pentatron
