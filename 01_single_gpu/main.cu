// 01: one GPU. A step loops over micro-batches (gradient accumulation), then updates the weights.
#include "checkpoint/checkpoint.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "run/program.h"
#include "run/sample.h"
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
  const MemoryPrediction predicted = predict_memory(options);
  require_memory(predicted);
  parameters.allocate();
  load_or_initialise(options, parameters, compute);
  const Seams seams = {{}, &region, &attention, &feed_forward};

  Transformer model(options, ids, parameters, options.sequence_length, seams, compute);
  const auto activations = model.make_activations(whole_model(options.model));
  Optimizer optimizer(options, parameters, compute);
  Checkpoints checkpoints(options, parameters, optimizer, compute);
  BatchLoader loader(data, options);
  StepTotals totals(compute);
  Run run(options, data, parameters, totals);

  for (int64_t step = checkpoints.first_step(); step < options.steps; step = run.next_step(step)) {
    run.begin_step(step);
    totals.reset();
    for (const Batch& batch : loader.load(step, compute)) {
      model.forward(batch, *activations);
      model.backward(batch, *activations);
      totals.add_loss(activations->loss);
    }
    optimizer.add_norm_squared(totals.norm_squared());
    optimizer.step(step, totals.norm_squared());
    run.end_step();
    checkpoints.after_update(step);
  }
  checkpoints.finish();
  run.summarize(predicted);
  const auto logits = [&](const Batch& batch) { return model.forward(batch, *activations); };
  run.show_sample(write_sample(options, parameters[ids.head], logits, compute));
}

}  // namespace

int main(int argc, char** argv) { return run_program(argc, argv, "Trains a transformer on one GPU.", train); }
