// What a pipeline sends, keeps and wastes, against the formulas and the simulator
// (05_pipeline_parallel/workbench/simulate.h).
// precisions: fp64 bf16

#include <map>
#include <set>
#include <string>

#include "../../05_pipeline_parallel/stages.h"
#include "../../05_pipeline_parallel/workbench/simulate.h"
#include "device/trace.h"
#include "memory_check.h"
#include "model/memory.h"
#include "parallel_model.h"
#include "run/program.h"

namespace pentatron {
namespace {

CombinedOptions pipeline_options(int layers, int micro_batches, int sequences = 2) {
  CombinedOptions o = test_options<CombinedOptions>(
      layers, /*d_model=*/32, /*heads=*/4, /*kv_heads=*/4, /*d_ff=*/96, /*vocab_size=*/32,
      /*sequence=*/8, /*micro_batch=*/sequences, /*global_batch=*/sequences * micro_batches);
  o.optimizer = OptimizerKind::sgd;
  return o;
}

// Every stage but the last sends an activation a micro-batch, and every one but the first a gradient, unless
// the neighbour is on the same rank.
void check_messages(const Technique& technique, int micro_batches, int sequences = 2) {
  const int p = mpi_tests::ranks(), stages = technique.schedule_of(p, micro_batches).stages();
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  const CombinedOptions options = pipeline_options(stages + 1, micro_batches, sequences);
  ParallelModel model(options, technique, world, ranks);
  model.train_step(0, random_batches(options, 0));

  int64_t sent = 0;
  const Schedule schedule = model.schedule();
  for (int copy = 0; copy < schedule.copies; ++copy) {
    for (int stage = 0; stage + 1 < stages; ++stage) {
      const int n = copy * stages + stage;
      const int before = schedule.placement[n].rank, after = schedule.placement[n + 1].rank;
      if (before != after && (before == world.rank() || after == world.rank()))
        sent += micro_batches / schedule.copies;
    }
  }
  const int64_t elements = options.micro_batch_size * options.sequence_length * options.model.d_model;
  const TrafficByOperation traffic = world.traffic();
  for (const char* operation : {"send", "receive"}) {
    const Traffic t = traffic.contains(operation) ? traffic.at(operation) : Traffic();
    CHECK(t.calls == (p > 1 ? sent : 0));
    CHECK(t.elements == (p > 1 ? sent * elements : 0));
  }
  const double of_scalars = 2.0 * (p - 1) / p * 2 * sizeof(double);
  // Two ranks sum the gradients of two copies: each sends 2 (2 - 1) / 2 of them.
  const size_t of_copies = schedule.copies > 1 ? model.parameters.group().flat_gradients().bytes() : 0;
  CHECK(sent_bytes(world.traffic()) ==
        Approx((p > 1 ? sent * elements * sizeof(real) : 0) + of_copies + of_scalars));
}

}  // namespace

TEST_CASE("05: messages are one a boundary, micro-batch and direction", "[05][traffic]") {
  const int p = mpi_tests::ranks();
  for (const int m : {1, 2 * p}) {
    INFO(m << " micro-batches");
    check_messages(pipeline(PpSchedule::afab), m);
    check_messages(pipeline(PpSchedule::one_f_one_b), m);
    check_messages(pipeline(PpSchedule::zb_h1), m);
    check_messages(odd_order(m, true), m);
    check_messages(pipeline(PpSchedule::zb_v, 2), m);
    check_messages(pipeline(PpSchedule::dualpipe_v, 2), m);
    if (p % 2 == 0 && m % 2 == 0) check_messages(pipeline(PpSchedule::dualpipe, 2), m);
    if (p > 1 && m % p == 0) check_messages(pipeline(PpSchedule::interleaved, 2), m);
  }
}

namespace {

// What each stream of messages does in a step, as a trace names both.
std::map<std::string, std::set<std::string>> traced_messages(const Technique& technique) {
  const int p = mpi_tests::ranks();
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  const CombinedOptions options = pipeline_options(technique.schedule_of(p, 2).stages(), 2);
  ParallelModel model(options, technique, world, ranks);
  trace::start();
  model.train_step(0, random_batches(options, 0));
  trace::stop();
  std::map<std::string, std::set<std::string>> found;
  for (const trace::Interval& i : trace::take()) {
    if (i.stream != "compute" && i.stream != "ranks") found[i.stream].insert(i.name);
  }
  return found;
}

}  // namespace

TEST_CASE("05: a trace names a rank's streams after what they carry, and where", "[05]") {
  const int p = mpi_tests::ranks(), k = mpi_tests::rank();
  std::map<std::string, std::set<std::string>> line, v;
  const auto add = [](auto& streams, const char* sends, const char* receives, const char* number) {
    streams[std::string(sends) + " out" + number] = {"send"};
    streams[std::string(receives) + " in" + number] = {"receive"};
  };
  if (k > 0) add(line, "gradients", "activations", "");
  if (k < p - 1) add(line, "activations", "gradients", "");
  CHECK(traced_messages(pipeline(PpSchedule::one_f_one_b)) == line);
  // Down, and up again: an end of the V has one neighbour, and turns there.
  for (const char* kind : {"activations", "gradients"}) {
    if (p > 1) add(v, kind, kind, "");
    if (k > 0 && k < p - 1) add(v, kind, kind, " 2");
  }
  CHECK(traced_messages(pipeline(PpSchedule::zb_v, 2)) == v);
}

// The stand-in passes up to 8 KiB on without waiting for the receiver: 1 KiB or 4 here, and 10 or 40.
TEST_CASE("05: messages of any size pass", "[05][traffic]") {
  const int m = 2 * mpi_tests::ranks();
  for (const int sequences : {2, 20}) {
    for (const PpSchedule schedule : {PpSchedule::afab, PpSchedule::one_f_one_b, PpSchedule::zb_h1}) {
      check_messages(pipeline(schedule), m, sequences);
    }
    for (const PpSchedule schedule : {PpSchedule::interleaved, PpSchedule::zb_v, PpSchedule::dualpipe_v}) {
      if (mpi_tests::ranks() > 1) check_messages(pipeline(schedule, 2), m, sequences);
    }
  }
}

TEST_CASE("05: a large vocabulary leaves fewer layers to the rank with the head", "[05]") {
  CombinedOptions options = pipeline_options(12, 1);
  const auto layers_of = [&](int rank) {
    const Schedule schedule = make_schedule(PpSchedule::one_f_one_b, 4, 1, 1);
    const LayerRange range = layers_of_rank(options, schedule, rank)[0];
    return range.last - range.first;
  };
  CHECK(layers_of(3) == 3);
  options.model.vocab_size = 1300;  // its product costs what three layers' do
  CHECK(layers_of(3) == 1);
  CHECK(layers_of(0) + layers_of(1) + layers_of(2) == 11);
  CHECK(layers_of(0) >= 3);  // the embedding, a lookup, costs nothing
}

// ---- Memory -----------------------------------------------------------------------------------------------

namespace {

// Bytes of activations that a model of this schedule added, without the tokens. Those of NCCL were known
// before.
int64_t activation_bytes(const Technique& technique, int micro_batches,
                         Recompute recompute = Recompute::none) {
  const int p = mpi_tests::ranks();
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  CombinedOptions options = pipeline_options(2 * p * technique.chunks, micro_batches);
  options.recompute = recompute;
  const Schedule schedule = technique.schedule_of(p, micro_batches);
  const size_t libraries = world.library_bytes(channels_of_pipeline(schedule, world.rank(), true));
  const MemoryBytes before = memory_in_use();
  ParallelModel model(options, technique, world, ranks);
  CHECK(world.library_bytes(0) == libraries);
  model.train_step(0, random_batches(options, 0));
  const MemoryBytes bytes = allocated_since(before);

  const PipelineRank rank = pipeline_rank(options, model.schedule(), world.rank());
  check_bytes(bytes, predict_memory(pipeline_share(options, rank)).total());
  const int64_t tokens =
      int64_t{4 * sizeof(int32_t)} * micro_batches * options.micro_batch_size * options.sequence_length;
  return static_cast<int64_t>(bytes[3]) - tokens;
}

}  // namespace

TEST_CASE("05: activations follow the micro-batches in flight", "[05][memory]") {
  const int p = mpi_tests::ranks(), k = mpi_tests::rank(), m = 2 * p + 1;
  const int64_t afab = activation_bytes(pipeline(PpSchedule::afab), m);
  const int64_t fewer = activation_bytes(pipeline(PpSchedule::afab), m - 1);
  const int64_t of_one = afab - fewer;  // micro-batch; all else is work space
  CHECK(of_one > 0);
  CHECK(activation_bytes(pipeline(PpSchedule::one_f_one_b), m) == afab - (m - (p - k)) * of_one);

  // Weight gradients on request keep p micro-batches on every rank, and of each more: their growth with p
  // says so.
  const int64_t zero_bubble = activation_bytes(pipeline(PpSchedule::zb_h1), m);
  const int64_t of_one_on_request = zero_bubble - (afab - m * of_one);
  CHECK(of_one_on_request > p * of_one);
  CHECK(activation_bytes(pipeline(PpSchedule::zb_h1), m + 3) == zero_bubble);
}

// On every rank, and before anything is sent.
TEST_CASE("05: a wrong schedule is refused before it runs", "[05]") {
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  ParallelModel model(pipeline_options(2 * ranks.ranks(), 4), pipeline(PpSchedule::one_f_one_b), world,
                      ranks);
  Schedule wrong = model.schedule();
  wrong.ranks.back().pop_back();
  const auto build = [&] {
    Pipeline(wrong, world, world.all(), model.parts_of_model(), *model.transformer, model.stream);
  };
  CHECK_THROWS_AS(build(), ScheduleError);
}

TEST_CASE("05: memory is as predicted", "[05][memory]") {
  const int p = mpi_tests::ranks();
  if (p > 1) activation_bytes(pipeline(PpSchedule::interleaved, 2), 2 * p);
  activation_bytes(pipeline(PpSchedule::zb_v, 2), 2 * p);
  activation_bytes(pipeline(PpSchedule::one_f_one_b), 1);
  activation_bytes(pipeline(PpSchedule::one_f_one_b), 3, Recompute::selective);
  activation_bytes(pipeline(PpSchedule::one_f_one_b), 3, Recompute::full);
  activation_bytes(pipeline(PpSchedule::zb_h1), 3, Recompute::selective);
  if (p % 2 == 0) activation_bytes(pipeline(PpSchedule::dualpipe, 2), 2 * p);
  for (const int m : {3, 8}) {
    activation_bytes(odd_order(m, false), m);
    activation_bytes(odd_order(m, true), m);
    activation_bytes(odd_order(m, true, v_shaped(p)), m);
  }
}

}  // namespace pentatron
