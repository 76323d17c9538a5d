// How long a step of 07 takes on modelled GPUs, in formulas. The kernels of a layer, and what it waits for
// (layer_cost.h); the pipeline's bubble, from playing its schedule (simulate.h); the gradients and weights
// that nothing hides; the optimizer. --dry-run issues every operation on a clock instead: that is exact, but
// takes minutes. The tests hold the formulas against it.
#pragma once

#include "layer_cost.h"

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

class CostModel : public LayerCost {
 public:
  using LayerCost::LayerCost;

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
    double end = played.total, late = 0, slowest = 0;
    int launches = 0;
    for (int k = 0; k < p; ++k) {
      end = std::max(end, sums_end(ranks[k], schedule_.ranks[k], played.times[k]));
      late = std::max(late, weights_late(ranks[k].chunks[0], played.times[k], schedule_.ranks[k]));
      const Work update = optimizer(ranks[k]);
      slowest = std::max(slowest, update.seconds());
      launches = std::max(launches, ranks[k].work.launches + update.launches);
    }
    result.data += end - played.total + late;
    result.optimizer = slowest + scalars();
    result.host = std::max(0.0, launches * gpu_.launch_seconds - result.total());
    return result;
  }

 protected:
  using Units = std::vector<Unit>;
  struct Rank {
    std::vector<Units> chunks;
    std::vector<Costs> costs;  // [chunks]
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
        Costs& c = rank.costs.emplace_back(costs_of(chunk));
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

  // ---- Data ranks: weights are gathered, gradients are summed, unit by unit

  int replicas(int group) const { return shape_.dp * shape_.cp / (group == expert_group ? shape_.ep : 1); }
  double gather(const Unit& u) const {
    double seconds = 0;  // the groups' streams run beside each other
    for (int g = 0; g < 2; ++g)
      seconds = std::max(seconds, replicas_[g].all_gather(r * u.size[g] / replicas(g)));
    return seconds;
  }
  double scatter(const Unit& u) const {
    double seconds[2] = {};
    for (int g = 0; g < 2; ++g) {
      const double bytes = a * u.size[g], bucket = std::min(bytes, o_.bucket_mb * 1e6);
      if (bytes == 0) continue;
      const bool scatters = is_sharded(1) && !style_.all_reduces;
      seconds[g] = scatters ? replicas_[g].reduce_scatter(bytes / replicas(g))
                            : bytes / bucket * replicas_[g].all_reduce(bucket);
      if (is_sharded(2)) seconds[g] += gpu_.seconds(moves(3 * bytes / replicas(g)));
    }
    return std::max(seconds[0], seconds[1]);
  }
  bool overlaps() const { return style_.overlaps_sharded_sums || o_.zero_stage == 0; }
  bool is_sharded(int stage) const { return o_.zero_stage >= stage && shape_.dp * shape_.cp > 1; }

  // Every micro-batch gathers the weights. (In a pipeline they stay gathered.)
  bool gathers_each() const { return is_sharded(3) && shape_.pp == 1; }

  // The compute stream and the data stream, while a pass uses one unit after the other.
  struct Pass {
    double compute = 0, data = 0;  // when each is done
  };
  // `gathers`: a unit's weights come while the one before is used. `sums`: a unit's gradients leave when they
  // are complete; with ZeRO-2 and 3, only two units' gradients have memory.
  template <class Seconds>
  Pass pass(const Units& units, bool forward, bool gathers, bool sums, const Seconds& seconds) const {
    Pass now;
    const int n = static_cast<int>(units.size());
    const auto at = [&](int i) -> const Unit& { return units[forward ? i : n - 1 - i]; };
    const bool has_buffers = sums && is_sharded(2);
    double came = 0, left[2] = {};
    if (gathers) now.data = came = gather(at(0));
    for (int i = 0; i < n; ++i) {
      const double begin = std::max({now.compute, came, has_buffers ? left[i % 2] : 0});
      if (gathers && i + 1 < n) now.data = came = std::max(now.data, begin) + gather(at(i + 1));
      now.compute = begin + seconds(at(i));
      if (sums) now.data = left[i % 2] = std::max(now.data, now.compute) + scatter(at(i));
    }
    return now;
  }
  Pass forward_pass(const Units& units) const {
    return pass(units, true, gathers_each(), false, [](const Unit& u) { return u.forward.seconds(); });
  }
  Pass backward_pass(const Units& units, Action action, bool sums) const {
    return pass(units, false, gathers_each(), sums, [&](const Unit& u) {
      return (action == Action::weight_gradient ? 0 : u.backward[0].seconds()) +
             (action == Action::input_gradient ? 0 : u.backward[1].seconds());
    });
  }

  // ---- The pipeline

  Costs costs_of(const Units& units) const {
    const bool each = is_sharded(2);  // every micro-batch's gradients are summed over the ranks
    Costs c = {forward_pass(units).compute, 0, 0, 0};
    if (schedule_.splits_backward) {
      c.input_gradient = backward_pass(units, Action::input_gradient, false).compute;
      c.weight_gradient = backward_pass(units, Action::weight_gradient, each).compute;
    } else {
      c.input_gradient = backward_pass(units, Action::backward, each).compute;
    }
    // If data travels for longer than all of it computes, it decides.
    double data = 0;
    for (const Unit& u : units) {
      if (each) data += scatter(u);
      if (gathers_each()) data += 2 * gather(u);
    }
    const double rest = std::max(0.0, data - c.forward - c.of(Action::backward));
    (schedule_.splits_backward ? c.weight_gradient : c.input_gradient) += rest;
    return c;
  }

  double message(int stage) const {
    if (shape_.pp == 1) return 0;
    const std::vector<int> line = members_of(shape_, MeshGroup::pipeline, 0);
    const int from = stage % shape_.pp, to = (stage + 1) % shape_.pp;
    return network_.between(line[from], line[to]).seconds(r * outside_ * c_.d) + style_.message_seconds;
  }

  // When a rank's last gradients are summed. They leave during the backward of its last micro-batch.
  double sums_end(const Rank& rank, const Instructions& list, const std::vector<Interval>& times) const {
    double end = 0;
    if (shape_.dp * shape_.cp == 1) return 0;
    if (!overlaps()) {
      for (const Units& units : rank.chunks)
        for (const Unit& u : units) end += scatter(u);
      return end + times.back().end;
    }
    const Action action = compute_actions(schedule_).back();
    for (size_t i = 0; i < list.size(); ++i) {
      const Instruction& now = list[i];
      if (now.action != action || now.micro_batch != last_micro_batch(list, now.chunk)) continue;
      const Pass last = backward_pass(rank.chunks[now.chunk], action, true);
      end = std::max(end, times[i].end - last.compute) + last.data;
    }
    return end;
  }

  // By how much the weights that are gathered after the optimizer's step delay a rank's first forward.
  double weights_late(const Units& units, const std::vector<Interval>& times,
                      const Instructions& list) const {
    if (!is_sharded(1) || gathers_each()) return 0;
    double came = 0, compute = 0, needed = 0;
    if (!overlaps()) {
      for (const Unit& u : units) came += gather(u);
      return came;
    }
    const size_t first = std::find_if(list.begin(), list.end(),
                                      [](const Instruction& i) { return i.action == Action::forward; }) -
                         list.begin();
    for (const Unit& u : units) {
      came += gather(u);
      compute = std::max(compute, came) + u.forward.seconds();
      needed += u.forward.seconds();
    }
    return std::max(0.0, compute - needed - times[first].begin);
  }

  // ---- The optimizer

  // The gradient's norm, and AdamW: 7 sums and a weight a parameter.
  Work optimizer(const Rank& rank) const {
    Work w;
    for (const Units& units : rank.chunks) {
      for (const Unit& u : units) {
        for (int g = 0; g < 2; ++g) {
          const double shard = u.size[g] / (is_sharded(1) ? replicas(g) : 1);
          if (shard == 0) continue;
          run(w, "norm", moves(a * shard)), run(w, "norm", little);
          const double parameters =
              (g == expert_group ? 3.0 * own_experts() : u.parameters) / (is_sharded(1) ? replicas(g) : 1);
          const int kernels = static_cast<int>(std::ceil(parameters)) + (is_sharded(1) ? 1 : 0);
          for (int i = 0; i < kernels; ++i) run(w, "AdamW", moves((7 * a + r) * shard / kernels));
        }
      }
    }
    return w;
  }
  // Sums over ranks of which nothing is hidden: of gradients that tensor ranks have parts of, the loss and
  // the norm.
  double scalars() const {
    const std::vector<int> all = members_of(shape_, MeshGroup::all, 0);
    double seconds = all.size() > 1 ? nccl_mpi::Ring(network_, all).all_reduce(24) : 0;
    if (sp_) seconds += (2.0 * m_.layers / shape_.pp + 1) * tensor_.all_reduce(a * c_.d);
    return seconds;
  }
};

}  // namespace pentatron
