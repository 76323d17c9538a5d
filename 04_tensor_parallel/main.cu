// 04: tensor parallelism. All ranks train on the same micro-batches. Each holds a part of every matrix, and
// tensor_parallel.h sums the partial results.
#include "checkpoint/checkpoint.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "run/parallel_program.h"
#include "run/totals.h"
#include "tensor_parallel.h"

using namespace pentatron;

namespace {

void train(const OptionsWith<TensorParallelOptions>& options, World& world) {
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  AttentionCore attention(options.attention);
  FeedForward feed_forward;

  Parameters parameters({.tensor_rank = world.rank(), .tensor_ranks = world.ranks()});
  const TransformerParameters ids = declare_transformer(options.model, feed_forward, parameters);
  Communicator tensor_ranks(world, world.all(), "tensor", tensor_blocks);
  const MemoryPrediction predicted =
      require_memory(predict_memory(tensor_parallel_share(options, options.technique, world.ranks())));
  const auto tensor_parallel =
      make_tensor_parallel(options, options.technique, options.rows(), tensor_ranks, compute);
  parameters.allocate();
  parameters.initialise(options.seed, compute);
  const Seams seams = {{}, tensor_parallel.get(), &attention, &feed_forward};

  Transformer model(options, ids, parameters, options.sequence_length, seams, compute);
  const auto activations = model.make_activations(whole_model(options.model));
  Optimizer optimizer(options, parameters, compute);
  Checkpoint checkpoint(options, parameters, optimizer, compute, data.checksum());
  BatchLoader loader(data, options);
  StepTotals totals(compute);
  Run run(options, data, parameters, totals, checkpoint);

  while (run.next_step()) {
    for (const Batch& batch : loader.load(run.step(), compute)) {
      model.forward(batch, *activations);
      model.backward(batch, *activations);
      if (world.rank() == 0) totals.add_loss(activations->loss);  // I: all have it, it counts once
    }
    tensor_parallel->sum_partial_gradients(parameters);  // P -> I
    optimizer.add_norm_squared(totals.norm_squared());
    tensor_ranks.sum_scalars(totals.data(), totals.size, compute);
    optimizer.step(run.step(), totals.norm_squared());
  }
  run.summarize(predicted, {{"tp", world.ranks()}});
  const auto logits = [&](const Batch& batch) { return model.forward(batch, *activations); };
  run.show_sample(write_sample(options, parameters[ids.head], logits, compute, world));
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, "Trains a transformer with tensor parallelism.", train);
}
