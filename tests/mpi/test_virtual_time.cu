// Modelled time, to the nanosecond: what a step takes is the longest path through its operations, which these
// tests find by hand. On the GPU `unit` a layer takes a second forward and two backward.
// precisions: fp64
#include <nccl.h>

#include "device/precision.h"
#if PRECISION == 64 && defined(NCCL_OVER_MPI)
#include "modelled.h"
#endif
#if PRECISION == 64 && defined(NCCL_OVER_MPI) && __has_include(<cuda_cpu.h>)

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "../../05_pipeline_parallel/workbench/simulate.h"
#include "parallel_model.h"

namespace pentatron {
namespace {

constexpr int kLayers = 3;
constexpr double kScalars = StepTotals::size * sizeof(double);  // bytes that end each step

// One micro-batch for each rank, or one for all.
CombinedOptions three_layers(bool one_for_each_rank) {
  CombinedOptions o =
      test_options<CombinedOptions>(kLayers, /*d_model=*/64, /*heads=*/8, /*kv_heads=*/8, /*d_ff=*/96,
                                    /*vocab_size=*/64, /*sequence=*/8, /*micro_batch=*/1,
                                    /*global_batch=*/one_for_each_rank ? mpi_tests::ranks() : 1);
  o.optimizer = OptimizerKind::sgd;
  return o;
}

// The second step: what one leaves to the next is included.
int64_t time_of_step(const CombinedOptions& options, const Technique& technique, const World& world,
                     Communicator& ranks) {
  ParallelModel model(options, technique, const_cast<World&>(world), ranks);
  const auto batches = random_batches(options, 1);
  model.train_step(0, batches);
  return modelled_time(world, [&] { model.train_step(1, batches); });
}

// Two streams by hand.
struct Path {
  int64_t compute = 0, communication = 0;

  void work(double seconds) { compute += static_cast<int64_t>(seconds * second); }
  void communicate(int64_t nanoseconds) { communication += nanoseconds; }
  void communication_waits(int64_t time) { communication = std::max(communication, time); }
  void communication_waits() { communication_waits(compute); }
  void compute_waits(int64_t time) { compute = std::max(compute, time); }
  void compute_waits() { compute_waits(communication); }
};

// Elements of each unit, embedding first, head last, as they are padded for the ranks.
std::vector<double> unit_sizes(const CombinedOptions& options) {
  Parameters parameters({.groups = {{mpi_tests::rank(), mpi_tests::ranks()}}});
  FeedForward feed_forward;
  declare_transformer(options.model, feed_forward, parameters);
  std::vector<double> sizes;
  for (int unit = 0; unit <= head_unit(kLayers); ++unit) {
    sizes.push_back(static_cast<double>(parameters.group().size(unit)));
  }
  return sizes;
}
constexpr int kHead = kLayers + 1;

double all_elements(const CombinedOptions& options) {
  const std::vector<double> sizes = unit_sizes(options);
  return std::accumulate(sizes.begin(), sizes.end(), 0.0);
}

// Links on which the gradients of a layer take so many seconds to be summed.
double bandwidth_for(const CombinedOptions& options, double seconds) {
  const int n = mpi_tests::ranks();
  return 2.0 * (n - 1) / n * unit_sizes(options)[1] * sizeof(accum) / seconds;
}

// Seconds of a layer's all-reduce: it hides behind the layer before; it does not.
const std::vector<double> kAllReduces = {0.7, 2.9};

}  // namespace

TEST_CASE("02: the time of naive, overlap and bucket", "[02][time]") {
  if (mpi_tests::ranks() == 1) return;
  const CombinedOptions options = three_layers(true);
  const std::vector<double> sizes = unit_sizes(options);
  for (const double seconds : kAllReduces) {
    const ModelledGpu gpu(1e-3, bandwidth_for(options, seconds));
    const RingTime ring;
    World world(nullptr, nullptr);
    Communicator ranks(world, world.all(), "ranks");
    const auto sum = [&](double elements) { return ring.all_reduce(elements * sizeof(accum)); };
    const int64_t scalars = ring.all_reduce(kScalars);

    CHECK(time_of_step(options, data_parallel(DpSync::naive), world, ranks) ==
          3 * kLayers * second + sum(all_elements(options)) + scalars);

    // Each unit's sum begins when the unit is complete and the sum before it is made.
    Path overlap;
    overlap.work(kLayers);
    for (int unit = kHead; unit >= 0; --unit) {
      if (unit > 0 && unit < kHead) overlap.work(2);
      overlap.communication_waits();
      overlap.communicate(sum(sizes[unit]));
    }
    overlap.compute_waits();
    CHECK(time_of_step(options, data_parallel(DpSync::overlap), world, ranks) == overlap.compute + scalars);

    // Buckets of one and a half layers, from the end; each begins when the unit at its beginning is complete.
    const double bucket = std::floor(1.5 * sizes[1]), bucket_mb = (bucket + 0.5) * sizeof(accum) * 1e-6;
    Path buckets;
    buckets.work(kLayers);
    double unsent = all_elements(options), complete = unsent;
    for (int unit = kHead; unit >= 0; --unit) {
      if (unit > 0 && unit < kHead) buckets.work(2);
      complete -= sizes[unit];
      for (; unsent >= complete + bucket; unsent -= bucket) {
        buckets.communication_waits();
        buckets.communicate(sum(bucket));
      }
    }
    buckets.communication_waits();
    buckets.communicate(sum(unsent));
    buckets.compute_waits();
    CHECK(time_of_step(options, data_parallel(DpSync::bucket, bucket_mb), world, ranks) ==
          buckets.compute + scalars);
  }
}

TEST_CASE("03: the time of the three stages", "[03][time]") {
  if (mpi_tests::ranks() == 1) return;
  const CombinedOptions options = three_layers(true);
  std::vector<double> shards = unit_sizes(options);
  for (double& size : shards) size /= mpi_tests::ranks();
  for (const double seconds : kAllReduces) {
    const ModelledGpu gpu(1e-3, bandwidth_for(options, seconds));
    const RingTime ring;
    World world(nullptr, nullptr);
    Communicator ranks(world, world.all(), "ranks");
    const auto gather = [&](int unit) { return ring.all_gather(shards[unit] * sizeof(real)); };
    const auto scatter = [&](int unit) { return ring.reduce_scatter(shards[unit] * sizeof(accum)); };
    const int64_t scalars = ring.all_reduce(kScalars);

    // Stages 1 and 2 gather all units after the step before; a layer waits for its own. Stage 2 has gradient
    // buffers for two units: weight gradients, which come after half of a dgrad, wait for the one of the unit
    // before the last.
    for (const int stage : {1, 2}) {
      Path path;
      for (int unit = 0; unit <= kHead; ++unit) {
        path.communicate(gather(unit));
        path.compute_waits();
        if (unit > 0 && unit < kHead) path.work(1);
      }
      int64_t free[2] = {};
      for (int unit = kHead; unit >= 0; --unit) {
        const bool layer = unit > 0 && unit < kHead;
        if (layer) path.work(0.5);
        if (stage == 2) path.compute_waits(free[unit % 2]);
        if (layer) path.work(1.5);
        path.communication_waits();
        path.communicate(scatter(unit));
        free[unit % 2] = path.communication;
      }
      path.compute_waits();
      INFO("stage " << stage << ", " << seconds << " s");
      CHECK(time_of_step(options, zero(stage), world, ranks) == path.compute + scalars);
    }

    // Stage 3 gathers the next unit, into the buffer of the unit before, while one is used. Backward finds
    // the last layer and the head still gathered, and has no use for the embedding's weights.
    Path path;
    int64_t gathered[kHead + 1] = {}, used[kHead + 1] = {};
    const auto fetch = [&](int unit, int replaced) {
      if (replaced >= 0) path.communication_waits(used[replaced]);
      path.communicate(gather(unit));
      gathered[unit] = path.communication;
    };
    fetch(0, -1);
    for (int unit = 0; unit <= kHead; ++unit) {
      if (unit < kHead) fetch(unit + 1, unit - 1);
      path.compute_waits(gathered[unit]);
      if (unit > 0 && unit < kHead) path.work(1);
      used[unit] = path.compute;
    }
    int64_t free[2] = {};
    for (int unit = kHead; unit >= 0; --unit) {
      const bool layer = unit > 0 && unit < kHead;
      if (layer && unit > 1) fetch(unit - 1, unit + 1);
      if (layer) path.compute_waits(gathered[unit]);
      if (layer) path.work(0.5);
      path.compute_waits(free[unit % 2]);
      if (layer) path.work(1.5);
      used[unit] = path.compute;
      path.communication_waits();
      path.communicate(scatter(unit));
      free[unit % 2] = path.communication;
    }
    path.compute_waits();
    INFO("stage 3, " << seconds << " s");
    CHECK(time_of_step(options, zero(3), world, ranks) == path.compute + scalars);
  }
}

TEST_CASE("04: the time of forward, where nothing hides, and of backward", "[04][time]") {
  const CombinedOptions options = three_layers(false);
  if (mpi_tests::ranks() == 1 || options.model.heads % mpi_tests::ranks() != 0) return;
  const int n = mpi_tests::ranks(), rows = options.sequence_length, d = options.model.d_model;
  constexpr double product = 0.25;  // of a rank's part of the columns, too
  // An all-reduce at a border, in seconds: shorter or longer than the weight gradients of a region.
  for (const double seconds : {1.2 * product, 3.2 * product}) {
    const ModelledGpu gpu(0, 2.0 * (n - 1) / n * rows * d * sizeof(real) / seconds);
    const RingTime ring;
    World world(nullptr, nullptr);
    Communicator ranks(world, world.all(), "ranks");
    const int64_t border = ring.all_reduce(rows * d * sizeof(real)), scalars = ring.all_reduce(kScalars);
    const int64_t loss = ring.all_reduce(rows * sizeof(accum)) + ring.all_reduce(2 * rows * sizeof(accum));
    // Embedding; attention and MLP of each layer; the cross-entropy's statistics.
    const int64_t forward = border + kLayers * (second + 2 * border) + loss;
    // The head; MLP and attention, each with two weight gradients, and as many input gradients.
    const int64_t two = second / 2, backward = border + kLayers * 2 * (two + std::max(border, two));
    CHECK(time_of_step(options, {.kind = Technique::tensor_parallel}, world, ranks) ==
          forward + backward + scalars);

    // With sequence parallelism an all-reduce is a reduce-scatter and a gather. In backward the region's
    // input is gathered again behind the second of its two input gradients, and its gradient is scattered
    // behind the weight gradients, of which the second wants that input.
    if (rows % n != 0) continue;
    const int64_t part = ring.all_gather(rows * d * sizeof(real) / n);
    Path path;
    path.work(kLayers * 4 * product);
    path.compute += part + kLayers * 4 * part + part + loss;
    path.communication = path.compute;
    path.communicate(part);  // the head's input, for a wgrad that takes no time,
    const int64_t entered = path.communication;
    path.communicate(part);  // and the scatter of its gradient
    path.compute_waits(entered);
    path.compute_waits();
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int region = 0; region < 2; ++region) {
        path.communication_waits();
        path.communicate(part);  // the gradient of the region's output
        path.compute_waits();
        path.work(product);
        // The input is gathered when the host says so; its buffer is free since the region before.
        path.communicate(part);
        const int64_t came = path.communication;
        path.work(product);
        path.communication_waits();
        path.communicate(part);  // the scatter
        path.work(product);
        path.compute_waits(came);
        path.work(product);
        path.compute_waits();
      }
    }
    path.communication_waits();
    path.communicate(part);  // the gradient of the embedding's output
    path.compute_waits();
    int64_t norms = 0;  // each norm weight's gradient is of this rank's rows; they go as one group
    for (int i = 0; i < 2 * kLayers + 1; ++i) norms += ring.all_reduce(d * sizeof(accum));
    CHECK(time_of_step(options, {.kind = Technique::tensor_parallel, .sequence_parallel = true}, world,
                       ranks) == path.compute + norms + scalars);
  }
}

TEST_CASE("04: the gradients of the norms are summed in turns", "[04][time]") {
  const CombinedOptions options = three_layers(false);
  const int n = mpi_tests::ranks();
  if (n == 1 || options.model.heads % n != 0 || options.sequence_length % n != 0) return;
  const ModelledGpu gpu(1e-3);
  World world(nullptr, nullptr);
  const auto step = [&](int channels) {
    Communicator ranks(world, world.all(), "ranks", channels);
    return time_of_step(options, {.kind = Technique::tensor_parallel, .sequence_parallel = true}, world,
                        ranks);
  };
  CHECK(step(2) - step(8) == 3 * RingTime().all_reduce(0));  // seven sums: four turns in place of one
}

TEST_CASE("04: the time of forward in chunks", "[04][time]") {
  CombinedOptions options = three_layers(false);
  options.sequence_length = 48;  // rows; 2, 3 and 4 chunks of each rank's part are equal
  const int n = mpi_tests::ranks(), rows = options.sequence_length, d = options.model.d_model;
  if (n == 1 || options.model.heads % n != 0 || rows % n != 0) return;
  constexpr double product = 0.25;  // of a chunk, too: on this GPU chunks hide the communication at a price
  // An all-reduce at a border, in seconds.
  for (const double seconds : {0.4 * product, 1.2 * product, 3.2 * product}) {
    const ModelledGpu gpu(1e-4, 2.0 * (n - 1) / n * rows * d * sizeof(real) / seconds);
    const RingTime ring;
    World world(nullptr, nullptr);
    Communicator ranks(world, world.all(), "ranks");
    for (const bool sequence_parallel : {false, true}) {
      const auto whole = [&](int chunks) {
        return time_of_step(options,
                            {.kind = Technique::tensor_parallel,
                             .sequence_parallel = sequence_parallel,
                             .tp_overlap = chunks},
                            world, ranks);
      };
      for (const int chunks : {2, 3}) {
        const double bytes = rows * d * sizeof(real);
        const auto border = [&](double part) {
          return sequence_parallel ? ring.reduce_scatter(part / n) : ring.all_reduce(part);
        };
        // Each product with its communication: first one, then the other, and in chunks.
        Path in_chunks, before;
        const auto enter = [&](double work) {
          if (!sequence_parallel) return in_chunks.work(work), before.work(work);
          before.compute += ring.all_gather(bytes / n);
          before.work(work);
          in_chunks.communication_waits();
          std::vector<int64_t> came;
          for (int i = 0; i < chunks; ++i) {
            in_chunks.communicate(ring.all_gather(bytes / n / chunks));
            came.push_back(in_chunks.communication);
          }
          for (int i = 0; i < chunks; ++i) {
            in_chunks.compute_waits(came[i]);
            in_chunks.work(work);
          }
        };
        const auto leave = [&](double work) {
          before.work(work);
          before.compute += border(bytes);
          for (int i = 0; i < chunks; ++i) {
            in_chunks.work(work);
            in_chunks.communication_waits();
            in_chunks.communicate(border(bytes / chunks));
          }
          in_chunks.compute_waits();
        };
        for (int layer = 0; layer < kLayers; ++layer) {
          enter(product), leave(product);
          enter(product), leave(product);
        }
        enter(0);  // the head
        INFO(chunks << " chunks, sequence parallel " << sequence_parallel << ", " << seconds << " s");
        CHECK(whole(1) - whole(chunks) == Approx(before.compute - in_chunks.compute).margin(100));
      }
    }
  }
}

// Two ways to one number: the executor's operations, and the simulator's instructions.
TEST_CASE("05: a step takes the time that the simulator says", "[05][time]") {
  const int p = mpi_tests::ranks();
  if (p == 1) return;
  mpi_tests::set_time_limit(120);
  constexpr int layers_of_stage = 2;
  for (const int m : {1, 2 * p, 2 * p + 1}) {
    // One line for each schedule that there is.
    const std::vector<Technique> techniques = {pipeline(PpSchedule::afab),
                                               pipeline(PpSchedule::one_f_one_b),
                                               pipeline(PpSchedule::interleaved, 2),
                                               pipeline(PpSchedule::zb_h1),
                                               pipeline(PpSchedule::zb_v, 2),
                                               pipeline(PpSchedule::dualpipe, 2),
                                               pipeline(PpSchedule::dualpipe_v, 2),
                                               odd_order(m, false),
                                               odd_order(m, true)};
    for (const Technique& technique : techniques) {
      const bool interleaved = technique.schedule == PpSchedule::interleaved;
      const bool dual = technique.schedule == PpSchedule::dualpipe;
      if (interleaved && m % p != 0) continue;
      if (dual && (m % 2 != 0 || p % 2 != 0)) continue;
      if (m == 2 * p && !interleaved && !dual) continue;  // 2 p + 1 shows as much
      for (const double transfer : {0.0, 0.5}) {
        CombinedOptions options =
            test_options<CombinedOptions>(layers_of_stage * p, 32, 4, 4, 96, 32, 8, 1, m);
        options.optimizer = OptimizerKind::sgd;
        const double bytes = options.sequence_length * options.model.d_model * sizeof(real);
        // The copies of a model sum their gradients, too: two hops, of latency alone.
        const double latency = dual ? transfer : 0, sum = 2 * latency;
        const ModelledGpu gpu(latency, transfer > latency ? bytes / transfer : 1e30);
        const RingTime ring;
        World world(nullptr, nullptr);
        Communicator ranks(world, world.all(), "ranks");
        const Schedule schedule = technique.schedule_of(p, m);
        const double chunk = double(layers_of_stage) * p / schedule.stages();
        const Simulation simulated = simulate(schedule, {chunk, chunk, chunk, transfer});
        INFO(schedule.name << ", " << m << " micro-batches, transfer " << transfer);
        CHECK(time_of_step(options, technique, world, ranks) ==
              cuda_cpu::nanoseconds(simulated.total + sum) + ring.all_reduce(kScalars));
      }
    }
  }
}

// A rank has one layer.
CombinedOptions as_many_layers_as_ranks(int micro_batches) {
  CombinedOptions o =
      test_options<CombinedOptions>(mpi_tests::ranks(), 32, 4, 4, 96, 32, 8, 1, micro_batches);
  o.optimizer = OptimizerKind::sgd;
  return o;
}

TEST_CASE("05: the bubble of ZB-H1 is a third of 1F1B's", "[05][time]") {
  const int p = mpi_tests::ranks(), m = 2 * p;
  if (p == 1) return;
  const CombinedOptions options = as_many_layers_as_ranks(m);
  const ModelledGpu gpu;
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  const auto bubble = [&](PpSchedule schedule) {
    return time_of_step(options, pipeline(schedule), world, ranks) - 3 * m * second;
  };
  CHECK(bubble(PpSchedule::one_f_one_b) == 3 * (p - 1) * second);
  CHECK(bubble(PpSchedule::zb_h1) == (p - 1) * second);
}

TEST_CASE("05: a trace says what waited for what", "[05][time]") {
  const int p = mpi_tests::ranks(), m = 3;
  if (p == 1) return;
  const CombinedOptions options = as_many_layers_as_ranks(m);
  const ModelledGpu gpu;
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  ParallelModel model(options, pipeline(PpSchedule::one_f_one_b), world, ranks);
  trace::start();
  model.train_step(0, random_batches(options, 0));
  trace::stop();
  const std::vector<trace::Interval> intervals = trace::take();

  // Every message has the same number at both ends.
  std::string sent, received;
  std::map<std::pair<int, int>, int> forward_products;  // by layer and micro-batch
  std::set<uint64_t> ids;
  for (const trace::Interval& i : intervals) {
    for (const uint64_t message : i.sent) sent += std::to_string(message) + "\n";
    for (const uint64_t message : i.received) received += std::to_string(message) + "\n";
    if (i.name == "gemm_forward" && i.layer >= 0) ++forward_products[{i.layer, i.micro_batch}];
    ids.insert(i.id);
  }
  const auto of_all = [&](const std::string& text) {
    std::multiset<std::string> numbers;
    for (const std::string& of_rank : world.gather(text)) {
      std::istringstream lines(of_rank);
      for (std::string line; std::getline(lines, line);) numbers.insert(line);
    }
    return numbers;
  };
  const auto all_sent = of_all(sent), all_received = of_all(received);
  CHECK(all_sent == all_received);
  if (world.rank() == 0) CHECK(all_sent.size() == static_cast<size_t>(2 * m * (p - 1)));
  // A rank has one layer, of which each micro-batch has four products.
  CHECK(forward_products.size() == static_cast<size_t>(m));
  for (const auto& [place, products] : forward_products)
    CHECK((place.first == world.rank() && products == 4));

  // Arrows have two ends.
  const auto events = nlohmann::json::parse(trace::chrome_events(intervals, world.rank()));
  std::map<std::string, int> ends;
  int waits = 0;
  for (const auto& event : events) {
    const bool from = event["ph"] == "s", to = event["ph"] == "f";
    if (!from && !to) continue;
    const std::string id = event["id"];
    if (id.starts_with("wait")) ends[id] += from ? 1 : -1, ++waits;
  }
  CHECK(waits > 0);
  for (const auto& [id, balance] : ends) CHECK(balance == 0);
}

namespace {

// Steps of a ring in which rank r works for work[r][step] while hops of these lengths pass, and then waits
// for both; a hop begins when both neighbours have come.
struct RingPath {
  std::vector<int64_t> time;

  void step(const std::vector<int64_t>& work, const std::vector<int64_t>& hops) {
    const int n = static_cast<int>(time.size());
    std::vector<int64_t> communication = time;
    for (const int64_t hop : hops) {
      const std::vector<int64_t> came = communication;
      for (int r = 0; r < n; ++r)
        communication[r] = std::max({came[(r + n - 1) % n], came[r], came[(r + 1) % n]}) + hop;
    }
    for (int r = 0; r < n; ++r) time[r] = std::max(time[r] + work[r], communication[r]);
  }
  int64_t slowest() const { return *std::max_element(time.begin(), time.end()); }
};

// Forward and backward of one layer's attention of zeros, in nanoseconds.
std::pair<int64_t, int64_t> times_of_attention(const CombinedOptions& o, Communicator& context,
                                               const World& world) {
  const Stream compute("compute");
  const Blas blas(compute);
  const auto attention = context_attention(o, o.context, context);
  const AttentionShape shape = {o.micro_batch_size,
                                o.sequence_length / context.ranks(),
                                {o.model.heads, o.model.kv_heads, o.model.head_size()}};
  DeviceArena memory(Purpose::activations);
  const auto zeros = [&](int heads) {
    const Tensor x = memory.matrix<real>(shape.batch * shape.sequence, heads * o.model.head_size());
    CUDA_CHECK(cudaMemsetAsync(x.data, 0, x.bytes(), compute));
    return x;
  };
  const auto queries = [&] { return zeros(o.model.heads); };
  const auto keys = [&] { return zeros(o.model.kv_heads); };
  const auto statistics = [&] {
    return memory.matrix<accum>(shape.batch * shape.sequence, shape.head.heads);
  };
  const AttentionTensors t = {queries(), keys(), keys(), queries(), statistics(), {}};
  const AttentionGradients g = {
      queries(), queries(), keys(), keys(), attention->backward_memory(memory, shape), statistics()};
  const int64_t forward = modelled_time(world, [&] {
    attention->forward(blas, shape, t);
    compute.synchronize();
  });
  const int64_t backward = modelled_time(world, [&] {
    attention->backward(blas, shape, t, g);
    compute.synchronize();
  });
  return {forward, backward};
}

}  // namespace

TEST_CASE("06: the time of the ring, in both layouts", "[06][time]") {
  const int n = mpi_tests::ranks();
  if (n == 1) return;
  constexpr int heads = 2, size = 16, rows = 32;                   // of a rank
  constexpr double of_product = 2.0 * heads * rows * rows * size;  // FLOPs of a whole block
  for (const double hop_seconds : {0.5, 1.5}) {
    // A whole block's two products of forward take a second.
    const double bytes = rows * heads * size * sizeof(real);
    const ModelledGpu gpu(0, 2 * bytes / hop_seconds, 2 * of_product);
    const RingTime ring;
    const int64_t hop = cuda_cpu::nanoseconds(2 * bytes / cuda_cpu::profile().link_bandwidth);
    World world(nullptr, nullptr);
    Communicator context(world, world.all(), "context");
    for (const CpLayout layout : {CpLayout::contiguous, CpLayout::zigzag}) {
      CombinedOptions o = test_options<CombinedOptions>(1, heads * size, heads, heads, 1, 2, rows * n, 1, 1);
      o.attention = Attention::tiled;
      o.context.cp_layout = layout;
      const auto [forward_time, backward_time] = times_of_attention(o, context, world);

      // On the diagonal half a block; then a whole one or none, or with the zigzag half of one everywhere.
      const auto work = [&](int step, double of_block) {
        std::vector<int64_t> all(n);
        for (int r = 0; r < n; ++r) {
          const double share = step == 0 || layout == CpLayout::zigzag ? 0.5 : step <= r ? 1 : 0;
          all[r] = static_cast<int64_t>(share * of_block * second);
        }
        return all;
      };
      RingPath forward{std::vector<int64_t>(n)}, backward = forward;
      for (int step = 0; step < n; ++step) {
        forward.step(work(step, 1), std::vector<int64_t>(step + 1 < n ? 1 : 0, hop));
        backward.step(work(step, 3.5),
                      std::vector<int64_t>((step + 1 < n ? 1 : 0) + (step > 0 ? 1 : 0), hop));
      }
      backward.step(std::vector<int64_t>(n), {hop});
      INFO(to_string(layout) << ", hops of " << hop_seconds << " s");
      CHECK(forward_time == forward.slowest());
      CHECK(backward_time == backward.slowest());
    }
  }
}

// An all-to-all, attention as on one rank, and an all-to-all back: nothing hides another.
TEST_CASE("06: the time of Ulysses", "[06][time]") {
  const int n = mpi_tests::ranks();
  if (n == 1) return;
  constexpr int size = 16, rows = 32;  // of a rank, which computes two of 2 n heads
  const double matrix = double(rows) * 2 * n * size * sizeof(real);  // bytes of q, and of each other one
  const double two_products = 2 * 2.0 * (2 * 0.5 * rows * n * rows * n) * size;
  constexpr double latency = 0.01, of_matrix = 0.1;  // s: of an all-to-all; of what it sends of a matrix
  const ModelledGpu gpu(latency, matrix * (n - 1) / n / of_matrix, two_products);
  const double of_dots = of_matrix / size * sizeof(accum) / sizeof(real);
  World world(nullptr, nullptr);
  Communicator context(world, world.all(), "context");
  CombinedOptions o = test_options<CombinedOptions>(1, 2 * n * size, 2 * n, 2 * n, 1, 2, rows * n, 1, 1);
  o.attention = Attention::tiled;
  o.context.cp_exchange = CpExchange::ulysses;
  for (const CpLayout layout : {CpLayout::contiguous, CpLayout::zigzag}) {
    o.context.cp_layout = layout;
    const auto [forward, backward] = times_of_attention(o, context, world);
    const double forward_seconds = 3 * of_matrix + 1 + of_matrix + 2 * latency;
    const double backward_seconds = of_matrix + of_dots + 3.5 + 3 * of_matrix + 3 * latency;
    CHECK(std::abs(forward - forward_seconds * second) < 10);
    CHECK(std::abs(backward - backward_seconds * second) < 10);
  }
}

}  // namespace pentatron

#endif
