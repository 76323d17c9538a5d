// What a step of 02, 03, 04 and 06 sends and what each rank holds, against formulas. They are written out
// here from the sizes of the model; nothing is asked of the code under test.
// precisions: fp64 bf16
#include <algorithm>
#include <numeric>

#include "../../03_zero/zero_memory.h"
#include "memory_check.h"
#include "parallel_model.h"
#include "run/program.h"

#if __has_include(<cuda_cpu.h>)
#include <cuda_cpu.h>
#endif

namespace pentatron {
namespace {

// ---- Sizes ------------------------------------------------------------------------------------------------

// Elements of each unit (embedding, layers, head and its norm), padded to shards of 16 bytes or more.
std::vector<int64_t> padded_units(const ModelConfig& m, int ranks) {
  const int64_t d = m.d_model, kv = d / m.heads * m.kv_heads, table = m.vocab_size * d;
  const int64_t layer = 2 * d * d + 2 * d * kv + 3 * d * m.d_ff + 2 * d;
  std::vector<int64_t> sizes(m.layers + 2, layer);
  sizes.front() = table;
  sizes.back() = table + d;
  const int64_t multiple = ranks * (16 / int64_t{sizeof(real)});
  for (int64_t& size : sizes) size = (size + multiple - 1) / multiple * multiple;
  return sizes;
}

int64_t sum(const std::vector<int64_t>& sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
}

// ---- Traffic ----------------------------------------------------------------------------------------------

CombinedOptions uneven_options(int layers, int micro_batches) {
  CombinedOptions o =
      test_options<CombinedOptions>(layers, /*d_model=*/12, /*heads=*/3, /*kv_heads=*/1, /*d_ff=*/10,
                                    /*vocab_size=*/23, /*sequence=*/5, /*micro_batch=*/1,
                                    /*global_batch=*/micro_batches * mpi_tests::ranks());
  o.optimizer = OptimizerKind::sgd;
  return o;
}

// Calls of one operation in a step, elements and bytes of the whole buffers.
struct Expected {
  int64_t calls = 0, elements = 0, bytes = 0;
  void add(int64_t more_calls, int64_t elements_of_all, size_t element_bytes) {
    calls += more_calls;
    elements += elements_of_all;
    bytes += elements_of_all * static_cast<int64_t>(element_bytes);
  }
};
using ExpectedTraffic = std::map<std::string, Expected>;

ExpectedTraffic loss_and_norm() { return {{"scalars", {1, 2, 2 * sizeof(double)}}}; }

// Collectives of a step with m micro-batches a rank.
ExpectedTraffic expected_traffic(const Technique& technique, const std::vector<int64_t>& units, int64_t m) {
  const int64_t all = sum(units), count = std::ssize(units), layers = count - 2;
  ExpectedTraffic e = loss_and_norm();
  if (technique.kind == Technique::data_parallel) {
    const int64_t bucket = static_cast<int64_t>(technique.bucket_mb * 1e6 / sizeof(accum));
    e["all_reduce"].add(technique.sync == DpSync::naive     ? 1
                        : technique.sync == DpSync::overlap ? count
                                                            : (all + bucket - 1) / bucket,
                        all, sizeof(accum));
    return e;
  }
  switch (technique.stage) {
    case 0:
      e["all_reduce"].add(count, all, sizeof(accum));
      break;
    case 1:  // 2 all: reduced once, gathered once
      e["reduce_scatter"].add(count, all, sizeof(accum));
      e["all_gather"].add(count, all, sizeof(real));
      break;
    case 2:  // (m + 1) all: reduced in every micro-batch
      e["reduce_scatter"].add(m * count, m * all, sizeof(accum));
      e["all_gather"].add(count, all, sizeof(real));
      break;
    case 3:
      // 3 m all, but for what is still there: forward ends with the last layer and the head gathered, so that
      // backward begins with these two, and it never needs the embedding; backward ends with the first two
      // layers gathered, of which the next micro-batch's forward finds the first (the embedding replaces the
      // other).
      e["reduce_scatter"].add(m * count, m * all, sizeof(accum));
      const int64_t backward = std::accumulate(units.begin() + 1, units.begin() + layers, int64_t{0});
      e["all_gather"].add(m * (count + layers - 1) - (m - 1), m * (all + backward) - (m - 1) * units[1],
                          sizeof(real));
      break;
  }
  // Hybrid sharding: the own shard, once a step, whatever m is.
  const int shards = technique.shards_of(mpi_tests::ranks());
  if (shards < mpi_tests::ranks()) e["all_reduce"].add(count, all / shards, sizeof(accum));
  return e;
}

// Bytes that a rank sends of each byte that a collective works on, under the ring algorithm.
double sent_share(const std::string& operation, double ranks) {
  if (operation == "send" || operation == "receive") return operation == "send" ? 1 : 0;
  return (operation == "all_reduce" || operation == "scalars" ? 2 : 1) * (ranks - 1) / ranks;
}

void check_step_traffic(const Technique& technique, const CombinedOptions& options,
                        const ExpectedTraffic& expected) {
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  ParallelModel model(options, technique, world, ranks);
  for (int step = 0; step < 2; ++step) {
    world.begin_counting();
    model.train_step(step, random_batches(options, step));
    double sent = 0;
    const TrafficByOperation all = world.traffic();
    for (const auto& [operation, traffic] : all) {
      INFO(operation);
      CHECK(expected.contains(operation));
    }
    for (const auto& [operation, e] : expected) {
      INFO(operation);
      const auto seen = all.find(operation);
      CHECK(seen != all.end());
      if (seen == all.end()) continue;
      CHECK(seen->second.calls == e.calls);
      CHECK(seen->second.elements == e.elements);
      int ranks_of_operation = world.ranks();
      if (operation == "all_to_all_v" && options.context.cp_exchange == CpExchange::ulysses_ring)
        ranks_of_operation = options.context.ulysses;
      if (technique.shard_ranks > 0 && operation != "scalars")
        ranks_of_operation =
            operation == "all_reduce" ? world.ranks() / technique.shard_ranks : technique.shard_ranks;
      sent += e.bytes * sent_share(operation, ranks_of_operation);
    }
    CHECK(sent_bytes(world.traffic()) == Approx(sent));
  }
}

void check_traffic(const Technique& technique) {
  mpi_tests::set_time_limit(120);
  for (const int layers : {1, 4}) {
    for (const int micro_batches : {1, 3}) {
      INFO(layers << " layers, " << micro_batches << " micro-batches a rank");
      const CombinedOptions options = uneven_options(layers, micro_batches);
      const std::vector<int64_t> units = padded_units(options.model, technique.shards_of(mpi_tests::ranks()));
      check_step_traffic(technique, options, expected_traffic(technique, units, micro_batches));
    }
  }
}

// ---- Tensor parallelism

// Per layer and micro-batch of R rows: forward two borders in and two out, backward likewise; full
// recomputation repeats forward's, but for the last way out. Without sequence parallelism half of the borders
// are free; with it backward gathers the inputs of both regions again. Chunks make more calls of as much.
ExpectedTraffic of_a_layer(bool sequence_parallel, bool full, int64_t elements /*R d*/, int chunks) {
  ExpectedTraffic e;
  const auto add = [&](const char* operation, int64_t forward, int64_t backward) {
    e[operation].add(forward * chunks + backward, (forward + backward) * elements, sizeof(real));
  };
  if (sequence_parallel) {
    add("all_gather", 2 + (full ? 2 : 0), 2 + 2);
    add("reduce_scatter", 2 + (full ? 1 : 0), 2);
  } else {
    add("all_reduce", 2 + (full ? 1 : 0), 2);
  }
  return e;
}

double sent(const ExpectedTraffic& traffic, int ranks) {
  double bytes = 0;
  for (const auto& [operation, e] : traffic) bytes += e.bytes * sent_share(operation, ranks);
  return bytes;
}

void check_tensor_traffic(bool sequence_parallel, Recompute recompute, int chunks = 1) {
  mpi_tests::set_time_limit(120);
  const int ranks = mpi_tests::ranks();
  if (ranks == 1) return;
  const bool full = recompute == Recompute::full;
  for (const int layers : {1, 4}) {
    for (const int m : {1, 3}) {
      INFO(layers << " layers, " << m << " micro-batches");
      CombinedOptions options = test_options<CombinedOptions>(
          layers, /*d_model=*/8 * ranks, /*heads=*/2 * ranks, /*kv_heads=*/ranks,
          /*d_ff=*/5 * ranks, /*vocab_size=*/7 * ranks, /*sequence=*/6, /*micro_batch=*/4,
          /*global_batch=*/4 * m);
      options.recompute = recompute;
      const int64_t rows = 4 * 6, d = options.model.d_model, elements = rows * d;

      ExpectedTraffic expected = loss_and_norm();
      const ExpectedTraffic layer = of_a_layer(sequence_parallel, full, elements, chunks);
      const double formula = sequence_parallel ? (full ? 13 : 10) : (full ? 10 : 8);
      CHECK(sent(layer, ranks) == Approx(formula * elements * (ranks - 1) / ranks * sizeof(real)));
      for (const auto& [operation, e] : layer) {
        expected[operation].add(m * layers * e.calls, m * layers * e.elements, sizeof(real));
      }
      if (sequence_parallel) {
        expected["reduce_scatter"].add(m, m * elements, sizeof(real));  // embedding, forward
        expected["all_gather"].add(m, m * elements, sizeof(real));      // embedding, backward
        // Head's input, twice.
        expected["all_gather"].add((chunks + 1) * m, 2 * m * elements, sizeof(real));
        expected["reduce_scatter"].add(m, m * elements, sizeof(real));  // its gradient
        const int64_t norms = 2 * layers + 1;                           // partial gradients, once a step
        expected["all_reduce"].add(norms, norms * d, sizeof(accum));
      } else {
        expected["all_reduce"].add(m, m * elements, sizeof(real));  // embedding, forward
        expected["all_reduce"].add(m, m * elements, sizeof(real));  // gradient of the head's input
      }
      expected["all_reduce"].add(2 * m, 3 * m * rows,
                                 sizeof(accum));  // cross-entropy: largest; sum and target
      check_step_traffic(
          {.kind = Technique::tensor_parallel, .sequence_parallel = sequence_parallel, .tp_overlap = chunks},
          options, expected);
    }
  }
}

// ---- Context parallelism

// Keys and values of a layer and micro-batch make c - 1 hops in forward (twice with full recomputation) and
// as many in backward, in which their gradients make c. With Ulysses they and the queries make an all-to-all
// in forward, and out one back; in backward d_out and its products with out, and then all three gradients.
void check_context_traffic(CpExchange exchange, Recompute recompute) {
  mpi_tests::set_time_limit(120);
  const int c = mpi_tests::ranks(), sequences = 3;
  for (const int layers : {1, 4}) {
    for (const int m : {1, 3}) {
      INFO(layers << " layers, " << m << " micro-batches");
      const int groups = exchange == CpExchange::ulysses ? c : 2;  // of heads
      const bool rings = exchange == CpExchange::ulysses_ring;
      CombinedOptions options = test_options<CombinedOptions>(
          layers, /*d_model=*/6 * groups, /*heads=*/3 * groups, /*kv_heads=*/groups,
          /*d_ff=*/10, /*vocab_size=*/23, /*sequence=*/4 * c, sequences,
          /*global_batch=*/sequences * m);
      options.recompute = recompute;
      options.context.cp_exchange = exchange;
      const Technique technique = {.kind = Technique::context_parallel, .sync = DpSync::overlap};
      ExpectedTraffic expected = loss_and_norm();
      const std::vector<int64_t> units = padded_units(options.model, c);
      expected["all_reduce"].add(std::ssize(units), sum(units), sizeof(accum));

      const int64_t keys = sequences * 4 * groups * 2;  // elements of a rank's k, and of its v
      const int64_t exchanges = m * layers * (recompute == Recompute::full ? 3 : 2);
      const int64_t homecomings = m * layers;
      if ((exchange == CpExchange::ring || rings) && c > 1) {
        const int of_ring = rings ? c / options.context.ulysses : c;
        const int64_t hops = exchanges * (of_ring - 1), gradient_hops = homecomings * of_ring;
        for (const char* operation : {"send", "receive"}) {
          expected[operation].add(2 * hops, 2 * hops * keys, sizeof(real));
          expected[operation].add(2 * gradient_hops, 2 * gradient_hops * keys, sizeof(accum));
        }
      }
      if (exchange == CpExchange::all_gather && c > 1) {
        expected["all_gather"].add(2 * exchanges, 2 * exchanges * c * keys, sizeof(real));
        expected["reduce_scatter"].add(2 * homecomings, 2 * homecomings * c * keys, sizeof(accum));
      }
      if ((exchange == CpExchange::ulysses || rings) && c > 1) {
        const int64_t queries = 3 * keys, dots = queries / 2;
        expected["all_to_all_v"].add(2 * exchanges, exchanges * (2 * queries + 2 * keys), sizeof(real));
        expected["all_to_all_v"].add(homecomings, homecomings * dots, sizeof(accum));
      }
      for (const CpLayout layout : {CpLayout::contiguous, CpLayout::zigzag}) {
        options.context.cp_layout = layout;
        check_step_traffic(technique, options, expected);
      }
    }
  }
}

}  // namespace

TEST_CASE("02: traffic of all ways to sum gradients is 2 all", "[02][traffic]") {
  check_traffic(data_parallel(DpSync::naive));
  check_traffic(data_parallel(DpSync::overlap));
  check_traffic(data_parallel(DpSync::bucket, 0.001));
  check_traffic(data_parallel(DpSync::bucket, 0.010));
  check_traffic(data_parallel(DpSync::bucket));
}
// Of the tiny model, and for each number of ranks: units are padded to divide by it.
TEST_CASE("02: the default bucket makes eight of all gradients", "[02][traffic]") {
  const CombinedOptions options = test_options<CombinedOptions>(8, 64, 8, 8, 192, 256, /*sequence=*/8,
                                                                /*micro_batch=*/1, mpi_tests::ranks());
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  ParallelModel model(options, data_parallel(DpSync::bucket, default_bucket_mb(options.model)), world, ranks);
  model.train_step(0, random_batches(options, 0));
  CHECK(world.traffic().at("all_reduce").calls == 8);
}
TEST_CASE("03: traffic of stage 0 is 2 all", "[03][traffic]") { check_traffic(zero(0)); }
TEST_CASE("03: traffic of stage 1 is 2 all", "[03][traffic]") { check_traffic(zero(1)); }
TEST_CASE("03: traffic of stage 2 is (m + 1) all", "[03][traffic]") { check_traffic(zero(2)); }
TEST_CASE("03: traffic of stage 3 is 3 m all, less what is still there", "[03][traffic]") {
  check_traffic(zero(3));
}
TEST_CASE("03: traffic of hybrid sharding adds 2 all / shards a step", "[03][traffic]") {
  if (mpi_tests::ranks() % 2 != 0) return;
  for (const int stage : {1, 2, 3}) check_traffic(zero(stage, mpi_tests::ranks() / 2));
}

TEST_CASE("04: traffic of a layer is 8 s b h (t-1)/t with tensor parallelism", "[04][traffic]") {
  check_tensor_traffic(false, Recompute::none);
}
TEST_CASE("04: traffic of a layer is 10 s b h (t-1)/t with sequence parallelism", "[04][traffic]") {
  check_tensor_traffic(true, Recompute::none);
}
TEST_CASE("04: traffic of forward in chunks is as much", "[04][traffic]") {
  check_tensor_traffic(false, Recompute::none, 3);
  check_tensor_traffic(true, Recompute::full, 3);
}
TEST_CASE("04: traffic with full recomputation", "[04][traffic]") {
  check_tensor_traffic(false, Recompute::full);
  check_tensor_traffic(true, Recompute::full);
}

TEST_CASE("06: traffic of the ring is c-1 hops, and c of the gradients", "[06][traffic]") {
  check_context_traffic(CpExchange::ring, Recompute::none);
}
TEST_CASE("06: traffic of the ring with full recomputation", "[06][traffic]") {
  check_context_traffic(CpExchange::ring, Recompute::full);
}
TEST_CASE("06: traffic of the all-gather", "[06][traffic]") {
  check_context_traffic(CpExchange::all_gather, Recompute::none);
  check_context_traffic(CpExchange::all_gather, Recompute::full);
}
TEST_CASE("06: traffic of Ulysses is two all-to-alls, and three in backward", "[06][traffic]") {
  check_context_traffic(CpExchange::ulysses, Recompute::none);
  check_context_traffic(CpExchange::ulysses, Recompute::full);
}

TEST_CASE("06: traffic of Ulysses in a ring is that of Ulysses, and of a shorter ring", "[06][traffic]") {
  if (mpi_tests::ranks() % 2 != 0 || mpi_tests::ranks() == 2) return;
  check_context_traffic(CpExchange::ulysses_ring, Recompute::none);
  check_context_traffic(CpExchange::ulysses_ring, Recompute::full);
}

// ---- Memory -----------------------------------------------------------------------------------------------

namespace {

// The default model, with short sequences.
CombinedOptions tiny_options() {
  return test_options<CombinedOptions>(/*layers=*/8, /*d_model=*/64, /*heads=*/8, /*kv_heads=*/8,
                                       /*d_ff=*/192,
                                       /*vocab_size=*/256, /*sequence=*/16, /*micro_batch=*/1,
                                       /*global_batch=*/2 * mpi_tests::ranks());
}

void check_within_a_percent(size_t measured, double expected) {
  CHECK(measured == Approx(expected).epsilon(0.01));
}

// Bytes of each purpose that a model of this technique added, after a step.
MemoryBytes measured_bytes(const CombinedOptions& options, const Technique& technique, World& world,
                           Communicator& ranks) {
  const MemoryBytes before = memory_in_use();
  ParallelModel model(options, technique, world, ranks);
  model.train_step(0, random_batches(options, 0));
  return allocated_since(before);
}

void check_memory(const Technique& technique) {
  const CombinedOptions options = tiny_options();
  World world(nullptr, nullptr);
  Communicator data(world, world.all(), "data");
  const int d = technique.shards_of(world.ranks());
  const int stage = technique.kind == Technique::zero ? technique.stage : 0;
  const MemoryBytes measured = measured_bytes(options, technique, world, data);

  RankShare rank(options);
  rank.micro_batches = 2;
  rank.replicas = d;
  const MemoryPrediction predicted = in_shards(predict_memory(rank), stage, options, rank.unit_sizes(), d);
  check_bytes(measured, predicted.total());

  // The published formulas, of what is there all the time, from the parameters without padding.
  const double all = static_cast<double>(parameter_count(options.model));
  const auto units = padded_units(options.model, 1);
  const int64_t largest = *std::max_element(units.begin(), units.end());
  const auto share = [&](int first_stage) { return stage >= first_stage ? all / d : all; };
  const size_t gathered = stage == 3 ? 2 * largest * sizeof(real) : 0;    // at most two units
  const size_t in_flight = stage >= 2 ? 2 * largest * sizeof(accum) : 0;  // two units' gradients
  check_within_a_percent(measured[0] - gathered, share(3) * sizeof(real));
  check_within_a_percent(measured[1] - in_flight, share(2) * sizeof(accum));
  check_within_a_percent(measured[2] - norm_parts * sizeof(double),
                         share(1) * sizeof(accum) * (has_master_weights ? 3 : 2));
}

}  // namespace

namespace {

// The activations that tensor ranks hold, after the formulas for a GPT layer of Korthikanti et al. (2022),
// derived for this one. Elements that a token of a layer keeps, with q = d columns of queries and r = kv
// heads / heads:
//   outside   4 d: input, normed twice, the stream between attention and MLP; 2 statistics
//   inside    (2 + 2 r) d: queries, keys, values, output; 3 f: gate, up, their product; lse and s scores a
//   head
// Inside is divided by t always, outside with sequence parallelism.
double kept_bytes_of_layers(const CombinedOptions& o, int t, bool sequence_parallel) {
  const ModelConfig& m = o.model;
  const double d = m.d_model, r = static_cast<double>(m.kv_heads) / m.heads,
               rows = o.micro_batch_size * o.sequence_length;
  const double scores = o.recompute == Recompute::none ? m.heads * o.sequence_length : 0;
  const double outside = 4 * d * sizeof(real) + 2 * sizeof(accum);
  const double inside = ((2 + 2 * r) * d + 3 * m.d_ff + scores) * sizeof(real) + m.heads * sizeof(accum);
  return m.layers * rows * (outside / (sequence_parallel ? t : 1) + inside / t);
}

void check_tensor_memory(bool sequence_parallel, Recompute recompute) {
  const int t = mpi_tests::ranks();
  if (t == 3) return;  // no divisor of the heads
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  const Technique technique = {.kind = Technique::tensor_parallel, .sequence_parallel = sequence_parallel};
  CombinedOptions shallow = tiny_options(), deep = shallow;
  for (CombinedOptions* o : {&shallow, &deep}) {
    o->recompute = recompute;
    o->global_batch_size = 2;
  }
  shallow.model.layers = 2;
  const MemoryBytes of_shallow = measured_bytes(shallow, technique, world, ranks);
  const MemoryBytes of_deep = measured_bytes(deep, technique, world, ranks);

  deep.tensor.sequence_parallel = sequence_parallel;
  const MemoryPrediction predicted = predict_memory(tensor_parallel_share(deep, deep.tensor, t));
  check_bytes(of_deep, predicted.total());
  // What six layers more keep; all else is work space that they share.
  const double kept =
      kept_bytes_of_layers(deep, t, sequence_parallel) - kept_bytes_of_layers(shallow, t, sequence_parallel);
  CHECK(of_deep[3] - of_shallow[3] == Approx(kept).epsilon(1e-9));
}

}  // namespace

namespace {

constexpr int kTokensOfRank = 32;

// A sequence of so many tokens for each of `ranks`.
CombinedOptions context_options(int layers, int ranks, int kv_heads = 4) {
  CombinedOptions o =
      test_options<CombinedOptions>(layers, /*d_model=*/64, /*heads=*/8, kv_heads, /*d_ff=*/192,
                                    /*vocab_size=*/256, kTokensOfRank * ranks, /*micro_batch=*/2,
                                    /*global_batch=*/4);
  o.attention = Attention::tiled;
  return o;
}

size_t activations_alone(const CombinedOptions& options) {
  const size_t before = memory_in_use()[3];
  const TestModel model(options);
  return memory_in_use()[3] - before;
}

void check_context_memory(CpExchange exchange, Attention attention) {
  const int c = mpi_tests::ranks();
  const bool ulysses = exchange == CpExchange::ulysses, rings = exchange == CpExchange::ulysses_ring;
  if (ulysses && c == 3) return;  // no divisor of the heads
  if (rings && (c % 2 != 0 || c == 2)) return;
  const int kv_heads = ulysses ? 8 : 4;
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  const Technique technique = {.kind = Technique::context_parallel, .sync = DpSync::bucket};
  CombinedOptions shallow = context_options(2, c, kv_heads), deep = context_options(8, c, kv_heads);
  for (CombinedOptions* o : {&shallow, &deep}) {
    o->context.cp_exchange = exchange;
    o->attention = attention;
  }
  const MemoryBytes of_deep = measured_bytes(deep, technique, world, ranks);
  const MemoryPrediction predicted = predict_memory(context_parallel_share(deep, deep.context, c));
  check_bytes(of_deep, predicted.total());
  if (c == 1) return;
  const MemoryBytes of_shallow = measured_bytes(shallow, technique, world, ranks);

  // Six layers more keep a c-th of what they keep on one rank; of the scores only those that have whole rows.
  CombinedOptions on_one[] = {deep, shallow};
  const bool scores_kept = ulysses && attention == Attention::naive;
  for (CombinedOptions& o : on_one) o.recompute = scores_kept ? Recompute::none : Recompute::selective;
  const double kept = kept_bytes_of_layers(on_one[0], 1, false) - kept_bytes_of_layers(on_one[1], 1, false);
  CHECK(of_deep[3] - of_shallow[3] == Approx(kept / c).epsilon(1e-9));
  if (scores_kept) return;
  // All activations: the same as those of a sequence of a rank's tokens, but for the table of all positions.
  const size_t table = deep.sequence_length * deep.model.head_size() * sizeof(accum);
  CombinedOptions alone = context_options(8, 1, kv_heads);
  CHECK(of_deep[3] - table == activations_alone(alone) - table / c);
  // A c-th of those of the whole sequence, but for the table and what is a row of features, or 256.
  CombinedOptions whole = context_options(8, c, kv_heads);
  CHECK((of_deep[3] - table) * c == Approx(activations_alone(whole) - table).epsilon(0.02));

  // On its way, and the results of a block: the ring's memory is the same on any number of ranks, and
  // Ulysses'.
  const int64_t rows = 2 * kTokensOfRank, q = 64, kv = 8 * kv_heads, heads = 8;
  if (ulysses) {
    CHECK(of_deep[4] == rows * (q + 2 * kv) * sizeof(real) + rows * heads * sizeof(accum));
    return;
  }
  // A rank of the ring inside has twice the tokens, and half of the heads.
  const bool is_ring = exchange == CpExchange::ring || rings;
  const int64_t buffers = is_ring ? 2 : c, sums = is_ring ? 3 : c, u = rings ? 2 : 1;
  const int64_t block = rows * (q + heads) + (has_master_weights ? rows * q : 0);
  const int64_t scores = attention == Attention::naive ? 2 * heads * u * kTokensOfRank * kTokensOfRank : 0;
  const size_t exchanged = rings ? rows * (q + 2 * kv) * sizeof(real) + rows * heads * sizeof(accum) : 0;
  CHECK(of_deep[4] == exchanged + (2 * buffers * rows * kv + scores) * sizeof(real) +
                          (2 * sums * rows * kv + block) * sizeof(accum));
}

}  // namespace

TEST_CASE("06: memory falls as 1/c, and is that of a rank's tokens", "[06][memory]") {
  for (const CpExchange exchange :
       {CpExchange::ring, CpExchange::all_gather, CpExchange::ulysses, CpExchange::ulysses_ring}) {
    check_context_memory(exchange, Attention::tiled);
    if (mpi_tests::ranks() > 3 && exchange != CpExchange::ulysses_ring)
      continue;  // fewer ranks have shown the rest
    check_context_memory(exchange, Attention::naive);
  }
}

TEST_CASE("04: memory, tensor parallel", "[04][memory]") {
  check_tensor_memory(false, Recompute::none);
  check_tensor_memory(false, Recompute::selective);
}
TEST_CASE("04: memory, sequence parallel", "[04][memory]") {
  check_tensor_memory(true, Recompute::none);
  check_tensor_memory(true, Recompute::selective);
}

TEST_CASE("02: memory", "[02][memory]") { check_memory(data_parallel(DpSync::bucket)); }
TEST_CASE("03: memory of stage 0", "[03][memory]") { check_memory(zero(0)); }
TEST_CASE("03: memory of stage 1", "[03][memory]") { check_memory(zero(1)); }
TEST_CASE("03: memory of stage 2", "[03][memory]") { check_memory(zero(2)); }
TEST_CASE("03: memory of stage 3", "[03][memory]") { check_memory(zero(3)); }
TEST_CASE("03: memory of hybrid sharding", "[03][memory]") {
  if (mpi_tests::ranks() % 2 != 0) return;
  for (const int stage : {1, 2, 3}) check_memory(zero(stage, mpi_tests::ranks() / 2));
}

#if __has_include(<cuda_cpu.h>)

TEST_CASE("after the first step nothing is allocated and nothing waits for the device",
          "[02][03][04][06][memory]") {
  World world(nullptr, nullptr);
  const auto check = [&](const Technique& technique, const CombinedOptions& options) {
    Communicator data(world, world.all(), "data");
    ParallelModel model(options, technique, world, data);
    model.train_step(0, random_batches(options, 0));
    const cuda_cpu::Counters before = cuda_cpu::counters();
    for (int step = 1; step < 3; ++step) model.train_step(step, random_batches(options, step));
    const cuda_cpu::Counters after = cuda_cpu::counters();
    CHECK(after.allocations == before.allocations);
    CHECK(after.frees == before.frees);
    CHECK(after.synchronous_copies == before.synchronous_copies);
  };
  for (const Technique& technique :
       {data_parallel(DpSync::naive), data_parallel(DpSync::overlap), data_parallel(DpSync::bucket, 0.01),
        zero(0), zero(1), zero(2), zero(3), zero(3, 1), Technique{.kind = Technique::tensor_parallel},
        Technique{.kind = Technique::tensor_parallel, .sequence_parallel = true}}) {
    INFO("kind " << technique.kind << ", stage " << technique.stage);
    const bool splits_heads = technique.kind == Technique::tensor_parallel;
    if (splits_heads && world.ranks() == 3) continue;  // no divisor of the heads
    check(technique, splits_heads ? tiny_options() : uneven_options(4, 3));
  }
  for (const CpExchange exchange : {CpExchange::ring, CpExchange::all_gather, CpExchange::ulysses}) {
    INFO(to_string(exchange));
    if (exchange == CpExchange::ulysses && world.ranks() == 3) continue;
    CombinedOptions options = context_options(2, world.ranks(), 8);
    options.context.cp_exchange = exchange;
    check({.kind = Technique::context_parallel}, options);
  }
}

#endif

}  // namespace pentatron
