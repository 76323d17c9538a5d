// ZeRO (Rajbhandari et al., 2020): data-parallel ranks need not all hold the same optimizer states, gradients
// and weights. With n ranks, every unit is divided into n equal shards, rank r owns shard r, and
//
//   stage 0   holds everything; gradients are all-reduced (data parallelism)
//   stage 1   updates its shard alone: reduce-scatter of the gradients, then all-gather of the weights
//   stage 2   keeps its shard of the gradients alone: a unit's are reduced and dropped in each backward
//   stage 3   keeps its shard of the weights alone: a unit's are gathered before use
//
// The model asks for weights(unit) and gradients(unit) at each use; here is where they are bound to what is
// there.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "kernels/kernels.h"
#include "model/seams.h"
#include "ranks/comm.h"

namespace pentatron {

// When stage 3 drops the weights that it has gathered: after their use in a pass, so that two units' weights
// exist at a time (PyTorch's FSDP: reshard_after_forward=True); or once a step, when the optimizer changes
// them, which costs the memory of all units and saves the gathers of every micro-batch but the first.
enum class Reshard { after_use, after_step };

class Zero : public UnitHooks {
 public:
  // Allocates weights and gradients of a group as the stage says, and makes this rank's shards those of the
  // optimizer. `data`: the ranks that share them out.
  Zero(int stage, ParameterGroup& group, Communicator& data, cudaStream_t compute,
       Reshard reshard = Reshard::after_use)
      : stage_(stage),
        group_(group),
        data_(data),
        compute_(compute),
        reshard_(reshard),
        units_(group.units().empty() ? 0 : group.units().back() + 1),
        weight_buffers_(reshard == Reshard::after_use ? 2 : units_.size()) {
    if (stage_ == 0) {
      group_.allocate();
      return;
    }
    for (const int unit : group_.units()) allocate_shard(unit);
    if (stage_ >= 2) {
      for (GradientBuffer& buffer : gradient_buffers_)
        buffer.gradients = gradient_memory_.matrix<accum>(1, group_.largest_size()).data;
    }
    if (stage_ == 3) allocate_weight_buffers();
  }

  // ---- Weights

  // After the optimizer has written this rank's shards (or they have been initialised), everybody gets all
  // shards. Stages 1 and 2 gather at once, unit by unit, and forward waits for each unit as it comes to it.
  // Stage 3 forgets what was gathered before.
  void weights_changed() override {
    if (stage_ == 0) return;
    wait_stream(data_.stream(), compute_);
    for (WeightBuffer& buffer : weight_buffers_) buffer.unit = none;
    if (stage_ == 3) return;
    for (const int unit : group_.units()) {
      gather(unit, group_.weights(unit));
      units_[unit].gathered.record(data_.stream());
    }
  }

  void before_weights(int unit, Pass pass) override {
    if (stage_ == 0 || !holds(unit)) return;
    if (stage_ == 3) {
      const int next = next_unit(unit, pass);
      group_.weights(unit) = gathered(unit, next).weights;
      if (next != none) gathered(next, unit);  // prefetch
    }
    wait_event(compute_, units_[unit].gathered);
  }

  void after_weights(int unit, Pass) override {
    if (stage_ != 3 || !holds(unit)) return;
    gathered(unit, none).free.record(compute_);
    group_.weights(unit) = nullptr;
  }

  // ---- Gradients

  void before_gradients(int unit) override {
    if (stage_ < 2 || !holds(unit)) return;
    const GradientBuffer& buffer = gradient_buffer(unit);
    wait_event(compute_, buffer.free);
    group_.gradients(unit) = buffer.gradients;
    CUDA_CHECK(cudaMemsetAsync(buffer.gradients, 0, group_.size(unit) * sizeof(accum), compute_));
  }

  void after_gradients(int unit, bool last) override {
    if (group_.size(unit) == 0) return;
    accum*& all = group_.gradients(unit);
    if (stage_ >= 2) {
      wait_stream(data_.stream(), compute_);
      reduce_scatter(unit, all);
      accumulate(all + shard_begin(unit), units_[unit].own_gradients, group_.shard_size(unit),
                 data_.stream());
      gradient_buffer(unit).free.record(data_.stream());
      all = nullptr;
    } else if (last) {
      wait_stream(data_.stream(), compute_);
      if (stage_ == 0) data_.all_reduce(all, all, group_.size(unit));
      if (stage_ == 1) reduce_scatter(unit, all);
    }
  }

  // After the last micro-batch: whatever `compute` does next has the global gradient of this rank's shards.
  void finish_gradient_sync() override { wait_stream(compute_, data_.stream()); }

 private:
  static constexpr int none = -1;

  // A unit buffer for gathered weights (stage 3).
  struct WeightBuffer {
    real* weights = nullptr;  // [largest unit]
    int unit = none;          // whose weights are, or are about to be, here
    Event free;               // compute has used them
  };

  // A unit buffer for gradients until they are reduced (stages 2 and 3).
  struct GradientBuffer {
    accum* gradients = nullptr;  // [largest unit]
    Event free;                  // what they held has been reduced
  };

  struct UnitState {
    real* own_weights = nullptr;     // [shard_size]
    accum* own_gradients = nullptr;  // likewise
    Event gathered;                  // all shards have come
  };

  bool holds(int unit) const { return unit < std::ssize(units_) && units_[unit].own_weights != nullptr; }
  size_t shard_begin(int unit) const { return data_.rank() * group_.shard_size(unit); }

  // The unit that is used after this one; backward skips the embedding, whose weights it does not read.
  int next_unit(int unit, Pass pass) const {
    const std::vector<int>& units = group_.units();
    const auto here = std::find(units.begin(), units.end(), unit);
    if (pass == Pass::forward) return here + 1 == units.end() ? none : *(here + 1);
    return here == units.begin() || *(here - 1) == embedding_unit ? none : *(here - 1);
  }

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

  // NCCL's in-place forms: the own shard already lies, or comes to lie, where it belongs.
  void gather(int unit, real* all) {
    data_.all_gather(units_[unit].own_weights, all, group_.shard_size(unit));
  }
  void reduce_scatter(int unit, accum* all) {
    data_.reduce_scatter(all, all + shard_begin(unit), group_.shard_size(unit));
  }

  // Neighbours have different ones: backward writes one unit's gradients while the other's are reduced.
  GradientBuffer& gradient_buffer(int unit) { return gradient_buffers_[unit % 2]; }

  // Two for any units, or one for each.
  void allocate_weight_buffers() {
    if (reshard_ == Reshard::after_step) {
      for (const int unit : group_.units())
        weight_buffers_[unit].weights = weight_memory_.matrix<real>(1, group_.size(unit)).data;
    } else {
      for (WeightBuffer& buffer : weight_buffers_)
        buffer.weights = weight_memory_.matrix<real>(1, group_.largest_size()).data;
    }
  }

  // The buffer with this unit's weights. If none has them, they are gathered, on the communication stream,
  // into one that does not hold unit `other`.
  WeightBuffer& gathered(int unit, int other) {
    WeightBuffer& buffer = buffer_for(unit, other);
    if (buffer.unit == unit) return buffer;
    buffer.unit = unit;
    wait_event(data_.stream(), buffer.free);
    gather(unit, buffer.weights);
    units_[unit].gathered.record(data_.stream());
    return buffer;
  }
  WeightBuffer& buffer_for(int unit, int other) {
    if (reshard_ == Reshard::after_step) return weight_buffers_[unit];
    for (WeightBuffer& buffer : weight_buffers_) {
      if (buffer.unit == unit) return buffer;
    }
    return weight_buffers_[0].unit == other ? weight_buffers_[1] : weight_buffers_[0];
  }

  int stage_;
  ParameterGroup& group_;
  Communicator& data_;
  cudaStream_t compute_;
  Reshard reshard_;
  std::vector<UnitState> units_;
  std::vector<WeightBuffer> weight_buffers_;
  std::array<GradientBuffer, 2> gradient_buffers_;
  DeviceArena weight_memory_{Purpose::weights}, gradient_memory_{Purpose::gradients};
};

}  // namespace pentatron
