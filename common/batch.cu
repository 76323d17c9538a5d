#include <algorithm>
#include <numeric>

#include "batch.h"

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
  const int32_t* on_device = device_.data();
  return {on_device,
          on_device + rows_,
          on_device + 2 * rows_,
          on_device + 3 * rows_,
          1 / target_tokens,
          1.0 / micro_batches,
          last};
}

int micro_batches_of_a_rank(const Options& options, int ranks) {
  if (options.global_batch_size % (options.micro_batch_size * ranks) != 0) {
    throw UsageError("--global-batch-size", std::to_string(options.global_batch_size),
                     "a multiple of --micro-batch-size times ranks (" +
                         std::to_string(options.micro_batch_size) + " x " + std::to_string(ranks) + ")");
  }
  return options.global_batch_size / (options.micro_batch_size * ranks);
}

BatchLoader::BatchLoader(const TokenData& data, const Options& options, int rank, int ranks)
    : data_(data), options_(options), rank_(rank), ranks_(ranks) {
  for (int i = 0; i < micro_batches_of_a_rank(options, ranks); ++i) {
    buffers_.emplace_back(static_cast<int64_t>(options.micro_batch_size) * options.sequence_length);
  }
}

std::vector<Batch> BatchLoader::load(int64_t step, cudaStream_t stream) {
  const double target_tokens = static_cast<double>(options_.global_batch_size) * options_.sequence_length;
  const int64_t first_micro_batch = int64_t{rank_} * micro_batches();
  std::vector<Batch> batches;
  for (int i = 0; i < micro_batches(); ++i) {
    BatchBuffer& buffer = buffers_[i];
    fill_sequences(data_, options_.seed, step, (first_micro_batch + i) * options_.micro_batch_size,
                   options_.sequence_length, buffer.tokens(), buffer.targets());
    for (size_t row = 0; row < buffer.positions().size(); ++row) {
      buffer.positions()[row] = static_cast<int32_t>(row % options_.sequence_length);
    }
    const bool last = i + 1 == micro_batches();
    batches.push_back(buffer.upload(target_tokens, int64_t{micro_batches()} * ranks_, last, stream));
  }
  return batches;
}

}  // namespace pentatron
