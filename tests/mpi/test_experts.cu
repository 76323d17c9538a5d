// Experts: every layout does what one rank does, to about 1e-14 in fp64; what travels, and what memory it
// takes.
// precisions: fp64 bf16
#include <cstdio>
#include <numeric>

#include "combined_model.h"
#include "gather.h"
#include "memory_check.h"
#include "parity.h"
#include "run/program.h"

namespace pentatron {
namespace {

constexpr int kExpertSteps = 2;

// Experts that the ranks can share out, with sizes that two tensor ranks can.
CombinedOptions expert_options(int experts, int top_k) {
  CombinedOptions o = training(
      test_options<CombinedOptions>(/*layers=*/3, /*d_model=*/12, /*heads=*/2, /*kv_heads=*/2, /*d_ff=*/10,
                                    /*vocab_size=*/22, /*sequence=*/8, /*micro_batch=*/2,
                                    /*global_batch=*/2 * 2 * mpi_tests::ranks()),
      kExpertSteps);
  o.model.experts = experts;
  o.model.top_k = top_k;
  o.experts.aux_loss = 0.1;
  o.zero.zero_stage = 0;
  return o;
}

// A mesh of all ranks; data ranks are what the other axes leave.
CombinedCase expert_case(CombinedOptions options, int tp = 1, int cp = 1, int pp = 1) {
  const int dp = mpi_tests::ranks() / (tp * cp * pp);
  options.global_batch_size = options.micro_batch_size * 2 * dp;
  return {{.tp = tp, .cp = cp, .dp = dp, .pp = pp, .ep = options.experts.ep}, options};
}

// Two pipeline ranks with two copies of the model.
CombinedCase in_two_copies(CombinedOptions options) {
  options.pipeline.pp_schedule = PpSchedule::dualpipe;
  options.pipeline.vpp = 2;
  options.model.layers = 5;
  CombinedCase c = expert_case(options, 1, 1, 2);
  c.options.global_batch_size *= 4;
  c.shape.copies = 2;
  c.shape.ep = c.options.experts.ep = c.shape.dp;
  return c;
}

int experts_for_ranks() { return mpi_tests::ranks() == 3 ? 6 : 8; }

}  // namespace
}  // namespace pentatron

#if PRECISION == 64

namespace pentatron {
namespace {

enum class Routing { as_drawn, to_the_first };

// A router of zeros finds all experts equal, and takes the first ones.
void set_routers(CombinedModel& model, Routing routing) {
  if (routing == Routing::as_drawn) return;
  for (const Shard& shard : model.parameters.shards()) {
    for (const ParameterRange& range : model.parameters.ranges(shard)) {
      if (range.parameter->tensor_split != TensorSplit::replicated_inside) continue;
      fill_constant(shard.weights + range.begin_in_shard, range.size, 0, model.compute);
    }
  }
}

// What a step leaves behind.
struct Step {
  double loss, norm, balance_loss;
  Tensors gradients;
};

struct Trained {
  Tensors initial, final;
  std::vector<Step> steps;
};

// On all ranks, or on one alone.
Trained train(World& world, const CombinedCase& c, Routing routing) {
  CombinedModel model(c, world);
  const bool alone = c.shape.ranks() < world.ranks();
  const auto all = [&](Content content) {
    if (!alone) return gather_parameters(world, model.parameters, content, model.compute);
    Tensors tensors;
    for (int id = 0; id < std::ssize(model.parameters.all()); ++id)
      tensors.push_back(content == Content::weights ? model.weights(id) : model.gradients(id));
    return tensors;
  };
  Trained result{all(Content::weights), {}, {}};
  for (int step = 0; step < c.options.steps; ++step) {
    set_routers(model, routing);
    model.accumulate(batches_of_step(c.options, step));
    Tensors gradients = all(Content::gradients);
    model.update(step);
    result.steps.push_back({model.totals.host_loss(), model.totals.host_norm(),
                            alone ? model.balance_loss : world.sum({model.balance_loss})[0], gradients});
  }
  result.final = all(Content::weights);
  return result;
}

void check_same(const Trained& got, const Trained& want, double grad_clip) {
  CHECK(!want.initial.empty());
  CHECK(got.initial == want.initial);  // bit for bit
  const auto close = [](double a, double b) { return std::abs(a - b) <= kScalarTolerance * std::abs(b); };
  for (size_t step = 0; step < want.steps.size(); ++step) {
    INFO("step " << step);
    const Step &a = got.steps[step], &b = want.steps[step];
    CHECK(close(a.loss, b.loss));
    CHECK(close(a.balance_loss, b.balance_loss));
    CHECK(close(a.norm, b.norm));
    CHECK(a.norm > grad_clip);
    for (size_t id = 0; id < want.initial.size(); ++id) {
      INFO("gradient " << id);
      CHECK(relative_error(a.gradients[id], b.gradients[id]) < kTensorTolerance);
    }
  }
  for (size_t id = 0; id < want.initial.size(); ++id) {
    INFO("weights " << id);
    CHECK(relative_error(got.final[id], want.final[id]) < kTensorTolerance);
  }
}

// Every number of expert ranks that divides what is left of the ranks; `few`: only the largest two.
enum class Ep { each, few };
void check_experts(CombinedCase c, Ep eps = Ep::few, Routing routing = Routing::as_drawn) {
  mpi_tests::set_time_limit(300);
  if (c.shape.ranks() != mpi_tests::ranks()) return;
  World world(nullptr, nullptr);
  const bool compares = world.rank() == 0;  // what is gathered is the same everywhere
  const Trained expected = compares ? train(world, c.alone(), routing) : Trained();
  const int replicas = c.shape.cp * c.shape.dp;
  for (int ep = replicas, tried = 0; ep >= 1 && (eps == Ep::each || tried < 2); --ep) {
    if (replicas % ep != 0) continue;
    ++tried;
    c.shape.ep = c.options.experts.ep = ep;
    INFO("tp " << c.shape.tp << ", cp " << c.shape.cp << ", ep " << ep << ", top " << c.options.model.top_k
               << ", ZeRO-" << c.options.zero.zero_stage << ", recompute " << to_string(c.options.recompute));
    const Trained got = train(world, c, routing);
    if (compares) check_same(got, expected, c.options.grad_clip);
  }
}

}  // namespace

TEST_CASE("07: parity of experts, alone", "[07][experts][parity]") {
  check_experts(expert_case(expert_options(experts_for_ranks(), 1)), Ep::each);
  check_experts(expert_case(expert_options(experts_for_ranks(), 3)), Ep::each);
}

// So few elements that no buffer of rows has one for each rank.
TEST_CASE("07: parity of experts, two tokens of a narrow model", "[07][experts][parity]") {
  CombinedOptions options = training(
      test_options<CombinedOptions>(/*layers=*/2, /*d_model=*/4, /*heads=*/2, /*kv_heads=*/2, /*d_ff=*/2,
                                    /*vocab_size=*/8, /*sequence=*/2, /*micro_batch=*/1,
                                    /*global_batch=*/1),
      kExpertSteps);
  options.model.experts = experts_for_ranks();
  options.model.top_k = 1;
  options.zero.zero_stage = 0;
  options.grad_clip = 1e-9;
  check_experts(expert_case(options));
}

TEST_CASE("07: parity of experts, all ways to sum gradients", "[07][experts][parity]") {
  CombinedCase c = expert_case(expert_options(experts_for_ranks(), 2));
  c.options.data_parallel.dp_sync = DpSync::naive;
  check_experts(c);
  c.options.data_parallel.dp_sync = DpSync::bucket;
  check_experts(c);
  c.options.data_parallel.bucket_mb = 0.001;
  check_experts(c);
}

TEST_CASE("07: parity of experts, ZeRO", "[07][experts][parity]") {
  for (const int stage : {1, 2, 3}) {
    CombinedCase c = expert_case(expert_options(experts_for_ranks(), 2));
    c.options.zero.zero_stage = stage;
    check_experts(c, stage == 3 ? Ep::each : Ep::few);
  }
}

TEST_CASE("07: parity of experts, tensor parallel", "[07][experts][parity]") {
  check_experts(expert_case(expert_options(8, 2), 2), Ep::each);
}

TEST_CASE("07: parity of experts, sequence parallel, ZeRO, full recomputation", "[07][experts][parity]") {
  CombinedCase c = expert_case(expert_options(8, 2), 2);
  c.options.tensor.sequence_parallel = true;
  c.options.zero.zero_stage = 3;
  c.options.recompute = Recompute::full;
  check_experts(c);
}

TEST_CASE("07: parity of experts, ranks that share sequences", "[07][experts][parity]") {
  check_experts(expert_case(expert_options(8, 2), 1, 2), Ep::each);
}

TEST_CASE("07: parity of experts, in a pipeline", "[07][experts][parity]") {
  for (const PpSchedule schedule : {PpSchedule::one_f_one_b, PpSchedule::zb_h1}) {
    CombinedCase c = expert_case(expert_options(8, 2), 1, 1, 2);
    c.options.pipeline.pp_schedule = schedule;
    check_experts(c);
  }
}

TEST_CASE("07: parity of experts, tensor, pipeline and data ranks", "[07][experts][parity][8]") {
  CombinedCase c = expert_case(expert_options(8, 2), 2, 1, 2);
  c.options.zero.zero_stage = 3;
  check_experts(c);
}

TEST_CASE("07: parity of experts, recomputation", "[07][experts][parity]") {
  for (const Recompute recompute : {Recompute::selective, Recompute::full}) {
    CombinedCase c = expert_case(expert_options(experts_for_ranks(), 2));
    c.options.recompute = recompute;
    check_experts(c);
  }
}

TEST_CASE("07: parity of experts, weight gradients put off", "[07][experts][parity]") {
  CombinedCase c = expert_case(expert_options(experts_for_ranks(), 2));
  c.options.pipeline.pp_schedule = PpSchedule::zb_h1;
  check_experts(c);
}

TEST_CASE("07: parity of experts, all tokens to one", "[07][experts][parity]") {
  check_experts(expert_case(expert_options(experts_for_ranks(), 1)), Ep::each, Routing::to_the_first);
}

TEST_CASE("07: parity of experts, some without a token", "[07][experts][parity]") {
  check_experts(expert_case(expert_options(experts_for_ranks(), 3)), Ep::each, Routing::to_the_first);
}

TEST_CASE("07: parity of experts with shared ones", "[07][experts][parity]") {
  CombinedOptions options = expert_options(experts_for_ranks(), 2);
  options.model.shared_experts = 2;
  check_experts(expert_case(options));
  options.model.shared_experts = 1;
  options.recompute = Recompute::full;
  options.model.balance = Balance::bias;
  check_experts(expert_case(options));
  if (mpi_tests::ranks() % 2 != 0) return;
  check_experts(expert_case(options, 2));
  options.tensor.sequence_parallel = true;
  check_experts(expert_case(options, 2));
  check_experts(expert_case(options, 1, 2));
  CombinedCase c = expert_case(options, 1, 1, 2);
  c.options.recompute = Recompute::none;
  c.options.pipeline.pp_schedule = PpSchedule::zb_h1;
  check_experts(c);
}

TEST_CASE("07: parity of experts, two copies of the model", "[07][experts][parity]") {
  if (mpi_tests::ranks() % 4 != 0) return;
  CombinedOptions options = expert_options(8, 2);
  check_experts(in_two_copies(options));
  options.zero.zero_stage = 3;
  options.model.balance = Balance::bias;
  check_experts(in_two_copies(options));
}

// Four steps: the biases of three of them choose.
TEST_CASE("07: parity of experts with a balance bias", "[07][experts][balance][parity][8]") {
  CombinedOptions options = expert_options(8, 2);
  if (options.model.experts % mpi_tests::ranks() != 0) return;
  options.model.balance = Balance::bias;
  options.steps = 4;
  check_experts(expert_case(options), Ep::each);
  options.recompute = Recompute::full;
  options.zero.zero_stage = 3;
  check_experts(expert_case(options));
  options.recompute = Recompute::none;
  if (mpi_tests::ranks() % 2 != 0) return;
  check_experts(expert_case(options, 1, 2));
  options.tensor.sequence_parallel = true;
  check_experts(expert_case(options, 2));
  options.pipeline.pp_schedule = PpSchedule::zb_h1;
  options.zero.zero_stage = 1;
  check_experts(expert_case(options, 1, 1, 2));
  if (mpi_tests::ranks() == 8) check_experts(expert_case(options, 2, 2, 2));
}

// Every layout finds the same whole numbers, and so the same bits.
TEST_CASE("07: a balance bias follows the loads, and the norm does not see it", "[07][experts][balance]") {
  CombinedOptions options = expert_options(8, 2);
  options.model.balance = Balance::bias;
  const int ranks = mpi_tests::ranks(), tp = ranks % 2 == 0 ? 2 : 1;
  options.experts.ep = options.model.experts % (ranks / tp) == 0 ? ranks / tp : 1;
  const CombinedCase c = expert_case(options, tp);
  World world(nullptr, nullptr);
  const double copies = c.options.global_batch_size * c.options.sequence_length * 2, mean = copies / 8;
  CombinedModel zeros(c, world);
  set_routers(zeros, Routing::to_the_first);  // the first two experts get all
  zeros.accumulate(batches_of_step(c.options, 0));
  const Tensors loads_of_first =
      gather_parameters(world, zeros.parameters, Content::gradients, zeros.compute);
  for (size_t id = 0; id < loads_of_first.size(); ++id) {
    if (zeros.parameters[id].own_step)
      CHECK(loads_of_first[id] == std::vector<double>{copies / 2, copies / 2, 0, 0, 0, 0, 0, 0});
  }

  CombinedModel model(c, world);
  std::vector<std::vector<double>> expected(c.options.model.layers, std::vector<double>(8));
  for (int step = 0; step < kExpertSteps; ++step) {
    model.accumulate(batches_of_step(c.options, step));
    const Tensors gradients = gather_parameters(world, model.parameters, Content::gradients, model.compute);
    model.update(step);
    const Tensors weights = gather_parameters(world, model.parameters, Content::weights, model.compute);
    double norm = 0;
    int layer = 0;
    for (size_t id = 0; id < weights.size(); ++id) {
      if (!model.parameters[id].own_step) {
        for (const double g : gradients[id]) norm += g * g;
        continue;
      }
      const std::vector<double>& loads = gradients[id];
      for (int e = 0; e < 8; ++e) expected[layer][e] += 1e-3 * ((loads[e] < mean) - (loads[e] > mean));
      CHECK(std::accumulate(loads.begin(), loads.end(), 0.0) == copies);
      CHECK(weights[id] == expected[layer]);
      CHECK(*std::max_element(loads.begin(), loads.end()) > mean);
      ++layer;
    }
    CHECK(model.totals.host_norm() == Approx(std::sqrt(norm)).epsilon(1e-12));
  }
}

// The serial reference itself, which the tests above compare with.
TEST_CASE("07: gradients of a model with experts are the slopes of its loss", "[07][experts]") {
  if (mpi_tests::ranks() > 1) return;
  CombinedCase c = expert_case(expert_options(4, 2));
  c.options.model.shared_experts = 1;
  World world(nullptr, nullptr);
  CombinedModel model(c, world);
  const std::vector<HostBatch> batches = batches_of_step(c.options, 0);
  const auto loss = [&] {
    model.accumulate(batches);
    model.totals.wait();
    return model.totals.host_loss();
  };
  loss();
  Tensors gradients;
  for (int id = 0; id < std::ssize(model.parameters.all()); ++id) gradients.push_back(model.gradients(id));
  for (int id = 0; id < std::ssize(gradients); ++id) {
    INFO(model.parameters[id].name);
    const std::vector<double>& gradient = gradients[id];
    const std::vector<double> weights = model.weights(id);
    std::vector<double> direction;  // along the gradient and across it
    double slope = 0, length = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      direction.push_back(gradient[i] + 0.01 * std::sin(double(i + 1)));
      slope += gradient[i] * direction[i];
      length += direction[i] * direction[i];
    }
    const double step = 1e-5 / std::sqrt(length);  // so short that each token keeps its experts
    const auto loss_at = [&](double distance) {
      std::vector<double> moved = weights;
      for (size_t i = 0; i < moved.size(); ++i) moved[i] += distance * step * direction[i];
      to_device(moved, model.parameters.weights(id).data, model.compute);
      return loss();
    };
    // Central differences of fourth order, as in test_transformer.cu.
    const double measured = (8 * (loss_at(1) - loss_at(-1)) - (loss_at(2) - loss_at(-2))) / (12 * step);
    loss_at(0);
    CHECK(slope != 0);
    CHECK(std::abs(measured - slope) < 1e-7 * std::abs(slope));
  }
}

// Equal probabilities 1 / E, and fractions 1 / K of the first K experts: E * sum of f P is 1 in every layer.
TEST_CASE("07: the balance loss of a router of zeros is the coefficient a layer", "[07][experts]") {
  const CombinedCase c = expert_case(expert_options(experts_for_ranks(), 2));
  World world(nullptr, nullptr);
  CombinedModel model(c, world);
  set_routers(model, Routing::to_the_first);
  model.accumulate(batches_of_step(c.options, 0));
  const double loss = world.sum({model.balance_loss})[0];
  CHECK(loss == Approx(c.options.experts.aux_loss * c.options.model.layers).epsilon(1e-12));
}

// ---- Traffic ----------------------------------------------------------------------------------------------

namespace {

using ExpertTraffic = std::map<std::string, Traffic>;

// Per micro-batch and layer: counts once; copies go out and arrivals come back, and so do their
// gradients. Full recomputation repeats forward's. With a router of zeros the first top_k experts get all.
ExpertTraffic expected_expert_traffic(const CombinedModel& model) {
  const CombinedOptions& o = model.of.options;
  const int64_t e = o.model.experts, own = e / o.experts.ep, d = o.model.d_model,
                rows = model.mesh.rows(model.options);
  const int64_t first = model.mesh.experts.rank() * own;
  const int64_t busy = std::clamp<int64_t>(o.model.top_k - first, 0, own);  // experts here that get rows
  const int64_t copies = rows * o.model.top_k, arrivals = o.experts.ep * rows * busy, to_self = rows * busy;
  const int64_t times = int64_t{o.model.layers} * model.micro_batches();
  const int64_t passes = o.recompute == Recompute::full ? 3 : 2;
  ExpertTraffic expected;
  expected["all_to_all"] = {times * (passes - 1), times * (passes - 1) * e,
                            double(times * (passes - 1) * (e - own) * sizeof(int32_t))};
  expected["all_to_all_v"] = {2 * times * passes, times * passes * (copies + arrivals) * d,
                              double(times * passes * (copies + arrivals - 2 * to_self) * d * sizeof(real))};
  return expected;
}

void check_counts(const TrafficByOperation& seen, const ExpertTraffic& expected) {
  CHECK(seen.size() == expected.size());
  for (const auto& [operation, e] : expected) {
    INFO(operation);
    const auto it = seen.find(operation);
    CHECK(it != seen.end());
    if (it == seen.end()) continue;
    CHECK(it->second.calls == e.calls);
    CHECK(it->second.elements == e.elements);
    CHECK(it->second.sent_bytes == Approx(e.sent_bytes));
  }
}

}  // namespace

TEST_CASE("07: elements of the experts' all-to-all", "[07][experts][traffic][8]") {
  mpi_tests::set_time_limit(120);
  for (int ep = 2; ep <= mpi_tests::ranks(); ++ep) {
    if (mpi_tests::ranks() % ep != 0) continue;
    for (const Recompute recompute : {Recompute::none, Recompute::full}) {
      for (const int top_k : {1, 3}) {
        INFO("ep " << ep << ", recompute " << to_string(recompute) << ", top " << top_k);
        CombinedOptions options = expert_options(experts_for_ranks(), top_k);
        options.experts.ep = ep;
        options.recompute = recompute;
        World world(nullptr, nullptr);
        CombinedModel model(expert_case(options), world);
        set_routers(model, Routing::to_the_first);
        model.accumulate(batches_of_step(model.of.options, 0));
        check_counts(model.mesh.experts.traffic(), expected_expert_traffic(model));
        CHECK(model.mesh.context.traffic().empty());

        // However tokens are routed, all ranks together send as much.
        CombinedModel drawn(model.of, world);
        drawn.accumulate(batches_of_step(model.of.options, 1));
        const int64_t passes = recompute == Recompute::full ? 6 : 4, layers = options.model.layers;
        const int64_t copies = drawn.mesh.rows(model.options) * top_k * drawn.micro_batches() * world.ranks();
        const double elements = drawn.mesh.experts.traffic().at("all_to_all_v").elements;
        CHECK(world.sum({elements})[0] == double(passes * layers * copies * options.model.d_model));
      }
    }
  }
}

TEST_CASE("07: ranks that share sequences sum a fraction for each expert", "[07][experts][traffic]") {
  if (mpi_tests::ranks() % 2 != 0) return;
  const CombinedCase c = expert_case(expert_options(experts_for_ranks(), 2), 1, 2);
  World world(nullptr, nullptr);
  CombinedModel model(c, world);
  model.accumulate(batches_of_step(c.options, 0));
  const int64_t times = int64_t{c.options.model.layers} * model.micro_batches(), e = c.options.model.experts;
  check_counts({{"all_reduce", model.mesh.context.traffic().at("all_reduce")}},
               {{"all_reduce", {times, times * e, double(times * e * sizeof(accum))}}});
}

// An expert's gradient is summed over the ranks that hold it, and no others.
TEST_CASE("07: elements of the experts' gradient sums", "[07][experts][traffic]") {
  const int ranks = mpi_tests::ranks(), ep = ranks % 2 == 0 ? 2 : 1;
  CombinedOptions options = expert_options(experts_for_ranks(), 2);
  options.experts.ep = ep;
  const int64_t elements =
      options.model.layers * options.model.experts / ep * 3 * options.model.d_model * options.model.d_ff;
  World world(nullptr, nullptr);
  CombinedModel model(expert_case(options), world);
  model.accumulate(batches_of_step(model.of.options, 0));
  const double holders = ranks / ep;  // elements divide by them and by 16 bytes: nothing is padded
  check_counts(model.mesh.expert_gradients.traffic(),
               {{"all_reduce", {1, elements, 2 * (holders - 1) / holders * elements * sizeof(accum)}}});
}

// A bias travels with the gradients of its layer: an element for each expert, and the padding.
TEST_CASE("07: elements of the balance biases' sums", "[07][experts][balance][traffic]") {
  const int ranks = mpi_tests::ranks(), multiple = ranks * 16 / static_cast<int>(sizeof(real));
  for (const Balance balance : {Balance::none, Balance::bias}) {
    CombinedOptions options = expert_options(experts_for_ranks(), 2);
    options.model.balance = balance;
    const int d = options.model.d_model, e = options.model.experts, attention = 4 * d * d + 2 * d;
    const int layer = attention + e * d + (balance == Balance::bias ? e : 0);
    int64_t elements = 0;
    for (const int unit : {22 * d, layer, layer, layer, 22 * d + d})
      elements += (unit + multiple - 1) / multiple * multiple;
    World world(nullptr, nullptr);
    CombinedModel model(expert_case(options), world);
    model.accumulate(batches_of_step(model.of.options, 0));
    const double sent = 2.0 * (ranks - 1) / ranks * elements * sizeof(accum);
    check_counts(model.mesh.gradients.traffic(), {{"all_reduce", {1, elements, sent}}});
  }
  if (ranks % 2 != 0) return;
  CombinedOptions options = expert_options(experts_for_ranks(), 2);
  options.model.balance = Balance::bias;
  World world(nullptr, nullptr);
  CombinedModel model(expert_case(options, 1, 2), world);
  model.accumulate(batches_of_step(model.of.options, 0));
  CHECK(!model.mesh.context.traffic().contains("all_reduce"));  // of fractions, which only a loss needs
}

// The experts of two layers are there at a time. Forward gathers those of all three, or, in later
// micro-batches, of the one that is missing; backward begins with the last two.
TEST_CASE("07: gathers of experts under ZeRO-3", "[07][experts][traffic]") {
  if (mpi_tests::ranks() % 2 != 0) return;
  CombinedOptions options = expert_options(experts_for_ranks(), 2);
  options.experts.ep = mpi_tests::ranks() / 2;
  const int64_t elements =
      options.model.experts / options.experts.ep * 3 * options.model.d_model * options.model.d_ff;
  World world(nullptr, nullptr);
  options.zero.zero_stage = 3;
  CombinedModel model(expert_case(options), world);
  const int64_t m = model.micro_batches(), gathers = 4 + 2 * (m - 1), sums = 3 * m;
  model.mesh.expert_gradients.reset_traffic();
  model.accumulate(batches_of_step(model.of.options, 0));
  check_counts(model.mesh.expert_gradients.traffic(),
               {{"all_gather", {gathers, gathers * elements, 0.5 * gathers * elements * sizeof(real)}},
                {"reduce_scatter", {sums, sums * elements, 0.5 * sums * elements * sizeof(accum)}}});
}

}  // namespace pentatron

#endif

// ---- Memory -----------------------------------------------------------------------------------------------

namespace pentatron {
namespace {

// Exactly: what dropless routing may need is allocated before the first step.
void check_expert_memory(const CombinedCase& c) {
  INFO("tp " << c.shape.tp << ", ep " << c.shape.ep << ", ZeRO-" << c.options.zero.zero_stage << ", "
             << to_string(c.options.pipeline.pp_schedule) << ", recompute "
             << to_string(c.options.recompute));
  World world(nullptr, nullptr);
  const MemoryBytes before = memory_in_use();
  CombinedModel model(c, world);
  model.accumulate(random_batches(c.options, 0));
  model.update(0);
  check_bytes(allocated_since(before), predict_memory(c.options, c.shape, world.rank()).total());
}

}  // namespace

TEST_CASE("07: memory of experts is as predicted", "[07][experts][memory][8]") {
  mpi_tests::set_time_limit(120);
  const int ranks = mpi_tests::ranks();
  for (const Recompute recompute : {Recompute::none, Recompute::full}) {
    CombinedOptions options = expert_options(experts_for_ranks(), 2);
    options.recompute = recompute;
    options.optimizer = OptimizerKind::adamw;
    options.experts.ep = ranks;
    check_expert_memory(expert_case(options));
    options.experts.ep = ranks % 2 == 0 ? ranks / 2 : 1;
    options.zero.zero_stage = 3;
    check_expert_memory(expert_case(options));
    options.experts.expert_buffer = 3;
    options.model.balance = Balance::bias;
    options.model.shared_experts = 2;
    options.zero.zero_stage = 1;
    options.tensor.sequence_parallel = true;
    if (ranks % 2 == 0) check_expert_memory(expert_case(options, 2));
    options.experts.expert_buffer = 0;
    options.pipeline.pp_schedule = PpSchedule::zb_h1;
    if (recompute != Recompute::full) check_expert_memory(expert_case(options));
    if (recompute != Recompute::full && ranks % 4 == 0) check_expert_memory(in_two_copies(options));
  }
}

// Prints a table of 07_combined_5d/experts.md, asked for by its tag: the three ways to balance, on one rank.
TEST_CASE("07: table of balance", "[.balance-table]") {
  mpi_tests::set_time_limit(3000);
  CombinedOptions options =
      test_options<CombinedOptions>(/*layers=*/4, /*d_model=*/32, /*heads=*/4, /*kv_heads=*/4, /*d_ff=*/64,
                                    /*vocab_size=*/256, /*sequence=*/64, /*micro_batch=*/16,
                                    /*global_batch=*/16);
  options.lr = 3e-3;
  options.steps = 400;
  options.model.experts = 8;
  options.zero.zero_stage = 0;
  options.attention = Attention::tiled;
  const TokenData data(PENTATRON_CORPUS, options.model.vocab_size, options.sequence_length);
  World world(nullptr, nullptr);
  for (const Balance balance : {Balance::loss, Balance::bias, Balance::none}) {
    options.model.balance = balance;
    CombinedModel model({{}, options}, world);
    BatchLoader loader(data, options, 0, 1, model.positions);
    const auto activations = model.model.make_activations(whole_model(options.model));
    std::vector<int64_t> late(options.model.experts);  // loads of the last 50 steps in the last layer
    const double mean = double(options.micro_batch_size) * options.sequence_length * options.model.top_k / 8;
    double busiest = 0, loss = 0;
    std::printf("%s\n  busiest expert over the mean, in a step and layer; means of 50 steps:",
                to_string(balance).c_str());
    for (int step = 0; step < options.steps; ++step) {
      model.totals.reset();
      for (const Batch& batch : loader.load(step, model.compute)) {
        model.model.forward(batch, *activations);
        model.model.backward(batch, *activations);
        model.totals.add_loss(activations->loss);
      }
      const double of_balance = to_host(model.with_experts->balance_loss(), model.compute)[0];
      model.with_experts->add_balance_loss(model.totals);
      for (UnitHooks* hooks : model.seams.hooks) hooks->finish_gradient_sync();
      model.optimizer.add_norm_squared(model.totals.norm_squared());
      model.update(step);
      for (int layer = 0; layer < options.model.layers; ++layer) {
        int64_t most = 0;
        const auto& experts =
            *static_cast<const ExpertActivations*>(activations->layers[layer].feed_forward.other.get());
        for (int e = 0; e < options.model.experts; ++e) {
          const int64_t load = experts.counts.sent[e];
          most = std::max(most, load);
          if (step >= 350 && layer == options.model.layers - 1) late[e] += load;
        }
        busiest += double(most) / mean / options.model.layers / 50;
      }
      if (step >= 350) loss += (model.totals.host_loss() - of_balance) / 50;
      if (step % 50 == 49) std::printf(" %.2f", std::exchange(busiest, 0));
    }
    std::printf("\n  last 50 steps: loss of the text %.3f; loads in the last layer, %%:", loss);
    std::sort(late.rbegin(), late.rend());
    for (const int64_t load : late) std::printf(" %.1f", 100 * double(load) / (50 * 8 * mean));
    std::printf("\n");
  }
}

TEST_CASE("07: room for the rows of experts", "[07][experts][memory]") {
  CombinedOptions options = expert_options(8, 2);
  CHECK(expert_buffer_rows(options.model, options.experts, 10) == 20);  // all copies
  options.experts.ep = 4;
  CHECK(expert_buffer_rows(options.model, options.experts, 10) ==
        80);  // both copies of everybody's tokens to the two experts here
  options.experts.ep = 8;
  CHECK(expert_buffer_rows(options.model, options.experts, 10) ==
        80);  // one copy of everybody's to the one expert here
  options.experts.expert_buffer = 1.26;
  CHECK(expert_buffer_rows(options.model, options.experts, 10) == 26);  // of an even share of 20
  options.experts.expert_buffer = 100;
  CHECK(expert_buffer_rows(options.model, options.experts, 10) == 80);
}

}  // namespace pentatron
