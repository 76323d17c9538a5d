// The model as 02 to 06 train it, beside TestModel, which trains the same global batch on one rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../../02_data_parallel/data_parallel.h"
#include "../../03_zero/zero.h"
#include "../../04_tensor_parallel/tensor_parallel.h"
#include "../../05_pipeline_parallel/pipeline.h"
#include "../../05_pipeline_parallel/schedule_file.h"
#include "../../06_context_parallel/context_parallel.h"
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
  bool sequence_parallel = false;  // of tensor parallelism
  int tp_chunks = 1;               // likewise
  PpSchedule schedule = PpSchedule::one_f_one_b;
  int chunks = 1;         // of layers on a pipeline rank
  std::string file = "";  // the text of a schedule, with from_file
  bool grouped = false;   // messages of a pipeline

  Schedule schedule_of(int p, int m) const {
    const Schedule s = schedule == PpSchedule::from_file ? parse_schedule("file", file, p, m)
                                                         : make_schedule(schedule, p, m, chunks);
    return grouped ? with_grouped_messages(s) : s;
  }
  // Whether each rank has its own part of the batch.
  bool splits_batch() const { return kind == data_parallel || kind == zero; }
  // Whether each rank has its own part of the loss.
  bool splits_tokens() const { return splits_batch() || kind == context_parallel; }
  ParameterLayout layout(const Communicator& ranks, const Communicator& copies,
                         const std::vector<int>& units) const {
    if (kind == tensor_parallel) return {.tensor_rank = ranks.rank(), .tensor_ranks = ranks.ranks()};
    if (kind == pipeline) return {.groups = {{copies.rank(), copies.ranks()}}, .units = units};
    return {.groups = {{ranks.rank(), ranks.ranks()}}};
  }
};

inline Technique data_parallel(DpSync sync, double bucket_mb = 25) {
  return {Technique::data_parallel, sync, bucket_mb};
}
inline Technique zero(int stage) { return {.kind = Technique::zero, .stage = stage}; }
inline Technique pipeline(const std::string& file) {
  return {.kind = Technique::pipeline, .schedule = PpSchedule::from_file, .file = file};
}
inline Technique pipeline(PpSchedule schedule, int chunks = 1) {
  return {.kind = Technique::pipeline, .schedule = schedule, .chunks = chunks};
}

inline Technique grouped(PpSchedule schedule) {
  return {.kind = Technique::pipeline, .schedule = schedule, .grouped = true};
}

// The same random order of m micro-batches on all ranks, which does not end with the last.
inline Technique odd_order(int m, bool splits_backward) {
  std::mt19937 engine(m);
  for (;;) {
    const std::string file = tests::random_schedule(mpi_tests::ranks(), m, splits_backward, engine);
    const Schedule schedule = parse_schedule("file", file, mpi_tests::ranks(), m);
    try {
      if (m > 1 && last_micro_batch(checked(schedule).ranks[0], 0) == m - 1) continue;
      return pipeline(file);
    } catch (const ScheduleError&) {  // its messages stop it
    }
  }
}

template <class Region = TensorParallel>
std::unique_ptr<TensorParallel> make_region(const Options& options, Communicator& ranks,
                                            cudaStream_t stream) {
  return std::make_unique<Region>(options, rows_of(options, {}).inside, ranks, stream);
}

// A rank's seams, where they are not the usual ones.
struct OtherSeams {
  AttentionCore* attention = nullptr;
  FeedForward* feed_forward = nullptr;
  decltype(&make_region<>) make_region = pentatron::make_region<>;
};

// Everything that one rank of a program has. `options` are those of the whole batch.
struct ParallelModel {
  Options options;
  Technique technique;
  Communicator& ranks;
  Communicator copies;  // of the model, in a pipeline
  Stream stream{"compute"};
  TensorRegion usual_region;
  AttentionCore usual_attention{options.attention};
  FeedForward usual_feed_forward;
  Parameters parameters;
  TransformerParameters ids;
  std::vector<int32_t> positions;  // of every sequence, that this rank has
  std::unique_ptr<Communicator> gradient_ranks;
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

  ParallelModel(const Options& o, Technique t, World& world, Communicator& communicator,
                OtherSeams other = {})
      : options(o),
        technique(t),
        ranks(communicator),
        copies(world,
               technique.kind == Technique::pipeline ? replicas_of(schedule(), ranks.rank())
                                                     : std::vector{ranks.rank()},
               "copies"),
        parameters(technique.layout(ranks, copies, units_of(parts_of_model()))) {
    options.sequence_parallel = technique.sequence_parallel;
    options.tp_chunks = technique.tp_chunks;
    if (options.tp_chunks > 1) options.tp_overlap = TpOverlap::chunks;
    Seams seams = {{},
                   &usual_region,
                   other.attention ? other.attention : &usual_attention,
                   other.feed_forward ? other.feed_forward : &usual_feed_forward};
    if (technique.kind == Technique::context_parallel) {
      positions = positions_of_rank(options, ranks.rank(), ranks.ranks());
      gradient_ranks = std::make_unique<Communicator>(world, world.all(), "gradients");
      context_parallel = context_attention(options, ranks);
      seams.attention = context_parallel.get();
    } else {
      positions = all_positions(options);
    }
    ids = declare_transformer(options.model, *seams.feed_forward, parameters);
    if (technique.kind == Technique::zero) {
      zero = std::make_unique<Zero>(technique.stage, parameters.group(), ranks, stream);
      seams.hooks = {zero.get()};
    } else {
      parameters.allocate();
    }
    if (technique.kind == Technique::data_parallel || context_parallel) {
      data_parallel = std::make_unique<DataParallel>(technique.sync, technique.bucket_mb, parameters.group(),
                                                     gradient_ranks ? *gradient_ranks : ranks, stream);
      seams.hooks = {data_parallel.get()};
    }
    if (technique.kind == Technique::tensor_parallel) {
      tensor_parallel = other.make_region(options, ranks, stream);
      seams.region = tensor_parallel.get();
    }
    parameters.initialise(options.seed, stream);
    if (zero) zero->weights_changed();
    transformer =
        std::make_unique<Transformer>(options, ids, parameters, std::ssize(positions), seams, stream);
    if (technique.kind == Technique::pipeline) {
      pipeline =
          std::make_unique<Pipeline>(schedule(), world, world.all(), parts_of_model(), *transformer, stream);
    } else {
      activations = transformer->make_activations(whole_model(options.model));
    }
    optimizer = std::make_unique<Optimizer>(options, parameters, stream);
    const bool splits = technique.splits_batch();
    loader = std::make_unique<HostBatchLoader>(options, splits ? ranks.rank() : 0, splits ? ranks.ranks() : 1,
                                               positions);
    world.begin_counting();
  }
  ~ParallelModel() {
    stream.synchronize();
    CUDA_CHECK(cudaStreamSynchronize(ranks.stream()));
  }

  // Forward and backward of this rank's part of the micro-batches of all ranks; then the global gradient,
  // loss and norm are on their way.
  void accumulate(const std::vector<HostBatch>& global) {
    totals.reset();
    const std::vector<Batch> batches = loader->load(global, stream);
    if (pipeline) pipeline->run(batches, &totals);
    for (size_t i = 0; !pipeline && i < batches.size(); ++i) {
      transformer->forward(batches[i], *activations);
      transformer->backward(batches[i], *activations);
      if (technique.splits_tokens() || ranks.rank() == 0) totals.add_loss(activations->loss);
    }
    if (pipeline) sum_gradients(parameters, copies, stream);
    if (zero) zero->finish_gradient_sync();
    if (data_parallel) data_parallel->finish_gradient_sync();
    if (tensor_parallel) tensor_parallel->sum_partial_gradients(parameters);
    optimizer->add_norm_squared(totals.norm_squared());
    ranks.sum_scalars(totals.data(), totals.size, stream);
  }

  void update(int64_t step) {
    optimizer->step(step, totals.norm_squared());
    if (zero) zero->weights_changed();
    totals.wait();
  }

  void train_step(int64_t step, const std::vector<HostBatch>& global) {
    accumulate(global);
    update(step);
  }

  Schedule schedule() const {
    return technique.schedule_of(ranks.ranks(), micro_batches_of_a_rank(options, 1));
  }
  std::vector<LayerRange> parts_of_model() const {
    if (technique.kind != Technique::pipeline) return {whole_model(options.model)};
    return layers_of_rank(options, schedule(), ranks.rank());
  }
};

}  // namespace pentatron
