// 05: pipeline parallelism. Each rank holds some layers. Micro-batches go through the ranks in the order of a
// schedule (schedule.h), which pipeline.h executes.
#include "draw_schedule.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "pipeline.h"
#include "program/checkpoint.h"
#include "program/program.h"
#include "program/sample.h"
#include "program/totals.h"

using namespace pentatron;

namespace {

void train(const PipelineOptions& options, int micro_batches, World& world) {
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  TensorRegion region;
  AttentionCore attention(options.attention);
  FeedForward feed_forward;
  const Schedule schedule = make_schedule(options, world.ranks(), micro_batches);
  const std::vector<LayerRange> chunks = layers_of_rank(options, schedule, world.rank());

  Communicator copies(world, replicas_of(schedule, world.rank()), "copies");
  Parameters parameters({.groups = {{copies.rank(), copies.ranks()}}, .units = units_of(chunks)});
  const TransformerParameters ids = declare_transformer(options.model, feed_forward, parameters);
  const MemoryPrediction predicted =
      predict_memory(options, element_sizes, micro_batches, pipeline_share(schedule, world.rank(), chunks));
  Communicator pipeline_ranks(world, world.all(), "pipeline");
  require_memory(predicted, world);
  parameters.allocate();
  load_or_initialise(options, parameters, compute);
  const Seams seams = {{}, &region, &attention, &feed_forward};

  Transformer model(options, ids, parameters, options.sequence_length, seams, compute);
  Pipeline pipeline(schedule, world, world.all(), chunks, model, compute);
  Optimizer optimizer(options, parameters, compute);
  Checkpoints checkpoints(options, parameters, optimizer, compute, world);
  BatchLoader loader(data, options);
  StepTotals totals(compute);
  Run run(options, data, parameters, totals, world);

  for (int64_t step = checkpoints.first_step(); step < options.steps; ++step) {
    run.begin_step(step);
    totals.reset();
    pipeline.run(loader.load(step, compute), &totals);
    sum_gradients(parameters, copies, compute);
    optimizer.add_norm_squared(totals.norm_squared());
    pipeline_ranks.sum_scalars(totals.data(), totals.size, compute);
    checkpoints.before_update();
    optimizer.step(step, totals.norm_squared());
    checkpoints.after_update(step);
    run.end_step();
  }
  checkpoints.finish();
  run.summarize(predicted, {{"pp", world.ranks()}});
  const auto logits = [&](const Batch& batch) { return pipeline.forward(batch); };
  run.show_sample(write_sample(options, parameters[ids.head], logits, compute, world));
}

}  // namespace

int main(int argc, char** argv) {
  return run_program_on_ranks(argc, argv, [&](World& world) {
    auto options =
        parse_options<PipelineOptions>(argc, argv, "Trains a transformer with pipeline parallelism.");
    const int micro_batches = micro_batches_of_a_rank(options, 1);
    complete_pipeline_options(options, world.ranks(), micro_batches);
    if (options.show_schedule) {
      if (world.rank() == 0) show_schedule(options, micro_batches);
      return;
    }
    world.configure(options);
    train(options, micro_batches, world);
  });
}
