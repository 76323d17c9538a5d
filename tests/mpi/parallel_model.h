// The model as 02 to 06 train it, beside TestModel, which trains the same global batch on one rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../../02_data_parallel/data_parallel.h"
#include "../../03_zero/zero.h"
#include "../../04_tensor_parallel/tensor_parallel.h"
#include "../../05_pipeline_parallel/choose_schedule.h"
#include "../../05_pipeline_parallel/pipeline.h"
#include "../../05_pipeline_parallel/workbench/simulate.h"
#include "../../06_context_parallel/context_parallel.h"
#include "../../07_combined_5d/options.h"
#include "model.h"
#include "mpi_tests.h"
#include "random_schedule.h"

namespace pentatron {
// What the ranks do together.
struct Technique {
  enum Kind { data_parallel, zero, tensor_parallel, pipeline, context_parallel } kind;
  DpSync sync = DpSync::naive;     // of data parallelism
  double bucket_mb = 25;           // likewise
  int stage = 0;                   // of ZeRO
  int shard_ranks = 0;             // likewise; 0: all
  bool sequence_parallel = false;  // of tensor parallelism
  int tp_overlap = 1;              // likewise
  PpSchedule schedule = PpSchedule::one_f_one_b;
  int chunks = 1;         // of layers on a pipeline rank
  std::string file = "";  // the text of a schedule, with from_file

  Schedule schedule_of(int p, int m) const {
    return schedule == PpSchedule::from_file ? parse_schedule("file", file, p, m)
                                             : make_schedule(schedule, p, m, chunks);
  }
  // Whether each rank has its own part of the batch.
  bool splits_batch() const { return kind == data_parallel || kind == zero; }
  // Whether each rank has its own part of the loss.
  bool splits_tokens() const { return splits_batch() || kind == context_parallel; }
  // Unless a pipeline's: that has a layout of its own.
  ParameterLayout layout(const Communicator& ranks) const {
    if (kind == tensor_parallel) return {.tensor_rank = ranks.rank(), .tensor_ranks = ranks.ranks()};
    const int shards = shards_of(ranks.ranks());
    return {.groups = {{ranks.rank() % shards, shards, ranks.rank() / shards}}};
  }
  int shards_of(int ranks) const { return ZeroOptions{stage, shard_ranks}.shards(ranks); }
};

inline Technique data_parallel(DpSync sync, double bucket_mb = 25) {
  return {Technique::data_parallel, sync, bucket_mb};
}
inline Technique zero(int stage, int shard_ranks = 0) {
  return {.kind = Technique::zero, .stage = stage, .shard_ranks = shard_ranks};
}
inline Technique pipeline(const std::string& file, int chunks = 1) {
  return {.kind = Technique::pipeline, .schedule = PpSchedule::from_file, .chunks = chunks, .file = file};
}
inline Technique pipeline(PpSchedule schedule, int chunks = 1) {
  return {.kind = Technique::pipeline, .schedule = schedule, .chunks = chunks};
}

// The same random order of m micro-batches on all ranks, which does not end with the last.
inline Technique odd_order(int m, bool splits_backward, const Placement& placement) {
  const int p = mpi_tests::ranks(), chunks = static_cast<int>(placement.size()) / p;
  std::mt19937 engine(m);
  for (;;) {
    const std::string file = tests::random_schedule(placement, m, splits_backward, engine);
    const Schedule schedule = parse_schedule("file", file, p, m);
    try {
      if (m > 1 && last_micro_batch(checked(schedule).ranks[0], 0) == m - 1) continue;
      return pipeline(file, chunks);
    } catch (const ScheduleError&) {  // its messages stop it
    }
  }
}
inline Technique odd_order(int m, bool splits_backward) {
  return odd_order(m, splits_backward, looped(mpi_tests::ranks(), 1));
}

// A rank's seams, where they are not the usual ones.
struct OtherSeams {
  AttentionCore* attention = nullptr;
  FeedForward* feed_forward = nullptr;
};

// Everything that one rank of a program has. `options` are those of the whole batch.
struct ParallelModel {
  CombinedOptions options;
  Technique technique;
  Communicator& ranks;
  Stream stream{"compute"};
  TensorRegion usual_region;
  AttentionCore usual_attention{options.attention};
  FeedForward usual_feed_forward;
  Parameters parameters;
  TransformerParameters ids;
  std::vector<int32_t> positions;  // of every sequence, that this rank has
  std::unique_ptr<Communicator> gradient_ranks, shard_ranks, replicate_ranks;
  std::unique_ptr<AttentionCore> context_parallel;  // one of the five, or this with the next
  std::unique_ptr<DataParallel> data_parallel;
  std::unique_ptr<Zero> zero;
  std::unique_ptr<TensorParallel> tensor_parallel;
  std::unique_ptr<Pipeline> pipeline;
  std::unique_ptr<Transformer> transformer;
  std::unique_ptr<Activations> activations;
  std::unique_ptr<Optimizer> optimizer;
  StepTotals totals{stream};
  std::unique_ptr<HostBatchLoader> loader;

  ParallelModel(const CombinedOptions& o, Technique t, World& world, Communicator& communicator,
                OtherSeams other = {});
  ~ParallelModel();

  // Forward and backward of this rank's part of the micro-batches of all ranks; then the global gradient,
  // loss and norm are on their way.
  void accumulate(const std::vector<HostBatch>& global);
  void update(int64_t step);

  void train_step(int64_t step, const std::vector<HostBatch>& global) {
    accumulate(global);
    update(step);
  }

  Schedule schedule() const;
  std::vector<LayerRange> parts_of_model() const;
};

}  // namespace pentatron
