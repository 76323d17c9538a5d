// What a pipeline changes in the memory of a rank (memory.h): its layers, and the micro-batches that it keeps.
#pragma once

#include <vector>

#include "model/memory.h"
#include "stages.h"

namespace pentatron {

// What a pipeline rank keeps, as its schedule says.
struct PipelineRank {
  int copies;                         // of the model, in the whole pipeline
  bool splits_backward;               // weight gradients are late
  std::vector<ModelPart> parts = {};  // [chunks]
  int inputs = 0;                     // buffers for the inputs of all chunks
};
inline PipelineRank pipeline_rank(const TrainingConfig& training, const Schedule& schedule, int rank) {
  PipelineRank keeps = {schedule.copies, schedule.splits_backward};
  const std::vector<LayerRange> chunks = layers_of_rank(training, schedule, rank);
  for (int c = 0; c < std::ssize(chunks); ++c) {
    keeps.parts.push_back({chunks[c], peak_in_flight(schedule.ranks[rank], c).until_weight_gradient});
    if (!chunks[c].embedding) keeps.inputs += input_buffers(schedule, rank, c);
  }
  return keeps;
}

// What predict_memory (memory.h) needs of this rank. `share` has its MLP already.
inline RankShare pipeline_share(RankShare share, const PipelineRank& rank) {
  share.parts = rank.parts;
  share.replicas *= rank.copies;
  size_t& bytes = share.added[Purpose::activations];
  bytes += rank.inputs * share.outside * share.columns.d * sizeof(real);
  if (!rank.splits_backward) return share;
  // For late weight gradients each micro-batch has the gradients inside its layers to itself, and copies of
  // the residual stream's gradient: one for attention's output, one for the MLP's, one for the embedding's
  // (WgradsOnRequest).
  const size_t copy = share.rows * share.columns.d * sizeof(real);
  for (const auto& [range, in_flight] : rank.parts) {
    bytes += in_flight * (range.last - range.first) * (share.gradients_of_layer() + 2 * copy);
    if (range.embedding) bytes += in_flight * copy;
  }
  return share;
}

}  // namespace pentatron
