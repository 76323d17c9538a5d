// What a step of 02 and 03 sends and what each rank holds, against formulas. They are written out here from
// the sizes of the model; nothing is asked of the code under test.
#include <algorithm>
#include <numeric>

#include "memory.h"
#include "parallel_model.h"
#include "program.h"

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

Options uneven_options(int layers, int micro_batches) {
  Options o = test_options(layers, /*d_model=*/12, /*heads=*/3, /*kv_heads=*/1, /*d_ff=*/10,
                           /*vocab_size=*/23, /*sequence=*/5, /*micro_batch=*/1,
                           /*global_batch=*/micro_batches * mpi_tests::ranks());
  o.optimizer = OptimizerKind::sgd;
  return o;
}

struct Expected {
  int64_t calls, elements;
};

// Collectives of a step with m micro-batches a rank: calls, and elements of the whole buffers.
std::map<std::string, Expected> expected_traffic(const Technique& technique,
                                                 const std::vector<int64_t>& units, int64_t m) {
  const int64_t all = sum(units), count = std::ssize(units), layers = count - 2;
  std::map<std::string, Expected> e = {{"scalars", {1, 2}}};  // loss and norm
  if (technique.kind == Technique::data_parallel) {
    const int64_t bucket = static_cast<int64_t>(technique.bucket_mb * 1e6 / sizeof(accum));
    e["all_reduce"] = {technique.sync == DpSync::naive     ? 1
                       : technique.sync == DpSync::overlap ? count
                                                           : (all + bucket - 1) / bucket,
                       all};
    return e;
  }
  switch (technique.stage) {
    case 0:
      e["all_reduce"] = {count, all};
      break;
    case 1:  // 2 all: reduced once, gathered once
      e["reduce_scatter"] = {count, all};
      e["all_gather"] = {count, all};
      break;
    case 2:  // (m + 1) all: reduced in every micro-batch
      e["reduce_scatter"] = {m * count, m * all};
      e["all_gather"] = {count, all};
      break;
    case 3:
      // 3 m all, but for what is still there: forward ends with the last layer and the head gathered, so that
      // backward begins with these two, and it never needs the embedding; backward ends with the first two
      // layers gathered, of which the next micro-batch's forward finds the first (the embedding replaces the
      // other).
      e["reduce_scatter"] = {m * count, m * all};
      const int64_t backward = std::accumulate(units.begin() + 1, units.begin() + layers, int64_t{0});
      e["all_gather"] = {m * (count + layers - 1) - (m - 1), m * (all + backward) - (m - 1) * units[1]};
      break;
  }
  return e;
}

// Bytes that a rank sends of each byte that a collective works on, under the ring algorithm.
double sent_share(const std::string& operation, double ranks) {
  return (operation == "all_reduce" || operation == "scalars" ? 2 : 1) * (ranks - 1) / ranks;
}

void check_traffic(const Technique& technique) {
  mpi_tests::set_time_limit(120);
  World world(nullptr, nullptr);
  for (const int layers : {1, 4}) {
    for (const int micro_batches : {1, 3}) {
      INFO(layers << " layers, " << micro_batches << " micro-batches a rank");
      const Options options = uneven_options(layers, micro_batches);
      const auto expected =
          expected_traffic(technique, padded_units(options.model, world.ranks()), micro_batches);
      Communicator data(world, 0, world.rank(), "data");
      ParallelModel model(options, technique, data);
      for (int step = 0; step < 2; ++step) {
        data.reset_traffic();
        model.train_step(step, random_batches(options, step));
        double sent = 0;
        for (const auto& [operation, traffic] : data.traffic()) {
          INFO(operation);
          CHECK(expected.contains(operation));
        }
        for (const auto& [operation, e] : expected) {
          INFO(operation);
          const auto seen = data.traffic().find(operation);
          CHECK(seen != data.traffic().end());
          if (seen == data.traffic().end()) continue;
          CHECK(seen->second.calls == e.calls);
          CHECK(seen->second.elements == e.elements);
          const size_t bytes = operation == "scalars"      ? sizeof(double)
                               : operation == "all_gather" ? sizeof(real)
                                                           : sizeof(accum);
          sent += e.elements * sent_share(operation, world.ranks()) * bytes;
        }
        CHECK(data.sent_bytes() == Approx(sent));
      }
    }
  }
}

Technique data_parallel(DpSync sync, double bucket_mb = 25) {
  return {Technique::data_parallel, sync, bucket_mb};
}
Technique zero(int stage) { return {.kind = Technique::zero, .stage = stage}; }

}  // namespace

TEST_CASE("02: traffic of all ways to sum gradients is 2 all", "[02][traffic]") {
  check_traffic(data_parallel(DpSync::naive));
  check_traffic(data_parallel(DpSync::overlap));
  check_traffic(data_parallel(DpSync::bucket, 0.001));
  check_traffic(data_parallel(DpSync::bucket, 0.010));
  check_traffic(data_parallel(DpSync::bucket));
}
TEST_CASE("03: traffic of stage 0 is 2 all", "[03][traffic]") { check_traffic(zero(0)); }
TEST_CASE("03: traffic of stage 1 is 2 all", "[03][traffic]") { check_traffic(zero(1)); }
TEST_CASE("03: traffic of stage 2 is (m + 1) all", "[03][traffic]") { check_traffic(zero(2)); }
TEST_CASE("03: traffic of stage 3 is 3 m all, less what is still there", "[03][traffic]") {
  check_traffic(zero(3));
}

// ---- Memory -----------------------------------------------------------------------------------------------

namespace {

// The default model, with short sequences.
Options tiny_options() {
  return test_options(/*layers=*/8, /*d_model=*/64, /*heads=*/8, /*kv_heads=*/8, /*d_ff=*/192,
                      /*vocab_size=*/256, /*sequence=*/16, /*micro_batch=*/1,
                      /*global_batch=*/2 * mpi_tests::ranks());
}

void check_within_a_percent(size_t measured, double expected) {
  CHECK(measured == Approx(expected).epsilon(0.01));
}

// Bytes of each purpose that a model of this technique added, after a step.
MemoryBytes measured_bytes(const Options& options, const Technique& technique, Communicator& data) {
  const MemoryBytes before = memory_in_use();
  ParallelModel model(options, technique, data);
  model.train_step(0, random_batches(options, 0));
  MemoryBytes bytes = memory_in_use();
  for (size_t i = 0; i < purposes; ++i) bytes[i] -= before[i];
  return bytes;
}

void check_memory(const Technique& technique) {
  const Options options = tiny_options();
  World world(nullptr, nullptr);
  Communicator data(world, 0, world.rank(), "data");
  const int d = world.ranks(), stage = technique.kind == Technique::zero ? technique.stage : 0;
  const MemoryBytes measured = measured_bytes(options, technique, data);

  const MemoryPrediction predicted = predict_memory(options, element_sizes, 2, {.zero_stage = stage, .data_ranks = d});
  for (size_t i = 0; i < purposes; ++i) {
    INFO(purpose_names[i]);
    check_within_a_percent(measured[i], static_cast<double>(predicted.total()[i]));
  }

  // The published formulas, of what is there all the time, from the parameters without padding.
  const double all = static_cast<double>(parameter_count(options.model));
  const auto units = padded_units(options.model, 1);
  const int64_t largest = *std::max_element(units.begin(), units.end());
  const auto share = [&](int first_stage) { return stage >= first_stage ? all / d : all; };
  const size_t gathered = stage == 3 ? 2 * largest * sizeof(real) : 0;    // at most two units
  const size_t in_flight = stage >= 2 ? 2 * largest * sizeof(accum) : 0;  // two units' gradients
  check_within_a_percent(measured[0] - gathered, share(3) * sizeof(real));
  check_within_a_percent(measured[1] - in_flight, share(2) * sizeof(accum));
  check_within_a_percent(measured[2], share(1) * sizeof(accum) * (has_master_weights ? 3 : 2));
}

}  // namespace

TEST_CASE("02: memory", "[02][memory]") { check_memory(data_parallel(DpSync::bucket)); }
TEST_CASE("03: memory of stage 0", "[03][memory]") { check_memory(zero(0)); }
TEST_CASE("03: memory of stage 1", "[03][memory]") { check_memory(zero(1)); }
TEST_CASE("03: memory of stage 2", "[03][memory]") { check_memory(zero(2)); }
TEST_CASE("03: memory of stage 3", "[03][memory]") { check_memory(zero(3)); }

#if __has_include(<cuda_cpu.h>)

TEST_CASE("03: after the first step nothing is allocated and nothing waits for the device",
          "[02][03][memory]") {
  World world(nullptr, nullptr);
  for (const Technique& technique :
       {data_parallel(DpSync::naive), data_parallel(DpSync::overlap), data_parallel(DpSync::bucket, 0.01),
        zero(0), zero(1), zero(2), zero(3)}) {
    INFO("kind " << technique.kind << ", stage " << technique.stage);
    const Options options = uneven_options(4, 3);
    Communicator data(world, 0, world.rank(), "data");
    ParallelModel model(options, technique, data);
    model.train_step(0, random_batches(options, 0));
    const cuda_cpu::Counters before = cuda_cpu::counters();
    for (int step = 1; step < 3; ++step) model.train_step(step, random_batches(options, step));
    const cuda_cpu::Counters after = cuda_cpu::counters();
    CHECK(after.allocations == before.allocations);
    CHECK(after.frees == before.frees);
    CHECK(after.synchronous_copies == before.synchronous_copies);
  }
}

#endif

}  // namespace pentatron
