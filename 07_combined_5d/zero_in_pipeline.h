// ZeRO-3 in a pipeline, which uses a unit again for every micro-batch. To gather its weights each time would
// cost too much. So they stay gathered until the optimizer changes them, and only a step's first micro-batch
// gathers (PyTorch's FSDP: reshard_after_forward=False). This takes a buffer for each unit, not two for all.
#pragma once

#include <numeric>
#include <vector>

#include "../03_zero/zero.h"
#include "../03_zero/zero_memory.h"

namespace pentatron {

class ZeroInPipeline : public Zero {
 public:
  ZeroInPipeline(int stage, ParameterGroup& group, Communicator& shard_ranks, Communicator& replicate_ranks,
                 cudaStream_t compute)
      : Zero(stage, group, shard_ranks, replicate_ranks, compute, sizes_of(group)) {}

 private:
  // [units of the model]; 0 for those of other ranks.
  static std::vector<size_t> sizes_of(const ParameterGroup& group) {
    std::vector<size_t> sizes;
    for (const int unit : group.units()) {
      sizes.resize(unit + 1);
      sizes[unit] = group.size(unit);
    }
    return sizes;
  }

  WeightBuffer& buffer_for(int unit, int /*other*/) override { return weight_buffer(unit); }
};

// in_shards (03's zero_memory.h) for stage 3 in a pipeline, where all units of these sizes have a buffer.
inline MemoryPrediction with_all_gathered(MemoryPrediction memory, const std::vector<size_t>& units) {
  const size_t all = std::accumulate(units.begin(), units.end(), size_t{0});
  size_t& buffers = memory.unit_buffers[Purpose::weights];
  buffers = buffers - two_buffers(units) * sizeof(real) + all * sizeof(real);
  return memory;
}

}  // namespace pentatron
