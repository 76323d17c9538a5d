// What ZeRO changes of predicted memory (memory.h).
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "model/batch.h"
#include "model/memory.h"
#include "options.h"

namespace pentatron {

// Elements of two unit buffers, each of the largest unit's size.
inline size_t two_buffers(const std::vector<size_t>& units) { return 2 * *std::ranges::max_element(units); }

// The prediction `memory` is of whole units of these sizes. Each of `ranks` ranks has a shard of them
// instead, and buffers for whole units.
inline MemoryPrediction in_shards(MemoryPrediction memory, int stage, const TrainingConfig& training,
                                  const std::vector<size_t>& units, int ranks) {
  const size_t all = std::accumulate(units.begin(), units.end(), size_t{0});
  const size_t two = two_buffers(units);
  const MemoryBytes of_others = parameter_memory(training, {all - all / ranks});
  auto& [resident, unit_buffers] = memory;
  if (stage >= 1) resident[Purpose::optimizer] -= of_others[Purpose::optimizer];
  if (stage >= 2) resident[Purpose::gradients] -= of_others[Purpose::gradients];
  if (stage >= 3) resident[Purpose::weights] -= of_others[Purpose::weights];
  // One is written, and the other one reduced; one is read, and the other one gathered.
  if (stage >= 2) unit_buffers[Purpose::gradients] += two * sizeof(accum);
  if (stage >= 3) unit_buffers[Purpose::weights] += two * sizeof(real);
  return memory;
}

// The prediction for one of `data_ranks`, each of which has its part of the micro-batches.
inline MemoryPrediction zero_memory(RankShare share, const ZeroOptions& options, int data_ranks) {
  share.micro_batches = micro_batches_of_a_rank(share.config, data_ranks);
  share.replicas = options.shards(data_ranks);
  return in_shards(predict_memory(share), options.zero_stage, share.config, share.unit_sizes(),
                   share.replicas);
}

}  // namespace pentatron
