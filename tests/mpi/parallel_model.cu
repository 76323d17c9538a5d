// precisions: fp64 bf16
#include "parallel_model.h"

namespace pentatron {

ParallelModel::ParallelModel(const CombinedOptions& o, Technique t, World& world, Communicator& communicator,
                             OtherSeams other)
    : options(o),
      technique(t),
      ranks(communicator),
      parameters(technique.kind == Technique::pipeline
                     ? pipeline_layout(schedule(), ranks.rank(), parts_of_model())
                     : technique.layout(ranks)) {
  options.tensor.sequence_parallel = technique.sequence_parallel;
  options.tensor.tp_overlap = technique.tp_overlap;
  Seams seams = {{},
                 &usual_region,
                 other.attention ? other.attention : &usual_attention,
                 other.feed_forward ? other.feed_forward : &usual_feed_forward};
  if (technique.kind == Technique::context_parallel) {
    positions = positions_of_rank(options, options.context, ranks.rank(), ranks.ranks());
    gradient_ranks = std::make_unique<Communicator>(world, world.all(), "gradients");
    context_parallel = context_attention(options, options.context, ranks);
    seams.attention = context_parallel.get();
  } else {
    positions = all_positions(options);
  }
  ids = declare_transformer(options.model, *seams.feed_forward, parameters);
  if (technique.kind == Technique::zero) {
    const int shards = technique.shards_of(ranks.ranks()), shard = ranks.rank() % shards;
    shard_ranks = std::make_unique<Communicator>(world, every(ranks.rank() - shard, shards), "shard");
    replicate_ranks =
        std::make_unique<Communicator>(world, every(shard, ranks.ranks() / shards, shards), "replicate");
    zero =
        std::make_unique<Zero>(technique.stage, parameters.group(), *shard_ranks, *replicate_ranks, stream);
    seams.hooks = {zero.get()};
  } else {
    parameters.allocate();
  }
  if (technique.kind == Technique::data_parallel || context_parallel) {
    data_parallel =
        std::make_unique<DataParallel>(DataParallelOptions{technique.sync, technique.bucket_mb},
                                       parameters.group(), gradient_ranks ? *gradient_ranks : ranks, stream);
    seams.hooks = {data_parallel.get()};
  }
  if (technique.kind == Technique::tensor_parallel) {
    tensor_parallel = make_tensor_parallel(options, options.tensor, options.rows(), ranks, stream);
    seams.region = tensor_parallel.get();
  }
  parameters.initialise(options.seed, stream);
  if (zero) zero->weights_changed();
  transformer = std::make_unique<Transformer>(options, ids, parameters, std::ssize(positions), seams, stream);
  if (technique.kind == Technique::pipeline) {
    pipeline = std::make_unique<Pipeline>(schedule(), world, world.all(), parts_of_model(), *transformer,
                                          stream, &parameters);
  } else {
    activations = transformer->make_activations(whole_model(options.model));
  }
  optimizer = std::make_unique<Optimizer>(options, parameters, stream);
  const bool splits = technique.splits_batch();
  loader = std::make_unique<HostBatchLoader>(options, splits ? ranks.rank() : 0, splits ? ranks.ranks() : 1,
                                             positions);
  world.begin_counting();
}

ParallelModel::~ParallelModel() {
  stream.synchronize();
  CUDA_CHECK(cudaStreamSynchronize(ranks.stream()));
}

void ParallelModel::accumulate(const std::vector<HostBatch>& global) {
  totals.reset();
  const std::vector<Batch> batches = loader->load(global, stream);
  if (pipeline) pipeline->run(batches, &totals);
  for (size_t i = 0; !pipeline && i < batches.size(); ++i) {
    transformer->forward(batches[i], *activations);
    transformer->backward(batches[i], *activations);
    if (technique.splits_tokens() || ranks.rank() == 0) totals.add_loss(activations->loss);
  }
  if (zero) zero->finish_gradient_sync();
  if (data_parallel) data_parallel->finish_gradient_sync();
  if (tensor_parallel) tensor_parallel->sum_partial_gradients(parameters);
  optimizer->add_norm_squared(totals.norm_squared());
  ranks.sum_scalars(totals.data(), totals.size, stream);
}

void ParallelModel::update(int64_t step) {
  optimizer->step(step, totals.norm_squared());
  if (zero) zero->weights_changed();
  totals.wait();
}

Schedule ParallelModel::schedule() const {
  return technique.schedule_of(ranks.ranks(), micro_batches_of_a_rank(options, 1));
}

std::vector<LayerRange> ParallelModel::parts_of_model() const {
  if (technique.kind != Technique::pipeline) return {whole_model(options.model)};
  return layers_of_rank(options, schedule(), ranks.rank());
}

}  // namespace pentatron
