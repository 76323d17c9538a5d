// What a pipeline rank has: a schedule for its micro-batches, the layers of its chunks, the ranks with the
// same layers, neighbours, and memory.
#pragma once

#include <set>
#include <utility>
#include <vector>

#include "choose_schedule.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/parameters.h"
#include "model/transformer.h"
#include "ranks/comm.h"

namespace pentatron {

// The schedule of a pipeline that has the whole batch.
inline Schedule schedule_of(const TrainingConfig& training, const PipelineOptions& options) {
  return chosen_schedule(options, options.pp, micro_batches_of_a_rank(training, 1));
}
inline void fit_to_ranks(const Options& all, PipelineOptions& options, int ranks) {
  complete_pipeline_options(all, options, ranks, micro_batches_of_a_rank(all, 1));
}

// The layers of a rank's chunks. A stage costs what its products cost, in units of a layer. So the head
// counts; the embedding is a lookup and does not.
inline std::vector<LayerRange> layers_of_rank(const TrainingConfig& options, const Schedule& schedule,
                                              int rank) {
  const ModelConfig& m = options.model;
  const double in_head = static_cast<double>(m.vocab_size) * m.d_model;
  const double in_layer = static_cast<double>(active_parameter_count(options.model) - 2 * in_head) / m.layers;
  const double in_attention = 2.0 * options.sequence_length * m.d_model;  // scores and output
  const int stages = schedule.stages();
  const std::vector<int> first = split_layers(m.layers, stages, in_head / (in_layer + in_attention));
  std::vector<LayerRange> chunks;
  for (int chunk = 0; chunk < schedule.v; ++chunk) {
    const int stage = schedule.stage(rank, chunk);
    chunks.push_back({first[stage], first[stage + 1], stage == 0, stage == stages - 1});
  }
  return chunks;
}

// The ranks with the same stages: this one alone, or with two copies of the model k and p - 1 - k. They sum
// their gradients.
inline std::vector<int> replicas_of(const Schedule& s, int rank) {
  if (s.copies == 1) return {rank};
  return {std::min(rank, s.p - 1 - rank), std::max(rank, s.p - 1 - rank)};
}
// The units of a rank's chunks, ascending.
inline std::vector<int> units_of(const std::vector<LayerRange>& ranges) {
  std::vector<int> units;
  for (const LayerRange& range : ranges) {
    if (range.embedding) units.push_back(embedding_unit);
    for (int layer = range.first; layer < range.last; ++layer) units.push_back(unit_of_layer(layer));
    if (range.head) units.push_back(head_unit(range.last));
  }
  std::sort(units.begin(), units.end());
  return units;
}

inline ParameterLayout pipeline_layout(const Schedule& s, int rank, const std::vector<LayerRange>& chunks) {
  return {.groups = {{rank == replicas_of(s, rank)[0] ? 0 : 1, s.copies}}, .units = units_of(chunks)};
}

// The pairs of stages between which a rank sends or receives: activations go from the first stage to the
// second one, and gradients come back.
inline std::vector<std::pair<ModelChunk, ModelChunk>> edges_of(const Schedule& s, int rank) {
  std::vector<std::pair<ModelChunk, ModelChunk>> edges;
  for (int n = 0; n + 1 < std::ssize(s.placement); ++n) {
    const ModelChunk from = s.placement[n], to = s.placement[n + 1];
    const bool is_end = (n + 1) % s.stages() == 0;  // a copy of the model ends here
    if (!is_end && from.rank != to.rank && (from.rank == rank || to.rank == rank))
      edges.emplace_back(from, to);
  }
  return edges;
}

// The channels of NCCL that a rank's Pipeline will have: for its messages (Pipeline::connect), and for the
// sum of two copies' gradients if the pipeline has to compute that.
inline int channels_of_pipeline(const Schedule& s, int rank, bool sums_copies) {
  std::set<std::pair<int, int>> ranks;
  for (const auto& [from, to] : edges_of(s, rank)) ranks.emplace(from.rank, to.rank);
  const int communicators = 2 * static_cast<int>(ranks.size());  // one for activations, one for gradients
  return edge_blocks * communicators + (sums_copies && s.copies > 1 ? data_blocks : 0);
}

// What a pipeline rank keeps, as its schedule says.
struct PipelineRank {
  int copies;                         // the pipeline has so many of the model
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
