// What each rank of a mesh holds and sends in a step, against what was predicted and against formulas, which
// are written out here from the sizes of the model.
// precisions: fp64
#include <algorithm>

#include "combined_model.h"
#include "memory_check.h"

namespace pentatron {
namespace {

// Meshes of 8 ranks, and what is asked of them.
struct Request {
  MeshShape shape;
  int zero_stage;
  bool sequence_parallel = false;
  PpSchedule schedule = PpSchedule::one_f_one_b;
  Recompute recompute = Recompute::none;
  CpExchange exchange = CpExchange::ring;
};

const std::vector<Request> requests = {
    {{8, 1, 1, 1}, 0, true},
    {{1, 8, 1, 1}, 1},
    {{1, 1, 8, 1}, 3},
    {{1, 1, 8, 1, 1, 1, /*shard_ranks=*/4}, 3},
    {{2, 2, 2, 1, 1, 1, 2}, 2, true},
    {{1, 1, 4, 2, 1, 1, 2}, 1},
    {{1, 1, 1, 8}, 0, false, PpSchedule::afab},
    {{2, 1, 4, 1}, 3, true, PpSchedule::one_f_one_b, Recompute::full},
    {{2, 2, 2, 1}, 2, true, PpSchedule::one_f_one_b, Recompute::selective},
    {{2, 2, 1, 2}, 1, false, PpSchedule::zb_h1, Recompute::none, CpExchange::all_gather},
    {{1, 2, 2, 2}, 3, false, PpSchedule::interleaved, Recompute::full},
    {{2, 1, 2, 2}, 2, true, PpSchedule::zb_h1},
    {{2, 1, 2, 2}, 1, true, PpSchedule::zb_v},
    {{1, 1, 2, 4}, 3, false, PpSchedule::dualpipe_v},
    {{4, 1, 1, 2}, 0, false, PpSchedule::interleaved, Recompute::selective},
    {{2, 4, 1, 1}, 2, true, PpSchedule::one_f_one_b, Recompute::full, CpExchange::ulysses},
    {{2, 2, 1, 2}, 1, false, PpSchedule::zb_h1, Recompute::none, CpExchange::ulysses},
};

constexpr int kMicroBatches = 4;

CombinedCase requested_case(const Request& r) {
  CombinedOptions o =
      test_options<CombinedOptions>(/*layers=*/9, /*d_model=*/48, /*heads=*/16, /*kv_heads=*/8, /*d_ff=*/40,
                                    /*vocab_size=*/56, /*sequence=*/16, /*micro_batch=*/2,
                                    /*global_batch=*/2 * kMicroBatches * r.shape.dp);
  o.zero.zero_stage = r.zero_stage;
  o.zero.shard_ranks = r.shape.shard_ranks;
  o.data_parallel.dp_sync = DpSync::overlap;
  o.tensor.sequence_parallel = r.sequence_parallel;
  o.pipeline.pp_schedule = r.schedule;
  o.pipeline.vpp = r.schedule == PpSchedule::interleaved || is_v_shaped(r.schedule) ? 2 : 1;
  o.recompute = r.recompute;
  o.context.cp_exchange = r.exchange;
  o.attention = Attention::tiled;
  return {r.shape, o};
}

// ---- Traffic ----------------------------------------------------------------------------------------------

struct ExpectedCalls {
  int64_t calls = 0, elements = 0;
  void add(int64_t times, int64_t each) { calls += times, elements += times * each; }
};
using ExpectedOfGroup = std::map<std::string, ExpectedCalls>;

void check_group_traffic(const char* group, const TrafficByOperation& traffic,
                         const ExpectedOfGroup& expected) {
  for (const auto& [operation, t] : traffic) {
    INFO(group << ": " << operation);
    CHECK(expected.contains(operation));
  }
  for (const auto& [operation, e] : expected) {
    INFO(group << ": " << operation);
    const auto seen = traffic.find(operation);
    const Traffic t = seen == traffic.end() ? Traffic() : seen->second;
    CHECK(t.calls == e.calls);
    CHECK(t.elements == e.elements);
  }
}

// What a rank has of the model, and of a micro-batch: R rows inside the tensor regions.
struct Part {
  int64_t layers, embedding, head;
  int64_t rows, rows_outside;
};
Part part_of(CombinedModel& combined, const CombinedCase& c) {
  Part part = {0, 0, 0, c.options.micro_batch_size * c.options.sequence_length / c.shape.cp, 0};
  part.rows_outside = part.rows / (c.options.tensor.sequence_parallel ? c.shape.tp : 1);
  for (const LayerRange& range : combined.chunks) {
    part.layers += range.last - range.first;
    part.embedding += range.embedding;
    part.head += range.head;
  }
  return part;
}

// Of the norms' gradients, those that lie in this rank's shard of each unit; calls and elements.
ExpectedCalls norms_of_shard(CombinedModel& combined, const CombinedCase& c) {
  ExpectedCalls e;
  const bool sharded = c.options.zero.zero_stage > 0;
  for (const int unit : units_of(combined.chunks)) {
    const int64_t size = combined.parameters.group(dense_group).size(unit);
    const int64_t own = sharded ? size / combined.mesh.gradients.ranks() : size;
    const int64_t begin = sharded ? own * combined.mesh.gradients.rank() : 0;
    for (const Parameter& p : combined.parameters.all()) {
      if (p.unit != unit || p.rows != 1) continue;
      const int64_t first = std::max<int64_t>(begin, p.offset);
      const int64_t last = std::min<int64_t>(begin + own, p.offset + p.columns);
      if (first < last) e.add(1, last - first);
    }
  }
  return e;
}

ExpectedOfGroup of_tensor_ranks(CombinedModel& combined, const CombinedCase& c) {
  const Part part = part_of(combined, c);
  const int64_t m = kMicroBatches, full = c.options.recompute == Recompute::full;
  const int64_t elements = part.rows * c.options.model.d_model;
  ExpectedOfGroup e;
  if (c.options.tensor.sequence_parallel) {
    e["all_gather"].add(m * (part.layers * (6 + 2 * full) + part.embedding + 2 * part.head), elements);
    e["reduce_scatter"].add(m * (part.layers * (4 + full) + part.embedding + part.head), elements);
    e["all_reduce"] = norms_of_shard(combined, c);
  } else {
    e["all_reduce"].add(m * (part.layers * (4 + full) + part.embedding + part.head), elements);
  }
  e["all_reduce"].add(m * part.head, part.rows);      // cross-entropy: largest logits
  e["all_reduce"].add(m * part.head, 2 * part.rows);  // sums and targets
  if (e["all_reduce"].calls == 0) e.erase("all_reduce");
  return e;
}

ExpectedOfGroup of_context_ranks(CombinedModel& combined, const CombinedCase& c) {
  const Part part = part_of(combined, c);
  const int64_t n = c.shape.cp, times = kMicroBatches * part.layers * 2;  // keys and values
  const int64_t passes = c.options.recompute == Recompute::full ? 3 : 2;  // of keys and values
  const int64_t elements = part.rows * c.options.model.kv_heads / c.shape.tp * c.options.model.head_size();
  ExpectedOfGroup e;
  if (c.options.context.cp_exchange == CpExchange::all_gather) {
    e["all_gather"].add(times * passes, n * elements);
    e["reduce_scatter"].add(times, n * elements);
  } else if (c.options.context.cp_exchange == CpExchange::ulysses) {
    // q, k, v there and out back; in backward d_out and its products with out there, three gradients back.
    const int64_t heads = c.options.model.heads / c.shape.tp, queries = heads * c.options.model.head_size();
    e["all_to_all_v"].add(kMicroBatches * part.layers * passes, part.rows * queries + 2 * elements);
    e["all_to_all_v"].add(kMicroBatches * part.layers * passes, part.rows * queries);
    e["all_to_all_v"].add(kMicroBatches * part.layers, part.rows * heads);
  } else {
    e["send"].add(times * (passes * (n - 1) + n), elements);
    e["receive"] = e["send"];
  }
  return e;
}

ExpectedOfGroup of_gradient_ranks(CombinedModel& combined, const CombinedCase& c) {
  ExpectedOfGroup e;
  const int64_t m = kMicroBatches;
  const std::vector<int> units = units_of(combined.chunks);
  const auto size = [&](int unit) {
    return static_cast<int64_t>(combined.parameters.group(dense_group).size(unit));
  };
  for (const int unit : units) {
    if (c.options.zero.zero_stage == 0) e["all_reduce"].add(1, size(unit));
    if (c.options.zero.zero_stage > 0)
      e["reduce_scatter"].add(c.options.zero.zero_stage == 1 ? 1 : m, size(unit));
    // Under a pipeline stage 3 gathers once a step, too.
    if (c.options.zero.zero_stage > 0 && (c.options.zero.zero_stage < 3 || c.shape.pp > 1))
      e["all_gather"].add(1, size(unit));
    if (c.options.zero.zero_stage < 3 || c.shape.pp > 1) continue;
    // Forward and backward of every micro-batch; backward finds the last two and needs no embedding, and the
    // next forward finds the first layer.
    const bool last_two = unit >= std::ssize(units) - 2;
    e["all_gather"].add(m + (unit == embedding_unit || last_two ? 0 : m) - (unit == 1 ? m - 1 : 0),
                        size(unit));
  }
  return e;
}

// Hybrid sharding: the own shard of each unit, once a step.
ExpectedOfGroup of_replicate(CombinedModel& combined, const CombinedCase& c) {
  ExpectedOfGroup e;
  for (const int unit : units_of(combined.chunks)) {
    if (combined.mesh.replicate.ranks() > 1)
      e["all_reduce"].add(1, combined.parameters.group(dense_group).size(unit) / c.shape.shard_ranks);
  }
  return e;
}

ExpectedOfGroup of_pipeline_ranks(CombinedModel& combined, const CombinedCase& c) {
  const Part part = part_of(combined, c);
  const int64_t stages = std::ssize(combined.chunks);
  const bool turns = is_v_shaped(c.options.pipeline.pp_schedule) && combined.mesh.at.pp == c.shape.pp - 1;
  const int64_t messages = kMicroBatches * (2 * stages - part.embedding - part.head - (turns ? 2 : 0));
  ExpectedOfGroup e;
  e["send"].add(messages, part.rows_outside * c.options.model.d_model);
  e["receive"] = e["send"];
  return e;
}

// World counts all groups together.
TrafficByOperation without(TrafficByOperation all, const TrafficByOperation& part) {
  for (const auto& [operation, t] : part) {
    all[operation].calls -= t.calls;
    all[operation].elements -= t.elements;
  }
  std::erase_if(all, [](const auto& entry) { return entry.second.calls == 0; });
  return all;
}

void check(const Request& request) {
  World world(nullptr, nullptr);
  CombinedCase c = requested_case(request);
  check_combined(c.options, c.shape);
  const MemoryBytes before = memory_in_use();
  CombinedModel combined(c, world);
  const auto train_step = [&](int step) {
    combined.accumulate(random_batches(c.options, step));
    combined.update(step);
  };
  train_step(0);
  check_bytes(allocated_since(before), predict_memory(c.options, c.shape, world.rank()).total());

  CUDA_CHECK(cudaDeviceSynchronize());
  for (Communicator* group :
       {&combined.mesh.tensor, &combined.mesh.context, &combined.mesh.gradients, &combined.mesh.experts,
        &combined.mesh.expert_gradients, &combined.mesh.replicate, &combined.mesh.all})
    group->reset_traffic();
  const TrafficByOperation of_first_step = world.traffic();  // of the pipeline's edges alone
  train_step(1);
  if (c.shape.tp > 1)
    check_group_traffic("tensor", combined.mesh.tensor.traffic(), of_tensor_ranks(combined, c));
  if (c.shape.cp > 1)
    check_group_traffic("context", combined.mesh.context.traffic(), of_context_ranks(combined, c));
  if (c.shape.dp * c.shape.cp > 1)
    check_group_traffic("gradients", combined.mesh.gradients.traffic(), of_gradient_ranks(combined, c));
  check_group_traffic("replicate", combined.mesh.replicate.traffic(), of_replicate(combined, c));
  check_group_traffic("experts", combined.mesh.experts.traffic(), {});
  check_group_traffic("all", combined.mesh.all.traffic(), {{"scalars", {1, 2}}});
  TrafficByOperation edges = without(world.traffic(), of_first_step);
  for (const Communicator* group :
       {&combined.mesh.tensor, &combined.mesh.context, &combined.mesh.gradients,
        &combined.mesh.expert_gradients, &combined.mesh.replicate, &combined.mesh.all})
    edges = without(edges, group->traffic());
  if (c.shape.pp > 1) check_group_traffic("pipeline", edges, of_pipeline_ranks(combined, c));
}

}  // namespace

TEST_CASE("07: memory and traffic of meshes are as predicted", "[07][memory][traffic]") {
  if (mpi_tests::ranks() != 8) return;
  mpi_tests::set_time_limit(300);
  for (const Request& request : requests) {
    INFO("tp " << request.shape.tp << ", cp " << request.shape.cp << ", dp " << request.shape.dp << ", pp "
               << request.shape.pp << ", ZeRO-" << request.zero_stage);
    check(request);
  }
}

}  // namespace pentatron
