// ZeRO (Rajbhandari et al., 2020): data-parallel ranks need not all hold the same optimizer states, gradients
// and weights. With n ranks, of every unit rank r owns part r of n equal parts, and
//
//   stage 0   holds everything; gradients are all-reduced (data parallelism)
//   stage 1   updates its part alone: reduce-scatter of the gradients, then all-gather of the weights
//   stage 2   keeps its part of the gradients alone: a unit's are reduced and dropped in each backward
//   stage 3   keeps its part of the weights alone: a unit's are gathered before use, at most two at once
//
// The model asks for weights(unit) and gradients(unit) at each use; here is where they are bound to what is
// there.
#pragma once

#include <array>
#include <vector>

#include "kernels/kernels.h"
#include "model/seams.h"
#include "ranks/comm.h"

namespace pentatron {

// What ZeRO is about, where that is not the whole model. A rank of a pipeline holds some units; experts are a
// span with ranks of their own; and if weights are `kept`, stage 3 gathers a unit once a step, not for every
// pass of every micro-batch, for which a pipeline has no time.
struct ZeroScope {
  Span span = Span::dense;
  std::vector<int> units = {};  // none: all
  bool kept = false;
};

class Zero : public UnitHooks {
 public:
  // Allocates weights and gradients of one span as the stage says, and makes this rank's parts the pieces of
  // the optimizer. `data`: the ranks that share them out.
  Zero(int stage, Parameters& parameters, Communicator& data, cudaStream_t compute, ZeroScope scope = {})
      : stage_(stage),
        parameters_(parameters),
        span_(scope.span),
        kept_(scope.kept),
        data_(data),
        compute_(compute),
        units_(parameters.units()),
        slots_(kept_ ? parameters.units() : 2) {
    const std::vector<int> held = scope.units.empty() ? parameters_.all_units() : scope.units;
    if (stage_ == 0) {
      parameters_.allocate(span_, held);
      return;
    }
    for (const int unit : held) allocate(unit);
    if (stage_ >= 2) {
      for (GradientSlot& slot : gradient_slots_)
        slot.gradients = gradient_memory_.matrix<accum>(1, largest_unit()).data;
    }
    if (stage_ == 3) allocate_slots();
  }

  // ---- Weights

  // After the optimizer has written this rank's parts (or initialised them): everybody gets all parts. Stages
  // 1 and 2 gather at once, unit by unit, and forward waits for each unit as it comes to it. Stage 3 forgets
  // what was gathered before.
  void weights_changed() override {
    if (stage_ == 0) return;
    data_.wait_for(compute_);
    for (Slot& slot : slots_) slot.unit = none;
    if (stage_ == 3) return;
    for (int unit = 0; unit < parameters_.units(); ++unit) {
      if (!holds(unit)) continue;
      gather(unit, weights(unit));
      units_[unit].gathered.record(data_.stream());
    }
  }

  void before_weights(int unit, Pass pass) override {
    if (stage_ == 0 || !holds(unit)) return;
    if (stage_ == 3) {
      const int next = neighbour(unit, pass);
      weights(unit) = slot_with(unit, next).weights;
      if (next != none) slot_with(next, unit);
    }
    units_[unit].gathered.make_wait(compute_);
  }

  void after_weights(int unit, Pass) override {
    if (stage_ != 3 || !holds(unit)) return;
    slot_with(unit, none).free.record(compute_);
    weights(unit) = nullptr;
  }

  // ---- Gradients

  void before_gradients(int unit) override {
    if (stage_ < 2 || !holds(unit)) return;
    const GradientSlot& slot = gradient_slot(unit);
    slot.free.make_wait(compute_);
    gradients(unit) = slot.gradients;
    CUDA_CHECK(cudaMemsetAsync(slot.gradients, 0, size(unit) * sizeof(accum), compute_));
  }

  void after_gradients(int unit, bool last) override {
    accum*& all = gradients(unit);
    if (all == nullptr) return;  // nothing of this span
    if (stage_ >= 2) {
      data_.wait_for(compute_);
      reduce_scatter(unit, all);
      accumulate(all + own_begin(unit), units_[unit].own_gradients, own_size(unit), data_.stream());
      gradient_slot(unit).free.record(data_.stream());
      all = nullptr;
    } else if (last) {
      data_.wait_for(compute_);
      if (stage_ == 0) data_.all_reduce(all, all, size(unit));
      if (stage_ == 1) reduce_scatter(unit, all);
    }
  }

  // After the last micro-batch: whatever `compute` does next has the global gradient of this rank's parts.
  void finish() override { data_.release(compute_); }

 private:
  static constexpr int none = -1;

  // Memory for one gathered unit (stage 3).
  struct Slot {
    real* weights = nullptr;  // [largest unit]
    int unit = none;          // whose weights are, or are about to be, here
    Event free;               // compute has used them
  };

  // Memory for one unit's gradients until they are reduced (stages 2 and 3).
  struct GradientSlot {
    accum* gradients = nullptr;  // [largest unit]
    Event free;                  // what they held has been reduced
  };

  struct UnitState {
    real* own_weights = nullptr;     // [own_size]: this rank's part
    accum* own_gradients = nullptr;  // likewise
    Event gathered;                  // all parts have come
  };

  real*& weights(int unit) { return parameters_.storage(unit).weights[static_cast<int>(span_)]; }
  accum*& gradients(int unit) { return parameters_.storage(unit).gradients[static_cast<int>(span_)]; }
  size_t size(int unit) const { return parameters_.span_size(unit, span_); }
  bool holds(int unit) const { return units_[unit].own_weights != nullptr; }

  // The unit with weights of this span that is used after this one: the next higher one here or, in backward,
  // which skips the embedding, the next lower one.
  int neighbour(int unit, Pass pass) const {
    const int step = pass == Pass::forward ? 1 : -1;
    for (int next = unit + step; next > embedding_unit && next < parameters_.units(); next += step) {
      if (holds(next)) return next;
    }
    return none;
  }

  size_t own_size(int unit) const { return size(unit) / data_.ranks(); }
  size_t own_begin(int unit) const { return data_.rank() * own_size(unit); }

  size_t largest_unit() const {
    size_t largest = 0;
    for (int unit = 0; unit < parameters_.units(); ++unit) {
      if (holds(unit)) largest = std::max(largest, size(unit));
    }
    return largest;
  }

  void allocate(int unit) {
    if (size(unit) == 0) return;
    UnitState& u = units_[unit];
    if (stage_ < 3) {
      weights(unit) = parameters_.allocate_weights(size(unit));
      u.own_weights = weights(unit) + own_begin(unit);
    } else {
      u.own_weights = parameters_.allocate_weights(own_size(unit));
    }
    if (stage_ < 2) {
      gradients(unit) = parameters_.allocate_gradients(size(unit));
      u.own_gradients = gradients(unit) + own_begin(unit);
    } else {
      u.own_gradients = parameters_.allocate_gradients(own_size(unit));
    }
    parameters_.pieces().push_back({unit, span_, own_begin(unit), own_begin(unit) + own_size(unit),
                                    u.own_weights, u.own_gradients, true});
  }

  // NCCL's in-place forms: the own part already lies, or comes to lie, where it belongs.
  void gather(int unit, real* all) { data_.all_gather(units_[unit].own_weights, all, own_size(unit)); }
  void reduce_scatter(int unit, accum* all) {
    data_.reduce_scatter(all, all + own_begin(unit), own_size(unit));
  }

  // Neighbours have different ones: backward writes one unit's gradients while the other's are reduced.
  GradientSlot& gradient_slot(int unit) { return gradient_slots_[unit % 2]; }

  // Two for any units or, if weights are kept, one for each.
  void allocate_slots() {
    for (int i = 0; i < std::ssize(slots_); ++i) {
      if (!kept_) slots_[i].weights = weight_memory_.matrix<real>(1, largest_unit()).data;
      if (kept_ && holds(i)) slots_[i].weights = weight_memory_.matrix<real>(1, size(i)).data;
    }
  }

  // The slot with this unit's weights. If none has them, they are gathered, on the communication stream, into
  // one that does not hold unit `other`.
  Slot& slot_with(int unit, int other) {
    Slot& slot = slot_for(unit, other);
    if (slot.unit == unit) return slot;
    slot.unit = unit;
    slot.free.make_wait(data_.stream());
    gather(unit, slot.weights);
    units_[unit].gathered.record(data_.stream());
    return slot;
  }
  Slot& slot_for(int unit, int other) {
    if (kept_) return slots_[unit];
    for (Slot& slot : slots_) {
      if (slot.unit == unit) return slot;
    }
    return slots_[slots_[0].unit == other];
  }

  int stage_;
  Parameters& parameters_;
  Span span_;
  bool kept_;
  Communicator& data_;
  cudaStream_t compute_;
  std::vector<UnitState> units_;
  std::vector<Slot> slots_;
  std::array<GradientSlot, 2> gradient_slots_;
  DeviceArena weight_memory_{Purpose::weights}, gradient_memory_{Purpose::gradients};
};

}  // namespace pentatron
