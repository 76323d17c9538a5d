// Experts: every layout does what one rank does, to about 1e-14 in fp64; what travels, and what memory it
// takes.
#include <cstdio>

#include "expert_model.h"
#include "gather.h"
#include "program.h"

namespace pentatron {
namespace {

constexpr int kSteps = 2;

// Experts that the ranks can share out, with sizes that two tensor ranks can.
Options expert_options(int experts, int top_k, int moe_every) {
  Options o = test_options(/*layers=*/3, /*d_model=*/12, /*heads=*/2, /*kv_heads=*/2, /*d_ff=*/10,
                           /*vocab_size=*/22, /*sequence=*/5, /*micro_batch=*/2,
                           /*global_batch=*/2 * 2 * mpi_tests::ranks());
  o.model.experts = experts;
  o.model.top_k = top_k;
  o.model.moe_every = moe_every;
  o.aux_loss = 0.1;
  o.optimizer = OptimizerKind::sgd;
  o.lr = 0.5;
  o.min_lr = 0.1;
  o.steps = kSteps;
  o.warmup_steps = 1;
  o.weight_decay = 0.01;
  o.grad_clip = 0.2;  // less than the norm
  return o;
}

int experts_for_ranks() { return mpi_tests::ranks() == 3 ? 6 : 8; }

}  // namespace
}  // namespace pentatron

#if PRECISION == 64

namespace pentatron {
namespace {

constexpr double kTensorTolerance = 1e-11;  // relative Frobenius error
constexpr double kScalarTolerance = 1e-12;  // relative error

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

enum class Routing { as_drawn, to_the_first };

// A router of zeros finds all experts equal, and takes the first ones.
void set_routers(ExpertModel& model, Routing routing) {
  if (routing == Routing::as_drawn) return;
  for (const Piece& piece : model.parameters.pieces()) {
    for (const Crossing& c : model.parameters.crossings(piece)) {
      if (c.parameter->tensor_split != TensorSplit::held_inside) continue;
      fill_constant(piece.weights + c.begin_in_piece, c.size, 0, model.stream);
    }
  }
}

using Tensors = std::vector<std::vector<double>>;  // [parameters]

// What a step leaves behind.
struct Step {
  double loss, norm, balance_loss;
  Tensors gradients;
};

struct Trained {
  Tensors initial, final;
  std::vector<Step> steps;
};

Trained train(World& world, const Options& options, const ExpertLayout& layout, Routing routing, bool alone) {
  ExpertModel model(world, options, layout, alone);
  const auto all = [&](Content content) {
    Tensors tensors;
    for (int id = 0; id < std::ssize(model.parameters.all()); ++id) {
      if (!alone)
        tensors.push_back(gather_parameter(world, model.parameters, id, content, model.stream));
      else if (content == Content::weights)
        tensors.push_back(to_host(model.parameters.weights(id), model.stream));
      else
        tensors.push_back(to_host(model.parameters.gradients(id), model.stream));
    }
    return tensors;
  };
  Trained result{all(Content::weights), {}, {}};
  for (int step = 0; step < kSteps; ++step) {
    set_routers(model, routing);
    model.accumulate(batches_of_step(options, step));
    const std::vector<double> balance = to_host(model.feed_forward.balance_loss(), model.stream);
    Tensors gradients = all(Content::gradients);
    model.update(step);
    result.steps.push_back({model.totals.host_loss(), model.totals.host_norm(),
                            alone ? balance[0] : world.sum(balance)[0], gradients});
  }
  result.final = all(Content::weights);
  return result;
}

void check_same(const Trained& got, const Trained& want, double grad_clip) {
  CHECK(!want.initial.empty());
  CHECK(got.initial == want.initial);  // bit for bit
  const auto close = [](double a, double b) { return std::abs(a - b) <= kScalarTolerance * std::abs(b); };
  for (int step = 0; step < kSteps; ++step) {
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
void check_parity(Options options, const ExpertLayout& layout, Ep eps = Ep::few,
                  Routing routing = Routing::as_drawn) {
  mpi_tests::set_time_limit(300);
  if (mpi_tests::ranks() % (layout.tensor * layout.context) != 0) return;
  const int groups = mpi_tests::ranks() / layout.tensor;
  options.global_batch_size = options.micro_batch_size * 2 * (groups / layout.context);
  World world(nullptr, nullptr);
  const bool compares = world.rank() == 0;  // what is gathered is the same everywhere
  Options reference = options;
  reference.recompute = Recompute::none;
  const Trained expected = compares ? train(world, reference, {}, routing, true) : Trained();
  for (int ep = groups, tried = 0; ep >= 1 && (eps == Ep::each || tried < 2); --ep) {
    if (groups % ep != 0) continue;
    ++tried;
    INFO(layout.tensor << " tensor, " << layout.context << " context ranks, ep " << ep << ", top "
                       << options.model.top_k << ", ZeRO " << layout.zero_stage << ", recompute "
                       << to_string(options.recompute));
    options.ep = ep;
    const Trained got = train(world, options, layout, routing, false);
    if (compares) check_same(got, expected, options.grad_clip);
  }
}

}  // namespace

TEST_CASE("07: parity of experts, alone", "[07][experts][parity]") {
  check_parity(expert_options(experts_for_ranks(), 1, 1), {}, Ep::each);
  check_parity(expert_options(experts_for_ranks(), 3, 1), {}, Ep::each);
}

TEST_CASE("07: parity of experts, all ways to sum gradients", "[07][experts][parity]") {
  const Options options = expert_options(experts_for_ranks(), 2, 2);
  check_parity(options, {.sync = DpSync::naive});
  check_parity(options, {.sync = DpSync::bucket, .bucket_mb = 0.001});
  check_parity(options, {.sync = DpSync::bucket});
}

TEST_CASE("07: parity of experts, ZeRO", "[07][experts][parity]") {
  for (const int stage : {0, 1, 2, 3})
    check_parity(expert_options(experts_for_ranks(), 2, 2), {.zero_stage = stage});
}

TEST_CASE("07: parity of experts, ZeRO-3, experts in every layer", "[07][experts][parity]") {
  check_parity(expert_options(experts_for_ranks(), 2, 1), {.zero_stage = 3}, Ep::each);
}

TEST_CASE("07: parity of experts, tensor parallel", "[07][experts][parity]") {
  check_parity(expert_options(8, 2, 1), {.tensor = 2}, Ep::each);
}

TEST_CASE("07: parity of experts, sequence parallel, ZeRO, full recomputation", "[07][experts][parity]") {
  Options options = expert_options(8, 2, 2);
  options.recompute = Recompute::full;
  check_parity(options, {.tensor = 2, .sequence_parallel = true, .zero_stage = 3});
}

TEST_CASE("07: parity of experts, ranks that share a micro-batch", "[07][experts][parity]") {
  check_parity(expert_options(8, 2, 1), {.context = 2}, Ep::each);
}

TEST_CASE("07: parity of experts, recomputation", "[07][experts][parity]") {
  for (const Recompute recompute : {Recompute::selective, Recompute::full}) {
    Options options = expert_options(experts_for_ranks(), 2, 2);
    options.recompute = recompute;
    check_parity(options, {});
  }
}

TEST_CASE("07: parity of experts, weight gradients put off", "[07][experts][parity]") {
  check_parity(expert_options(experts_for_ranks(), 2, 2), {.weight_gradients = WeightGradients::deferred});
}

TEST_CASE("07: parity of experts, all tokens to one", "[07][experts][parity]") {
  check_parity(expert_options(experts_for_ranks(), 1, 1), {}, Ep::each, Routing::to_the_first);
}

TEST_CASE("07: parity of experts, some without a token", "[07][experts][parity]") {
  check_parity(expert_options(experts_for_ranks(), 3, 1), {}, Ep::each, Routing::to_the_first);
}

// The serial reference itself, which the tests above compare with.
TEST_CASE("07: gradients of a model with experts are the slopes of its loss", "[07][experts]") {
  if (mpi_tests::ranks() > 1) return;
  const Options options = expert_options(4, 2, 2);
  World world(nullptr, nullptr);
  ExpertModel model(world, options, {}, true);
  const std::vector<HostBatch> batches = batches_of_step(options, 0);
  const auto loss = [&] {
    model.accumulate(batches);
    model.totals.wait();
    return model.totals.host_loss();
  };
  loss();
  Tensors gradients;
  for (int id = 0; id < std::ssize(model.parameters.all()); ++id)
    gradients.push_back(to_host(model.parameters.gradients(id), model.stream));
  for (int id = 0; id < std::ssize(gradients); ++id) {
    INFO(model.parameters[id].name);
    const std::vector<double>& gradient = gradients[id];
    const std::vector<double> weights = to_host(model.parameters.weights(id), model.stream);
    std::vector<double> direction;  // along the gradient and across it
    double slope = 0, length = 0;
    for (size_t i = 0; i < weights.size(); ++i) {
      direction.push_back(gradient[i] + 0.01 * std::sin(double(i + 1)));
      slope += gradient[i] * direction[i];
      length += direction[i] * direction[i];
    }
    const double step = 1e-4 / std::sqrt(length);
    const auto loss_at = [&](double distance) {
      std::vector<double> moved = weights;
      for (size_t i = 0; i < moved.size(); ++i) moved[i] += distance * step * direction[i];
      to_device(moved, model.parameters.weights(id).data, model.stream);
      return loss();
    };
    // Central differences of fourth order, as in test_transformer.cu; the choice of experts stays what it is.
    const double measured = (8 * (loss_at(1) - loss_at(-1)) - (loss_at(2) - loss_at(-2))) / (12 * step);
    loss_at(0);
    CHECK(slope != 0);
    CHECK(std::abs(measured - slope) < 1e-7 * std::abs(slope));
  }
}

// Equal probabilities 1 / E, and fractions 1 / K of the first K experts: E * sum of f P is 1 in every layer.
TEST_CASE("07: the balance loss of a router of zeros is the coefficient a layer", "[07][experts]") {
  const Options options = expert_options(experts_for_ranks(), 2, 1);
  World world(nullptr, nullptr);
  ExpertModel model(world, options, {});
  set_routers(model, Routing::to_the_first);
  model.accumulate(batches_of_step(options, 0));
  const double loss = world.sum(to_host(model.feed_forward.balance_loss(), model.stream))[0];
  CHECK(loss == Approx(options.aux_loss * options.model.layers).epsilon(1e-12));
}

// ---- Traffic ----------------------------------------------------------------------------------------------

namespace {

using Expected = std::map<std::string, Traffic>;

// Per micro-batch and layer with experts: counts once; copies go out and arrivals come back, and so do their
// gradients. Full recomputation repeats forward's. With a router of zeros the first top_k experts get all.
Expected expected_traffic(const Options& o, const ExpertModel& model, int expert_layers) {
  const int64_t e = o.model.experts, own = e / o.ep, d = o.model.d_model, rows = model.rows();
  const int64_t first = model.expert_ranks.rank() * own;
  const int64_t busy = std::clamp<int64_t>(o.model.top_k - first, 0, own);  // experts here that get rows
  const int64_t copies = rows * o.model.top_k, arrivals = o.ep * rows * busy, to_self = rows * busy;
  const int64_t times = int64_t{expert_layers} * model.micro_batches();
  const int64_t passes = o.recompute == Recompute::full ? 3 : 2;
  Expected expected;
  expected["all_to_all"] = {times * (passes - 1), times * (passes - 1) * e,
                            double(times * (passes - 1) * (e - own) * sizeof(int32_t))};
  expected["all_to_all_v"] = {2 * times * passes, times * passes * (copies + arrivals) * d,
                              double(times * passes * (copies + arrivals - 2 * to_self) * d * sizeof(real))};
  return expected;
}

void check_counts(const TrafficByOperation& seen, const Expected& expected) {
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

TEST_CASE("07: elements of the experts' all-to-all", "[07][experts][traffic]") {
  mpi_tests::set_time_limit(120);
  for (int ep = 2; ep <= mpi_tests::ranks(); ++ep) {
    if (mpi_tests::ranks() % ep != 0) continue;
    for (const Recompute recompute : {Recompute::none, Recompute::full}) {
      for (const int top_k : {1, 3}) {
        INFO("ep " << ep << ", recompute " << to_string(recompute) << ", top " << top_k);
        Options options = expert_options(experts_for_ranks(), top_k, 1);
        options.ep = ep;
        options.recompute = recompute;
        World world(nullptr, nullptr);
        ExpertModel model(world, options, {});
        set_routers(model, Routing::to_the_first);
        model.accumulate(batches_of_step(options, 0));
        check_counts(model.expert_ranks.traffic(), expected_traffic(options, model, options.model.layers));
        CHECK(model.context_ranks.traffic().empty());

        // However tokens are routed, all ranks together send as much.
        model.update(0);
        ExpertModel drawn(world, options, {});
        drawn.accumulate(batches_of_step(options, 1));
        const int64_t passes = recompute == Recompute::full ? 6 : 4, layers = options.model.layers;
        const int64_t copies = drawn.rows() * top_k * drawn.micro_batches() * world.ranks();
        const double elements = drawn.expert_ranks.traffic().at("all_to_all_v").elements;
        CHECK(world.sum({elements})[0] == double(passes * layers * copies * options.model.d_model));
      }
    }
  }
}

TEST_CASE("07: ranks that share a micro-batch sum a fraction for each expert", "[07][experts][traffic]") {
  if (mpi_tests::ranks() % 2 != 0) return;
  const Options options = expert_options(experts_for_ranks(), 2, 1);
  World world(nullptr, nullptr);
  ExpertModel model(world, options, {.context = 2});
  model.accumulate(batches_of_step(options, 0));
  const int64_t times = int64_t{options.model.layers} * model.micro_batches(), e = options.model.experts;
  check_counts(model.context_ranks.traffic(),
               {{"all_reduce", {times, times * e, double(times * e * sizeof(accum))}}});
}

// An expert's gradient is summed over the ranks that hold it, and no others.
TEST_CASE("07: elements of the experts' gradient sums", "[07][experts][traffic]") {
  const int ranks = mpi_tests::ranks(), ep = ranks % 2 == 0 ? 2 : 1;
  Options options = expert_options(experts_for_ranks(), 2, 2);  // one layer of three
  options.ep = ep;
  const int64_t elements = options.model.experts / ep * 3 * options.model.d_model * options.model.d_ff;
  World world(nullptr, nullptr);
  ExpertModel model(world, options, {});
  model.accumulate(batches_of_step(options, 0));
  const double holders = ranks / ep;  // elements divide by them and by 16 bytes: nothing is padded
  check_counts(model.same_experts.traffic(),
               {{"all_reduce", {1, elements, 2 * (holders - 1) / holders * elements * sizeof(accum)}}});
}

// Layers 1, 3 and 5 have experts, and two of them are there at a time. Forward gathers all three, or, in
// later micro-batches, the one that is missing; backward begins with the last two.
TEST_CASE("07: gathers of experts under ZeRO-3", "[07][experts][traffic]") {
  if (mpi_tests::ranks() % 2 != 0) return;
  Options options = expert_options(experts_for_ranks(), 2, 2);
  options.model.layers = 6;
  options.ep = mpi_tests::ranks() / 2;
  const int64_t elements =
      options.model.experts / options.ep * 3 * options.model.d_model * options.model.d_ff;
  World world(nullptr, nullptr);
  ExpertModel model(world, options, {.zero_stage = 3});
  const int64_t m = model.micro_batches(), gathers = 4 + 2 * (m - 1), sums = 3 * m;
  model.same_experts.reset_traffic();
  model.accumulate(batches_of_step(options, 0));
  check_counts(model.same_experts.traffic(),
               {{"all_gather", {gathers, gathers * elements, 0.5 * gathers * elements * sizeof(real)}},
                {"reduce_scatter", {sums, sums * elements, 0.5 * sums * elements * sizeof(accum)}}});
}

}  // namespace pentatron

#endif

// ---- Memory -----------------------------------------------------------------------------------------------

namespace pentatron {
namespace {

// Exactly: what dropless routing may need is allocated before the first step.
void check_memory(const Options& options, const ExpertLayout& layout) {
  const int groups = mpi_tests::ranks() / layout.tensor;
  INFO(layout.tensor << " tensor ranks, ep " << options.ep << ", ZeRO " << layout.zero_stage << ", recompute "
                     << to_string(options.recompute) << ", experts in every " << options.model.moe_every);
  World world(nullptr, nullptr);
  const MemoryBytes before = memory_in_use();
  ExpertModel model(world, options, layout);
  model.accumulate(random_batches(options, 0));
  model.update(0);
  Sharding sharding = {.zero_stage = std::max(layout.zero_stage, 0),
                       .data_ranks = groups,
                       .tensor_ranks = layout.tensor,
                       .sequence_parallel = layout.sequence_parallel};
  if (layout.weight_gradients == WeightGradients::deferred) {
    sharding.deferred_weight_gradients = true;
    sharding.parts = {ModelPart{.layers = options.model.layers, .in_flight = model.micro_batches()}};
  }
  const MemoryBytes predicted =
      predict_memory(options, element_sizes, model.micro_batches(), sharding).total();
  for (size_t i = 0; i < purposes; ++i) {
    INFO(purpose_names[i]);
    CHECK(memory_in_use()[i] - before[i] == predicted[i]);
  }
}

}  // namespace

TEST_CASE("07: memory of experts is as predicted", "[07][experts][memory]") {
  mpi_tests::set_time_limit(120);
  const int ranks = mpi_tests::ranks();
  for (const int moe_every : {1, 2}) {
    for (const Recompute recompute : {Recompute::none, Recompute::full}) {
      Options options = expert_options(experts_for_ranks(), 2, moe_every);
      options.recompute = recompute;
      options.optimizer = OptimizerKind::adamw;
      options.ep = ranks;
      check_memory(options, {});
      options.ep = ranks % 2 == 0 ? ranks / 2 : 1;
      check_memory(options, {.zero_stage = 3});
      options.expert_capacity = 3;
      if (ranks % 2 == 0) check_memory(options, {.tensor = 2, .sequence_parallel = true, .zero_stage = 1});
      if (recompute == Recompute::none)
        check_memory(options, {.weight_gradients = WeightGradients::deferred});
    }
  }
}

// Prints the table of 07_combined_5d/README.md, for the tiny model with eight experts; asked for by its tag.
TEST_CASE("07: table of experts", "[.experts-table]") {
  mpi_tests::set_time_limit(300);
  if (mpi_tests::rank() == 0)
    std::printf(
        "ep  room | weights gradients optimizer activations communication, KiB | rows: elements a step\n");
  for (const double capacity : {0.0, 2.0}) {
    for (int ep = 1; ep <= mpi_tests::ranks(); ep *= 2) {
      Options options = test_options(/*layers=*/8, /*d_model=*/64, /*heads=*/8, /*kv_heads=*/8, /*d_ff=*/192,
                                     /*vocab_size=*/256, /*sequence=*/128, /*micro_batch=*/4,
                                     /*global_batch=*/4 * mpi_tests::ranks());
      options.model.experts = 8;
      options.model.top_k = 2;
      options.ep = ep;
      options.expert_capacity = capacity;
      World world(nullptr, nullptr);
      const MemoryBytes before = memory_in_use();
      ExpertModel model(world, options, {});
      model.accumulate(random_batches(options, 0));
      model.update(0);
      const TrafficByOperation traffic = model.expert_ranks.traffic();
      const auto rows = traffic.find("all_to_all_v");
      const double elements = rows == traffic.end() ? 0 : rows->second.sent_bytes / sizeof(real);
      const double least = -world.largest({-elements})[0], most = world.largest({elements})[0];
      if (world.rank() > 0) continue;
      std::printf("%2d %5.1f |", ep, capacity);
      for (size_t i = 0; i < purposes; ++i) std::printf(" %zu", (memory_in_use()[i] - before[i]) / 1024);
      std::printf(" | %.0f to %.0f\n", least, most);
    }
  }
}

TEST_CASE("07: room for the rows of experts", "[07][experts][memory]") {
  Options options = expert_options(8, 2, 1);
  CHECK(expert_capacity(options, 10) == 20);  // all copies
  options.ep = 4;
  CHECK(expert_capacity(options, 10) == 80);  // both copies of everybody's tokens to the two experts here
  options.ep = 8;
  CHECK(expert_capacity(options, 10) == 80);  // one copy of everybody's to the one expert here
  options.expert_capacity = 1.26;
  CHECK(expert_capacity(options, 10) == 26);  // of an even share of 20
  options.expert_capacity = 100;
  CHECK(expert_capacity(options, 10) == 80);
}

}  // namespace pentatron
