// The model as 02 and 03 train it, beside TestModel, which trains the same global batch on one rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../../02_data_parallel/data_parallel.h"
#include "../../03_zero/zero.h"
#include "model.h"
#include "mpi_tests.h"

namespace pentatron {
// How gradients are summed and who holds what.
struct Technique {
  enum Kind { data_parallel, zero } kind;
  DpSync sync = DpSync::naive;  // of data parallelism
  double bucket_mb = 25;        // likewise
  int stage = 0;                // of ZeRO
};

// Everything that one rank of a data-parallel program has. `options` are those of the whole batch.
struct ParallelModel {
  Options options;
  Communicator& data;
  Stream stream{"compute"};
  TensorRegion region;
  AttentionCore usual_attention{options.attention};
  FeedForward feed_forward;
  Parameters parameters;
  TransformerParameters ids;
  std::unique_ptr<DataParallel> data_parallel;  // one of the two
  std::unique_ptr<Zero> zero;
  std::unique_ptr<Transformer> transformer;
  std::unique_ptr<Activations> activations;
  std::unique_ptr<Optimizer> optimizer;
  StepTotals totals{stream};
  std::vector<BatchBuffer> buffers;  // [micro-batches of this rank]

  ParallelModel(const Options& o, Technique technique, Communicator& ranks)
      : ParallelModel(o, technique, ranks, usual_attention) {}

  ParallelModel(const Options& o, Technique technique, Communicator& ranks, AttentionCore& attention)
      : options(o), data(ranks), parameters({.shard_rank = ranks.rank(), .shard_ranks = ranks.ranks()}) {
    ids = declare_transformer(options.model, feed_forward, parameters);
    if (technique.kind == Technique::zero) {
      zero = std::make_unique<Zero>(technique.stage, parameters, data, stream);
    } else {
      parameters.allocate();
      data_parallel =
          std::make_unique<DataParallel>(technique.sync, technique.bucket_mb, parameters, data, stream);
    }
    parameters.initialise(options.seed, stream);
    if (zero) zero->weights_changed();
    UnitHooks* hooks = zero ? static_cast<UnitHooks*>(zero.get()) : data_parallel.get();
    transformer = std::make_unique<Transformer>(options.model, ids, parameters, whole_model(options.model),
                                                options.micro_batch_size, options.sequence_length,
                                                options.sequence_length, options.recompute,
                                                Seams{hooks, &region, &attention, &feed_forward}, stream);
    activations = transformer->make_activations();
    optimizer = std::make_unique<Optimizer>(options, parameters, stream);
    for (int i = 0; i < micro_batches_of_a_rank(options, data.ranks()); ++i) {
      buffers.emplace_back(static_cast<int64_t>(options.micro_batch_size) * options.sequence_length);
    }
    data.reset_traffic();
  }
  ~ParallelModel() {
    stream.synchronize();
    CUDA_CHECK(cudaStreamSynchronize(data.stream()));
  }

  // Forward and backward of this rank's part of the micro-batches of all ranks; then the global gradient,
  // loss and norm are on their way.
  void accumulate(const std::vector<HostBatch>& global) {
    const int64_t mine = std::ssize(buffers), first = data.rank() * mine;
    totals.reset();
    parameters.zero_gradients(stream);
    for (int64_t i = 0; i < mine; ++i) {
      const HostBatch& host = global[first + i];
      std::copy(host.tokens.begin(), host.tokens.end(), buffers[i].tokens().begin());
      std::copy(host.targets.begin(), host.targets.end(), buffers[i].targets().begin());
      for (size_t row = 0; row < host.tokens.size(); ++row) {
        buffers[i].positions()[row] = static_cast<int32_t>(row % options.sequence_length);
      }
      const Batch batch = buffers[i].upload(count_targets(global), std::ssize(global), i + 1 == mine, stream);
      transformer->forward(batch, *activations);
      transformer->backward(batch, *activations);
      totals.add_loss(activations->loss);
    }
    if (zero) zero->finish();
    if (data_parallel) data_parallel->finish();
    optimizer->add_norm_squared(totals.norm_squared());
    data.sum_scalars(totals.data(), totals.size, stream);
  }

  void update(int64_t step) {
    optimizer->step(step, totals.norm_squared());
    if (zero) zero->weights_changed();
    totals.wait();
  }

  void train_step(int64_t step, const std::vector<HostBatch>& global) {
    accumulate(global);
    update(step);
  }

  static double count_targets(const std::vector<HostBatch>& batches) {
    double count = 0;
    for (const HostBatch& batch : batches) {
      for (const int32_t target : batch.targets) count += target != ignored_target;
    }
    return count;
  }
};

}  // namespace pentatron
