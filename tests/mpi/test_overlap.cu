// How much of the communication hides behind compute, from the trace. Both take modelled time, asleep, so
// that a busy machine changes little: links are slowed down, and so is attention.
#include <nccl.h>

#include "device/precision.h"
#if PRECISION == 32 && defined(NCCL_OVER_MPI)

#include <cstdlib>

#include "device/trace.h"
#include "parallel_model.h"
#include "slow.h"

namespace pentatron {
namespace {

constexpr int kLayers = 8, kSteps = 4;
constexpr double kForward = 8e-3, kBackward = 16e-3;  // s, of a layer
constexpr double kAllReduce = 8e-3;                   // s, of a layer's gradients; a gather takes half
constexpr double kBorder = 6e-3;                      // s, of an all-reduce at the border of a tensor region
constexpr double kGradient = 8e-3;  // s, of a region's input gradient, and of its weight gradients

// Weight gradients, and the input gradients that go before them, take a while.
class SlowGradients : public TensorParallel {
 public:
  SlowGradients(const Options& options, int64_t rows, Communicator& tensor, cudaStream_t compute)
      : TensorParallel(options, rows, tensor, compute), compute_(compute) {}
  void prefetch_entered(Tensor x) override {
    TensorParallel::prefetch_entered(x);
    pause(compute_, &kGradient);
  }
  Tensor enter_backward(Tensor d_in, const std::function<void()>& meanwhile) override {
    return TensorParallel::enter_backward(d_in, [&] {
      meanwhile();
      pause(compute_, &kGradient);
    });
  }

 private:
  cudaStream_t compute_;
};

// Layers far larger than the vocabulary.
Options layered_options() {
  Options o = test_options(kLayers, /*d_model=*/32, /*heads=*/4, /*kv_heads=*/4, /*d_ff=*/96,
                           /*vocab_size=*/32, /*sequence=*/8, /*micro_batch=*/1,
                           /*global_batch=*/mpi_tests::ranks());
  o.optimizer = OptimizerKind::sgd;
  return o;
}
double layer_elements(const ModelConfig& m) {
  return 4.0 * m.d_model * m.d_model + 3.0 * m.d_model * m.d_ff + 2 * m.d_model;
}

// Of the time that the ranges of stream `communication` take, the share in which `compute` is at work, too.
double hidden_share(const std::vector<trace::Interval>& intervals, const std::string& communication,
                    const std::string& compute) {
  // Ranges of one stream follow one another, but may lie within one another.
  const auto merged = [&](const std::string& stream) {
    std::vector<std::pair<double, double>> spans;
    for (const trace::Interval& i : intervals) {
      if (i.stream == stream) spans.push_back({i.begin, i.end});
    }
    std::sort(spans.begin(), spans.end());
    size_t last = 0;
    for (size_t i = 1; i < spans.size(); ++i) {
      if (spans[i].first <= spans[last].second) {
        spans[last].second = std::max(spans[last].second, spans[i].second);
      } else {
        spans[++last] = spans[i];
      }
    }
    if (!spans.empty()) spans.resize(last + 1);
    return spans;
  };
  double all = 0, hidden = 0;
  const auto at_work = merged(compute);
  for (const auto& [begin, end] : merged(communication)) {
    all += end - begin;
    for (const auto& [from, to] : at_work) hidden += std::max(0.0, std::min(end, to) - std::max(begin, from));
  }
  return all > 0 ? hidden / all : 0;
}

struct Measured {
  double share = 0, seconds = 1e9;  // communication that is hidden; the fastest step
  std::vector<trace::Interval> intervals;
};

// A few steps, after a first one that nobody looks at.
Measured measure(ParallelModel& model, World& world) {
  mpi_tests::set_time_limit(120);
  model.train_step(0, random_batches(model.options, 0));
  mpi_tests::barrier();
  Measured measured;
  trace::start();
  for (int step = 1; step <= kSteps; ++step) {
    const auto begin = std::chrono::steady_clock::now();
    model.train_step(step, random_batches(model.options, step));
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    measured.seconds = std::min(measured.seconds, world.largest({elapsed.count()})[0]);
  }
  trace::stop();
  measured.intervals = trace::intervals();
  measured.share = hidden_share(measured.intervals, "ranks", "compute");
  if (std::getenv("VERBOSE"))
    std::printf("hidden %.3f, step %.1f ms\n", measured.share, measured.seconds * 1e3);
  return measured;
}

// What ZeRO-1 and -2 gather after a step hides behind the next one's forward.
Measured measure(const Technique& technique) {
  const Options options = layered_options();
  const SlowLink link =
      SlowLink::of_all_reduce(layer_elements(options.model), kAllReduce, mpi_tests::ranks());
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  SlowAttention attention(options.attention, kForward, kBackward);
  ParallelModel model(options, technique, world, ranks, {.attention = &attention});
  return measure(model, world);
}

}  // namespace

TEST_CASE("share of communication that is hidden", "[02]") {
  using Intervals = std::vector<trace::Interval>;
  const auto share = [](const Intervals& i) { return hidden_share(i, "data", "compute"); };
  CHECK(share({}) == 0);
  CHECK(share({{"k", "compute", 0, 1}, {"r", "data", 1, 2}}) == 0);
  CHECK(share({{"k", "compute", 0, 1}, {"r", "data", 0.5, 1.5}}) == Approx(0.5));
  CHECK(share({{"k", "compute", 0, 3}, {"r", "data", 1, 2}}) == Approx(1));
  CHECK(share({{"k", "compute", 0, 1}, {"l", "compute", 2, 3}, {"r", "data", 0, 4}}) == Approx(0.5));
  CHECK(share({{"outer", "compute", 0, 2}, {"inner", "compute", 0, 1}, {"r", "data", 0, 4}}) == Approx(0.5));
  CHECK(share({{"group", "data", 0, 4}, {"r", "data", 1, 2}, {"k", "compute", 0, 1}}) == Approx(0.25));
  CHECK(share({{"k", "other", 0, 1}, {"r", "data", 0, 1}}) == 0);
}

TEST_CASE("02: all-reduces during backward are hidden, and steps are faster", "[02][overlap]") {
  if (mpi_tests::ranks() != 2) return;
  const Measured naive = measure(data_parallel(DpSync::naive));
  const Measured overlap = measure(data_parallel(DpSync::overlap));
  const double layer_mb = 1e-6 * sizeof(accum) * layer_elements(layered_options().model);
  const Measured bucket = measure(data_parallel(DpSync::bucket, layer_mb));
  CHECK(naive.share < 0.15);
  CHECK(overlap.share > 0.7);
  CHECK(bucket.share > 0.7);
  // All but the last of the all-reduces, and half of the gain for noise.
  const double gain = 0.5 * (kLayers - 1) * kAllReduce;
  CHECK(overlap.seconds < naive.seconds - gain);
  CHECK(bucket.seconds < naive.seconds - gain);
}

TEST_CASE("03: ZeRO-3 gathers the next unit while this one is used", "[03][overlap]") {
  if (mpi_tests::ranks() != 2) return;
  const Measured zero3 = measure({.kind = Technique::zero, .stage = 3});
  CHECK(zero3.share > 0.7);

  std::vector<trace::Interval> gathers, pauses;
  for (const trace::Interval& i : zero3.intervals) {
    if (i.name == "all_gather") gathers.push_back(i);
    if (i.name == "pause") pauses.push_back(i);
  }
  CHECK(gathers.size() == kSteps * (2 * kLayers + 1));  // test_traffic.cu says why
  CHECK(pauses.size() == kSteps * 2 * kLayers);
  if (gathers.size() != kSteps * (2 * kLayers + 1) || pauses.size() != kSteps * 2 * kLayers) return;
  // Forward gathers the embedding, and then layer i while layer i-1 computes. Backward finds the last layer
  // still gathered, and gathers layer i while layer i+1 computes.
  for (int layer = 1; layer < kLayers; ++layer) {
    INFO("layer " << layer);
    CHECK(gathers[1 + layer].begin < pauses[layer - 1].end);
    if (layer == kLayers - 1) continue;
    const int nth = kLayers - 2 - layer;  // in backward
    CHECK(gathers[kLayers + 2 + nth].begin < pauses[kLayers + nth].end);
  }
}

TEST_CASE("03: stages 0 to 2 hide their collectives", "[03][overlap]") {
  if (mpi_tests::ranks() != 2) return;
  CHECK(measure({.kind = Technique::zero, .stage = 0}).share > 0.7);
  // Nothing follows the last of the steps, behind which its gathers could hide.
  CHECK(measure({.kind = Technique::zero, .stage = 1}).share > 0.5);
  CHECK(measure({.kind = Technique::zero, .stage = 2}).share > 0.5);
}

namespace {

// Intervals of the communication stream, in order, of those names; of each step [first, first + count).
std::vector<trace::Interval> of_each_step(const std::vector<trace::Interval>& all,
                                          const std::vector<std::string>& names, size_t first, size_t count) {
  std::vector<trace::Interval> named, chosen;
  for (const trace::Interval& i : all) {
    if (i.stream == "ranks" && std::find(names.begin(), names.end(), i.name) != names.end())
      named.push_back(i);
  }
  const size_t in_step = named.size() / kSteps;
  for (size_t i = 0; i < named.size(); ++i) {
    if (i % in_step >= first && i % in_step < first + count) chosen.push_back(named[i]);
  }
  return chosen;
}

double hidden_share_of(std::vector<trace::Interval> communication, const std::vector<trace::Interval>& all) {
  for (const trace::Interval& i : all) {
    if (i.stream == "compute") communication.push_back(i);
  }
  return hidden_share(communication, "ranks", "compute");
}

std::vector<trace::Interval> measure_tensor_parallel(bool sequence_parallel) {
  Options options = layered_options();
  options.global_batch_size = options.micro_batch_size;
  const double elements = options.micro_batch_size * options.sequence_length * options.model.d_model;
  const SlowLink link = SlowLink::of_all_reduce(elements, kBorder, mpi_tests::ranks());
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  ParallelModel model(options, {.kind = Technique::tensor_parallel, .sequence_parallel = sequence_parallel},
                      world, ranks, {.make_region = make_region<SlowGradients>});
  return measure(model, world).intervals;
}

}  // namespace

TEST_CASE("04: all-reduces of input gradients hide behind weight gradients", "[04][overlap]") {
  if (mpi_tests::ranks() != 2) return;
  const std::vector<trace::Interval> all = measure_tensor_parallel(false);
  // All-reduces of a step: embedding, two a layer, two of the cross-entropy; backward of the head, two a
  // layer.
  constexpr size_t forward = 1 + 2 * kLayers + 2, backward = 1 + 2 * kLayers;
  const std::vector<trace::Interval> of_backward = of_each_step(all, {"all_reduce"}, forward, backward);
  CHECK(of_backward.size() == kSteps * backward);
  const double in_forward = hidden_share_of(of_each_step(all, {"all_reduce"}, 0, forward), all);
  const double in_backward = hidden_share_of(of_backward, all);
  if (std::getenv("VERBOSE")) std::printf("hidden: forward %.3f, backward %.3f\n", in_forward, in_backward);
  CHECK(in_forward < 0.15);
  CHECK(in_backward > 0.7);
}

TEST_CASE("04: gathers and scatters of sequence parallelism hide behind input and weight gradients",
          "[04][overlap]") {
  if (mpi_tests::ranks() != 2) return;
  const std::vector<trace::Interval> all = measure_tensor_parallel(true);
  // Gathers of a step: into two regions a layer, and into the head; in backward again into the head, then for
  // each region the gradient of its output, and its input again; the gradient of the embedding's output.
  constexpr size_t forward = 2 * kLayers + 1, backward = 1 + 2 * 2 * kLayers + 1;
  const std::vector<trace::Interval> gathers = of_each_step(all, {"all_gather"}, forward, backward);
  CHECK(gathers.size() == kSteps * backward);
  std::vector<trace::Interval> inputs;
  for (size_t i = 0; i < gathers.size(); ++i) {
    if (i % backward % 2 == 0) inputs.push_back(gathers[i]);
  }
  const double of_inputs = hidden_share_of(inputs, all);
  const double of_gradients =
      hidden_share_of(of_each_step(all, {"reduce_scatter"}, 1 + 2 * kLayers, 1 + 2 * kLayers), all);
  if (std::getenv("VERBOSE"))
    std::printf("hidden: gathers of inputs %.3f, scatters of gradients %.3f\n", of_inputs, of_gradients);
  CHECK(of_inputs > 0.7);
  CHECK(of_gradients > 0.7);
}

// ---- Ring attention, whose blocks take the time that they take

namespace {

struct MeasuredRing {
  double block;              // s, in forward
  double forward, backward;  // share of the hops that is hidden
};

double median_of_ranks(World& world, std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return world.sum({values[values.size() / 2]})[0] / world.ranks();
}

// Attention of `length` tokens a rank, in a zigzag, several times.
MeasuredRing measure_ring(World& world, int length) {
  constexpr int heads = 8, size = 32, repetitions = 5;
  Options o = test_options(/*layers=*/1, heads * size, heads, heads, /*d_ff=*/1, /*vocab_size=*/2,
                           length * world.ranks(), /*micro_batch=*/1, /*global_batch=*/1);
  o.attention = Attention::tiled;
  Communicator context(world, world.all(), "context");
  const Stream compute("compute");
  const Blas blas(compute);
  RingAttention ring(o, context);
  DeviceArena memory(Purpose::activations);
  const auto zeros = [&] {
    const Tensor x = memory.matrix<real>(length, heads * size);
    CUDA_CHECK(cudaMemsetAsync(x.data, 0, x.bytes(), compute));
    return x;
  };
  const auto statistics = [&] { return memory.matrix<accum>(length, heads); };
  const AttentionShape shape = {1, length, {heads, heads, size}};
  const AttentionTensors t = {zeros(), zeros(), zeros(), zeros(), statistics(), {}};
  const AttentionGradients g = {zeros(), zeros(), zeros(), zeros(), {}, statistics()};

  std::vector<double> blocks, forward, backward;
  const auto traced = [&](const auto& run) {
    compute.synchronize();
    mpi_tests::barrier();
    trace::start();
    run();
    compute.synchronize();
    trace::stop();
    return trace::intervals();
  };
  for (int i = 0; i < repetitions; ++i) {
    const auto in_forward = traced([&] { ring.forward(blas, shape, t); });
    const auto in_backward = traced([&] { ring.backward(blas, shape, t, g); });
    for (const trace::Interval& interval : in_forward) {
      if (interval.name.starts_with("tiled_forward_kernel")) blocks.push_back(interval.end - interval.begin);
    }
    forward.push_back(hidden_share(in_forward, "context", "compute"));
    backward.push_back(hidden_share(in_backward, "context", "compute"));
  }
  return {median_of_ranks(world, blocks), median_of_ranks(world, forward), median_of_ranks(world, backward)};
}

}  // namespace

// A hop takes time in proportion to a rank's tokens, a block to their square. Over this link both take
// equally long at 512 tokens, if floating-point operations take as long everywhere: far below that a hop
// shows, far above it hides, but for the last of backward's three, which brings the gradients home.
TEST_CASE("06: hops of the ring hide behind blocks that are long enough", "[06][overlap]") {
  if (mpi_tests::ranks() != 2) return;
  mpi_tests::set_time_limit(120);
  World world(nullptr, nullptr);
  constexpr int even = 512, width = 256;
  const double flops = 4.0 * even * even / 2 * width / measure_ring(world, even).block;  // a second
  const double bandwidth = 4 * flops / even;  // bytes a second: the condition, with 4 bytes and a zigzag
  setenv("NCCL_CPU_LINK", ("1us," + std::to_string(bandwidth) + "B/s").c_str(), true);
  const bool print = std::getenv("VERBOSE") && world.rank() == 0;
  if (print) std::printf("%.2f GFLOP/s, link %.0f MB/s\n", flops * 1e-9, bandwidth * 1e-6);
  std::map<int, MeasuredRing> of_length;
  for (const int length : {64, 128, 256, 512, 1024, 2048}) {
    const MeasuredRing m = of_length[length] = measure_ring(world, length);
    const double hop = 2 * sizeof(real) * length * width / bandwidth;
    if (print) {
      std::printf("%4d tokens: hop %5.1f ms, block %5.1f ms, hidden in forward %.2f, in backward %.2f\n",
                  length, hop * 1e3, m.block * 1e3, m.forward, m.backward);
    }
  }
  unsetenv("NCCL_CPU_LINK");
  CHECK(of_length[64].forward < 0.5);
  CHECK(of_length[2048].forward > 0.8);
  CHECK(of_length[2048].backward > 0.55);
}

}  // namespace pentatron

#endif
