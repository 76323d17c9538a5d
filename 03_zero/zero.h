// ZeRO (Rajbhandari et al., 2020, arXiv 1910.02054): data-parallel ranks divide optimizer states, gradients
// and weights among them. Every unit has n equal shards, one for each of the n ranks. Rank r owns shard r.
//
//   stage 0   shards nothing: all-reduce of the gradients (data parallelism)
//   stage 1   shards the optimizer states: reduce-scatter of the gradients, all-gather of updated weights
//   stage 2   also the gradients: each backward reduce-scatters a unit's gradients, then reuses their memory
//   stage 3   also the weights: forward and backward all-gather a unit's weights before they use them
//
// At each use the model asks for weights(unit) and gradients(unit): Zero says which buffer holds them now.
//
// Hybrid sharding (Zhang et al., "MiCS", 2022, arXiv 2205.00119): all this among n neighbours, the shard
// group, which hold one copy of the model. Other shard groups hold other copies. The ranks with the same
// shard are a replicate group: after the step's last micro-batch they all-reduce its gradient.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/elementwise.h"
#include "model/seams.h"
#include "ranks/comm.h"

namespace pentatron {

class Zero : public UnitHooks {
 public:
  // Allocates the group's weights and gradients as `stage` (0 to 3) needs, and adds this rank's shards, which
  // the optimizer updates. The shard ranks own the shards of one copy of the model. The replicate ranks own
  // this shard, each in another copy. `compute`: the stream of the model. `weight_buffers`: the sizes of
  // stage 3's unit buffers for weights, in elements. By default it has two, of the size of the largest unit,
  // and so whole weights of two units at most (PyTorch's FSDP: reshard_after_forward=True).
  Zero(int stage, ParameterGroup& group, Communicator& shard_ranks, Communicator& replicate_ranks,
       cudaStream_t compute, const std::vector<size_t>& weight_buffers = {})
      : stage_(stage),
        group_(group),
        shard_ranks_(shard_ranks),
        replicate_ranks_(replicate_ranks),
        compute_(compute),
        units_(group.units().empty() ? 0 : group.units().back() + 1),
        weight_buffers_(weight_buffers.empty() ? 2 : weight_buffers.size()) {
    if (stage_ == 0) {
      group_.allocate();
      return;
    }
    for (const int unit : group_.units()) allocate_shard(unit);
    if (stage_ >= 2) {
      for (GradientBuffer& buffer : gradient_buffers_)
        buffer.gradients = gradient_memory_.matrix<accum>(1, group_.largest_size()).data;
    }
    if (stage_ < 3) return;
    for (size_t i = 0; i < weight_buffers_.size(); ++i) {
      const size_t size = weight_buffers.empty() ? group_.largest_size() : weight_buffers[i];
      weight_buffers_[i].weights = weight_memory_.matrix<real>(1, size).data;
    }
  }

  // ---- Weights

  // Called after the optimizer has updated (or `initialise` has written) this rank's shards of the weights.
  // Stages 1 and 2 gather all units, one by one; forward waits for each unit before its use. Stage 3 marks
  // its unit buffers as stale, and gathers later.
  void weights_changed() override {
    if (stage_ == 0) return;
    wait_stream(shard_ranks_.stream(), compute_);
    for (WeightBuffer& buffer : weight_buffers_) buffer.unit = none;
    if (stage_ == 3) return;
    for (const int unit : group_.units()) {
      gather(unit, group_.weights(unit));
      units_[unit].weights_came.record(shard_ranks_.stream());
    }
  }

  // Compute waits until the unit's weights are whole. Stage 3 gathers them, and begins to gather those of the
  // next unit in this pass. after_weights() frees their buffer.
  void before_weights(int unit, Pass pass) override {
    if (stage_ == 0 || !holds(unit)) return;
    if (stage_ == 3) {
      group_.weights(unit) = gathered_buffer(unit).weights;
      if (const int next = next_unit(unit, pass); next != none) gathered_buffer(next);  // prefetch
    }
    wait_event(compute_, units_[unit].weights_came);
  }

  void after_weights(int unit, Pass) override {
    if (stage_ != 3 || !holds(unit)) return;
    weight_buffer(unit).free.record(compute_);
    group_.weights(unit) = nullptr;
  }

  // ---- Gradients

  // Stages 2 and 3: gives the unit a buffer. Compute waits until the earlier gradients in it have been
  // reduced.
  void before_gradients(int unit) override {
    if (stage_ < 2 || !holds(unit)) return;
    const GradientBuffer& buffer = gradient_buffer(unit);
    wait_event(compute_, buffer.free);
    group_.gradients(unit) = buffer.gradients;
  }

  // Stages 2 and 3: adds each micro-batch's sum over the ranks to the own shard. Stages 0 and 1 sum once,
  // after the last micro-batch. Then, in stages 1 to 3, the copies sum their shards.
  void after_gradients(int unit, bool last) override {
    if (group_.size(unit) == 0) return;
    accum* const all = group_.gradients(unit);
    if (stage_ >= 2) {
      UnitState& own = units_[unit];
      accum* const sum = own.add ? all + shard_begin(unit) : own.own_gradients;
      wait_stream(shard_ranks_.stream(), compute_);
      reduce_scatter(unit, all, sum);
      if (own.add) accumulate(sum, own.own_gradients, group_.shard_size(unit), shard_ranks_.stream());
      own.add = !last;
      gradient_buffer(unit).free.record(shard_ranks_.stream());
      group_.take_gradients(unit);  // own_gradients has the sum of the step
    } else if (last) {
      wait_stream(shard_ranks_.stream(), compute_);
      if (stage_ == 0) shard_ranks_.all_reduce(all, all, group_.size(unit));
      if (stage_ == 1) reduce_scatter(unit, all, all + shard_begin(unit));
    }
    if (last && replicate_ranks_.ranks() > 1) sum_copies(unit);
  }

  // After the last micro-batch: `compute` waits for all sums. Work issued to it after this call reads the
  // global gradient of this rank's shards.
  void finish_gradient_sync() override {
    wait_stream(compute_, shard_ranks_.stream());
    wait_stream(compute_, replicate_ranks_.stream());
  }

 protected:  // a test asks for events of units_, and calls sum_copies() by itself
  static constexpr int none = -1;

  // A unit buffer for gathered weights (stage 3).
  struct WeightBuffer {
    real* weights = nullptr;  // [its size in the constructor]
    int unit = none;          // the unit whose weights it holds, or whose gather into it has been issued
    Event free;               // done when compute has used the weights
  };

  // A unit buffer for gradients until they are reduced (stages 2 and 3).
  struct GradientBuffer {
    accum* gradients = nullptr;  // [largest unit]
    Event free;                  // done when the gradients in it have been reduced
  };

  struct UnitState {
    real* own_weights = nullptr;     // [shard_size]
    accum* own_gradients = nullptr;  // [shard_size]
    bool add = false;                // stages 2 and 3: own_gradients holds a sum of this step
    Event weights_came;              // done when all shards of the weights have arrived
  };

  bool holds(int unit) const { return unit < std::ssize(units_) && units_[unit].own_weights != nullptr; }
  // The first element of this rank's shard in the unit: rank r has the r-th of equal shards.
  size_t shard_begin(int unit) const { return shard_ranks_.rank() * group_.shard_size(unit); }

  // The unit that the pass uses after this one, or none. Backward does not read the embedding's weights.
  int next_unit(int unit, Pass pass) const {
    const std::vector<int>& units = group_.units();
    const auto here = std::find(units.begin(), units.end(), unit);
    if (pass == Pass::forward) return here + 1 == units.end() ? none : *(here + 1);
    return here == units.begin() || *(here - 1) == embedding_unit ? none : *(here - 1);
  }

  // Allocates weights and gradients of a unit: a shard of what the stage keeps in shards, all of the rest.
  // Names the own shard to the optimizer (add_shard).
  void allocate_shard(int unit) {
    const size_t all = group_.size(unit), begin = shard_begin(unit), size = group_.shard_size(unit);
    UnitState& own = units_[unit];
    if (stage_ < 3) {
      group_.weights(unit) = group_.allocate_weights(all);
      own.own_weights = group_.weights(unit) + begin;
    } else {
      own.own_weights = group_.allocate_weights(size);
    }
    if (stage_ < 2) {
      group_.gradients(unit) = group_.allocate_gradients(all);
      own.own_gradients = group_.gradients(unit) + begin;
    } else {
      own.own_gradients = group_.allocate_gradients(size);
    }
    group_.add_shard(unit, begin, begin + size, own.own_weights, own.own_gradients);
  }

  // all [size(unit)]. In stages 1 and 2 `gather` is in place: the own shard already lies in `all`.
  // reduce_scatter writes the own shard of the sum to `own`, which may be in its place in `all`.
  void gather(int unit, real* all) {
    shard_ranks_.all_gather(units_[unit].own_weights, all, group_.shard_size(unit));
  }
  void reduce_scatter(int unit, accum* all, accum* own) {
    shard_ranks_.reduce_scatter(all, own, group_.shard_size(unit));
  }

  // After the last micro-batch, with several copies: sums the gradient of this rank's shard over them.
  // Meanwhile the next unit's gradients are reduce-scattered.
  void sum_copies(int unit) {
    accum* const own = units_[unit].own_gradients;
    wait_stream(replicate_ranks_.stream(), shard_ranks_.stream());
    replicate_ranks_.all_reduce(own, own, group_.shard_size(unit));
  }

  // Successive units use different buffers: backward writes one while the other is reduce-scattered, and the
  // model reads one while the other is gathered.
  GradientBuffer& gradient_buffer(int unit) { return gradient_buffers_[unit % 2]; }
  WeightBuffer& weight_buffer(int unit) { return weight_buffers_[unit % weight_buffers_.size()]; }

  // The buffer with this unit's weights. If it has another unit's, the communication stream gathers them. The
  // caller waits for weights_came.
  WeightBuffer& gathered_buffer(int unit) {
    WeightBuffer& buffer = weight_buffer(unit);
    if (buffer.unit == unit) return buffer;
    buffer.unit = unit;
    wait_event(shard_ranks_.stream(), buffer.free);
    gather(unit, buffer.weights);
    units_[unit].weights_came.record(shard_ranks_.stream());
    return buffer;
  }

  int stage_;
  ParameterGroup& group_;
  Communicator &shard_ranks_, &replicate_ranks_;
  cudaStream_t compute_;
  std::vector<UnitState> units_;
  std::vector<WeightBuffer> weight_buffers_;
  std::array<GradientBuffer, 2> gradient_buffers_;
  DeviceArena weight_memory_{Purpose::weights}, gradient_memory_{Purpose::gradients};
};

}  // namespace pentatron
