// What the combined program needs beside its mesh and its experts, because it involves all techniques:
// checks of the options, and data parallelism or ZeRO for each parameter group.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../02_data_parallel/data_parallel.h"
#include "../03_zero/zero.h"
#include "../04_tensor_parallel/tensor_parallel.h"
#include "../05_pipeline_parallel/pipeline.h"
#include "../06_context_parallel/context_parallel.h"
#include "combined_memory.h"
#include "expert_parallel.h"
#include "mesh.h"
#include "model/batch.h"
#include "run/program.h"

namespace pentatron {

// Completes the options. Throws UsageError if this mesh can't divide the model or the batch.
inline void check_combined(CombinedOptions& options, const MeshShape& shape) {
  const int64_t rows = options.rows() / shape.cp;
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

// With --ranks, a dry run has only the ranks that differ (fold.h, workbench/fold.cu).
void fold_world(const CombinedOptions& options, World& world);

// With --show-mesh and --show-schedule, rank 0 prints the pictures, and the program does not train.
inline bool show_pictures(const CombinedOptions& options, const Peers& peers) {
  const MeshShape shape = mesh_shape(options, peers.ranks());
  const bool first = peers.rank() == 0;
  if (first && options.show_mesh) show_mesh(shape);
  if (first && options.pipeline.show_schedule)
    show_schedule(options.pipeline, micro_batches_of_a_rank(options, shape.dp));
  return options.show_mesh || options.pipeline.show_schedule;
}

// A pipeline uses a unit again for every micro-batch. To gather its weights each time would cost too much. So
// ZeRO-3 gets a buffer for each unit there, in place of two for all, and only a step's first micro-batch
// gathers (PyTorch's FSDP: reshard_after_forward=False).
inline std::vector<size_t> a_buffer_for_each(const ParameterGroup& group) {
  std::vector<size_t> sizes;  // [units of the model]; 0 for those of other ranks
  for (const int unit : group.units()) {
    sizes.resize(unit + 1);
    sizes[unit] = group.size(unit);
  }
  return sizes;
}

// Allocates one parameter group, and returns the hooks that sum its gradients: data parallelism, or ZeRO.
inline std::unique_ptr<UnitHooks> sync_gradients(const CombinedOptions& options, Mesh& mesh,
                                                 Parameters& parameters, int group_number,
                                                 cudaStream_t compute) {
  ParameterGroup& group = parameters.group(group_number);
  Communicator& ranks = group_number == dense_group ? mesh.gradients : mesh.expert_gradients;
  if (options.zero.zero_stage > 0) {
    const auto buffers = mesh.shape.pp > 1 ? a_buffer_for_each(group) : std::vector<size_t>();
    return std::make_unique<Zero>(options.zero.zero_stage, group, ranks, mesh.replicate, compute, buffers);
  }
  group.allocate();
  return std::make_unique<DataParallel>(options.data_parallel, group, ranks, compute);
}

}  // namespace pentatron
