#include <algorithm>
#include <numeric>

#include "model/batch.h"

namespace pentatron {

BatchBuffer::BatchBuffer(const TrainingConfig& config, const std::vector<int32_t>& positions,
                         int64_t micro_batches)
    : positions_(positions),
      sequence_length_(config.sequence_length),
      rows_(config.micro_batch_size * std::ssize(positions)),
      host_(2 * micro_batches * size()),
      device_(memory_.matrix<int32_t>(1, micro_batches * size())) {}

void BatchBuffer::write(std::span<const int32_t> tokens, std::span<const int32_t> targets, int64_t i) {
  for (int64_t row = 0; row < rows_; ++row) {
    const int32_t position = positions_[row % std::ssize(positions_)];
    const int64_t in_batch = row / std::ssize(positions_) * sequence_length_ + position;
    array(i, 0)[row] = tokens[in_batch];
    array(i, 1)[row] = targets[in_batch];
    array(i, 2)[row] = position;
  }
  const std::span<int32_t> by_token = array(i, 3), token = array(i, 0);
  std::iota(by_token.begin(), by_token.end(), 0);
  std::ranges::stable_sort(by_token, {}, [&](int32_t row) { return token[row]; });
}

Batch BatchBuffer::upload(double target_tokens, int64_t micro_batches, bool last, cudaStream_t stream,
                          int64_t i) {
  CUDA_CHECK(cudaMemcpyAsync(device_.data + begin(i, 0), array(i, 0).data(), size() * sizeof(int32_t),
                             cudaMemcpyHostToDevice, stream));
  const auto on_device = [&](int array) { return device_.data + begin(i, array); };
  return {on_device(0),      on_device(1),        on_device(2), on_device(3),
          1 / target_tokens, 1.0 / micro_batches, last,         static_cast<int>(i)};
}

int micro_batches_of_a_rank(const TrainingConfig& config, int ranks) {
  const int64_t at_once = int64_t{config.micro_batch_size} * ranks;  // sequences, on all ranks
  require(config.global_batch_size % at_once == 0, "--global-batch-size", config.global_batch_size,
          "a multiple of --micro-batch-size times ranks (", config.micro_batch_size, " x ", ranks, ")");
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
      micro_batches_(micro_batches_of_a_rank(config, ranks)),
      buffer_(config, positions.empty() ? all_positions(config) : positions, micro_batches_) {}

std::vector<Batch> BatchLoader::load(int64_t step, cudaStream_t stream) {
  const double target_tokens = static_cast<double>(config_.global_batch_size) * config_.sequence_length;
  const int64_t first_micro_batch = int64_t{rank_} * micro_batches_;
  std::vector<int32_t> tokens(size_t(config_.micro_batch_size) * config_.sequence_length), targets(tokens);
  std::vector<Batch> batches;
  buffer_.next_step();
  for (int i = 0; i < micro_batches_; ++i) {
    if (!is_dry_run()) {  // which looks at no token
      fill_sequences(data_, config_.seed, step, (first_micro_batch + i) * config_.micro_batch_size,
                     config_.sequence_length, tokens, targets);
      buffer_.write(tokens, targets, i);
    }
    const bool last = i + 1 == micro_batches_;
    batches.push_back(buffer_.upload(target_tokens, int64_t{micro_batches_} * ranks_, last, stream, i));
  }
  return batches;
}

}  // namespace pentatron
