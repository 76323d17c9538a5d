// fp16 in every layout: the gradients of one rank, and steps that all ranks skip together.
// precisions: fp16
#include "checkpoint/checkpoint_folder.h"
#include "continued_run.h"
#include "reference.h"

#ifdef REAL_IS_HALF

namespace pentatron {
namespace {

CombinedOptions half_options() {
  CombinedOptions o = training(
      test_options<CombinedOptions>(/*layers=*/4, /*d_model=*/16, /*heads=*/4, /*kv_heads=*/4, /*d_ff=*/24,
                                    /*vocab_size=*/32, /*sequence=*/16, /*micro_batch=*/4,
                                    /*global_batch=*/8 * mpi_tests::ranks()),
      /*steps=*/3);
  o.zero.zero_stage = 0;
  return o;
}

std::vector<CombinedCase> scaled_layouts() {
  const int n = mpi_tests::ranks();
  const CombinedOptions o = half_options();
  std::vector<CombinedCase> all;
  for (const int zero_stage : {0, 1, 2, 3}) {
    all.push_back({{.dp = n}, o});
    all.back().options.zero.zero_stage = zero_stage;
  }
  if (n % 2 != 0) return all;
  for (const bool sequence_parallel : {false, true}) {
    all.push_back({{.tp = 2, .dp = n / 2}, o});
    all.back().options.tensor.sequence_parallel = sequence_parallel;
  }
  all.push_back({{.cp = 2, .dp = n / 2}, o});
  for (const PpSchedule schedule : {PpSchedule::one_f_one_b, PpSchedule::zb_h1}) {
    all.push_back({{.dp = n / 2, .pp = 2}, o});
    all.back().options.pipeline.pp_schedule = schedule;
  }
  if (n == 8) all.push_back({{.tp = 2, .cp = 2, .pp = 2}, o});
  for (CombinedCase& c : all) c.options.experts.ep = 1;
  return all;
}

std::string name_of(const MeshShape& s) {
  return "tp " + std::to_string(s.tp) + ", cp " + std::to_string(s.cp) + ", dp " + std::to_string(s.dp) +
         ", pp " + std::to_string(s.pp);
}

// Sets a number on the device; returns what was there. Waits for all streams.
real exchange(real* at, real value) {
  real old;
  CUDA_CHECK(cudaDeviceSynchronize());
  CUDA_CHECK(cudaMemcpy(&old, at, sizeof old, cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(at, &value, sizeof value, cudaMemcpyHostToDevice));
  return old;
}

}  // namespace

// The tolerance of test_golden.cu: k C^depth epsilon (TTrace, 2025), where a gradient has passed the modules
// twice. Both sides round.
TEST_CASE("07: fp16 in every layout", "[07][parity]") {
  mpi_tests::set_time_limit(300);
  World world(nullptr, nullptr);
  for (const CombinedCase& c : scaled_layouts()) {
    INFO(name_of(c.shape) << ", ZeRO-" << c.options.zero.zero_stage);
    const double tolerance = 4 * std::pow(1.03, 2 * (3 + 8 * c.options.model.layers)) * epsilon<real>();
    CombinedModel combined(c, world);
    std::unique_ptr<CombinedModel> alone;
    if (world.rank() == 0) alone = std::make_unique<CombinedModel>(c.alone(), world);
    for (int step = 0; step < c.options.steps; ++step) {
      const std::vector<HostBatch> batches = batches_of_step(c.options, step);
      combined.accumulate(batches);
      const Tensors got = gather_parameters(world, combined.parameters, Content::gradients, combined.compute);
      if (alone) alone->accumulate(batches);
      for (size_t id = 0; alone && id < got.size(); ++id) {
        INFO("step " << step << ", gradient " << combined.parameters[int(id)].name);
        CHECK(relative_error(got[id], alone->gradients(int(id))) < tolerance);
      }
      combined.update(step);
      if (!alone) continue;
      alone->update(step);
      const auto close = [&](double a, double b) { return std::abs(a - b) < tolerance * std::abs(b); };
      CHECK(close(combined.totals.host_loss(), alone->totals.host_loss()));
      CHECK(close(combined.totals.host_norm(), alone->totals.host_norm()));
    }
  }
}

// One rank in turn has a weight that is infinite for a step. Then no rank changes a bit, and the next step is
// fine.
TEST_CASE("07: fp16: all ranks skip a step that overflowed on one", "[07][parity]") {
  mpi_tests::set_time_limit(300);
  World world(nullptr, nullptr);
  int unlucky = 0;
  for (const CombinedCase& c : scaled_layouts()) {
    unlucky = (unlucky + 1) % world.ranks();
    INFO(name_of(c.shape) << ", ZeRO-" << c.options.zero.zero_stage << ", rank " << unlucky);
    CombinedModel model(c, world);
    const auto state = [&] {
      Tensors all = gather_parameters(world, model.parameters, Content::weights, model.compute);
      for (size_t i = 0; i < model.parameters.shards().size(); ++i)
        for (const AccumTensor& tensor : model.optimizer.states(i))
          all.push_back(to_host(tensor, model.compute));
      return all;
    };
    for (const int step : {0, 1, 2}) {
      const Tensors before = state();
      real* const weight = model.parameters.shards().back().weights;
      const bool overflows = step == 1 && world.rank() == unlucky;
      const real good = overflows ? exchange(weight, real(INFINITY)) : real();
      model.accumulate(batches_of_step(c.options, step));
      if (overflows) exchange(weight, good);
      model.optimizer.step(step, model.totals.norm_squared());
      for (UnitHooks* hooks : model.seams.hooks) hooks->weights_changed();
      model.totals.send(model.parameters.loss_scale());
      model.totals.receive();
      CHECK((state() == before) == (step == 1));
      const LossScale scale = model.totals.host_loss_scale();
      CHECK(scale.factor == (step == 0 ? 65536 : 32768));
      CHECK(scale.skipped == (step == 0 ? 0 : 1));
      CHECK(std::isfinite(model.totals.host_norm()) == (step != 1));
    }
  }
}

TEST_CASE("07: fp16: a run continues with its loss scale", "[07][checkpoint]") {
  World world(nullptr, nullptr);
  const SharedFolder folder(world);
  CombinedCase c = {{.dp = mpi_tests::ranks()}, half_options()};
  c.options.steps = 5;
  c.options.zero.zero_stage = 1;
  const Trained whole = train(c, world, folder.path() + "/whole");
  c.options.loss_scale = 1;  // the checkpoint's counts
  const Trained rest = train(c, world, folder.path() + "/rest", folder.path() + "/whole/step_000003");
  CHECK(rest.model == whole.model);
  CHECK(rest.optimizer == whole.optimizer);
  if (world.rank() > 0) return;
  const std::string last = "/step_000005";
  const std::vector<double> of_whole =
      read_trainer_state("--load", folder.path() + "/whole" + last).loss_scale;
  CHECK(of_whole == std::vector<double>{65536, 5, 0});
  CHECK(read_trainer_state("--load", folder.path() + "/rest" + last).loss_scale == of_whole);
}

}  // namespace pentatron

#endif
