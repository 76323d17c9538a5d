// 05: pipeline parallelism. Each rank holds some layers; micro-batches go through them as a schedule says.
#include "checkpoint/checkpoint.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "pipeline.h"
#include "run/parallel_program.h"
#include "run/totals.h"

using namespace pentatron;

namespace {

void train(const OptionsWith<PipelineOptions>& options, World& world) {
  if (show_pictures(options, world)) return;
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  TensorRegion region;
  AttentionCore attention(options.attention);
  FeedForward feed_forward;
  const Schedule schedule = schedule_of(options, options.technique);
  const std::vector<LayerRange> chunks = layers_of_rank(options, schedule, world.rank());

  Parameters parameters(pipeline_layout(schedule, world.rank(), chunks));
  const TransformerParameters ids = declare_transformer(options.model, feed_forward, parameters);
  Communicator pipeline_ranks(world, world.all(), "pipeline");
  const MemoryPrediction predicted =
      require_memory(predict_memory(pipeline_share(options, pipeline_rank(options, schedule, world.rank()))),
                     channels_of_pipeline(schedule, world.rank(), /*sums_copies=*/true));
  parameters.allocate();
  parameters.initialise(options.seed, compute);
  const Seams seams = {{}, &region, &attention, &feed_forward};

  Transformer model(options, ids, parameters, options.sequence_length, seams, compute);
  Pipeline pipeline(schedule, world, world.all(), chunks, model, compute, &parameters);
  Optimizer optimizer(options, parameters, compute);
  Checkpoint checkpoint(options, parameters, optimizer, compute, data.checksum());
  BatchLoader loader(data, options);
  StepTotals totals(compute);
  Run run(options, data, parameters, totals, checkpoint);

  while (run.next_step()) {
    pipeline.run(loader.load(run.step(), compute), &totals);
    optimizer.add_norm_squared(totals.norm_squared());
    pipeline_ranks.sum_scalars(totals.data(), totals.size, compute);
    optimizer.step(run.step(), totals.norm_squared());
  }
  run.summarize(predicted, {{"pp", world.ranks()}});
  const auto logits = [&](const Batch& batch) { return pipeline.forward(batch); };
  run.show_sample(write_sample(options, parameters[ids.head], logits, compute, world));
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, "Trains a transformer with pipeline parallelism.", train);
}
