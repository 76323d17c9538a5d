// What a rank of the combined program has (07_combined_5d/main.cu), with batches that tests make.
#pragma once

#include <vector>

#include "../../07_combined_5d/combined.h"
#include "model.h"
#include "mpi_tests.h"
#include "program/checkpoint.h"

namespace pentatron {

struct CombinedCase {
  MeshShape shape;
  Options options;

  // The same on one rank, in the plainest way.
  CombinedCase alone() const {
    CombinedCase c = {{}, options};
    c.options.pp_schedule = PpSchedule::one_f_one_b;
    c.options.zero_stage = 0;
    c.options.sequence_parallel = false;
    c.options.recompute = Recompute::none;
    c.options.ep = c.options.vpp = c.options.expert_chunks = 1;
    c.options.expert_products = ExpertProducts::loop;
    return c;
  }
};

// All ranks of the mesh make one, and may be fewer than those of the world. The members are made in this
// order, which is that in which they need each other.
struct CombinedModel {
  const CombinedCase of;
  const Options& options = of.options;
  const Stream compute{"compute"};
  Mesh mesh;
  const std::vector<LayerRange> chunks;
  const std::vector<int32_t> positions;
  TensorParallel tensor_parallel;
  std::unique_ptr<AttentionCore> attention;
  ExpertParallel feed_forward;
  Parameters parameters;
  const TransformerParameters ids;
  const std::unique_ptr<UnitHooks> dense, experts;
  const Seams seams;
  Transformer model;
  Pipeline pipeline;
  Optimizer optimizer;
  StepTotals totals{compute};
  HostBatchLoader loader;

  CombinedModel(const CombinedCase& c, World& world)
      : of(c),
        mesh(of.shape, world),
        chunks(layers_of_rank(options, schedule_of(options, of.shape), mesh.place.pp)),
        positions(positions_of_rank(options, mesh.place.cp, of.shape.cp)),
        tensor_parallel(options, mesh.rows(options), mesh.tensor, compute),
        attention(context_attention(options, mesh.context, of.shape.tp)),
        feed_forward(options, mesh.experts, compute, &mesh.context, &mesh.tensor),
        parameters(mesh.parameter_layout(units_of(chunks))),
        ids(declare_transformer(options.model, feed_forward, parameters)),
        dense(sync_gradients(options, mesh, parameters, dense_group, compute)),
        experts(sync_gradients(options, mesh, parameters, expert_group, compute)),
        seams(initialised()),
        model(options, ids, parameters, std::ssize(positions), seams, compute),
        pipeline(schedule_of(options, of.shape), world, mesh.pipeline, chunks, model, compute),
        optimizer(options, parameters, compute),
        loader(options, mesh.place.dp, of.shape.dp, positions) {
    world.begin_counting();  // as Run does
  }
  ~CombinedModel() { CUDA_CHECK(cudaStreamSynchronize(compute)); }

  // Forward and backward of this rank's part of a step; then the global gradient, loss and norm are on their
  // way.
  void accumulate(const std::vector<HostBatch>& global) {
    totals.reset();
    pipeline.run(loader.load(global, compute), mesh.place.tp == 0 ? &totals : nullptr);
    balance_loss = feed_forward.balance_loss().data ? to_host(feed_forward.balance_loss(), compute)[0] : 0;
    feed_forward.add_balance_loss(totals);
    for (UnitHooks* hooks : seams.hooks) hooks->finish_gradient_sync();
    tensor_parallel.sum_partial_gradients(parameters);
    optimizer.add_norm_squared(totals.norm_squared());
    mesh.all.sum_scalars(totals.data(), totals.size, compute);
  }
  double balance_loss = 0;  // this rank's part

  void update(int64_t step) {
    optimizer.step(step, totals.norm_squared());
    for (UnitHooks* hooks : seams.hooks) hooks->weights_changed();
    totals.wait();
  }

  int micro_batches() const { return micro_batches_of_a_rank(options, of.shape.dp); }
  std::vector<double> weights(int id) { return to_host(parameters.weights(id), compute); }
  std::vector<double> gradients(int id) { return to_host(parameters.gradients(id).sum, compute); }

 private:
  Seams initialised() {
    const Seams all = {{dense.get(), experts.get()}, &tensor_parallel, attention.get(), &feed_forward};
    load_or_initialise(options, parameters, compute);
    for (UnitHooks* hooks : all.hooks) hooks->weights_changed();
    return all;
  }
};

}  // namespace pentatron
