// How long a step of 07 takes on modelled GPUs, in formulas. The kernels of a layer, and what it waits for
// (layer_cost.h); the gradients and weights that nothing hides (data_cost.h); the pipeline's bubble, from
// playing its schedule (simulate.h); the optimizer. --dry-run issues every operation on a clock instead: that
// is exact, but takes minutes. The tests hold the formulas against it.
#pragma once

#include <ranges>

#include "data_cost.h"

namespace pentatron {

// Where a step's time goes on the pipeline rank that has most to do. In seconds.
struct StepCost {
  Work work;             // of all micro-batches
  double bubble = 0;     // idle in the pipeline
  double host = 0;       // what the host takes longer to issue than the GPU to run
  double data = 0;       // gradients and weights on their way that nothing hides
  double optimizer = 0;  // with the norm
  double total() const { return work.seconds() + bubble + host + data + optimizer; }
};

class CostModel : public DataCost {
 public:
  using DataCost::DataCost;

  // No step takes less: that of the rank that has most to do, if it never waits in the pipeline.
  double least() const {
    double most = 0;
    for (const Rank& rank : ranks()) most = std::max(most, rank.seconds);
    return most;
  }

  StepCost step() const {
    const int p = shape_.pp;
    const std::vector<Rank> ranks = this->ranks();
    std::vector<Costs> costs(schedule_.stages());
    StepCost result;
    double most = 0;
    for (int k = 0; k < p; ++k) {
      for (int c = 0; c < schedule_.v; ++c) costs[schedule_.stage(k, c)] = ranks[k].costs[c];
      if (ranks[k].seconds <= most) continue;
      most = ranks[k].seconds;
      result.work = ranks[k].work;
    }
    const Simulation played = simulate(schedule_, costs);
    result.bubble = std::max(0.0, played.total - most);
    result.data = std::max(0.0, most - result.work.seconds());  // so far what ZeRO stretches
    double late = 0, slowest = 0;
    int launches = 0;
    for (int k = 0; k < p; ++k) {
      late = std::max(late, weights_late(ranks[k].chunks, played.times[k], schedule_.ranks[k]));
      const Work update = optimizer(ranks[k]);
      slowest = std::max(slowest, update.seconds());
      launches = std::max(launches, ranks[k].work.launches + update.launches);
    }
    result.data += std::max(0.0, sums_end(ranks, played) - played.total) + late;
    result.optimizer = slowest + scalars();
    result.host = std::max(0.0, launches * gpu_.launch_seconds - result.total());
    return result;
  }

 protected:
  struct Rank {
    std::vector<Units> chunks;
    std::vector<Costs> costs;  // [chunks]
    std::vector<double> late;  // [chunks]: by how much its gradients are
    Work work;                 // of a step
    double seconds = 0;        // of it, as ZeRO stretches it
  };

  std::vector<Rank> ranks() const {
    std::vector<Rank> all(shape_.pp);
    for (int k = 0; k < shape_.pp; ++k) {
      Rank& rank = all[k];
      for (const LayerRange& range : layers_of_rank(o_, schedule_, k)) {
        const int stage = schedule_.stage(k, static_cast<int>(rank.chunks.size()));
        const Units& chunk = rank.chunks.emplace_back(units(range));
        Costs& c = rank.costs.emplace_back(costs_of(chunk, rank.late.emplace_back()));
        c.transfer = message(stage);
        rank.work += work_of(chunk) * schedule_.m;
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

  // ---- The pipeline

  // Of the next micro-batch.
  Costs costs_of(Streams& now, const Units& units, bool forward) const {
    const auto seconds = [&](const auto& pass) {
      const double begin = now.compute;
      pass();
      return now.compute - begin;
    };
    Costs c;
    c.forward = forward ? seconds([&] { forward_pass(now, units); }) : 0;
    const bool splits = schedule_.splits_backward;
    c.input_gradient = seconds([&] {
      backward_pass(now, units, splits ? Action::input_gradient : Action::backward, !splits && sums_each());
    });
    c.weight_gradient =
        splits ? seconds([&] { backward_pass(now, units, Action::weight_gradient, sums_each()); }) : 0;
    return c;
  }
  // The mean of the first micro-batch and of those after it. `late`: by how much the last gradients are.
  Costs costs_of(const Units& units, double& late) const {
    Streams now;
    Costs c = costs_of(now, units, true);
    if (schedule_.m > 1 && sums_each()) {
      const bool alternates = o_.pp_schedule != PpSchedule::afab;  // otherwise all forwards come first
      Costs again = costs_of(now, units, alternates);
      if (!alternates) again.forward = c.forward;
      for (double Costs::*part : {&Costs::forward, &Costs::input_gradient, &Costs::weight_gradient})
        c.*part += (again.*part - c.*part) * (schedule_.m - 1) / schedule_.m;
    }
    late = now.done() - now.compute;
    return c;
  }

  double message(int stage) const {
    if (stage + 1 == schedule_.stages()) return 0;
    const int from = schedule_.places[stage].rank, to = schedule_.places[stage + 1].rank;
    if (from == to) return 0;
    const std::vector<int> line = members_of(shape_, MeshGroup::pipeline, 0);
    const double bytes = r * outside_ * c_.d;
    return network_.for_message(line[from], line[to], bytes).seconds(bytes) + style_.message_seconds;
  }

  // When the last gradients are summed. They leave during the backward of a rank's last micro-batch. Its
  // message to the stage before starts after them (data_cost.h).
  double sums_end(const std::vector<Rank>& ranks, const Simulation& played) const {
    if (shape_.dp * shape_.cp == 1) return 0;
    const Action action = compute_actions(schedule_).back();
    std::vector<Streams> streams(shape_.pp);
    double end = 0, message_came = 0;
    for (int stage = schedule_.stages() - 1; stage >= 0; --stage) {
      const auto [k, chunk] = schedule_.places[stage];
      const Instructions& list = schedule_.ranks[k];
      const Instruction last = {action, last_micro_batch(list, chunk), chunk};
      const Interval& time = played.times[k][std::find(list.begin(), list.end(), last) - list.begin()];
      const Units& units = ranks[k].chunks[chunk];
      Streams& now = streams[k];
      if (!overlaps()) {
        for (const Unit& u : units)
          for (int g = 0; g < 2; ++g) now.move(g, played.times[k].back().end, scatter(u, g));
      } else if (sums_each()) {
        now.compute = std::max(now.compute, time.end + ranks[k].late[chunk]);
      } else {
        now.compute = std::max({now.compute, time.begin, message_came});
        backward_pass(now, units, action, true);
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
    if (!overlaps()) return now.done();
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
