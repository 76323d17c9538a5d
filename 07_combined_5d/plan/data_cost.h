// How long the weights and gradients of 07 travel between data ranks, and what waits for them. A pass plays
// three streams, unit by unit: compute, and the data of each parameter group (data_parallel.h, zero.h). NCCL
// starts a rank's operations in the order in which the host issued them, on whatever streams
// (NCCL_LAUNCH_ORDER_IMPLICIT, comm.cu). ZeRO-3's backward with tensor ranks, for example:
//
//   compute   unit 3 ......... | unit 2: wait for the first sum of rows .... | unit 2 .......
//   data                       [ reduce-scatter of 3's gradients            ][ gather 1's weights ]
//
// The host issues the gather before unit 2, so the sum may not start before it.
#pragma once

#include "layer_cost.h"

namespace pentatron {

class DataCost : public LayerCost {
 public:
  using LayerCost::LayerCost;

 protected:
  using Units = std::vector<Unit>;

  int replicas(int group) const { return shape_.dp * shape_.cp / (group == expert_group ? shape_.ep : 1); }
  bool is_sharded(int stage) const { return o_.zero.zero_stage >= stage; }
  // Every micro-batch sums its gradients. (Otherwise the last one sums those of all.)
  bool sums_each() const { return is_sharded(2); }
  // Every micro-batch gathers the weights. (In a pipeline they stay gathered.)
  bool gathers_each() const { return is_sharded(3) && shape_.pp == 1; }

  // Seconds on the way. Gradients travel in buckets, or each unit's together.
  double gather(const Unit& u, int group) const {
    return u.size[group] == 0 ? 0 : replicas_[group].all_gather(r * u.size[group] / replicas(group));
  }
  double scatter(const Unit& u, int group) const {
    const double bytes = a * u.size[group], n = buckets(u, group), m = schedule_.m;
    if (bytes == 0) return 0;
    if (!is_sharded(1)) return n * replicas_[group].all_reduce(bytes / n);
    const double add = gpu_.seconds(moves(3 * bytes / replicas(group)));  // but for the first micro-batch
    return replicas_[group].reduce_scatter(bytes / replicas(group)) + (sums_each() ? (m - 1) / m * add : 0);
  }
  double buckets(const Unit& u, int group) const {
    return is_sharded(1) ? 1 : std::max(1.0, a * u.size[group] / (o_.data_parallel.bucket_mb * 1e6));
  }

  struct Streams {
    double compute = 0, data[2] = {};  // when each is done; data: [groups]
    double started = 0;                // when the last operation on a data stream did
    // ZeRO's two buffers of each group: whose weights one has, and when they came; when the gradients in one
    // have left.
    int unit[2][2] = {{none, none}, {none, none}};
    double came[2][2] = {}, left[2][2] = {};

    double done() const { return std::max({compute, data[0], data[1]}); }
    // Moves data that is `ready`, in `pieces` one after the other. Returns when all have come.
    double move(int group, double ready, double seconds, double pieces = 1) {
      data[group] = std::max({started, data[group], ready}) + seconds;
      started = data[group] - seconds / pieces;
      return data[group];
    }
    // Computes. `free`: when there is memory for the weight gradients.
    void run(const Work& work, double free = 0) {
      if (work.meets) compute = std::max(compute, started - work.until_meeting);
      compute = std::max(compute, free - work.until_gradients) + work.seconds();
    }
  };

  // ZeRO-3: when a unit's weights are there. If no buffer has them, they come into the one without `other`.
  double gathered(Streams& now, const Units& units, int group, int unit, int other) const {
    int(&holds)[2] = now.unit[group];
    const int buffer = holds[0] == unit || (holds[1] != unit && holds[0] != other) ? 0 : 1;
    double& came = now.came[group][buffer];
    if (holds[buffer] != unit) came = now.move(group, now.compute, gather(units[unit], group));
    holds[buffer] = unit;
    return came;
  }
  // The group's next unit of a pass whose weights are read: backward does not read the embedding's.
  static int next_unit(const Units& units, int group, int unit, bool forward) {
    const int step = forward ? 1 : -1, end = forward ? static_cast<int>(units.size()) : 0;
    for (int next = unit + step; next != end && unit != end; next += step) {
      if (units[next].size[group] > 0) return next;
    }
    return none;
  }

  static Work work_of(const Unit& u, Action action) {
    if (action == Action::forward) return u.forward;
    Work work = u.backward[action == Action::weight_gradient];
    if (action == Action::backward) work += u.backward[1];
    return work;
  }

  // A pass of a micro-batch over units. A unit's weights are gathered while the one before is used. If it
  // `sums`, a unit's gradients leave when they are complete; with ZeRO-2 and 3, only two units' gradients
  // have memory.
  void pass(Streams& now, const Units& units, Action action, bool sums) const {
    const bool forward = action == Action::forward;
    const int n = static_cast<int>(units.size());
    for (int i = 0; i < n; ++i) {
      const int unit = forward ? i : n - 1 - i, buffer = units[unit].number % 2;
      double ready = now.compute, free = 0;
      for (int g = 0; g < 2; ++g) {
        if (units[unit].size[g] == 0) continue;
        if (gathers_each() && (forward || unit > 0)) {
          const int next = next_unit(units, g, unit, forward);
          ready = std::max(ready, gathered(now, units, g, unit, next));
          if (next != none) gathered(now, units, g, next, unit);
        }
        if (sums_each()) free = std::max(free, now.left[g][buffer]);
      }
      now.compute = ready;
      now.run(work_of(units[unit], action), sums ? free : 0);
      for (int g = 0; g < 2; ++g) {
        if (!sums || units[unit].size[g] == 0) continue;
        now.left[g][buffer] = now.move(g, now.compute, scatter(units[unit], g), buckets(units[unit], g));
      }
    }
  }

 private:
  static constexpr int none = -1;
};

}  // namespace pentatron
