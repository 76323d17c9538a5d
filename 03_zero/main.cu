// 03: ZeRO. As 02, but the data-parallel ranks shard optimizer states, gradients and weights (zero.h).
#include "checkpoint/checkpoint.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "options.h"
#include "run/parallel_program.h"
#include "run/totals.h"
#include "zero.h"
#include "zero_memory.h"

using namespace pentatron;

namespace {

void train(const OptionsWith<ZeroOptions>& options, World& world) {
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  TensorRegion region;
  AttentionCore attention(options.attention);
  FeedForward feed_forward;

  const int shards = options.technique.shards(world.ranks());
  const int shard = world.rank() % shards, shard_group = world.rank() / shards;
  Parameters parameters({.groups = {{shard, shards, shard_group}}});
  const TransformerParameters ids = declare_transformer(options.model, feed_forward, parameters);
  Communicator data_ranks(world, world.all(), "data");
  Communicator shard_ranks(world, every(shard_group * shards, shards), "shard");
  Communicator replicate_ranks(world, every(shard, world.ranks() / shards, shards), "replicate");
  const MemoryPrediction predicted = require_memory(zero_memory(options, options.technique, world.ranks()));
  Zero zero(options.technique.zero_stage, parameters.group(), shard_ranks, replicate_ranks, compute);
  parameters.initialise(options.seed, compute);
  const Seams seams = {{&zero}, &region, &attention, &feed_forward};

  Transformer model(options, ids, parameters, options.sequence_length, seams, compute);
  const auto activations = model.make_activations(whole_model(options.model));
  Optimizer optimizer(options, parameters, compute);
  Checkpoint checkpoint(options, parameters, optimizer, compute, data.checksum());
  zero.weights_changed();
  BatchLoader loader(data, options, world.rank(), world.ranks());
  StepTotals totals(compute);
  Run run(options, data, parameters, totals, checkpoint);

  while (run.next_step()) {
    for (const Batch& batch : loader.load(run.step(), compute)) {
      model.forward(batch, *activations);
      model.backward(batch, *activations);
      totals.add_loss(activations->loss);
    }
    zero.finish_gradient_sync();
    optimizer.add_norm_squared(totals.norm_squared());
    data_ranks.sum_scalars(totals.data(), totals.size, compute);
    optimizer.step(run.step(), totals.norm_squared());
    zero.weights_changed();
  }
  run.summarize(predicted, {{"dp", world.ranks()}});
  const auto logits = [&](const Batch& batch) { return model.forward(batch, *activations); };
  run.show_sample(write_sample(options, parameters[ids.head], logits, compute));
}

}  // namespace

int main(int argc, char** argv) { return run_program(argc, argv, "Trains a transformer with ZeRO.", train); }
