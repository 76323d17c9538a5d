// What the combined program needs beside its mesh and its experts, because it involves all techniques:
// checks of the options, the prediction of memory, and data parallelism or ZeRO for each parameter group.
#pragma once

#include <iostream>
#include <memory>
#include <string>

#include "../02_data_parallel/data_parallel.h"
#include "../03_zero/zero.h"
#include "../04_tensor_parallel/tensor_parallel.h"
#include "../05_pipeline_parallel/pipeline.h"
#include "../06_context_parallel/context_parallel.h"
#include "expert_parallel.h"
#include "mesh.h"
#include "model/batch.h"
#include "run/program.h"

namespace pentatron {

// Completes the options. Throws UsageError if this mesh can't divide the model or the batch.
inline void check_combined(CombinedOptions& options, const MeshShape& shape) {
  const int64_t rows = int64_t{options.micro_batch_size} * options.sequence_length / shape.cp;
  check_tensor_parallel(options.model, options.tensor, shape.tp, rows,
                        std::string("--micro-batch-size x --seq-len") + (shape.cp > 1 ? " / --cp" : ""));
  check_context_parallel(options, options.context, shape.cp, shape.tp);
  fit_to_ranks(options, options.zero, shape.replicas());
  require(shape.shards() % shape.ep == 0, "--shard-ranks", shape.shards(), "a multiple of --ep, ", shape.ep);
  const int micro_batches = micro_batches_of_a_rank(options, shape.dp);
  complete_pipeline_options(options, options.pipeline, shape.pp, micro_batches);
  const bool has_buckets = options.zero.zero_stage == 0 && options.data_parallel.dp_sync == DpSync::bucket;
  require(!has_buckets || completes_from_the_end(chosen_schedule(options.pipeline, shape.pp, micro_batches)),
          "--dp-sync", "bucket",
          "overlap or naive: with this schedule a rank completes the gradients of an earlier stage before "
          "those of a later one");
}

inline void fit_to_ranks(CombinedOptions& options, int ranks) {
  check_combined(options, mesh_shape(options, options.ranks > 0 ? options.ranks : ranks));
}

// The pipeline schedule of one data rank's micro-batches.
inline Schedule schedule_of(const CombinedOptions& options, const MeshShape& shape) {
  return chosen_schedule(options.pipeline, shape.pp, micro_batches_of_a_rank(options, shape.dp));
}

// With --ranks, a dry run has only the ranks that differ (fold.h, workbench/fold.cu).
void fold_world(const CombinedOptions& options, World& world);

// With --show-mesh and --show-schedule, rank 0 prints the pictures, and the program does not train.
inline bool show_pictures(const CombinedOptions& options, const Peers& peers) {
  const MeshShape shape = mesh_shape(options, peers.ranks());
  const bool first = peers.rank() == 0;
  if (first && options.show_mesh) std::cout << draw_mesh(shape);
  if (first && options.pipeline.show_schedule)
    show_schedule(options.pipeline, micro_batches_of_a_rank(options, shape.dp));
  return options.show_mesh || options.pipeline.show_schedule;
}

// Device memory that a rank needs whose pipeline_share is `share`. RankShare says which share of
// the model and the batch a rank has; each technique in turn changes it.
inline MemoryPrediction predict_memory(const CombinedOptions& options, ElementSizes element,
                                       const MeshShape& shape, RankShare share) {
  share.replicas = {shape.shards()};
  share.sharded_states = options.zero.zero_stage;
  share.gathers_once_a_step = shape.pp > 1;
  share.tensor_ranks = shape.tp;
  share = context_parallel_share(options, options.context, shape.cp, share);
  share = tensor_parallel_share(options, options.tensor, shape.tp, share);
  share = expert_parallel_share(options, options.experts, share);
  return predict_memory(options, element, micro_batches_of_a_rank(options, shape.dp), share);
}
// The same for `rank` of the world.
inline MemoryPrediction predict_memory(const CombinedOptions& options, ElementSizes element,
                                       const MeshShape& shape, int rank) {
  return predict_memory(options, element, shape,
                        pipeline_share(options, schedule_of(options, shape), coordinates_of(shape, rank).pp));
}

// Allocates one parameter group, and returns the hooks that sum its gradients: data parallelism, or ZeRO. A
// pipeline uses a unit again for every micro-batch. To gather its weights each time would cost too much, so
// ZeRO-3 keeps them gathered until the end of the step.
inline std::unique_ptr<UnitHooks> sync_gradients(const CombinedOptions& options, Mesh& mesh,
                                                 Parameters& parameters, int group_number,
                                                 cudaStream_t compute) {
  ParameterGroup& group = parameters.group(group_number);
  Communicator& ranks = group_number == dense_group ? mesh.gradients : mesh.expert_gradients;
  if (options.zero.zero_stage > 0) {
    return std::make_unique<Zero>(options.zero.zero_stage, group, ranks, mesh.replicate, compute,
                                  mesh.shape.pp > 1 ? Reshard::after_step : Reshard::after_use);
  }
  group.allocate();
  return std::make_unique<DataParallel>(options.data_parallel, group, ranks, compute);
}

}  // namespace pentatron
