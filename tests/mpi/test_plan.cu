// The planner's search against single layouts, and its coarse time where it is easy to say. (tests/plan.py
// holds that against dry runs.) The cases need no communication, so one rank is enough. It is one of four:
// both fp64 and bf16 are tested on so many.
// precisions: fp64 bf16
#include <algorithm>
#include <random>

#include "../../07_combined_5d/plan/dry_run.h"
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
  o.micro_batch_size = 1 + draw() % 6;
  if (o.pipeline.pp > 1) {
    constexpr PpSchedule planned[] = {PpSchedule::afab,    PpSchedule::one_f_one_b, PpSchedule::interleaved,
                                      PpSchedule::zb_h1,   PpSchedule::zb_v,        PpSchedule::dualpipe_v,
                                      PpSchedule::dualpipe};
    o.pipeline.pp_schedule = planned[draw() % std::size(planned)];
    const bool is_interleaved = o.pipeline.pp_schedule == PpSchedule::interleaved;
    o.pipeline.vpp = chunks_of(o.pipeline.pp_schedule) + (is_interleaved ? draw() % 3 : 0);
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
    CombinedOptions o = random_layout(draw, {}, 64);
    o.zero.shard_ranks = i % 5;
    const CombinedOptions read = with_layout({}, "--compare", layout_of(o), 64);
    CAPTURE(layout_of(o));
    CHECK(layout_of(read) == layout_of(o));
    CHECK(options_of(read) == options_of(o));
    CHECK(read.zero.shard_ranks == o.zero.shard_ranks);
  }
  for (const char* words :
       {"dual pp4", "tp0", "tp", "tp1-8", "zero4", "dp-1", "tp2x", "fast", "interleaved", "mbs99999999"}) {
    CAPTURE(words);
    CHECK_THROWS_AS(with_layout({}, "--compare", words, 8), UsageError);
  }
}

TEST_CASE("07: the search finds what no other layout beats", "[07][plan]") {
  if (!is_chosen()) return;
  const CombinedOptions base = options_of_model({"small", 8, 1024, 16, 8, 2816, 32768, 1e4, 1e-5}, 2048, 96);
  DeviceProfile gpu = load_profile("h100");
  gpu.memory_bytes = 8e9;  // so that not all fit
  gpu.gpus_per_node = 4;
  Planner planner = {base, 16, gpu};
  const Search found = planner.search(5);
  REQUIRE(found.best.size() == 5);
  CHECK(found.divide > found.fit);
  CHECK(found.fit >= found.reach);
  for (size_t i = 0; i + 1 < found.best.size(); ++i)
    CHECK(found.best[i].seconds <= found.best[i + 1].seconds);
  for (const Plan& p : found.best) {
    CHECK(p.memory() <= gpu.memory_bytes);
    CHECK(planner.plan(p.options).seconds == p.seconds);
  }
  const Search of_each_mesh = planner.search(1000);  // the fastest layout of each; there are fewer
  for (size_t i = 0; i < found.best.size(); ++i) CHECK(found.best[i].seconds == of_each_mesh.best[i].seconds);
  for (const Plan& p : of_each_mesh.best) {  // no rank needs more than what had to fit
    for (int rank = 0; rank < p.shape.ranks(); ++rank) {
      const MemoryBytes bytes = predict_memory(p.options, p.shape, rank).total();
      CHECK(std::accumulate(bytes.begin(), bytes.end(), size_t{0}) <= sum_of(p.tensors()));
    }
  }
  std::mt19937 draw(3);
  int accepted = 0;
  for (int i = 0; i < 300; ++i) {
    const CombinedOptions o = random_layout(draw, base, 16);
    try {
      const Plan p = planner.plan(o);
      if (p.memory() > gpu.memory_bytes) continue;
      ++accepted;
      CAPTURE(layout_of(o));
      const auto of_mesh = std::ranges::find(of_each_mesh.best, p.shape.degrees(),
                                             [](const Plan& other) { return other.shape.degrees(); });
      REQUIRE(of_mesh != of_each_mesh.best.end());
      CHECK(p.seconds >= of_mesh->seconds);
    } catch (const UsageError&) {  // 07 would refuse it, too
    }
  }
  CHECK(accepted > 30);
}

TEST_CASE("07: small kernels wait for the host", "[07][plan]") {
  if (!is_chosen()) return;
  DeviceProfile gpu = load_profile("h100");
  const auto host_share = [&](int micro_batch_size) {
    CombinedOptions o = options_of_model({"small", 8, 1024, 16, 8, 2816, 32768, 1e4, 1e-5}, 512, 64);
    o.tp = 8, o.dp = o.pipeline.pp = 1;
    o.micro_batch_size = micro_batch_size;
    o.tensor.sequence_parallel = true;
    const Plan plan = Planner{o, 8, gpu}.plan(o);
    return plan.parts.back().second / plan.seconds;
  };
  CHECK(host_share(1) == 0);  // this project's host takes 3 us for an operation
  gpu.launch_seconds = 35e-6;
  CHECK(host_share(1) > 0.5);
  CHECK(host_share(64) < host_share(1) / 2);  // the same kernels, with more to do
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
    const CombinedOptions o = with_layout(base, "--compare", layout, 8);
    const Plan p = Planner{base, 8, gpu}.plan(o);
    const double parameters = double(parameter_count(model)) / o.pipeline.pp;  // of the mean rank
    const double sums = p.micro_batches * sizeof(accum) * parameters * (o.dp - 1) / o.dp / gpu.link_bandwidth;
    CAPTURE(p.seconds, sums);
    CHECK(p.seconds > sums);
    CHECK(p.seconds < 2 * sums);
  }
}

TEST_CASE("07: copies sum a shard once a step", "[07][plan]") {
  if (!is_chosen()) return;
  DeviceProfile gpu = load_profile("h100");
  gpu.gpus_per_node = 2, gpu.network_bandwidth = 1e9;  // so slow that nothing else counts
  const ModelConfig model = {"small", 8, 1024, 16, 8, 2816, 32768, 1e4, 1e-5};
  const CombinedOptions base = options_of_model(model, 512, 32);
  const double sums =
      2 * 3.0 / 4 * sizeof(accum) * double(parameter_count(model)) / 2 / gpu.network_bandwidth;
  for (const char* layout : {"dp8 zero1 shards2 mbs1", "dp8 zero2 shards2 mbs2", "dp8 zero3 shards2 mbs1"}) {
    const Plan p = Planner{base, 8, gpu}.plan(with_layout(base, "--compare", layout, 8));
    CAPTURE(layout, p.seconds, sums);
    CHECK(p.seconds > sums);
    CHECK(p.seconds < 1.2 * sums);
  }
}

TEST_CASE("07: the bubble of a coarse time is the note's", "[07][plan]") {
  if (!is_chosen()) return;
  DeviceProfile gpu = load_profile("h100");
  gpu.link_latency = 0, gpu.link_bandwidth = 1e30;
  const CombinedOptions base = options_of_model({"small", 16, 1024, 16, 8, 2816, 32, 1e4, 1e-5}, 2048, 32);
  const auto bubble = [&](const char* layout) {
    const Plan p = Planner{base, 4, gpu}.plan(with_layout(base, "--compare", layout, 4));
    return p.parts[4].second / p.parts[0].second;  // of the kernels
  };
  const double of_1f1b = bubble("pp4 zero1 mbs1 1f1b");
  CHECK(of_1f1b == Approx(3.0 / 32).epsilon(0.02));  // (p - 1) / m; a rank has the head, too
  CHECK(bubble("pp4 zero1 mbs1 afab") == Approx(of_1f1b));
  CHECK(bubble("pp4 zero1 mbs1 interleaved4") == Approx(of_1f1b / 4).epsilon(0.01));
  CHECK(bubble("pp4 zero1 mbs1 zb-h1") < of_1f1b / 1.5);
  CHECK(bubble("pp4 zero1 mbs1 zb-v") < bubble("pp4 zero1 mbs1 zb-h1"));
  gpu.launch_seconds = 1e-3;  // a host that is late holds up each micro-batch, in the bubble, too
  const Plan late = Planner{base, 4, gpu}.plan(with_layout(base, "--compare", "pp4 zero1 mbs1 1f1b", 4));
  CHECK(late.parts[4].second / (late.parts[0].second + late.parts.back().second) ==
        Approx(3.0 / 32).epsilon(0.05));
  CHECK(late.seconds > 32 * 4 * 42 * 1e-3);  // so many micro-batches, layers, and kernels of a layer
}

TEST_CASE("07: ranks on many nodes hold each other up", "[07][plan]") {
  if (!is_chosen()) return;
  const CombinedOptions base = options_of_model({"wide", 2, 4096, 64, 64, 8192, 32, 1e4, 1e-5}, 2048, 32);
  DeviceProfile gpu = load_profile("h100");
  enum Part { tensor = 1, data = 5, host = 8 };
  const auto seconds = [&](const char* layout, int gpus, double contention, Part part) {
    gpu.contention = contention;
    return Planner{base, gpus, gpu}.plan(with_layout(base, "--compare", layout, gpus)).parts[part].second;
  };
  CHECK(seconds("tp8", 8, 0.5, tensor) == seconds("tp8", 8, 0, tensor));
  CHECK(seconds("tp32", 32, 0.5, tensor) >= 2 * seconds("tp32", 32, 0, tensor));  // the root of four nodes
  CHECK(seconds("dp16 mbs1", 16, 0.5, data) == seconds("dp16 mbs1", 16, 0, data));
  CHECK(seconds("dp32 mbs1", 32, 0.5, data) >
        1.2 * seconds("dp32 mbs1", 32, 0, data));  // the root of 4 / 2 nodes
  gpu.collective_seconds = 1;                      // so long that nothing else counts
  const auto of_collective = [&](const char* layout, int gpus, double contention) {
    return seconds(layout, gpus, contention, host) / (gpus > 8 ? 1 : 2);  // a layer is a rank's, or two
  };
  CHECK(of_collective("tp8 pp2", 16, 0) == Approx(9 * of_collective("tp8", 8, 0)).epsilon(0.01));
  CHECK(of_collective("tp16 pp2", 32, 0.5) ==
        Approx((1 + 16 * std::sqrt(2)) * of_collective("tp8", 8, 0)).epsilon(0.01));
}

TEST_CASE("07: what a framework does otherwise", "[07][plan]") {
  if (!is_chosen()) return;
  DeviceProfile ours = load_profile("h100");
  ours.link_latency = 0;
  CombinedOptions base = options_of_model({"small", 8, 1024, 16, 8, 2816, 32768, 1e4, 1e-5}, 512, 64);
  enum Part { compute, tensor, context, experts, bubble, data, optimizer, messages, host };
  const auto plan = [&](const char* layout, const DeviceProfile& gpu) {
    return Planner{base, 4, gpu}.plan(with_layout(base, "--compare", layout, 4));
  };
  const auto seconds = [&](const char* layout, const DeviceProfile& gpu, Part part) {
    return plan(layout, gpu).parts[part].second;
  };
  DeviceProfile gpu = ours;
  gpu.elementwise_passes = 3;  // the optimizer only moves
  CHECK(seconds("dp4 zero1 mbs4", gpu, optimizer) ==
        Approx(3 * seconds("dp4 zero1 mbs4", ours, optimizer)).epsilon(0.1));
  CHECK(seconds("dp4 zero1 mbs4", gpu, compute) > 1.1 * seconds("dp4 zero1 mbs4", ours, compute));
  gpu = ours, gpu.loss_bytes = 60;
  const double logits = 64.0 / 4 * 512 * 32768, moved = (60 - 3 * sizeof(real)) * logits;
  CHECK(seconds("dp4 zero1 mbs4", gpu, compute) - seconds("dp4 zero1 mbs4", ours, compute) ==
        Approx(moved / gpu.memory_bandwidth / gpu.memory_achievable));
  gpu = ours, gpu.gradient_bytes = sizeof(accum) / 2;
  const Plan full = plan("dp4 zero0 mbs4", ours), half = plan("dp4 zero0 mbs4", gpu);
  CHECK(2 * half.tensors()[Purpose::gradients] == full.tensors()[Purpose::gradients]);
  gpu.exposed_sums = 1;
  const double all =
      2.0 * 3 / 4 * gpu.gradient_bytes * double(parameter_count(base.model)) / gpu.link_bandwidth;
  CHECK(seconds("dp4 zero0 mbs4", gpu, data) == Approx(all).epsilon(0.02));  // nothing hides them
  CHECK(seconds("tp4 mbs4", gpu, tensor) > 1.2 * seconds("tp4 mbs4", ours, tensor));
  base.data_parallel.dp_sync = DpSync::naive;
  CHECK(seconds("dp4 zero0 mbs4", ours, data) == Approx(2 * all).epsilon(0.02));  // after backward
  gpu = ours, gpu.message_seconds = 1e-3;
  CHECK(seconds("pp4 mbs4 1f1b", ours, messages) == 0);
  CHECK(seconds("pp4 mbs4 1f1b", gpu, messages) == Approx(16 * 2 * 1e-3).epsilon(0.05));
  CHECK(seconds("pp4 mbs4 interleaved2", gpu, messages) == Approx(16 * 4 * 1e-3).epsilon(0.05));
  gpu.link_bandwidth = 1e9;
  const double whole = seconds("tp2 pp2 mbs4 1f1b", gpu, messages);
  gpu.split_messages = 1;
  CHECK(seconds("tp2 pp2 mbs4 1f1b", gpu, messages) - 0.032 == Approx((whole - 0.032) / 2));
  gpu = ours, gpu.equal_stages = 1;
  base.model.vocab_size = 1 << 18;  // a head that costs as much as all layers
  CHECK(plan("pp4 mbs4 1f1b", gpu).tensors()[Purpose::weights] >
        plan("pp4 mbs4 1f1b", ours).tensors()[Purpose::weights]);
}

TEST_CASE("07: scores in memory are passes over them", "[07][plan]") {
  if (!is_chosen()) return;
  CombinedOptions base = options_of_model({"one", 1, 1024, 16, 16, 2816, 32, 1e4, 1e-5}, 4096, 1);
  const DeviceProfile gpu = load_profile("h100");
  const auto seconds = [&](Attention attention) {
    base.attention = attention;
    return Planner{base, 1, gpu}.plan(with_layout(base, "--compare", "mbs1", 1)).seconds;
  };
  const double scores = 16.0 * 4096 * 4096 * sizeof(real) / gpu.memory_bandwidth / gpu.memory_achievable;
  const double more = seconds(Attention::naive) - seconds(Attention::tensor_core);
  CHECK(more > 5 * scores);  // softmax has two passes, its gradient three; products write them, too
  CHECK(more < 16 * scores);
}

TEST_CASE("07: a search keeps to what is asked", "[07][plan]") {
  if (!is_chosen()) return;
  const CombinedOptions o = with_layout({}, "--compare", "tp4 dp2 pp2 zero3 mbs1 sp", 16);
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
  // A model has no replica here but that of dualpipe: two copies, which ZeRO can split.
  const CombinedOptions base = options_of_model({"small", 8, 1024, 16, 8, 2816, 32, 1e4, 1e-5}, 512, 32);
  for (const char* words : {"pp4 dualpipe zero2", "pp4 dualpipe zero3", "pp4 1f1b zero1"}) {
    CAPTURE(words);
    CHECK(Planner{base, 4, load_profile("h100"), read_wishes("--only", words)}.search(1).best.size() == 1);
  }
  CHECK(Planner{base, 4, load_profile("h100"), read_wishes("--only", "pp4 1f1b zero2")}.search(1).divide ==
        0);
}

TEST_CASE("07: the search has all micro-batches and chunks, and recomputes what attention keeps",
          "[07][plan]") {
  if (!is_chosen()) return;
  CombinedOptions base = options_of_model({"small", 12, 1024, 16, 8, 2816, 32, 1e4, 1e-5}, 512, 48);
  const auto found = [&](const std::string& words) {
    return Planner{base, 4, load_profile("h100"), read_wishes("--only", words)}.search(1).reach;
  };
  for (const char* words :
       {"dp4 mbs3", "dp4 mbs6", "dp4 mbs12", "dp2 pp2 interleaved3 mbs1", "pp4 interleaved3"}) {
    CAPTURE(words);
    CHECK(found(words) > 0);
  }
  CHECK(found("dp4 mbs5") == 0);
  CHECK(found("pp4 interleaved4") == 0);  // 16 stages of 12 layers
  const auto seconds = [&](const char* words) {
    return Planner{base, 4, load_profile("h100")}.plan(with_layout(base, "--compare", words, 4)).seconds;
  };
  CHECK(found("selective") == 0);  // these kernels keep no scores
  CHECK(seconds("dp4 mbs1 selective") == seconds("dp4 mbs1"));
  base.attention = Attention::naive;
  CHECK(found("selective") > 0);
  CHECK(seconds("dp4 mbs1 selective") > seconds("dp4 mbs1"));
}

TEST_CASE("07: the parts of a dry run are what its kernels do not hide", "[07][plan]") {
  if (!is_chosen()) return;
  Plan plan{{}, {}};
  read_summary(plan, nlohmann::json::parse(R"({"modelled": {"seconds": 10, "compute_seconds": 7}, "streams": {
    "tensor": {"seconds": 4, "hidden": 0.25}, "context in": {"seconds": 1, "hidden": 0},
    "experts": {"seconds": 2, "hidden": 0.5}, "data": {"seconds": 8, "hidden": 0.75},
    "forward in": {"seconds": 3, "hidden": 0}, "backward out": {"seconds": 2, "hidden": 0.5}}})"));
  CHECK(plan.seconds == 10);
  const std::vector<std::pair<std::string, double>> expected = {{"compute", 7}, {"idle", 3},    {"tensor", 3},
                                                                {"context", 1}, {"experts", 1}, {"data", 2},
                                                                {"messages", 4}};
  CHECK(plan.parts == expected);
}
