// plan --score: predicts layouts that were measured elsewhere. Each row of a CSV file names one; the answer
// is CSV, too: tokens/s a GPU, and bytes of the fullest rank.
#pragma once

#include <cmath>

#include "layouts.h"

namespace pentatron {

// A row: model (its size, such as 1.3B), nodes, mbs, grad_acc, dp, pp, tp, zero.
struct MeasuredLayout {
  double billions;
  int nodes, micro_batch_size, micro_batches, dp, pp, tp, zero_stage;
};

// Models with a head size of 64, 96, 128 and 128, sequences of 4096 tokens and 131072 tokens in the
// vocabulary; the first two tie their head to the embedding.
struct MeasuredModel {
  double billions;
  ModelConfig sizes;
  bool tied;
};
inline const MeasuredModel& measured_model(double billions) {
  static const MeasuredModel models[] = {{1.3, {"1.3B", 16, 2048, 32, 32, 8192, 131072, 1e4, 1e-5}, true},
                                         {3.6, {"3.6B", 28, 3072, 32, 32, 8192, 131072, 1e4, 1e-5}, true},
                                         {8.9, {"8.9B", 32, 4096, 32, 32, 14336, 131072, 1e4, 1e-5}, false},
                                         {80, {"80B", 80, 8192, 64, 64, 28672, 131072, 1e4, 1e-5}, false}};
  const auto apart = [&](const MeasuredModel& m) { return std::abs(std::log(m.billions / billions)); };
  return *std::ranges::min_element(models, {}, apart);
}

struct Score {
  double tokens_per_second, bytes;  // of a GPU
  std::string kind;
};

inline Score score(const MeasuredLayout& row, const DeviceProfile& gpu, const Style& style) {
  const MeasuredModel& model = measured_model(row.billions);
  CombinedOptions o;
  o.model = model.sizes;
  o.sequence_length = 4096;
  o.attention = Attention::tensor_core;
  o.global_batch_size = row.dp * row.micro_batch_size * row.micro_batches;
  Layout l;
  l.shape = {row.tp, 1, row.dp, row.pp, 1};
  l.zero_stage = row.zero_stage, l.micro_batch_size = row.micro_batch_size;
  l.sequence_parallel = row.tp > 1;
  o = options_of(o, l);
  check_tensor_parallel(o, row.tp, int64_t{row.micro_batch_size} * o.sequence_length);
  if (row.pp > o.model.layers)
    throw UsageError("--score: pp", std::to_string(row.pp),
                     "at most the layers, " + std::to_string(o.model.layers));
  const Schedule schedule = schedule_of(o, l.shape);
  std::vector<RankShare> stages;
  for (int stage = 0; stage < row.pp; ++stage) stages.push_back(stage_share(o, schedule, stage));

  MemoryOfLayout memory = memory_of(o, l.shape, stages, style);
  const double table = double(o.model.vocab_size) * o.model.d_model / row.tp;
  if (model.tied && row.pp == 1)
    memory.others -= table * (2 + 2 + 4 + 12.0 / (row.zero_stage > 0 ? row.dp : 1));
  const double full = memory.total() / gpu.memory_bytes;
  const double seconds =
      CostModel(o, l.shape, gpu, schedule, style).step().total() + row.micro_batches * retries(style, full);
  return {o.global_batch_size * double(o.sequence_length) / seconds / l.shape.ranks(), memory.total(),
          kind_of(style, l.shape, gpu, full)};
}

}  // namespace pentatron
