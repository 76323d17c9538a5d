// 07: all techniques at once. This is 01; each new or changed line ends with the stage that it comes from.
#include <optional>

#include "checkpoint/checkpoint.h"
#include "combined.h"  // 02-07
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "run/parallel_program.h"
#include "run/totals.h"

using namespace pentatron;

namespace {

void train(const CombinedOptions& options, World& world) {  // 02-07
  fold_world(options, world);                               // 07
  if (show_pictures(options, world)) return;                // 05, 07
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  const MeshShape shape = mesh_shape(options, world.ranks());                                // 07
  Mesh mesh(shape, world);                                                                   // 07
  const Schedule schedule = schedule_of(options, shape);                                     // 05
  const auto chunks = layers_of_rank(options, schedule, mesh.at.pp);                         // 05
  const auto positions = positions_of_rank(options, options.context, mesh.at.cp, shape.cp);  // 06
  const auto tensor_parallel =
      make_tensor_parallel(options, options.tensor, mesh.rows(options), mesh.tensor, compute);  // 04
  const auto attention = context_attention(options, options.context, mesh.context, shape.tp);   // 06
  std::optional<ExpertParallel> expert_mlp;                                                     // 07
  if (options.model.experts > 0)
    expert_mlp.emplace(options, options.experts, mesh.experts, compute, &mesh.context, &mesh.tensor);  // 07
  FeedForward dense_mlp;
  FeedForward& feed_forward = expert_mlp ? *expert_mlp : dense_mlp;  // 07

  Parameters parameters(mesh.parameter_layout(units_of(chunks)));  // 02-07
  const TransformerParameters ids = declare_transformer(options.model, feed_forward, parameters);
  const MemoryPrediction predicted =
      require_memory(predict_memory(options, shape, world.rank()),                        // 02-07
                     channels_of_pipeline(schedule, mesh.at.pp, /*sums_copies=*/false));  // 05
  const auto dense = sync_gradients(options, mesh, parameters, dense_group, compute);     // 02, 03
  const auto experts = sync_gradients(options, mesh, parameters, expert_group, compute);  // 07
  parameters.initialise(options.seed, compute);
  const Seams seams = {
      {dense.get(), experts.get()}, tensor_parallel.get(), attention.get(), &feed_forward};  // 02-07

  Transformer model(options, ids, parameters, std::ssize(positions), seams, compute);  // 06
  Pipeline pipeline(schedule, world, mesh.pipeline, chunks, model, compute);           // 05
  Optimizer optimizer(options, parameters, compute);
  Checkpoint checkpoint(options, parameters, optimizer, compute, data.checksum());
  for (UnitHooks* hooks : seams.hooks) hooks->weights_changed();       // 03
  BatchLoader loader(data, options, mesh.at.dp, shape.dp, positions);  // 02, 06
  StepTotals totals(compute);
  Run run(options, data, parameters, totals, checkpoint);

  while (run.next_step()) {
    pipeline.run(loader.load(run.step(), compute), mesh.at.tp == 0 ? &totals : nullptr);  // 05, 04
    if (expert_mlp) expert_mlp->add_balance_loss(totals);                                 // 07
    for (UnitHooks* hooks : seams.hooks) hooks->finish_gradient_sync();                   // 02, 03
    tensor_parallel->sum_partial_gradients(parameters);                                   // 04
    optimizer.add_norm_squared(totals.norm_squared());
    mesh.all.sum_scalars(totals.data(), totals.size, compute);  // 02
    optimizer.step(run.step(), totals.norm_squared());
    for (UnitHooks* hooks : seams.hooks) hooks->weights_changed();  // 03
  }
  run.summarize(predicted, shape.degrees());                                                          // 02
  const auto logits = [&](const Batch& batch) { return mesh.one_replica(pipeline.forward(batch)); };  // 05
  run.show_sample(write_sample(options, parameters[ids.head], logits, compute, world, positions));    // 02
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(
      argc, argv, "Trains a transformer on a mesh of tensor, context, data, pipeline and expert axes.", train,
      Attention::tiled);  // 06
}
