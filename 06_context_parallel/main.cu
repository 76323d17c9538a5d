// 06: context parallelism. Each rank has a part of every sequence; its queries see the keys of the others.
#include "../02_data_parallel/data_parallel.h"
#include "checkpoint/checkpoint.h"
#include "context_parallel.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "run/parallel_program.h"
#include "run/totals.h"

using namespace pentatron;

namespace {

void train(const OptionsWith<ContextParallelOptions>& options, World& world) {
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  TensorRegion region;
  FeedForward feed_forward;

  Parameters parameters({.groups = {{world.rank(), world.ranks()}}});
  const TransformerParameters ids = declare_transformer(options.model, feed_forward, parameters);
  Communicator context_ranks(world, world.all(), "context");
  Communicator gradient_ranks(world, world.all(), "gradients");
  const MemoryPrediction predicted =
      require_memory(predict_memory(context_parallel_share(options, options.technique, world.ranks())));
  parameters.allocate();
  parameters.initialise(options.seed, compute);
  const auto attention = context_attention(options, options.technique, context_ranks);
  DataParallel data_parallel({DpSync::bucket, default_bucket_mb(options.model)}, parameters.group(),
                             gradient_ranks, compute);
  const Seams seams = {{&data_parallel}, &region, attention.get(), &feed_forward};

  const auto positions = positions_of_rank(options, options.technique, world.rank(), world.ranks());
  Transformer model(options, ids, parameters, std::ssize(positions), seams, compute);
  const auto activations = model.make_activations(whole_model(options.model));
  Optimizer optimizer(options, parameters, compute);
  Checkpoint checkpoint(options, parameters, optimizer, compute, data.checksum());
  BatchLoader loader(data, options, 0, 1, positions);
  StepTotals totals(compute);
  Run run(options, data, parameters, totals, checkpoint);

  while (run.next_step()) {
    for (const Batch& batch : loader.load(run.step(), compute)) {
      model.forward(batch, *activations);
      model.backward(batch, *activations);
      totals.add_loss(activations->loss);
    }
    data_parallel.finish_gradient_sync();  // gradients, of own tokens: P -> I
    optimizer.add_norm_squared(totals.norm_squared());
    gradient_ranks.sum_scalars(totals.data(), totals.size, compute);
    optimizer.step(run.step(), totals.norm_squared());
  }
  run.summarize(predicted, {{"cp", world.ranks()}});
  const auto logits = [&](const Batch& batch) { return model.forward(batch, *activations); };
  run.show_sample(write_sample(options, parameters[ids.head], logits, compute, world, positions));
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, "Trains a transformer with context parallelism.", train, Attention::tiled);
}
