// The planner of 07 against published steps, and its search against single layouts. (tests/plan.py holds it
// against dry runs.) The cases need no communication, so one rank is enough. It is one of four: both fp64 and
// bf16 are tested on so many.
// precisions: fp64 bf16
#include <algorithm>
#include <random>

#include "../../07_combined_5d/plan/layouts.h"
#include "../catch.h"
#include "mpi_tests.h"

using namespace pentatron;

namespace {

bool is_chosen() { return mpi_tests::ranks() == 4 && mpi_tests::rank() == 0; }

CombinedOptions options_of_model(const ModelConfig& model, int sequence, int batch) {
  CombinedOptions options;
  options.model = model;
  options.sequence_length = sequence;
  options.global_batch_size = batch;
  options.attention = Attention::tensor_core;
  return options;
}

CombinedOptions random_layout(std::mt19937& draw, CombinedOptions o, int gpus) {
  const auto degree = [&](int& left) {
    const int n = 1 << draw() % 3;
    if (left % n != 0) return 1;
    left /= n;
    return n;
  };
  o.dp = gpus;
  o.tp = degree(o.dp), o.cp = degree(o.dp), o.pipeline.pp = degree(o.dp);
  o.zero.zero_stage = o.dp * o.cp > 1 ? static_cast<int>(draw() % 4) : 1;
  o.micro_batch_size = 1 << draw() % 3;
  if (o.pipeline.pp > 1) {
    constexpr PpSchedule planned[] = {PpSchedule::afab,  PpSchedule::one_f_one_b, PpSchedule::interleaved,
                                      PpSchedule::zb_h1, PpSchedule::zb_v,        PpSchedule::dualpipe_v};
    o.pipeline.pp_schedule = planned[draw() % std::size(planned)];
    o.pipeline.vpp = chunks_of(o.pipeline.pp_schedule);
  }
  o.tensor.sequence_parallel = o.tp > 1 && draw() % 2 == 0;
  const bool splits = o.pipeline.pp_schedule == PpSchedule::zb_h1 || is_v_shaped(o.pipeline.pp_schedule);
  if (!splits && draw() % 3 == 0) o.recompute = Recompute::full;
  return o;
}

}  // namespace

TEST_CASE("07: a layout is read as it was written", "[07][plan]") {
  if (!is_chosen()) return;
  std::mt19937 draw(7);
  for (int i = 0; i < 200; ++i) {
    const CombinedOptions o = random_layout(draw, {}, 64),
                          read = with_layout({}, "--explain", layout_of(o), 64);
    CAPTURE(layout_of(o));
    CHECK(layout_of(read) == layout_of(o));
    CHECK(shape_of(read) == shape_of(o));
  }
  for (const char* words : {"dualpipe pp4", "tp0", "tp", "tp1-8", "zero4", "dp-1", "tp2x", "fast",
                            "interleaved", "mbs99999999"}) {
    CAPTURE(words);
    CHECK_THROWS_AS(with_layout({}, "--explain", words, 8), UsageError);
  }
}

TEST_CASE("07: the search finds what no other layout beats", "[07][plan]") {
  if (!is_chosen()) return;
  const CombinedOptions base = options_of_model({"small", 8, 1024, 16, 8, 2816, 32768, 1e4, 1e-5}, 2048, 64);
  DeviceProfile gpu = load_profile("h100");
  gpu.memory_bytes = 8e9;  // so that not all fit
  gpu.gpus_per_node = 4;
  Planner planner(base, 16, gpu);
  const Search found = planner.search(5);
  REQUIRE(found.best.size() == 5);
  CHECK(found.divide > found.fit);
  CHECK(found.fit >= found.reach);
  for (size_t i = 0; i + 1 < found.best.size(); ++i)
    CHECK(found.best[i].cost.total() <= found.best[i + 1].cost.total());
  for (const Plan& p : found.best) {
    CHECK(p.memory.total() <= gpu.memory_bytes);
    CHECK(planner.plan(p.options).cost.total() == p.cost.total());
  }
  const Search of_each_mesh = planner.search(1000);  // the fastest layout of each; there are fewer
  for (size_t i = 0; i < found.best.size(); ++i)
    CHECK(found.best[i].cost.total() == of_each_mesh.best[i].cost.total());
  for (const Plan& p : of_each_mesh.best) {  // no rank needs more than what had to fit
    for (int rank = 0; rank < p.shape.ranks(); ++rank) {
      const MemoryBytes bytes = predict_memory(p.options, element_sizes, p.shape, rank).total();
      CHECK(std::accumulate(bytes.begin(), bytes.end(), size_t{0}) <= p.memory.tensors);
    }
  }
  std::mt19937 draw(3);
  int accepted = 0;
  for (int i = 0; i < 300; ++i) {
    const CombinedOptions o = random_layout(draw, base, 16);
    try {
      const Plan p = planner.plan(o);
      if (p.memory.total() > gpu.memory_bytes) continue;
      ++accepted;
      CAPTURE(layout_of(o));
      const auto of_mesh = std::ranges::find(of_each_mesh.best, p.shape, &Plan::shape);
      REQUIRE(of_mesh != of_each_mesh.best.end());
      CHECK(p.cost.total() >= of_mesh->cost.total());
    } catch (const UsageError&) {  // 07 would refuse it, too
    }
  }
  CHECK(accepted > 30);
}

TEST_CASE("07: small kernels wait for the host", "[07][plan]") {
  if (!is_chosen()) return;
  const DeviceProfile gpu = load_profile("h100");
  const auto host_share = [&](const Style& style, int micro_batch_size) {
    CombinedOptions o = options_of_model({"small", 8, 1024, 16, 8, 2816, 32768, 1e4, 1e-5}, 512, 64);
    o.tp = 8, o.dp = o.pipeline.pp = 1;
    o.micro_batch_size = micro_batch_size;
    o.tensor.sequence_parallel = true;
    const StepCost cost = Planner(o, 8, gpu, style).plan(o).cost;
    return cost.host / cost.total();
  };
  CHECK(host_share(own_style, 1) == 0);  // this project's host takes 3 us for an operation
  Style eager;
  eager.operation_seconds = 35e-6;
  CHECK(host_share(eager, 1) > 0.5);
  CHECK(host_share(eager, 64) < host_share(eager, 1) / 2);  // the same kernels, with more to do
}

TEST_CASE("07: ZeRO-2 sums all gradients of each micro-batch, in a pipeline, too", "[07][plan]") {
  if (!is_chosen()) return;
  DeviceProfile gpu = load_profile("h100");
  gpu.link_bandwidth = 1e9;  // so slow that nothing else counts
  const ModelConfig model = {"small", 8, 1024, 16, 8, 2816, 32768, 1e4, 1e-5};
  const CombinedOptions base = options_of_model(model, 512, 32);
  for (const char* layout :
       {"pp2 dp4 zero2 mbs1 1f1b", "pp2 dp4 zero3 mbs1 zb-v", "pp4 dp2 zero2 mbs1 afab"}) {
    CAPTURE(layout);
    const CombinedOptions o = with_layout(base, "--explain", layout, 8);
    const Plan p = Planner(base, 8, gpu).plan(o);
    const double parameters = double(parameter_count(model)) / o.pipeline.pp;  // of the mean rank
    const double sums = p.micro_batches * sizeof(accum) * parameters * (o.dp - 1) / o.dp / gpu.link_bandwidth;
    CHECK(p.cost.total() > sums);
    CHECK(p.cost.total() < 2 * sums);
  }
}

TEST_CASE("07: a search keeps to what is asked", "[07][plan]") {
  if (!is_chosen()) return;
  const CombinedOptions o = with_layout({}, "--explain", "tp4 dp2 pp2 zero3 mbs1 sp", 16);
  for (const char* words : {"", "tp4", "tp1-8 zero3", "zero0-3 sp 1f1b", "cp1"}) {
    CAPTURE(words);
    CHECK(is_as_wished(o, read_wishes("--only", words)));
  }
  for (const char* words : {"tp1-2", "tp8", "zero1", "full", "tp4 zb-h1", "pp4-8"}) {
    CAPTURE(words);
    CHECK_FALSE(is_as_wished(o, read_wishes("--only", words)));
  }
  for (const char* words : {"fast", "tp", "tp1-x", "zero1-7"})
    CHECK_THROWS_AS(read_wishes("--only", words), UsageError);
  CHECK_THROWS_AS(style_of("none"), UsageError);
}

#if PRECISION == 16
// Korthikanti et al., "Reducing Activation Recomputation" (2022), table 5: seconds of a step on A100s, with
// full recomputation, and with selective and sequence parallelism. Their MLP of 4 d in two products has the
// operations of ours with 8 d / 3 in three.
TEST_CASE("07: steps of Megatron-LM are as published", "[07][plan]") {
  if (!is_chosen()) return;
  struct Row {
    int layers, d, heads, pp, vpp, micro_batch_size, micro_batches;
    double full, selective;
  };
  const DeviceProfile gpu = load_profile("a100");
  double sum = 0;
  for (const Row& row : {Row{48, 6144, 64, 1, 1, 4, 1, 1.42, 1.10},
                         {96, 12288, 96, 8, 3, 1, 64, 18.13, 13.75},
                         {105, 20480, 128, 35, 3, 1, 280, 49.05, 37.83},
                         {128, 25600, 160, 64, 1, 1, 512, 94.42, 71.49}}) {
    for (const bool full : {true, false}) {
      CombinedOptions o = options_of_model(
          {"GPT", row.layers, row.d, row.heads, row.heads, row.d * 8 / 24 * 8, 51200, 1e4, 1e-5}, 2048,
          row.micro_batch_size * row.micro_batches);
      o.attention = Attention::naive;
      o.tp = 8, o.dp = 1, o.pipeline.pp = row.pp, o.micro_batch_size = row.micro_batch_size;
      o.pipeline.pp_schedule = row.vpp > 1 ? PpSchedule::interleaved : PpSchedule::one_f_one_b;
      o.pipeline.vpp = row.vpp;
      o.tensor.sequence_parallel = !full;
      o.recompute = full ? Recompute::full : Recompute::selective;
      const double seconds = Planner(o, 8 * row.pp, gpu, style_of("megatron")).plan(o).cost.total();
      const double apart = seconds / (full ? row.full : row.selective) - 1;
      CAPTURE(row.layers, full, seconds, apart);
      CHECK(std::abs(apart) < 0.1);
      sum += std::abs(apart);
    }
  }
  CHECK(sum / 8 < 0.05);
}
#endif
