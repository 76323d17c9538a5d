// Whatever the technique, all ranks together must do what one rank does alone: the same initial weights to
// the bit, in every step the same loss, gradient norm and gradients, and so the same weights. In fp64
// agreement is about 1e-14, and a bug is not.
#include "precision.h"
#if PRECISION == 64

#include <map>

#include "gather.h"
#include "parallel_model.h"

namespace pentatron {
namespace {

constexpr int kSteps = 5;
constexpr double kTensorTolerance = 1e-11;  // relative Frobenius error
constexpr double kScalarTolerance = 1e-12;  // relative error

using Tensors = std::vector<std::vector<double>>;  // [parameters]

// Sizes that no number of ranks divides: every shard ends within a parameter, or in the padding.
Options odd_options(int micro_batches, Recompute recompute) {
  Options o = test_options(/*layers=*/3, /*d_model=*/12, /*heads=*/3, /*kv_heads=*/1, /*d_ff=*/10,
                           /*vocab_size=*/23, /*sequence=*/5, /*micro_batch=*/2,
                           /*global_batch=*/2 * micro_batches * mpi_tests::ranks());
  o.optimizer = OptimizerKind::sgd;
  o.lr = 0.5;
  o.min_lr = 0.1;
  o.steps = kSteps;
  o.warmup_steps = 2;
  o.weight_decay = 0.01;
  o.grad_clip = 0.2;  // less than the norm
  o.recompute = recompute;
  return o;
}

// Ranks and micro-batches have different numbers of targets.
std::vector<HostBatch> batches_of_step(const Options& o, int step) {
  std::vector<HostBatch> batches = random_batches(o, 100 + step);
  for (size_t i = 0; i < batches.size(); ++i) {
    std::vector<int32_t>& targets = batches[i].targets;
    for (size_t row = 0; row < targets.size(); ++row) {
      if (row % (i % 3 + 2) == 0) targets[row] = ignored_target;
    }
  }
  return batches;
}

// What one rank computes alone.
struct Reference {
  Tensors initial, final;
  std::vector<double> loss, norm;  // [steps]
  std::vector<Tensors> gradients;  // [steps]
};

Reference train_alone(const Options& options) {
  TestModel model(options);
  const int parameters = static_cast<int>(model.parameters.all().size());
  Reference r;
  for (int id = 0; id < parameters; ++id) r.initial.push_back(model.weights(id));
  for (int step = 0; step < kSteps; ++step) {
    model.accumulate(batches_of_step(options, step));
    r.gradients.emplace_back();
    for (int id = 0; id < parameters; ++id) r.gradients.back().push_back(model.gradients(id));
    model.optimizer->step(step, model.totals.norm_squared());
    model.totals.wait();
    r.loss.push_back(model.totals.host_loss());
    r.norm.push_back(model.totals.host_norm());
  }
  for (int id = 0; id < parameters; ++id) r.final.push_back(model.weights(id));
  return r;
}

const Reference& reference(int micro_batches, Recompute recompute) {
  static std::map<std::pair<int, Recompute>, Reference> known;
  const auto key = std::make_pair(micro_batches, recompute);
  if (!known.contains(key)) known[key] = train_alone(odd_options(micro_batches, recompute));
  return known[key];
}

void check_parity(const Technique& technique, int micro_batches, Recompute recompute) {
  const Options options = odd_options(micro_batches, recompute);
  const Reference& expected = reference(micro_batches, recompute);
  World world(nullptr, nullptr);
  Communicator data(world, 0, world.rank(), "data");
  ParallelModel model(options, technique, data);
  const auto gather = [&](size_t id, Content content) {
    return gather_parameter(world, model.parameters, static_cast<int>(id), content, model.stream);
  };

  for (size_t id = 0; id < expected.initial.size(); ++id) {
    INFO(model.parameters[id].name << ": initial weights");
    CHECK(gather(id, Content::weights) == expected.initial[id]);
  }
  for (int step = 0; step < kSteps; ++step) {
    INFO("step " << step);
    model.accumulate(batches_of_step(options, step));
    for (size_t id = 0; id < expected.initial.size(); ++id) {
      INFO(model.parameters[id].name << ": gradient");
      CHECK(relative_error(gather(id, Content::gradients), expected.gradients[step][id]) < kTensorTolerance);
    }
    model.update(step);
    CHECK(std::abs(model.totals.host_loss() - expected.loss[step]) <= kScalarTolerance * expected.loss[step]);
    CHECK(std::abs(model.totals.host_norm() - expected.norm[step]) <= kScalarTolerance * expected.norm[step]);
    CHECK(model.totals.host_norm() > options.grad_clip);
  }
  for (size_t id = 0; id < expected.initial.size(); ++id) {
    INFO(model.parameters[id].name << ": weights");
    CHECK(relative_error(expected.initial[id], expected.final[id]) > 1e-4);
    CHECK(relative_error(gather(id, Content::weights), expected.final[id]) < kTensorTolerance);
  }
}

// Accumulation and recomputation change when hooks are called.
void check_parity(const Technique& technique) {
  mpi_tests::set_time_limit(300);
  for (const int micro_batches : {1, 3}) {
    for (const Recompute recompute : {Recompute::none, Recompute::full}) {
      INFO(micro_batches << " micro-batches a rank, recompute " << to_string(recompute));
      check_parity(technique, micro_batches, recompute);
    }
  }
}

Technique data_parallel(DpSync sync, double bucket_mb = 25) {
  return {Technique::data_parallel, sync, bucket_mb};
}
Technique zero(int stage) { return {.kind = Technique::zero, .stage = stage}; }

}  // namespace

TEST_CASE("02: parity, naive", "[02][parity]") { check_parity(data_parallel(DpSync::naive)); }
TEST_CASE("02: parity, overlap", "[02][parity]") { check_parity(data_parallel(DpSync::overlap)); }

// A layer has 768 elements of 8 bytes.
TEST_CASE("02: parity, several buckets a unit", "[02][parity]") {
  check_parity(data_parallel(DpSync::bucket, 0.001));
}
TEST_CASE("02: parity, a bucket for several units", "[02][parity]") {
  check_parity(data_parallel(DpSync::bucket, 0.010));
}
TEST_CASE("02: parity, one bucket for all", "[02][parity]") { check_parity(data_parallel(DpSync::bucket)); }

TEST_CASE("03: parity, stage 0", "[03][parity]") { check_parity(zero(0)); }
TEST_CASE("03: parity, stage 1", "[03][parity]") { check_parity(zero(1)); }
TEST_CASE("03: parity, stage 2", "[03][parity]") { check_parity(zero(2)); }
TEST_CASE("03: parity, stage 3", "[03][parity]") { check_parity(zero(3)); }

}  // namespace pentatron

#endif
