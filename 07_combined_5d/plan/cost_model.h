// How long a step of 07 takes on modelled GPUs, in formulas. The kernels of a layer, and what it waits for
// (layer_cost.h); the gradients and weights that nothing hides (data_cost.h); the pipeline's bubble, from
// playing its schedule (simulate.h); the optimizer. --dry-run issues every operation on a clock instead: that
// is exact, but takes minutes. The tests hold the formulas against it.
#pragma once

#include <ranges>

#include "../../05_pipeline_parallel/workbench/simulate.h"
#include "data_cost.h"

namespace pentatron {

// Where a step's time goes on the pipeline rank that has most to do. In seconds.
struct StepCost {
  Work work;             // of all micro-batches
  double bubble = 0;     // idle in the pipeline
  double host = 0;       // what the GPU waits for the host
  double data = 0;       // gradients and weights on their way that nothing hides
  double optimizer = 0;  // with the norm
  double total() const { return work.seconds() + bubble + host + data + optimizer; }
};

class CostModel : public DataCost {
 public:
  using DataCost::DataCost;

  // No step takes less: that of the rank that has most to do, if it never waits in the pipeline.
  double least() const {
    const std::vector<Rank> all = ranks();
    return busiest(all).seconds;
  }

  StepCost step() const {
    const int p = shape_.pp;
    std::vector<Rank> ranks = this->ranks();
    Simulation played = play(ranks);
    if (hides_in_pipeline()) {
      for (int k = 0; k < p; ++k) wait_for_sums(ranks[k], schedule_.ranks[k], played.times[k]);
      played = play(ranks);
    }
    const Rank& most = busiest(ranks);
    StepCost result = {most.work, std::max(0.0, played.total - most.seconds), most.host};
    result.data = std::max(0.0, most.seconds - most.work.seconds() - most.host);  // what ZeRO stretches
    double late = 0, slowest = 0;
    for (int k = 0; k < p; ++k) {
      late = std::max(late, weights_late(ranks[k].chunks, played.times[k], schedule_.ranks[k]));
      slowest = std::max(slowest, optimizer(ranks[k]).seconds());
    }
    result.data += std::max(0.0, sums_end(ranks, played) - played.total) + late;
    result.optimizer = slowest + scalars();
    return result;
  }

 protected:
  struct Rank {
    std::vector<Units> chunks;
    std::vector<Costs> costs;  // [chunks]
    double late = 0;           // by how much its last gradients are, where each micro-batch sums them
    Work work;                 // of a step
    double seconds = 0;        // of it, as ZeRO and the host stretch it
    double host = 0;           // of them: waits for the host
  };

  static const Rank& busiest(const std::vector<Rank>& ranks) {
    return *std::ranges::max_element(ranks, {}, &Rank::seconds);
  }

  std::vector<Rank> ranks() const {
    std::vector<Rank> all(shape_.pp);
    for (int k = 0; k < shape_.pp; ++k) {
      Rank& rank = all[k];
      for (const LayerRange& range : layers_of_rank(o_, schedule_, k)) {
        const int stage = schedule_.stage(k, static_cast<int>(rank.chunks.size()));
        const Units& chunk = rank.chunks.emplace_back(units(range));
        Costs& c = rank.costs.emplace_back(costs_of(chunk, rank.late));
        c.transfer = message(stage);
        const Work work = work_of(chunk);
        rank.work += work * schedule_.m;
        rank.host += schedule_.m * wait_for_host(c, work);
        rank.seconds += schedule_.m * (c.of(Action::forward) + c.of(Action::backward));
      }
    }
    return all;
  }

  static Work work_of(const Units& units) {
    Work sum;
    for (const Unit& u : units) sum += u.forward, sum += u.backward[0], sum += u.backward[1];
    return sum;
  }

  // The host issues what a micro-batch needs, and may be ahead of the GPU by as much. Stretches the costs
  // where it takes longer. Returns by how much.
  double wait_for_host(Costs& c, const Work& work) const {
    const bool crosses = shape_.pp > 1 && shape_.ranks() > network_.ranks_per_node;
    const double collective = gpu_.launch_seconds + style_.collective_seconds +
                              (crosses && shape_.tp > 1 ? style_.pipelined_seconds * shape_.tp : 0);
    const double gpu = c.of(Action::forward) + c.of(Action::backward);
    const double host = work.launches * gpu_.launch_seconds + work.collectives * collective;
    const double waits = std::max(0.0, host - gpu);
    const double longer = 1 + waits / gpu;
    c.forward *= longer, c.input_gradient *= longer, c.weight_gradient *= longer;
    return waits;
  }

  // ---- The pipeline

  // Of the next micro-batch.
  Costs costs_of(Streams& now, const Units& units, bool forward) const {
    const bool sums = sums_each() && !hides_in_pipeline(), splits = schedule_.splits_backward;
    const auto seconds = [&](Action action, bool and_sums) {
      const double begin = now.compute;
      pass(now, units, action, and_sums);
      return now.compute - begin;
    };
    Costs c;
    c.forward = forward ? seconds(Action::forward, false) : 0;
    c.input_gradient = seconds(splits ? Action::input_gradient : Action::backward, sums && !splits);
    c.weight_gradient = splits ? seconds(Action::weight_gradient, sums) : 0;
    return c;
  }
  // The mean of the first micro-batch and of those after it. `late`: by how much the last gradients are. In a
  // pipeline the sums come later: wait_for_sums.
  Costs costs_of(const Units& units, double& late) const {
    Streams now;
    Costs c = costs_of(now, units, true);
    if (schedule_.m > 1 && sums_each() && !hides_in_pipeline()) {
      const bool alternates =
          o_.pipeline.pp_schedule != PpSchedule::afab;  // otherwise all forwards come first
      Costs again = costs_of(now, units, alternates);
      if (!alternates) again.forward = c.forward;
      for (double Costs::*part : {&Costs::forward, &Costs::input_gradient, &Costs::weight_gradient})
        c.*part += (again.*part - c.*part) * (schedule_.m - 1) / schedule_.m;
    }
    late = now.done() - now.compute;
    return c;
  }

  // ZeRO-2 and 3: each backward sums gradients, behind what the rank does next, in whichever chunk.
  bool hides_in_pipeline() const { return sums_each() && shape_.pp > 1; }

  // Adds to the costs what a rank waits for sums: for memory for gradients, and before the first operation
  // with tensor ranks until they have started. Its instructions begin as they did without sums, and later by
  // what it has waited so far.
  void wait_for_sums(Rank& rank, const Instructions& list, const std::vector<Interval>& times) const {
    Streams now;
    double waited = 0;
    for (size_t n = 0; n < list.size(); ++n) {
      const auto [action, micro_batch, chunk] = list[n];
      if (is_message(action)) continue;
      const Units& units = rank.chunks[chunk];
      const double begin = now.compute = std::max(now.compute, times[n].begin + waited);
      pass(now, units, action, action == compute_actions(schedule_).back());
      const double lasts = times[n].end - times[n].begin, more = std::max(0.0, now.compute - begin - lasts);
      now.compute = begin + lasts + more;
      waited += more;
      Costs& c = rank.costs[chunk];
      (action == Action::forward          ? c.forward
       : action == Action::input_gradient ? c.input_gradient
                                          : c.weight_gradient) += more / schedule_.m;
    }
    rank.late = now.done() - now.compute;
    rank.seconds += waited;
  }

  // The schedule with these ranks' costs.
  Simulation play(const std::vector<Rank>& ranks) const {
    std::vector<Costs> costs(schedule_.stages());
    for (int k = 0; k < shape_.pp; ++k) {
      for (int c = 0; c < schedule_.v; ++c) costs[schedule_.stage(k, c)] = ranks[k].costs[c];
    }
    return simulate(schedule_, costs);
  }

  double message(int stage) const {
    if (stage + 1 == schedule_.stages()) return 0;
    const int from = schedule_.placement[stage].rank, to = schedule_.placement[stage + 1].rank;
    if (from == to) return 0;
    const double bytes = r * outside_ * c_.d;
    return network_.for_message(pipeline_[from], pipeline_[to], bytes).seconds(bytes);
  }

  // When the last gradients are summed. They leave during the backward of a rank's last micro-batch. Its
  // message to the stage before starts after them (data_cost.h).
  double sums_end(const std::vector<Rank>& ranks, const Simulation& played) const {
    if (shape_.dp * shape_.cp == 1) return 0;
    const Action action = compute_actions(schedule_).back();
    std::vector<Streams> streams(shape_.pp);
    double end = 0, message_came = 0;
    for (int stage = schedule_.stages() - 1; stage >= 0; --stage) {
      const auto [k, chunk] = schedule_.placement[stage];
      const Instructions& list = schedule_.ranks[k];
      const Instruction last = {action, last_micro_batch(list, chunk), chunk};
      const Interval& time = played.times[k][std::find(list.begin(), list.end(), last) - list.begin()];
      const Units& units = ranks[k].chunks[chunk];
      Streams& now = streams[k];
      if (sums_each()) {
        now.compute = std::max(now.compute, time.end + ranks[k].late);
      } else {
        now.compute = std::max({now.compute, time.begin, message_came});
        pass(now, units, action, true);
        if (stage > 0 && !schedule_.splits_backward)  // (that sends it before weight gradients)
          message_came = std::max(now.compute, now.started) + message(stage - 1);
      }
      end = std::max(end, now.done());
    }
    return end;
  }

  // By how much the weights that are gathered after the optimizer's step delay a rank's first forward.
  double weights_late(const std::vector<Units>& chunks, const std::vector<Interval>& times,
                      const Instructions& list) const {
    if (!is_sharded(1) || gathers_each()) return 0;
    Streams now;
    Units all;
    for (const Units& units : chunks) all.insert(all.end(), units.begin(), units.end());
    std::vector<double> came(all.size());
    for (int g = 0; g < 2; ++g) {
      for (size_t u = 0; u < all.size(); ++u) {
        if (all[u].size[g] > 0) came[u] = std::max(came[u], now.move(g, 0, gather(all[u], g)));
      }
    }
    if (is_sharded(3)) now.started = 0;  // it gathers a unit when the one before is used
    double needed = 0;
    for (size_t u = 0; u < chunks[0].size(); ++u) {
      now.compute = std::max(now.compute, came[u]);
      now.run(all[u].forward);
      needed += all[u].forward.seconds();
    }
    if (shape_.pp > 1) now.compute = std::max(now.compute, now.started);  // messages start after them, too
    const auto first = std::ranges::find(list, Action::forward, &Instruction::action);
    return std::max(0.0, now.compute - needed - times[first - list.begin()].begin);
  }

  // ---- The optimizer

  // The gradient's norm, and AdamW: 7 sums and a weight a parameter.
  Work optimizer(const Rank& rank) const {
    Work w;
    for (const Unit& u : rank.chunks | std::views::join) {
      for (int g = 0; g < 2; ++g) {
        const int shards = is_sharded(1) ? replicas(g) : 1;
        const double shard = u.size[g] / shards;
        if (shard == 0) continue;
        run(w, "norm", moves(a * shard)), run(w, "norm", little);
        const double parameters = (g == expert_group ? 3.0 * own_experts() : u.parameters) / shards;
        const int kernels = static_cast<int>(std::ceil(parameters)) + (is_sharded(1) ? 1 : 0);
        for (int i = 0; i < kernels; ++i) run(w, "AdamW", moves((7 * a + r) * shard / kernels));
      }
    }
    return w;
  }
  // Sums over ranks of which nothing is hidden: of the norms' gradients, in one group of which each channel
  // takes its share; of the loss and the norm.
  double scalars() const {
    const std::vector<int> all = members_of(shape_, MeshGroup::all, 0);
    double seconds = nccl_mpi::Collectives(network_, all).all_reduce(24);
    const double norms = 2.0 * o_.model.layers / shape_.pp + 1;
    if (sp_) seconds += tensor_.all_reduce(norms * a * c_.d, std::ceil(norms / tensor_blocks));
    return seconds;
  }
};

}  // namespace pentatron
