// What a pipeline sends, keeps and wastes, against the formulas and the simulator
// (05_pipeline_parallel/simulate.h).
#include <algorithm>

#include "../../05_pipeline_parallel/simulate.h"
#include "model/memory.h"
#include "parallel_model.h"
#include "program/program.h"
#include "slow.h"

namespace pentatron {
namespace {

Options pipeline_options(int layers, int micro_batches) {
  Options o =
      test_options(layers, /*d_model=*/32, /*heads=*/4, /*kv_heads=*/4, /*d_ff=*/96, /*vocab_size=*/32,
                   /*sequence=*/8, /*micro_batch=*/2, /*global_batch=*/2 * micro_batches);
  o.optimizer = OptimizerKind::sgd;
  return o;
}

// Every stage but the last sends an activation a micro-batch, and every one but the first a gradient.
void check_messages(const Technique& technique, int micro_batches) {
  const int p = mpi_tests::ranks(), stages = p * technique.chunks;
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  const Options options = pipeline_options(stages + 1, micro_batches);
  ParallelModel model(options, technique, world, ranks);
  model.train_step(0, random_batches(options, 0));

  int64_t sent = 0;
  for (int stage = world.rank(); stage < stages; stage += p) {
    sent += (stage < stages - 1 ? micro_batches : 0) + (stage > 0 ? micro_batches : 0);
  }
  const int64_t elements = options.micro_batch_size * options.sequence_length * options.model.d_model;
  const TrafficByOperation traffic = world.traffic();
  for (const char* operation : {"send", "receive"}) {
    const Traffic t = traffic.contains(operation) ? traffic.at(operation) : Traffic();
    CHECK(t.calls == (p > 1 ? sent : 0));
    CHECK(t.elements == (p > 1 ? sent * elements : 0));
  }
  const double of_scalars = 2.0 * (p - 1) / p * 2 * sizeof(double);
  CHECK(sent_bytes(world.traffic()) == Approx((p > 1 ? sent * elements * sizeof(real) : 0) + of_scalars));
}

}  // namespace

TEST_CASE("05: messages are one a boundary, micro-batch and direction", "[05][traffic]") {
  const int p = mpi_tests::ranks();
  for (const int m : {1, 2 * p}) {
    INFO(m << " micro-batches");
    check_messages(pipeline(PpSchedule::afab), m);
    check_messages(pipeline(PpSchedule::one_f_one_b), m);
    check_messages(pipeline(PpSchedule::zb_h1), m);
    if (p > 1 && m % p == 0) check_messages(pipeline(PpSchedule::interleaved, 2), m);
  }
}

TEST_CASE("05: a large vocabulary leaves fewer layers to the rank with the head", "[05]") {
  Options options = pipeline_options(12, 1);
  const auto layers_of = [&](int rank) {
    const LayerRange range = layers_of_rank(options, rank, 4, 1)[0];
    return range.last - range.first;
  };
  CHECK(layers_of(3) == 3);
  options.model.vocab_size = 1300;  // its product costs what three layers' do
  CHECK(layers_of(3) == 1);
  CHECK(layers_of(0) + layers_of(1) + layers_of(2) == 11);
}

// ---- Memory -----------------------------------------------------------------------------------------------

namespace {

// Bytes of activations that a model of this schedule added, without the tokens.
int64_t activation_bytes(const Technique& technique, int micro_batches,
                         Recompute recompute = Recompute::none) {
  const int p = mpi_tests::ranks();
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  Options options = pipeline_options(2 * p * technique.chunks, micro_batches);
  options.recompute = recompute;
  const MemoryBytes before = memory_in_use();
  ParallelModel model(options, technique, world, ranks);
  model.train_step(0, random_batches(options, 0));
  MemoryBytes bytes = memory_in_use();
  for (size_t i = 0; i < purposes; ++i) bytes[i] -= before[i];

  const MemoryPrediction predicted =
      predict_memory(options, element_sizes, micro_batches,
                     pipeline_share(model.schedule(), world.rank(), model.parts_of_model()));
  for (size_t i = 0; i < purposes; ++i) {
    INFO(purpose_names[i]);
    CHECK(bytes[i] == predicted.total()[i]);
  }
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
  activation_bytes(pipeline(PpSchedule::one_f_one_b), 1);
  activation_bytes(pipeline(PpSchedule::one_f_one_b), 3, Recompute::selective);
  activation_bytes(pipeline(PpSchedule::one_f_one_b), 3, Recompute::full);
  activation_bytes(pipeline(PpSchedule::zb_h1), 3, Recompute::selective);
}

// ---- Time -------------------------------------------------------------------------------------------------

#if PRECISION == 32 && defined(NCCL_OVER_MPI)

namespace {

constexpr int kLayersOfStage = 2, kMeasuredSteps = 3;
constexpr double kUnit = 6e-3;  // s: forward, input gradient and weight gradient of a layer

class SlowWeightGradients : public FeedForward {
 public:
  void backward(const Blas& blas, const Parameters& parameters, int layer, const Batch& batch,
                Tensor d_partial, Tensor normed, const FeedForwardTensors& kept,
                const FeedForwardGradients& gradients, TensorRegion& region, WgradQueue& queue,
                Tensor d_h) override {
    FeedForward::backward(blas, parameters, layer, batch, d_partial, normed, kept, gradients, region, queue,
                          d_h);
    queue.push(unit_of_layer(layer), [&blas] { pause(blas.stream(), &kUnit); });
  }
};

struct Bubble {
  double simulated, measured;  // over the ideal time
  double seconds, least;       // of the fastest step; that no step can take less than
};

// The bubble of a step from its trace: the time that the compute stream does not pause, over the time that it
// does. `transfer`: seconds that a message takes.
Bubble bubble(const Technique& technique, int micro_batches, double transfer) {
  mpi_tests::set_time_limit(120);
  const int p = mpi_tests::ranks();
  const Options options = pipeline_options(kLayersOfStage * p, micro_batches);
  const double bytes =
      options.micro_batch_size * options.sequence_length * options.model.d_model * sizeof(real);
  const SlowLink link(bytes, std::max(transfer, 1e-6));
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  SlowAttention attention(options.attention, kUnit, kUnit);
  SlowWeightGradients feed_forward;
  ParallelModel model(options, technique, world, ranks,
                      {.attention = &attention, .feed_forward = &feed_forward});
  const double chunk = kUnit * kLayersOfStage / technique.chunks;
  const Simulation simulated = simulate(model.schedule(), {chunk, chunk, chunk, transfer});
  Bubble result = {simulated.bubble_ratio(), 0, 1e9, simulated.total};

  model.train_step(0, random_batches(options, 0));
  mpi_tests::barrier();
  trace::start();
  for (int step = 1; step <= kMeasuredSteps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    model.train_step(step, random_batches(options, step));
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    result.seconds = std::min(result.seconds, world.largest({elapsed.count()})[0]);
  }
  trace::stop();
  double work = 0;
  for (const trace::Interval& i : trace::intervals()) {
    if (i.name == "pause") work += (i.end - i.begin) / kMeasuredSteps;
  }
  work = world.largest({work})[0];
  result.measured = result.seconds / work - 1;
  if (std::getenv("VERBOSE") && world.rank() == 0) {
    std::printf("%-11s %d ranks, transfer %.0f ms: step %.0f ms, bubble %.3f, simulated %.3f\n",
                std::string(to_string(technique.schedule)).c_str(), p, transfer * 1e3, result.seconds * 1e3,
                result.measured, result.simulated);
  }
  return result;
}

}  // namespace

TEST_CASE("05: bubbles take the time that the simulator says", "[05][overlap]") {
  const int p = mpi_tests::ranks(), m = 2 * p;
  if (p != 2 && p != 4) return;
  const double surroundings = 0.15;  // of the pauses
  for (const double transfer : {0.0, 4e-3}) {
    // A busy machine gets more tries: all ranks see the same numbers. It can't be faster than the pauses.
    const auto measured = [&](const Technique& technique) {
      Bubble b = bubble(technique, m, transfer);
      for (int more = 4; more > 0 && b.measured >= b.simulated + surroundings; --more)
        b = bubble(technique, m, transfer);
      CHECK(b.seconds >= b.least);
      CHECK(b.measured < b.simulated + surroundings);
      return b;
    };
    measured(pipeline(PpSchedule::afab));
    const Bubble one_f_one_b = measured(pipeline(PpSchedule::one_f_one_b));
    const Bubble interleaved = measured(pipeline(PpSchedule::interleaved, 2));
    const Bubble zero_bubble = measured(pipeline(PpSchedule::zb_h1));
    CHECK(interleaved.seconds < one_f_one_b.seconds);
    CHECK(zero_bubble.seconds < one_f_one_b.seconds);
  }
}

#endif

}  // namespace pentatron
