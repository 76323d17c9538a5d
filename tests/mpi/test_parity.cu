// Whatever the technique, all ranks together must do what one rank does alone: the same initial weights to
// the bit, in every step the same loss, gradient norm and gradients, and so the same weights. In fp64
// agreement is about 1e-14, and a bug is not.
// precisions: fp64
#include "gather.h"
#include "parallel_model.h"
#include "parity.h"

#if PRECISION == 64

namespace pentatron {
namespace {

constexpr int kSteps = 3, kSamples = 2;

CombinedOptions training(CombinedOptions o, Recompute recompute) {
  o.recompute = recompute;
  return training(o, kSteps);
}
// Sizes that no number of ranks divides: every shard ends within a parameter, or in the padding.
CombinedOptions odd_options(int micro_batches, Recompute recompute) {
  return training(
      test_options<CombinedOptions>(/*layers=*/3, /*d_model=*/12, /*heads=*/3, /*kv_heads=*/1, /*d_ff=*/10,
                                    /*vocab_size=*/23, /*sequence=*/5, /*micro_batch=*/2,
                                    /*global_batch=*/2 * micro_batches * mpi_tests::ranks()),
      recompute);
}

// Sizes that the ranks divide, and a sequence that they don't: rows are split across sequences.
CombinedOptions divisible_options(int kv_heads, int micro_batches, Recompute recompute) {
  const int ranks = mpi_tests::ranks(), heads = ranks == 3 ? 6 : 8;
  return training(
      test_options<CombinedOptions>(/*layers=*/2, /*d_model=*/2 * heads, heads, kv_heads, /*d_ff=*/5 * ranks,
                                    /*vocab_size=*/9 * ranks, /*sequence=*/6, /*micro_batch=*/4,
                                    /*global_batch=*/4 * micro_batches),
      recompute);
}

// What one rank computes alone.
struct Reference {
  Tensors initial, final;
  std::vector<double> loss, norm;  // [steps]
  std::vector<Tensors> gradients;  // [steps]
  Tensors logits;                  // [samples], after the last step
};

Reference train_alone(const CombinedOptions& options) {
  TestModel model(options);
  const int parameters = static_cast<int>(model.parameters.all().size());
  Reference r;
  for (int id = 0; id < parameters; ++id) r.initial.push_back(model.weights(id));
  for (int step = 0; step < kSteps; ++step) {
    model.accumulate(batches_of_step(options, step));
    r.gradients.emplace_back();
    for (int id = 0; id < parameters; ++id) r.gradients.back().push_back(model.gradients(id));
    model.update(step);
    r.loss.push_back(model.totals.host_loss());
    r.norm.push_back(model.totals.host_norm());
  }
  for (int id = 0; id < parameters; ++id) r.final.push_back(model.weights(id));
  for (int sample = 0; sample < kSamples; ++sample) {
    const Batch batch = model.loader.load(batches_of_step(options, kSteps + sample), model.stream)[0];
    model.transformer->forward(batch, *model.activations);
    r.logits.push_back(to_host(model.activations->logits, model.stream));
  }
  return r;
}

// Whether this rank's part of a parameter is that of `global`, bit for bit, counted or not.
bool holds_part_of(ParallelModel& model, int id, const std::vector<double>& global) {
  const Parameter& p = model.parameters[id];
  const std::vector<double> mine = to_host(model.parameters.weights(id), model.stream);
  for (size_t i = 0; i < mine.size(); ++i) {
    const int64_t row = p.first_row + i / p.local_columns, column = p.first_column + i % p.local_columns;
    if (mine[i] != global[row * p.columns + column]) return false;
  }
  return true;
}

void check_parity(const Technique& technique, const CombinedOptions& options) {
  World world(nullptr, nullptr);
  const bool compares = world.rank() == 0;  // what is gathered is the same everywhere
  const Reference expected = compares ? train_alone(options) : Reference();
  Communicator ranks(world, world.all(), "ranks");
  ParallelModel model(options, technique, world, ranks);
  const int parameters = static_cast<int>(model.parameters.all().size());
  const auto gather = [&](Content content) {
    return gather_parameters(world, model.parameters, content, model.stream);
  };
  // The copies that ranks have of one weight never differ.
  const auto check_copies = [&](const Tensors& weights) {
    if (technique.kind != Technique::tensor_parallel) return;
    for (int id = 0; id < parameters; ++id) {
      INFO(model.parameters[id].name);
      CHECK(holds_part_of(model, id, weights[id]));
    }
  };

  const Tensors initial = gather(Content::weights);
  if (compares) CHECK(initial == expected.initial);
  check_copies(initial);
  for (int step = 0; step < kSteps; ++step) {
    INFO("step " << step);
    model.accumulate(batches_of_step(options, step));
    const Tensors gradients = gather(Content::gradients);
    for (int id = 0; compares && id < parameters; ++id) {
      INFO(model.parameters[id].name << ": gradient");
      CHECK(relative_error(gradients[id], expected.gradients[step][id]) < kTensorTolerance);
    }
    model.update(step);
    const std::vector<double> scalars =  // of the one that compares
        world.sum(compares ? std::vector{expected.loss[step], expected.norm[step]} : std::vector{0.0, 0.0});
    CHECK(std::abs(model.totals.host_loss() - scalars[0]) <= kScalarTolerance * scalars[0]);
    CHECK(std::abs(model.totals.host_norm() - scalars[1]) <= kScalarTolerance * scalars[1]);
    CHECK(model.totals.host_norm() > options.grad_clip);
  }
  const Tensors weights = gather(Content::weights);
  check_copies(weights);
  for (int id = 0; compares && id < parameters; ++id) {
    INFO(model.parameters[id].name << ": weights");
    CHECK(relative_error(expected.initial[id], expected.final[id]) > 1e5 * kTensorTolerance);  // it has moved
    CHECK(relative_error(weights[id], expected.final[id]) < kTensorTolerance);
  }
  for (int sample = 0; model.pipeline && sample < kSamples; ++sample) {
    INFO("sample " << sample);
    const Batch batch = model.loader->load(batches_of_step(options, kSteps + sample), model.stream)[0];
    std::vector<double> logits = to_host(model.pipeline->forward(batch), model.stream);
    logits.resize(int64_t{options.micro_batch_size} * options.sequence_length * options.model.vocab_size);
    logits = world.sum(logits);  // one rank has them
    if (compares) CHECK(relative_error(logits, expected.logits[sample]) < kTensorTolerance);
  }
}

// Accumulation and recomputation change when hooks are called.
void check_parity(const Technique& technique) {
  mpi_tests::set_time_limit(300);
  for (const int micro_batches : {1, 3}) {
    for (const Recompute recompute : {Recompute::none, Recompute::full}) {
      INFO(micro_batches << " micro-batches a rank, recompute " << to_string(recompute));
      check_parity(technique, odd_options(micro_batches, recompute));
    }
  }
}

// Query heads in groups of several sizes, as far as the ranks can share out the key heads.
void check_tensor_parity(bool sequence_parallel, int micro_batches, Recompute recompute, int chunks = 1) {
  mpi_tests::set_time_limit(300);
  for (const int kv_heads : {2, 3, 4, 6, 8}) {
    const CombinedOptions options = divisible_options(kv_heads, micro_batches, recompute);
    if (options.model.heads % kv_heads != 0 || kv_heads % mpi_tests::ranks() != 0) continue;
    INFO(kv_heads << " kv heads, recompute " << to_string(recompute));
    check_parity(
        {.kind = Technique::tensor_parallel, .sequence_parallel = sequence_parallel, .tp_overlap = chunks},
        options);
  }
}

// Every rank has some layers, not all equally many, and every schedule does the same.
void check_pipeline_parity(const Technique& technique, const std::vector<int>& micro_batches,
                           Recompute recompute) {
  mpi_tests::set_time_limit(300);
  for (const int m : micro_batches) {
    INFO(m << " micro-batches, " << technique.chunks << " chunks, recompute " << to_string(recompute));
    const int layers = mpi_tests::ranks() * technique.chunks + 3;
    const CombinedOptions options =
        training(test_options<CombinedOptions>(layers, /*d_model=*/8, /*heads=*/2, /*kv_heads=*/1,
                                               /*d_ff=*/10, /*vocab_size=*/23,
                                               /*sequence=*/5, /*micro_batch=*/2, /*global_batch=*/2 * m),
                 recompute);
    check_parity(technique, options);
  }
}
void check_pipeline_parity(PpSchedule schedule, int chunks, const std::vector<int>& micro_batches,
                           Recompute recompute) {
  check_pipeline_parity(pipeline(schedule, chunks), micro_batches, recompute);
}

// Sequences that the ranks divide, and nothing else that they do. Each kind of attention and recomputation,
// with its own choice of grouped heads, of one or three sequences, of one or two micro-batches.
void check_context_parity(CpLayout layout, CpExchange exchange) {
  mpi_tests::set_time_limit(300);
  const int chunks = mpi_tests::ranks() * (layout == CpLayout::zigzag ? 2 : 1);
  int i = 0;
  for (const Attention attention : {Attention::naive, Attention::tiled}) {
    for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
      // Each rank that splits heads has its own.
      const int groups = exchange == CpExchange::ulysses        ? mpi_tests::ranks()
                         : exchange == CpExchange::ulysses_ring ? ContextParallelOptions().ulysses
                                                                : 1;
      const int kv_heads = groups * std::vector{1, 2, 4, 2, 4, 1}[i],
                sequences = std::vector{3, 1, 3, 3, 3, 1}[i];
      const int micro_batches = 1 + i++ % 2;
      INFO(kv_heads << " kv heads, " << sequences << " sequences, attention " << to_string(attention)
                    << ", recompute " << to_string(recompute));
      CombinedOptions options =
          training(test_options<CombinedOptions>(
                       /*layers=*/2, /*d_model=*/24 * groups, /*heads=*/4 * groups, kv_heads, /*d_ff=*/10,
                       /*vocab_size=*/23,
                       /*sequence=*/3 * chunks, sequences, /*global_batch=*/sequences * micro_batches),
                   recompute);
      options.attention = attention;
      options.context.cp_layout = layout;
      options.context.cp_exchange = exchange;
      const double bucket_mb = 0.001 * groups * groups;  // about as many buckets in every model
      check_parity({.kind = Technique::context_parallel, .sync = DpSync::bucket, .bucket_mb = bucket_mb},
                   options);
    }
  }
}

void check_interleaved_parity(int chunks) {
  const int p = mpi_tests::ranks();
  if (p == 1) return;
  check_pipeline_parity(PpSchedule::interleaved, chunks, {p, 2 * p}, Recompute::none);
}

}  // namespace

TEST_CASE("02: parity, naive", "[02][parity]") { check_parity(data_parallel(DpSync::naive)); }
TEST_CASE("02: parity, overlap", "[02][parity]") { check_parity(data_parallel(DpSync::overlap)); }

// A layer has 768 elements of 8 bytes.
TEST_CASE("02: parity, several buckets a unit", "[02][parity][8]") {
  check_parity(data_parallel(DpSync::bucket, 0.001));
}
TEST_CASE("02: parity, a bucket for several units", "[02][parity]") {
  check_parity(data_parallel(DpSync::bucket, 0.010));
}
TEST_CASE("02: parity, one bucket for all", "[02][parity]") { check_parity(data_parallel(DpSync::bucket)); }

TEST_CASE("03: parity, stage 0", "[03][parity]") { check_parity(zero(0)); }
TEST_CASE("03: parity, stage 1", "[03][parity]") { check_parity(zero(1)); }
TEST_CASE("03: parity, stage 2", "[03][parity]") { check_parity(zero(2)); }
TEST_CASE("03: parity, stage 3", "[03][parity][8]") { check_parity(zero(3)); }
TEST_CASE("03: parity, hybrid sharding", "[03][parity][8]") {
  mpi_tests::set_time_limit(300);
  for (int shards = 1; shards < mpi_tests::ranks(); ++shards) {
    if (mpi_tests::ranks() % shards != 0) continue;
    for (const int stage : {1, 2, 3}) {
      INFO("stage " << stage << ", " << shards << " ranks a copy");
      check_parity(zero(stage, shards), odd_options(/*micro_batches=*/3, Recompute::none));
    }
  }
}

TEST_CASE("04: parity, tensor parallel", "[04][parity]") { check_tensor_parity(false, 1, Recompute::none); }
TEST_CASE("04: parity, tensor parallel, selective recomputation", "[04][parity]") {
  check_tensor_parity(false, 1, Recompute::selective);
}
TEST_CASE("04: parity, tensor parallel, full recomputation", "[04][parity]") {
  check_tensor_parity(false, 3, Recompute::full);
}
TEST_CASE("04: parity, sequence parallel", "[04][parity][8]") {
  check_tensor_parity(true, 1, Recompute::none);
}
TEST_CASE("04: parity, sequence parallel, selective recomputation", "[04][parity]") {
  check_tensor_parity(true, 1, Recompute::selective);
}
TEST_CASE("04: parity, sequence parallel, full recomputation", "[04][parity]") {
  check_tensor_parity(true, 3, Recompute::full);
}

// Three do not divide the rows, and a hundred are more than there are.
TEST_CASE("04: parity, forward in chunks", "[04][parity]") {
  for (const int chunks : {3, 100}) {
    check_tensor_parity(false, 1, Recompute::none, chunks);
    check_tensor_parity(true, 1, Recompute::none, chunks);
    check_tensor_parity(true, 3, Recompute::full, chunks);
  }
}

TEST_CASE("05: parity, afab", "[05][parity]") {
  check_pipeline_parity(PpSchedule::afab, 1, {1, 2, 3, 5, 8}, Recompute::none);
}
TEST_CASE("05: parity, 1f1b", "[05][parity]") {
  check_pipeline_parity(PpSchedule::one_f_one_b, 1, {1, 2, 3, 4, 5, 7, 8, 9, 12}, Recompute::none);
}
TEST_CASE("05: parity, 1f1b, recomputation", "[05][parity]") {
  check_pipeline_parity(PpSchedule::one_f_one_b, 1, {5}, Recompute::selective);
  check_pipeline_parity(PpSchedule::one_f_one_b, 1, {5}, Recompute::full);
}
TEST_CASE("05: parity, interleaved, one chunk a rank", "[05][parity]") { check_interleaved_parity(1); }
TEST_CASE("05: parity, interleaved, two chunks a rank", "[05][parity][8]") { check_interleaved_parity(2); }
TEST_CASE("05: parity, interleaved, four chunks a rank", "[05][parity]") { check_interleaved_parity(4); }
TEST_CASE("05: parity, zb-h1", "[05][parity]") {
  check_pipeline_parity(PpSchedule::zb_h1, 1, {1, 2, 3, 4, 6, 7, 11}, Recompute::none);
}
TEST_CASE("05: parity, zb-h1, selective recomputation", "[05][parity]") {
  check_pipeline_parity(PpSchedule::zb_h1, 1, {5}, Recompute::selective);
}
TEST_CASE("05: parity, zb-v", "[05][parity][8]") {
  check_pipeline_parity(PpSchedule::zb_v, 2, {1, 2, 3, 5, 9, 12}, Recompute::none);
}
TEST_CASE("05: parity, zb-v, selective recomputation", "[05][parity]") {
  check_pipeline_parity(PpSchedule::zb_v, 2, {5}, Recompute::selective);
}
TEST_CASE("05: parity, dualpipe-v", "[05][parity]") {
  check_pipeline_parity(PpSchedule::dualpipe_v, 2, {1, 2, 3, 5, 9, 12}, Recompute::none);
}

TEST_CASE("05: parity, dualpipe", "[05][parity]") {
  if (mpi_tests::ranks() % 2 == 0)
    check_pipeline_parity(PpSchedule::dualpipe, 2, {2, 4, 6, 10, 16}, Recompute::none);
}

// Chunks in an order of their own: the middle of the model is on rank 0, and both ends are on rank 1.
TEST_CASE("05: parity, stages that a file places", "[05][parity]") {
  if (mpi_tests::ranks() != 2) return;
  check_pipeline_parity(pipeline("2,1: F0.1 F0 F1.1 F1 B0 W0 B0.1 B1 B1.1 W0.1 W1 W1.1\n"
                                 "0,3: F0 F1 F0.1 B0.1 F1.1 B1.1 W0.1 B0 W0 B1 W1.1 W1\n"),
                        {2}, Recompute::none);
}

// Every step ends with another micro-batch than the last, and buffers pass on in another order than 0, 1, ...
TEST_CASE("05: parity, micro-batches in any order", "[05][parity]") {
  if (mpi_tests::ranks() == 2) {
    check_pipeline_parity(pipeline("F1 F0 F2 B0 W0 F3 B1 B3 W1 W3 B2 W2\n"
                                   "F1 F0 B0 F2 W0 B1 F3 B3 W3 W1 B2 W2\n"),
                          {4}, Recompute::none);
  }
  for (const int m : {3, 7}) {
    check_pipeline_parity(odd_order(m, false), {m}, Recompute::none);
    check_pipeline_parity(odd_order(m, true), {m}, Recompute::none);
  }
  check_pipeline_parity(odd_order(5, false), {5}, Recompute::full);
}

// Two chunks on each rank: looped, in a V, neighbours, which hand over without messages, or anywhere.
TEST_CASE("05: parity, chunks and micro-batches in any order", "[05][parity]") {
  const int p = mpi_tests::ranks();
  Placement neighbours;
  for (int stage = 0; stage < 2 * p; ++stage) neighbours.push_back({stage / 2, stage % 2});
  std::mt19937 engine(1);
  for (const int m : {4, 5, 6, 7}) {
    for (const Placement& placement :
         {looped(p, 2), v_shaped(p), neighbours, tests::random_placement(p, 2, engine)}) {
      for (const bool splits_backward : {false, true})
        check_pipeline_parity(odd_order(m, splits_backward, placement), {m}, Recompute::none);
    }
  }
}

TEST_CASE("06: parity, contiguous ring", "[06][parity]") {
  check_context_parity(CpLayout::contiguous, CpExchange::ring);
}
TEST_CASE("06: parity, zigzag ring", "[06][parity][8]") {
  check_context_parity(CpLayout::zigzag, CpExchange::ring);
}
TEST_CASE("06: parity, contiguous all-gather", "[06][parity]") {
  check_context_parity(CpLayout::contiguous, CpExchange::all_gather);
}
TEST_CASE("06: parity, zigzag all-gather", "[06][parity]") {
  check_context_parity(CpLayout::zigzag, CpExchange::all_gather);
}
TEST_CASE("06: parity, contiguous Ulysses", "[06][parity]") {
  check_context_parity(CpLayout::contiguous, CpExchange::ulysses);
}
TEST_CASE("06: parity, zigzag Ulysses", "[06][parity]") {
  check_context_parity(CpLayout::zigzag, CpExchange::ulysses);
}
TEST_CASE("06: parity, Ulysses in a ring", "[06][parity]") {
  if (mpi_tests::ranks() % 2 != 0 || mpi_tests::ranks() == 2) return;
  check_context_parity(CpLayout::contiguous, CpExchange::ulysses_ring);
  check_context_parity(CpLayout::zigzag, CpExchange::ulysses_ring);
}

}  // namespace pentatron

#endif

namespace pentatron {

// In any precision, master weights and all: without clipping, and with one micro-batch, stages differ in who
// does what alone. (A sum of two ranks has one order; of more, an all-reduce may have another than a
// reduce-scatter.)
TEST_CASE("03: all stages leave the same bits", "[03]") {
  CombinedOptions options =
      test_options<CombinedOptions>(/*layers=*/2, /*d_model=*/12, /*heads=*/3, /*kv_heads=*/1, /*d_ff=*/10,
                                    /*vocab_size=*/23, /*sequence=*/5, /*micro_batch=*/2,
                                    /*global_batch=*/2 * mpi_tests::ranks());
  options.steps = 3;
  options.grad_clip = 0;
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  const auto trained = [&](int stage) {
    ParallelModel model(options, zero(stage), world, ranks);
    for (int step = 0; step < options.steps; ++step) model.train_step(step, batches_of_step(options, step));
    return gather_parameters(world, model.parameters, Content::weights, model.stream);
  };
  const Tensors expected = trained(1);
  for (const int stage : {0, 2, 3}) {
    INFO("stage " << stage);
    if (stage > 0 || mpi_tests::ranks() <= 2) CHECK(trained(stage) == expected);
  }
}

}  // namespace pentatron
