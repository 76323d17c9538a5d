// Everything that a rank of the combined program has: the techniques of 02 to 06 and the experts, each in its
// seam of one transformer.
#pragma once

#include <memory>
#include <vector>

#include "../02_data_parallel/data_parallel.h"
#include "../03_zero/zero.h"
#include "../04_tensor_parallel/tensor_parallel.h"
#include "../05_pipeline_parallel/pipeline.h"
#include "../06_context_parallel/ring_attention.h"
#include "expert_parallel.h"
#include "mesh.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "program/program.h"
#include "program/totals.h"

namespace pentatron {

// Throws UsageError where the model and the batch can't be shared out over this mesh.
inline void check_combined(Options& options, const MeshShape& shape) {
  check_tensor_parallel(options, shape.tp, shape.cp);
  check_context_parallel(options, shape.cp);
  complete_pipeline_options(options, shape.pp, micro_batches_of_a_rank(options, shape.dp));
}

inline Schedule schedule_of(const Options& options, const MeshShape& shape) {
  return make_schedule(options.pp_schedule, shape.pp, micro_batches_of_a_rank(options, shape.dp),
                       options.vpp);
}

inline MemoryPrediction predict_memory(const Options& options, const MeshShape& shape, int rank) {
  const int stage = place_of(shape, rank).pp;
  const std::vector<LayerRange> chunks = layers_of_rank(options, stage, shape.pp, options.vpp);
  return predict_memory(options, element_sizes, micro_batches_of_a_rank(options, shape.dp),
                        {.zero_stage = options.zero_stage,
                         .data_ranks = shape.dp * shape.cp,
                         .gathered_weights_kept = shape.pp > 1,
                         .tensor_ranks = shape.tp,
                         .sequence_parallel = options.sequence_parallel,
                         .parts = parts_of_rank(schedule_of(options, shape), stage, chunks),
                         .deferred_weight_gradients = options.pp_schedule == PpSchedule::zb_h1,
                         .context_ranks = shape.cp});
}

// Its members are made in this order, which is that in which they need each other.
struct Combined {
  const Stream compute{"compute"};
  Mesh mesh;
  const std::vector<int32_t> positions;  // of every sequence, on this rank
  const int64_t rows;                    // of a micro-batch, on this rank
  const std::vector<LayerRange> chunks;  // of layers, on this rank
  TensorParallel region;
  RingAttention attention;
  ExpertParallel feed_forward;
  Parameters parameters;
  const TransformerParameters ids;
  const std::unique_ptr<UnitHooks> dense_hooks, expert_hooks;  // data parallelism or ZeRO, of each span
  HooksOfBothSpans hooks;
  Transformer model;
  Pipeline pipeline;
  Optimizer optimizer;
  StepTotals totals{compute};

  Combined(const Options& options, const MeshShape& shape, World& world)
      : mesh(shape, world),
        positions(context_positions(options, mesh.context.rank(), shape.cp)),
        rows(options.micro_batch_size * std::ssize(positions)),
        chunks(layers_of_rank(options, mesh.place.pp, shape.pp, options.vpp)),
        region(options.sequence_parallel, rows, options.model.d_model, mesh.tensor, compute),
        attention(options, mesh.context, shape.tp),
        feed_forward(options, mesh.of_parameters(options.model), rows, mesh.experts, mesh.context, compute),
        parameters(mesh.of_parameters(options.model)),
        ids(declare_transformer(options.model, feed_forward, parameters)),
        dense_hooks(make_hooks(options, Span::dense, mesh.gradients)),
        expert_hooks(make_hooks(options, Span::experts, mesh.expert_gradients)),
        hooks(initialise(options)),
        model(options.model, ids, parameters, options.micro_batch_size,
              static_cast<int>(std::ssize(positions)), options.sequence_length, options.recompute,
              {&hooks, &region, &attention, &feed_forward}, compute),
        pipeline(schedule_of(options, shape), world, mesh.pipeline, mesh.place.pp, chunks, model, compute),
        optimizer(options, parameters, compute) {}

  // Forward and backward of this rank's part of a step. Whatever `compute` is given next has the global
  // gradient, the loss and the squared norm.
  void accumulate(const std::vector<Batch>& batches) {
    totals.reset();
    feed_forward.begin_step();
    parameters.zero_gradients(compute);
    pipeline.run(batches, mesh.place.tp == 0 ? &totals : nullptr);  // all tensor ranks have the same loss
    if (feed_forward.has_experts()) totals.add_loss(feed_forward.balance_loss());
    hooks.finish();
    region.sum_partial_gradients(parameters);
    optimizer.add_norm_squared(totals.norm_squared());
    mesh.all.sum_scalars(totals.data(), totals.size, compute);
  }

  // Then the weights. Waits for the totals.
  void update(int64_t step) {
    optimizer.step(step, totals.norm_squared());
    hooks.weights_changed();
    totals.wait();
  }

 private:
  std::unique_ptr<UnitHooks> make_hooks(const Options& options, Span span, Communicator& ranks) {
    const std::vector<int> units = units_of(chunks);
    if (options.zero_stage > 0) {
      const ZeroScope scope = {.span = span, .units = units, .kept = mesh.shape.pp > 1};
      return std::make_unique<Zero>(options.zero_stage, parameters, ranks, compute, scope);
    }
    parameters.allocate(span, units);
    return std::make_unique<DataParallel>(options.dp_sync, options.bucket_mb, parameters, ranks, compute,
                                          span);
  }

  HooksOfBothSpans initialise(const Options& options) {
    HooksOfBothSpans both(*dense_hooks, *expert_hooks);
    parameters.initialise(options.seed, compute);
    both.weights_changed();
    return both;
  }
};

}  // namespace pentatron
