// fp8 in every layout: what is quantised is the same, however it is split.
// precisions: fp8
#include "combined_model.h"
#include "gather.h"
#include "memory_check.h"
#include "parity.h"

#ifdef PRODUCTS_IN_FP8

namespace pentatron {
namespace {

CombinedCase fp8_case(MeshShape shape, int layers = 2) {
  CombinedCase c = {
      shape, training(test_options<CombinedOptions>(layers, /*d_model=*/128, /*heads=*/4, /*kv_heads=*/4,
                                                    /*d_ff=*/256, /*vocab_size=*/64, /*sequence=*/256,
                                                    /*micro_batch=*/1, /*global_batch=*/2 * shape.dp),
                      /*steps=*/2)};
  c.options.model.heads = c.options.model.kv_heads = 2 * shape.tp;
  c.options.model.d_model = 128 * c.options.model.heads / 2;  // head size 64: 128 columns a tensor rank
  c.options.model.d_ff = 128 * shape.tp;
  c.options.zero.zero_stage = 0;
  return c;
}

void check_fp8(World& world, const CombinedCase& c, double tolerance) {
  INFO("tp " << c.shape.tp << ", cp " << c.shape.cp << ", dp " << c.shape.dp << ", pp " << c.shape.pp
             << ", ZeRO-" << c.options.zero.zero_stage);
  CombinedModel combined(c, world);
  std::unique_ptr<CombinedModel> alone;
  if (world.rank() == 0) alone = std::make_unique<CombinedModel>(c.alone(), world);
  const std::vector<HostBatch> batches = batches_of_step(c.options, 0);
  combined.accumulate(batches);
  const Tensors got = gather_parameters(world, combined.parameters, Content::gradients, combined.compute);
  combined.totals.wait();
  if (!alone) return;
  alone->accumulate(batches);
  alone->totals.wait();
  for (size_t id = 0; id < got.size(); ++id) {
    INFO("gradient " << combined.parameters[int(id)].name);
    CHECK(relative_error(got[id], alone->gradients(int(id))) < tolerance);
  }
  const auto close = [&](double a, double b) { return std::abs(a - b) < tolerance * std::abs(b); };
  CHECK(close(combined.totals.host_loss(), alone->totals.host_loss()));
  CHECK(close(combined.totals.host_norm(), alone->totals.host_norm()));
}

// For sums that differ by this part of themselves, as those in another order do. The step of e4m3 is 2^-3.5
// of a number, so one in 2^-3.5 / difference comes out a step apart. Such steps have 12 times the variance of
// the rounding to e4m3, which is 2^-3.5 / sqrt(12) of both operands. A gradient has passed up to 8 products a
// layer.
double tolerance_of(double difference, int layers) {
  const double step = std::exp2(-3.5), rounding = step / std::sqrt(12);
  return std::sqrt(2) * rounding * std::sqrt(12 * difference / step) * std::sqrt(8.0 * layers);
}

}  // namespace

// Data ranks, shards and stages compute what one rank does, bit for bit, up to the order of sums in fp32.
TEST_CASE("07: fp8 in layouts that split no product", "[07][fp8]") {
  mpi_tests::set_time_limit(300);
  World world(nullptr, nullptr);
  const int n = world.ranks();
  for (const int zero_stage : {0, 1, 2, 3}) {
    CombinedCase c = fp8_case({.dp = n});
    c.options.zero.zero_stage = zero_stage;
    check_fp8(world, c, 1e-5);
  }
  if (n % 2 != 0) return;
  for (const PpSchedule schedule : {PpSchedule::one_f_one_b, PpSchedule::zb_h1}) {
    CombinedCase c = fp8_case({.dp = n / 2, .pp = 2});
    c.options.pipeline.pp_schedule = schedule;
    check_fp8(world, c, 1e-5);
  }
}

// Which rows of an expert share a scale, for the weight gradients, depends on who sends them. Scales are
// powers of two, so that changes only numbers below 2^-14 of the largest, by 2^-18 of it. But an expert's
// products have other numbers of rows, and a BLAS may add those at the edge in another order: 128 terms or
// more, each rounded by 2^-24.
TEST_CASE("07: fp8 with experts", "[07][fp8]") {
  mpi_tests::set_time_limit(300);
  World world(nullptr, nullptr);
  const int n = world.ranks();
  for (const int ep : {n, 1}) {
    CombinedCase c = fp8_case({.dp = n, .ep = ep});
    c.options.experts.ep = ep;
    c.options.model.experts = 2 * n;
    INFO("ep " << ep);
    check_fp8(world, c, tolerance_of(std::sqrt(128) * std::exp2(-24), c.options.model.layers));
  }
}

// There sums are rounded to bf16 in another place, by 2^-9 of a number.
TEST_CASE("07: fp8 in layouts that split products", "[07][fp8]") {
  mpi_tests::set_time_limit(300);
  World world(nullptr, nullptr);
  const int n = world.ranks();
  if (n % 2 != 0) return;
  constexpr int layers = 4;
  const double tolerance = tolerance_of(std::exp2(-9), layers);
  for (const bool sequence_parallel : {false, true}) {
    CombinedCase c = fp8_case({.tp = 2, .dp = n / 2}, layers);
    c.options.tensor.sequence_parallel = sequence_parallel;
    check_fp8(world, c, tolerance);
  }
  check_fp8(world, fp8_case({.cp = 2, .dp = n / 2}, layers), tolerance);
  CombinedCase chunks = fp8_case({.tp = 2, .dp = n / 2}, layers);
  chunks.options.tensor.sequence_parallel = true;
  chunks.options.tensor.tp_overlap = 2;
  check_fp8(world, chunks, tolerance);
  if (n == 4) check_fp8(world, fp8_case({.tp = 2, .cp = 2}, layers), tolerance);
  if (n == 8) check_fp8(world, fp8_case({.tp = 2, .cp = 2, .pp = 2}, layers), tolerance);
}

TEST_CASE("07: fp8: memory is as predicted", "[07][fp8][memory]") {
  World world(nullptr, nullptr);
  const int n = world.ranks();
  std::vector<CombinedCase> cases = {fp8_case({.dp = n})};
  if (n % 2 == 0) cases.push_back(fp8_case({.tp = 2, .dp = n / 2}));
  for (const int shared : {0, 2}) {
    cases.push_back(fp8_case({.dp = n, .ep = n}));
    cases.back().options.model.experts = 2 * n;
    cases.back().options.model.shared_experts = shared;
  }
  for (CombinedCase& c : cases) {
    c.options.experts.ep = c.shape.ep;
    INFO("tp " << c.shape.tp << ", ep " << c.shape.ep << ", shared experts "
               << c.options.model.shared_experts);
    const MemoryBytes before = memory_in_use();
    CombinedModel model(c, world);
    model.accumulate(batches_of_step(c.options, 0));
    model.update(0);
    check_bytes(allocated_since(before), predict_memory(c.options, c.shape, world.rank()).total());
  }
}

}  // namespace pentatron

#endif
