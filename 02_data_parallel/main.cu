// 02: data parallelism. Each rank computes the gradients of its own micro-batches; data_parallel.h sums them.
#include "checkpoint/checkpoint.h"
#include "data_parallel.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "run/parallel_program.h"
#include "run/totals.h"

using namespace pentatron;

namespace {

void train(const OptionsWith<DataParallelOptions>& options, World& world) {
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  TensorRegion region;
  AttentionCore attention(options.attention);
  FeedForward feed_forward;

  Parameters parameters({.groups = {{world.rank(), world.ranks()}}});
  const TransformerParameters ids = declare_transformer(options.model, feed_forward, parameters);
  Communicator data_ranks(world, world.all(), "data");
  const MemoryPrediction predicted =
      require_memory(predict_memory(data_parallel_share(options, options.technique, world.ranks())));
  parameters.allocate();
  parameters.initialise(options.seed, compute);
  DataParallel data_parallel(options.technique, parameters.group(), data_ranks, compute);
  const Seams seams = {{&data_parallel}, &region, &attention, &feed_forward};

  Transformer model(options, ids, parameters, options.sequence_length, seams, compute);
  const auto activations = model.make_activations(whole_model(options.model));
  Optimizer optimizer(options, parameters, compute);
  Checkpoint checkpoint(options, parameters, optimizer, compute, data.checksum());
  BatchLoader loader(data, options, world.rank(), world.ranks());
  StepTotals totals(compute);
  Run run(options, data, parameters, totals, checkpoint);

  while (run.next_step()) {
    for (const Batch& batch : loader.load(run.step(), compute)) {
      model.forward(batch, *activations);
      model.backward(batch, *activations);
      totals.add_loss(activations->loss);
    }
    data_parallel.finish_gradient_sync();
    optimizer.add_norm_squared(totals.norm_squared());
    data_ranks.sum_scalars(totals.data(), totals.size, compute);
    optimizer.step(run.step(), totals.norm_squared());
  }
  run.summarize(predicted, {{"dp", world.ranks()}});
  const auto logits = [&](const Batch& batch) { return model.forward(batch, *activations); };
  run.show_sample(write_sample(options, parameters[ids.head], logits, compute));
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, "Trains a transformer with data parallelism.", train);
}
