// A model and everything around it, as the programs build it, for tests; and copies between host and device.
#pragma once

#include <cmath>
#include <memory>
#include <vector>

#include "kernels/elementwise.h"
#include "kernels/loss.h"
#include "model/batch.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "options/options.h"
#include "run/totals.h"

namespace pentatron {

// Waits for the stream and copies `size` elements to the host, as doubles.
template <class T>
std::vector<double> to_host(const T* device, size_t size, cudaStream_t stream) {
  PinnedArray<T> host(size);
  CUDA_CHECK(cudaMemcpyAsync(host.data(), device, size * sizeof(T), cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  std::vector<double> result;
  for (size_t i = 0; i < size; ++i) result.push_back(static_cast<double>(static_cast<accum>(host[i])));
  return result;
}

template <class T>
std::vector<double> to_host(Matrix<T> device, cudaStream_t stream) {
  return to_host(device.data, device.size(), stream);
}

template <class T>
void to_device(const std::vector<double>& values, T* device, cudaStream_t stream) {
  PinnedArray<T> host(values.size());
  for (size_t i = 0; i < values.size(); ++i) host[i] = static_cast<T>(static_cast<accum>(values[i]));
  CUDA_CHECK(cudaMemcpyAsync(device, host.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
}

// |a - b| / |b|, Frobenius norms.
inline double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(difference) / std::max(std::sqrt(norm), 1e-300);
}

template <class ProgramOptions = Options>
ProgramOptions test_options(int layers, int d_model, int heads, int kv_heads, int d_ff, int vocab_size,
                            int sequence, int micro_batch, int global_batch) {
  ProgramOptions o;
  o.model = {"test", layers, d_model, heads, kv_heads, d_ff, vocab_size, 10000.0, 1e-5};
  o.sequence_length = sequence;
  o.micro_batch_size = micro_batch;
  o.global_batch_size = global_batch;
  o.lr = 1e-2;
  return o;
}

// One micro-batch of tokens on the host.
struct HostBatch {
  std::vector<int32_t> tokens, targets;  // [rows]
};

// Batches of tokens that look random but follow from `seed` alone.
inline std::vector<HostBatch> random_batches(const Options& o, uint64_t seed) {
  std::vector<HostBatch> batches(o.global_batch_size / o.micro_batch_size);
  uint64_t i = 0;
  const auto token = [&] {
    return static_cast<int32_t>(philox4x32(0, i++, philox_key(seed, "tokens")).word[0] % o.model.vocab_size);
  };
  for (HostBatch& batch : batches) {
    for (int row = 0; row < o.micro_batch_size * o.sequence_length; ++row) {
      batch.tokens.push_back(token());
      batch.targets.push_back(token());
    }
  }
  return batches;
}

// What BatchLoader is for data: the part of a rank in batches that tests make.
class HostBatchLoader {
 public:
  explicit HostBatchLoader(const Options& options, int rank = 0, int ranks = 1,
                           const std::vector<int32_t>& positions = {})
      : first_(rank * micro_batches_of_a_rank(options, ranks)) {
    for (int i = 0; i < micro_batches_of_a_rank(options, ranks); ++i)
      buffers_.emplace_back(options, positions.empty() ? all_positions(options) : positions);
  }

  std::vector<Batch> load(const std::vector<HostBatch>& global, cudaStream_t stream) {
    double targets = 0;
    for (const HostBatch& batch : global)
      for (const int32_t target : batch.targets) targets += target != ignored_target;
    std::vector<Batch> batches;
    for (BatchBuffer& buffer : buffers_) {
      const HostBatch& host = global[first_ + batches.size()];
      buffer.write(host.tokens, host.targets);
      const bool last = batches.size() + 1 == buffers_.size();
      batches.push_back(buffer.upload(targets, std::ssize(global), last, stream));
      batches.back().number = static_cast<int>(batches.size()) - 1;
    }
    return batches;
  }

 private:
  int first_;
  std::vector<BatchBuffer> buffers_;  // [micro-batches of this rank]
};

struct TestModel {
  Options options;
  std::vector<UnitHooks*> hooks;
  Stream stream{"compute"};
  TensorRegion region;
  AttentionCore attention{options.attention};
  FeedForward feed_forward;
  Parameters parameters;
  TransformerParameters ids;
  std::unique_ptr<Transformer> transformer;
  std::unique_ptr<Activations> activations;
  std::unique_ptr<Optimizer> optimizer;
  StepTotals totals{stream};
  HostBatchLoader loader;

  explicit TestModel(const Options& o, std::vector<UnitHooks*> h = {})
      : options(o), hooks(std::move(h)), loader(options) {
    ids = declare_transformer(options.model, feed_forward, parameters);
    parameters.allocate();
    parameters.initialise(options.seed, stream);
    transformer =
        std::make_unique<Transformer>(options, ids, parameters, options.sequence_length, seams(), stream);
    activations = transformer->make_activations(whole_model(options.model));
    optimizer = std::make_unique<Optimizer>(options, parameters, stream);
  }

  Seams seams() { return {hooks, &region, &attention, &feed_forward}; }

  // Forward and backward of all micro-batches; gradients, loss and norm are then there.
  void accumulate(const std::vector<HostBatch>& batches) {
    totals.reset();
    for (const Batch& batch : loader.load(batches, stream)) {
      transformer->forward(batch, *activations);
      transformer->backward(batch, *activations);
      totals.add_loss(activations->loss);
    }
    optimizer->add_norm_squared(totals.norm_squared());
  }

  void update(int64_t step) {
    optimizer->step(step, totals.norm_squared());
    totals.wait();
  }

  void train_step(int64_t step, const std::vector<HostBatch>& batches) {
    accumulate(batches);
    update(step);
  }

  std::vector<double> weights(int id) { return to_host(parameters.weights(id), stream); }
  // Without the loss scale, as nothing has overflowed.
  std::vector<double> gradients(int id) {
    std::vector<double> gradients = to_host(parameters.gradients(id).sum, stream);
    for (double& g : gradients) g /= has_loss_scale ? options.loss_scale : 1;
    return gradients;
  }
};

}  // namespace pentatron
