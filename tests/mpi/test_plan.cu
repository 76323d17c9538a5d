// The planner of 07 against published steps, and its search against single layouts. (tests/plan.py holds it
// against dry runs.) The cases need no communication: each rank does all of it.
#include <algorithm>
#include <random>

#include "../../07_combined_5d/plan/layouts.h"
#include "../catch.h"
#include "mpi_tests.h"

using namespace pentatron;

namespace {

CombinedOptions options_of_model(const ModelConfig& model, int sequence, int batch) {
  CombinedOptions options;
  options.model = model;
  options.sequence_length = sequence;
  options.global_batch_size = batch;
  options.attention = Attention::tensor_core;
  return options;
}

Layout random_layout(std::mt19937& draw, int gpus) {
  const auto degree = [&](int& left) {
    const int n = 1 << draw() % 3;
    if (left % n != 0) return 1;
    left /= n;
    return n;
  };
  Layout l;
  int left = gpus;
  l.shape.tp = degree(left), l.shape.cp = degree(left), l.shape.pp = degree(left);
  l.shape.dp = left;
  l.zero_stage = l.shape.dp * l.shape.cp > 1 ? static_cast<int>(draw() % 4) : 1;
  l.micro_batch_size = 1 << draw() % 3;
  if (l.shape.pp > 1) {
    constexpr PpSchedule planned[] = {PpSchedule::afab,  PpSchedule::one_f_one_b, PpSchedule::interleaved,
                                      PpSchedule::zb_h1, PpSchedule::zb_v,        PpSchedule::dualpipe_v};
    l.schedule = planned[draw() % std::size(planned)];
    if (l.schedule == PpSchedule::interleaved || is_v_shaped(l.schedule)) l.vpp = 2;
  }
  l.sequence_parallel = l.shape.tp > 1 && draw() % 2 == 0;
  const bool splits = l.schedule == PpSchedule::zb_h1 || is_v_shaped(l.schedule);
  if (!splits && draw() % 3 == 0) l.recompute = Recompute::full;
  return l;
}

}  // namespace

TEST_CASE("07: a layout is read as it was written", "[07][plan]") {
  if (mpi_tests::ranks() != 4) return;
  std::mt19937 draw(7);
  for (int i = 0; i < 200; ++i) {
    const Layout l = random_layout(draw, 64);
    CAPTURE(to_string(l));
    CHECK(to_string(parse_layout("--explain", to_string(l), 64)) == to_string(l));
    CHECK(parse_layout("--explain", to_string(l), 64).shape == l.shape);
  }
  for (const char* words :
       {"dualpipe pp4", "tp0", "tp", "zero4", "dp-1", "tp2x", "fast", "interleaved", "mbs99999999"}) {
    CAPTURE(words);
    CHECK_THROWS_AS(parse_layout("--explain", words, 8), UsageError);
  }
}

TEST_CASE("07: the search finds what no other layout beats", "[07][plan]") {
  if (mpi_tests::ranks() != 4) return;
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
    CHECK(planner.plan(p.layout).cost.total() == p.cost.total());
  }
  const Search of_each_mesh = planner.search(1000);  // the fastest layout of each; there are fewer
  for (size_t i = 0; i < found.best.size(); ++i)
    CHECK(found.best[i].cost.total() == of_each_mesh.best[i].cost.total());
  std::mt19937 draw(3);
  int accepted = 0;
  for (int i = 0; i < 300; ++i) {
    const Layout l = random_layout(draw, 16);
    try {
      const Plan p = planner.plan(l);
      if (p.memory.total() > gpu.memory_bytes) continue;
      ++accepted;
      CAPTURE(to_string(l));
      const auto of_mesh = std::find_if(of_each_mesh.best.begin(), of_each_mesh.best.end(),
                                        [&](const Plan& best) { return best.layout.shape == l.shape; });
      REQUIRE(of_mesh != of_each_mesh.best.end());
      CHECK(p.cost.total() >= of_mesh->cost.total());
    } catch (const UsageError&) {  // 07 would refuse it, too
    }
  }
  CHECK(accepted > 30);
}

TEST_CASE("07: small kernels wait for the host", "[07][plan]") {
  if (mpi_tests::ranks() != 4) return;
  const DeviceProfile gpu = load_profile("h100");
  const auto host_share = [&](const Style& style, int micro_batch_size) {
    Layout l;
    l.shape = {8, 1, 1, 1, 1};
    l.micro_batch_size = micro_batch_size;
    l.sequence_parallel = true;
    const CombinedOptions options =
        options_of(options_of_model({"small", 8, 1024, 16, 8, 2816, 32768, 1e4, 1e-5}, 512, 64), l);
    const Schedule schedule = schedule_of(options, l.shape);
    const StepCost cost = CostModel(options, l.shape, gpu, schedule, style).step();
    return cost.host / cost.total();
  };
  CHECK(host_share(own_style, 1) == 0);  // this project's host takes 3 us for an operation
  Style eager;
  eager.operation_seconds = 35e-6;
  CHECK(host_share(eager, 1) > 0.5);
  CHECK(host_share(eager, 64) < host_share(eager, 1) / 2);  // the same kernels, with more to do
}

TEST_CASE("07: a search keeps to what is asked", "[07][plan]") {
  if (mpi_tests::ranks() != 4) return;
  Layout l;
  l.shape = {4, 1, 2, 2, 1};
  l.zero_stage = 3, l.sequence_parallel = true;
  for (const char* words : {"", "tp4", "tp1-8 zero3", "zero0-3 sp 1f1b", "cp1"}) {
    CAPTURE(words);
    CHECK_NOTHROW(check_words("--only", words));
    CHECK(Wishes{words}.allow(l));
  }
  for (const char* words : {"tp1-2", "tp8", "zero1", "full", "tp4 zb-h1", "pp4-8"}) {
    CAPTURE(words);
    CHECK_FALSE(Wishes{words}.allow(l));
  }
  for (const char* words : {"fast", "tp", "tp1-x", "zero1-7"})
    CHECK_THROWS_AS(check_words("--only", words), UsageError);
  CHECK_THROWS_AS(style_of("none"), UsageError);
}

#if PRECISION == 16
// Korthikanti et al., "Reducing Activation Recomputation" (2022), table 5: seconds of a step on A100s, with
// full recomputation, and with selective and sequence parallelism. Their MLP of 4 d in two products has the
// operations of ours with 8 d / 3 in three.
TEST_CASE("07: steps of Megatron-LM are as published", "[07][plan]") {
  if (mpi_tests::ranks() != 4) return;
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
      Layout l;
      l.shape = {8, 1, 1, row.pp, 1};
      l.micro_batch_size = row.micro_batch_size;
      l.vpp = row.vpp;
      l.schedule = row.vpp > 1 ? PpSchedule::interleaved : PpSchedule::one_f_one_b;
      l.sequence_parallel = !full;
      l.recompute = full ? Recompute::full : Recompute::selective;
      CombinedOptions base = options_of_model(
          {"GPT", row.layers, row.d, row.heads, row.heads, row.d * 8 / 24 * 8, 51200, 1e4, 1e-5}, 2048,
          row.micro_batch_size * row.micro_batches);
      base.attention = Attention::naive;
      const CombinedOptions options = options_of(base, l);
      const Schedule schedule = schedule_of(options, l.shape);
      const double seconds = CostModel(options, l.shape, gpu, schedule, style_of("megatron")).step().total();
      const double apart = seconds / (full ? row.full : row.selective) - 1;
      CAPTURE(row.layers, full, seconds, apart);
      CHECK(std::abs(apart) < 0.1);
      sum += std::abs(apart);
    }
  }
  CHECK(sum / 8 < 0.05);
}
#endif
