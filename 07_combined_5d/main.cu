// 07: all of them at once. Ranks form a mesh (mesh.h) of tensor, context, data and pipeline axes; on each,
// the techniques of 02 to 06 and the experts act on one transformer (combined.h).
#include "../05_pipeline_parallel/draw_schedule.h"
#include "combined.h"
#include "program/sample.h"

using namespace pentatron;

namespace {

void train(const Options& options, const MeshShape& shape, World& world) {
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const MemoryPrediction predicted = predict_memory(options, shape, world.rank());
  require_memory(predicted, free_device_memory());
  Combined combined(options, shape, world);
  BatchLoader loader(data, options, combined.mesh.place.dp, shape.dp, combined.positions);
  Run run(options, data, combined.parameters, world);

  for (int64_t step = 0; step < options.steps; ++step) {
    run.begin_step();
    combined.accumulate(loader.load(step, combined.compute));
    combined.update(step);
    run.end_step(step, combined.totals);
  }
  run.finish(predicted,
             {{"tp", shape.tp}, {"cp", shape.cp}, {"dp", shape.dp}, {"pp", shape.pp}, {"ep", shape.ep}});
  // Of data-parallel ranks, which all compute the same, one is heard.
  const auto logits = [&](const Batch& batch) {
    const Tensor mine = combined.pipeline.forward(batch);
    return combined.mesh.place.dp == 0 ? mine : Tensor();
  };
  run.show_sample(write_sample(options, combined.parameters[combined.ids.head], logits, combined.compute,
                               world, combined.positions));
}

}  // namespace

int main(int argc, char** argv) {
  return run_program_on_ranks(argc, argv, [&](World& world) {
    Options options = parse_options(
        argc, argv, "Trains a transformer on a mesh of tensor, context, data, pipeline and expert axes.",
        {OptionGroup::mesh, OptionGroup::data_parallel, OptionGroup::zero, OptionGroup::tensor_parallel,
         OptionGroup::pipeline, OptionGroup::context_parallel, OptionGroup::experts,
         OptionGroup::communication},
        Attention::tiled);
    const MeshShape shape = mesh_shape(options, world.ranks());
    check_combined(options, shape);
    if (options.show_mesh || options.show_schedule) {
      if (world.rank() == 0 && options.show_mesh) std::cout << draw_mesh(shape);
      if (world.rank() == 0 && options.show_schedule)
        show_schedule(options, micro_batches_of_a_rank(options, shape.dp));
      return;
    }
    world.configure(options);
    train(options, shape, world);
  });
}
