#include <algorithm>
#include <numeric>

#include "model/batch.h"

namespace pentatron {

BatchBuffer::BatchBuffer(int64_t rows)
    : rows_(rows), host_(arrays * rows), device_(arrays * rows, Purpose::activations) {}

Batch BatchBuffer::upload(double target_tokens, int64_t micro_batches, bool last, cudaStream_t stream) {
  const std::span<int32_t> by_token = array(3);
  std::iota(by_token.begin(), by_token.end(), 0);
  std::stable_sort(by_token.begin(), by_token.end(),
                   [&](int32_t a, int32_t b) { return tokens()[a] < tokens()[b]; });
  CUDA_CHECK(cudaMemcpyAsync(device_.data(), host_.data(), host_.size() * sizeof(int32_t),
                             cudaMemcpyHostToDevice, stream));
  const auto array = [&](int i) { return device_.data() + i * rows_; };
  return {array(0), array(1), array(2), array(3), 1 / target_tokens, 1.0 / micro_batches, last};
}

int micro_batches_of_a_rank(const TrainingConfig& config, int ranks) {
  const int64_t at_once = int64_t{config.micro_batch_size} * ranks;  // sequences, on all ranks
  if (config.global_batch_size % at_once != 0) {
    throw UsageError("--global-batch-size", std::to_string(config.global_batch_size),
                     "a multiple of --micro-batch-size times ranks (" +
                         std::to_string(config.micro_batch_size) + " x " + std::to_string(ranks) + ")");
  }
  return static_cast<int>(config.global_batch_size / at_once);
}

std::vector<int32_t> all_positions(const TrainingConfig& config) {
  std::vector<int32_t> positions(config.sequence_length);
  std::iota(positions.begin(), positions.end(), 0);
  return positions;
}

BatchLoader::BatchLoader(const TokenData& data, const TrainingConfig& config, int rank, int ranks,
                         const std::vector<int32_t>& positions)
    : data_(data),
      config_(config),
      rank_(rank),
      ranks_(ranks),
      positions_(positions.empty() ? all_positions(config) : positions) {
  for (int i = 0; i < micro_batches_of_a_rank(config, ranks); ++i) {
    buffers_.emplace_back(config.micro_batch_size * std::ssize(positions_));
  }
}

std::vector<Batch> BatchLoader::load(int64_t step, cudaStream_t stream) {
  const double target_tokens = static_cast<double>(config_.global_batch_size) * config_.sequence_length;
  const int64_t first_micro_batch = int64_t{rank_} * micro_batches();
  std::vector<int32_t> tokens(size_t(config_.micro_batch_size) * config_.sequence_length), targets(tokens);
  std::vector<Batch> batches;
  for (int i = 0; i < micro_batches(); ++i) {
    BatchBuffer& buffer = buffers_[i];
    fill_sequences(data_, config_.seed, step, (first_micro_batch + i) * config_.micro_batch_size,
                   config_.sequence_length, tokens, targets);
    for (size_t row = 0; row < buffer.positions().size(); ++row) {
      const int32_t position = positions_[row % positions_.size()];
      const size_t in_batch = row / positions_.size() * config_.sequence_length + position;
      buffer.tokens()[row] = tokens[in_batch];
      buffer.targets()[row] = targets[in_batch];
      buffer.positions()[row] = position;
    }
    const bool last = i + 1 == micro_batches();
    batches.push_back(buffer.upload(target_tokens, int64_t{micro_batches()} * ranks_, last, stream));
    batches.back().number = i;
  }
  return batches;
}

}  // namespace pentatron
