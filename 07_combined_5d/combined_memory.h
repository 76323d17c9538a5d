// The predicted memory of a rank of the mesh: each technique changes a rank's share of all (memory.h).
#pragma once

#include <numeric>
#include <vector>

#include "../02_data_parallel/data_parallel.h"
#include "../03_zero/zero_memory.h"
#include "../04_tensor_parallel/tensor_parallel.h"
#include "../05_pipeline_parallel/stages.h"
#include "../06_context_parallel/context_parallel.h"
#include "expert_memory.h"
#include "mesh.h"

namespace pentatron {

// The pipeline schedule of one data rank's micro-batches.
inline Schedule schedule_of(const CombinedOptions& options, const MeshShape& shape) {
  return chosen_schedule(options.pipeline, shape.pp, micro_batches_of_a_rank(options, shape.dp));
}

// Device memory of a rank that keeps `pipeline` as one of its pipeline's ranks.
inline MemoryPrediction predict_memory(const CombinedOptions& options, const MeshShape& shape,
                                       const PipelineRank& pipeline) {
  RankShare share = data_parallel_share(options, options.data_parallel, shape.dp);
  share = context_parallel_share(share, options.context, shape.cp, shape.tp);
  share = tensor_parallel_share(share, options.tensor, shape.tp);
  share = expert_parallel_share(share, options.experts);
  share = pipeline_share(share, pipeline);
  share.replicas = shape.shards();

  MemoryPrediction memory = predict_memory(share);
  const auto shard = [&](const std::vector<size_t>& units, int ranks) {
    memory = in_shards(memory, options.zero.zero_stage, options, units, ranks);
    if (options.zero.zero_stage < 3 || shape.pp == 1) return;
    // ZeRO-3 has a buffer for each unit in a pipeline (combined.h), where in_shards counts two.
    const size_t all = std::accumulate(units.begin(), units.end(), size_t{0});
    size_t& buffers = memory.unit_buffers[Purpose::weights];
    buffers = buffers - two_buffers(units) * sizeof(real) + all * sizeof(real);
  };
  shard(share.unit_sizes(), share.replicas);
  if (options.model.experts > 0) {
    const std::vector<size_t> experts = expert_units(share, options.experts);
    memory.resident += parameter_memory(options, experts);
    shard(experts, share.replicas / shape.ep);
  }
  return memory;
}
// Device memory of `rank` of the world.
inline MemoryPrediction predict_memory(const CombinedOptions& options, const MeshShape& shape, int rank) {
  const int stage = coordinates_of(shape, rank).pp;
  return predict_memory(options, shape, pipeline_rank(options, schedule_of(options, shape), stage));
}

}  // namespace pentatron
