// precisions: fp64 bf16 fp16 fp8
#include "combined_model.h"

namespace pentatron {

CombinedModel::CombinedModel(const CombinedCase& c, World& world)
    : of(c),
      mesh(of.shape, world),
      chunks(layers_of_rank(options, schedule_of(options, of.shape), mesh.at.pp)),
      positions(positions_of_rank(options, options.context, mesh.at.cp, of.shape.cp)),
      tensor_parallel(
          make_tensor_parallel(options, options.tensor, mesh.rows(options), mesh.tensor, compute)),
      attention(context_attention(options, options.context, mesh.context, of.shape.tp)),
      with_experts(options.model.experts > 0
                       ? std::make_unique<ExpertParallel>(options, options.experts, mesh.experts, compute,
                                                          &mesh.context, &mesh.tensor)
                       : nullptr),
      feed_forward(with_experts ? *with_experts : dense_mlp),
      parameters(mesh.parameter_layout(units_of(chunks))),
      ids(declare_transformer(options.model, feed_forward, parameters)),
      dense(sync_gradients(options, mesh, parameters, dense_group, compute)),
      experts(sync_gradients(options, mesh, parameters, expert_group, compute)),
      seams(initialised()),
      model(options, ids, parameters, std::ssize(positions), seams, compute),
      pipeline(schedule_of(options, of.shape), world, mesh.pipeline, chunks, model, compute),
      optimizer(options, parameters, compute),
      loader(options, mesh.at.dp, of.shape.dp, positions) {
  world.begin_counting();  // as Run does
}

CombinedModel::~CombinedModel() { CUDA_CHECK(cudaStreamSynchronize(compute)); }

void CombinedModel::accumulate(const std::vector<HostBatch>& global) {
  totals.reset();
  pipeline.run(loader.load(global, compute), mesh.at.tp == 0 ? &totals : nullptr);
  if (with_experts) {
    balance_loss = to_host(with_experts->balance_loss(), compute)[0];
    with_experts->add_balance_loss(totals);
  }
  for (UnitHooks* hooks : seams.hooks) hooks->finish_gradient_sync();
  tensor_parallel->sum_partial_gradients(parameters);
  optimizer.add_norm_squared(totals.norm_squared());
  mesh.all.sum_scalars(totals.data(), totals.size, compute);
}

void CombinedModel::update(int64_t step) {
  optimizer.step(step, totals.norm_squared());
  for (UnitHooks* hooks : seams.hooks) hooks->weights_changed();
  totals.wait();
}

Seams CombinedModel::initialised() {
  const Seams all = {{dense.get(), experts.get()}, tensor_parallel.get(), attention.get(), &feed_forward};
  parameters.initialise(options.seed, compute);
  for (UnitHooks* hooks : all.hooks) hooks->weights_changed();
  return all;
}

}  // namespace pentatron
