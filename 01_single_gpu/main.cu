// 01: one GPU. A step loops over micro-batches (gradient accumulation), then updates the weights.
#include "checkpoint/checkpoint.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "run/program.h"
#include "run/totals.h"

using namespace pentatron;

namespace {

void train(const Options& options) {
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  TensorRegion region;
  AttentionCore attention(options.attention);
  FeedForward feed_forward;

  Parameters parameters;
  const TransformerParameters ids = declare_transformer(options.model, feed_forward, parameters);
  const MemoryPrediction predicted = require_memory(predict_memory(options));
  parameters.allocate();
  parameters.initialise(options.seed, compute);
  const Seams seams = {{}, &region, &attention, &feed_forward};

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
      totals.add_loss(activations->loss);
    }
    optimizer.add_norm_squared(totals.norm_squared());
    optimizer.step(run.step(), totals.norm_squared());
  }
  run.summarize(predicted);
  const auto logits = [&](const Batch& batch) { return model.forward(batch, *activations); };
  run.show_sample(write_sample(options, parameters[ids.head], logits, compute));
}

}  // namespace

int main(int argc, char** argv) { return run_program(argc, argv, "Trains a transformer on one GPU.", train); }
