// The combined program's rank (07_combined_5d/combined.h) with batches that tests make.
#pragma once

#include <vector>

#include "../../07_combined_5d/combined.h"
#include "model.h"
#include "mpi_tests.h"

namespace pentatron {

struct CombinedCase {
  MeshShape shape;
  Options options;
};

// This rank's part of the batches of all ranks, as BatchLoader makes it.
inline std::vector<Batch> upload(const Combined& combined, const Options& options,
                                 const std::vector<HostBatch>& global, std::vector<BatchBuffer>& buffers) {
  double targets = 0;
  for (const HostBatch& batch : global) {
    for (const int32_t target : batch.targets) targets += target != ignored_target;
  }
  const int mine = micro_batches_of_a_rank(options, combined.mesh.shape.dp);
  const size_t of_a_sequence = combined.positions.size();
  std::vector<Batch> batches;
  for (int i = 0; i < mine; ++i) {
    if (std::ssize(buffers) == i) buffers.emplace_back(combined.rows);
    const HostBatch& host = global[combined.mesh.place.dp * mine + i];
    for (int64_t row = 0; row < combined.rows; ++row) {
      const int32_t position = combined.positions[row % of_a_sequence];
      const size_t in_batch = row / of_a_sequence * options.sequence_length + position;
      buffers[i].tokens()[row] = host.tokens[in_batch];
      buffers[i].targets()[row] = host.targets[in_batch];
      buffers[i].positions()[row] = position;
    }
    batches.push_back(buffers[i].upload(targets, std::ssize(global), i + 1 == mine, combined.compute));
  }
  return batches;
}

}  // namespace pentatron
