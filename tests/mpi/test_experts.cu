// Experts: every layout does what one rank does, to about 1e-14 in fp64; what travels, and what memory it
// takes.
#include "expert_model.h"
#include "gather.h"
#include "program.h"

namespace pentatron {
namespace {

constexpr int kSteps = 3;

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
  o.warmup_steps = 2;
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
  for (const auto& z : model.zero) z->weights_changed();
}

double balance_loss(World& world, ExpertModel& model, bool alone) {
  const std::vector<double> mine = to_host(model.feed_forward.balance_loss(), model.stream);
  return alone ? mine[0] : world.sum(mine)[0];
}

void check_parity(Options options, const ExpertLayout& layout, Routing routing = Routing::as_drawn) {
  INFO(layout.tensor << " tensor, " << layout.context << " context ranks, ep " << options.ep << ", top "
                     << options.model.top_k << ", ZeRO " << layout.zero_stage << ", sequence parallel "
                     << layout.sequence_parallel << ", recompute " << to_string(options.recompute));
  World world(nullptr, nullptr);
  Options serial_options = options;
  serial_options.ep = 1;
  ExpertModel serial(world, serial_options, {}, true), model(world, options, layout);
  const int parameters = static_cast<int>(serial.parameters.all().size());
  const auto gather = [&](int id, Content content) {
    return gather_parameter(world, model.parameters, id, content, model.stream);
  };
  std::vector<std::vector<double>> initial;
  for (int id = 0; id < parameters; ++id) {
    initial.push_back(to_host(serial.parameters.weights(id), serial.stream));
    INFO(serial.parameters[id].name << ": initial weights");
    CHECK(gather(id, Content::weights) == initial.back());
  }
  for (ExpertModel* m : {&serial, &model}) set_routers(*m, routing);
  const auto close = [](double a, double b) { return std::abs(a - b) <= kScalarTolerance * std::abs(b); };
  for (int step = 0; step < kSteps; ++step) {
    INFO("step " << step);
    const std::vector<HostBatch> batches = batches_of_step(options, step);
    serial.accumulate(batches);
    model.accumulate(batches);
    CHECK(close(balance_loss(world, model, false), balance_loss(world, serial, true)));
    for (int id = 0; id < parameters; ++id) {
      INFO(serial.parameters[id].name << ": gradient");
      const std::vector<double> expected = to_host(serial.parameters.gradients(id), serial.stream);
      CHECK(relative_error(gather(id, Content::gradients), expected) < kTensorTolerance);
    }
    serial.update(step);
    model.update(step);
    CHECK(close(model.totals.host_loss(), serial.totals.host_loss()));
    CHECK(close(model.totals.host_norm(), serial.totals.host_norm()));
    CHECK(model.totals.host_norm() > options.grad_clip);
  }
  for (int id = 0; id < parameters; ++id) {
    INFO(serial.parameters[id].name << ": weights");
    const std::vector<double> expected = to_host(serial.parameters.weights(id), serial.stream);
    CHECK(relative_error(gather(id, Content::weights), expected) < kTensorTolerance);
  }
}

// Every number of expert ranks that divides what is left of the ranks.
void check_each_ep(Options options, const ExpertLayout& layout, Routing routing = Routing::as_drawn) {
  mpi_tests::set_time_limit(300);
  const int each = layout.tensor * layout.context;
  if (mpi_tests::ranks() % each != 0) return;
  const int groups = mpi_tests::ranks() / layout.tensor;
  options.global_batch_size = options.micro_batch_size * 2 * (groups / layout.context);
  for (int ep = 1; ep <= groups; ++ep) {
    if (groups % ep != 0) continue;
    options.ep = ep;
    check_parity(options, layout, routing);
  }
}

}  // namespace

TEST_CASE("07: parity of experts, alone", "[07][experts][parity]") {
  for (const int top_k : {1, 3}) check_each_ep(expert_options(experts_for_ranks(), top_k, 1), {});
}

TEST_CASE("07: parity of experts, all ways to sum gradients", "[07][experts][parity]") {
  for (const double bucket_mb : {0.001, 25.0}) {
    check_each_ep(expert_options(experts_for_ranks(), 2, 2),
                  {.sync = DpSync::bucket, .bucket_mb = bucket_mb});
  }
  check_each_ep(expert_options(experts_for_ranks(), 2, 2), {.sync = DpSync::naive});
}

TEST_CASE("07: parity of experts, ZeRO", "[07][experts][parity]") {
  for (const int stage : {0, 1, 2, 3}) {
    check_each_ep(expert_options(experts_for_ranks(), 2, stage == 3 ? 1 : 2), {.zero_stage = stage});
  }
  check_each_ep(expert_options(experts_for_ranks(), 2, 2), {.zero_stage = 3});
}

TEST_CASE("07: parity of experts, tensor parallel", "[07][experts][parity]") {
  check_each_ep(expert_options(8, 2, 1), {.tensor = 2});
}

TEST_CASE("07: parity of experts, sequence parallel, ZeRO, full recomputation", "[07][experts][parity]") {
  Options options = expert_options(8, 2, 2);
  options.recompute = Recompute::full;
  check_each_ep(options, {.tensor = 2, .sequence_parallel = true, .zero_stage = 3});
}

TEST_CASE("07: parity of experts, ranks that share a micro-batch", "[07][experts][parity]") {
  check_each_ep(expert_options(8, 2, 1), {.context = 2});
}

TEST_CASE("07: parity of experts, recomputation", "[07][experts][parity]") {
  for (const Recompute recompute : {Recompute::selective, Recompute::full}) {
    Options options = expert_options(experts_for_ranks(), 2, 1);
    options.recompute = recompute;
    check_each_ep(options, {});
  }
}

TEST_CASE("07: parity of experts, weight gradients put off", "[07][experts][parity]") {
  check_each_ep(expert_options(experts_for_ranks(), 2, 2), {.weight_gradients = WeightGradients::deferred});
}

TEST_CASE("07: parity of experts, all tokens to one", "[07][experts][parity]") {
  check_each_ep(expert_options(experts_for_ranks(), 1, 1), {}, Routing::to_the_first);
}

TEST_CASE("07: parity of experts, some without a token", "[07][experts][parity]") {
  check_each_ep(expert_options(experts_for_ranks(), 3, 1), {}, Routing::to_the_first);
}

}  // namespace pentatron

#endif
