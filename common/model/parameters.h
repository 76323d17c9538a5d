// Each parameter of the model is declared once: name, global shape, unit, and how it is split. The
// declarations determine the rest: the slice that a rank holds, its initial values, its place in memory, what
// the optimizer updates, what counts in the gradient norm, and how a full tensor is gathered.
//
//   unit     the embedding, one layer, or the head; techniques communicate whole units
//   group    parameters whose gradients are summed over the same ranks; one device has one group
//   shard    the part of a unit that this rank's optimizer updates: all of it, or one of equal parts
//
// A unit has one flat array of weights for each group, and one of gradients. The parameters lie in it one
// after the other (FlatParameter in PyTorch's FSDP1).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "device/tensor.h"
#include "kernels/loss.h"

namespace pentatron {

// ---- One parameter ----------------------------------------------------------------------------------------

// How the tensor ranks split a parameter (used from 04 on). Megatron's column-parallel linear layer is split
// by output, its row-parallel one by input, embedding and head by vocabulary. The rest is replicated: all
// tensor ranks hold it whole. Outside the tensor regions (norms) the gradient is partial only if the ranks
// split the rows there; inside them it is always partial.
enum class TensorSplit { by_output, by_input, by_vocabulary, replicated_outside, replicated_inside };
constexpr bool is_replicated(TensorSplit split) {
  return split == TensorSplit::replicated_outside || split == TensorSplit::replicated_inside;
}

struct StepFactors;  // kernels/optimizer_step.h

// A step of some elements of a parameter, with the arguments of sgd_step there.
using OwnStep = std::function<void(real* weights, accum* master, const accum* gradients,
                                   const StepFactors* factors, size_t size, cudaStream_t stream)>;

struct Declaration {
  std::string name;       // the name in Hugging Face's Llama
  int unit;               // 0: embedding, 1 + i: layer i, 1 + layers: head
  int64_t rows, columns;  // global shape: [output features, input features], or [1, features] for a norm
  TensorSplit tensor_split;
  double standard_deviation = 0.0;  // the initial values have it; 0: they are all 1
  bool decays = true;               // weight decay applies
  int group = 0;
  bool held = true;  // false: only other ranks hold it
  // If set, it takes the place of the optimizer's step. Then the gradient is no slope, so no norm counts it,
  // and the parameter begins at 0.
  OwnStep own_step = {};
};

struct Parameter : Declaration {
  int64_t first_row, first_column;    // where the slice begins in the global matrix
  int64_t local_rows, local_columns;  // the slice's shape; 0 rows where it is not held
  size_t offset;                      // the slice begins here in the unit's flat array, in elements
  size_t local_size() const { return static_cast<size_t>(local_rows) * local_columns; }
};

// ---- From 02 on: who holds what ---------------------------------------------------------------------------

// Replicas are ranks that hold the same parameters and compute on different tokens. The sum of their
// gradients is the gradient. This is number `rank` of `ranks` replicas, which may own a shard each. More
// replicas form more such groups, of which this is number `shard_group`.
struct Replicas {
  int rank = 0, ranks = 1, shard_group = 0;
};

// How the parameters are split over ranks, and which rank this is. The default is one device.
struct ParameterLayout {
  int tensor_rank = 0, tensor_ranks = 1;
  std::vector<Replicas> groups = {{}};  // [groups]
  std::vector<int> units = {};          // units on this rank, ascending; empty: all
};

// ---- Where parameters lie: units and their shards ---------------------------------------------------------

// Elements [begin, end) of a unit's flat arrays, which this rank's optimizer updates.
struct Shard {
  int group, unit;
  size_t begin, end;
  real* weights;     // points to element `begin`
  accum* gradients;  // points to element `begin`
  size_t size() const { return end - begin; }
};

// The elements of one parameter that lie in a shard.
struct ParameterRange {
  const Parameter* parameter;
  size_t begin_in_parameter, begin_in_shard, size;
};

class ParameterGroup {
 public:
  ParameterGroup(int number, Replicas replicas) : number_(number), replicas_(replicas) {}

  const Replicas& replicas() const { return replicas_; }
  // The units of which this rank holds parameters of this group, ascending.
  const std::vector<int>& units() const { return units_; }
  // Elements of a unit's flat arrays, padding included. With the padding all replicas have equal shards,
  // which begin at multiples of 16 bytes. No product reads the padding, and no norm counts it.
  size_t size(int unit) const;
  size_t shard_size(int unit) const { return size(unit) / replicas_.ranks; }
  size_t largest_size() const;  // elements of the largest unit

  // Pointers to a unit's flat arrays, null while it has no memory. A technique may change them at any
  // time, so do not keep copies.
  real*& weights(int unit) { return flat_[unit].weights; }
  accum*& gradients(int unit) { return flat_[unit].gradients; }
  // Takes a micro-batch's gradients out of the sum of the step, and their memory back: the next micro-batch
  // assigns its gradients instead of adding them.
  void take_gradients(int unit) {
    flat_[unit].gradients = nullptr;
    flat_[unit].add = false;
  }

  // Allocates all units whole; each is one shard. flat_gradients() holds their gradients end to end.
  void allocate();
  AccumTensor flat_gradients() const { return flat_gradients_; }  // [1, size of all units]
  // Instead of allocate(), a technique can call these three. The memory, of `size` elements, lives as long as
  // this object. add_shard: the optimizer updates elements [begin, end) of a unit; pointers are to `begin`.
  real* allocate_weights(size_t size) { return weight_memory_.matrix<real>(1, size).data; }
  accum* allocate_gradients(size_t size) { return gradient_memory_.matrix<accum>(1, size).data; }
  void add_shard(int unit, size_t begin, size_t end, real* weights, accum* gradients) {
    shards_.push_back({number_, unit, begin, end, weights, gradients});
  }

 private:
  friend class Parameters;
  struct Flat {
    size_t used = 0;  // elements declared so far
    real* weights = nullptr;
    accum* gradients = nullptr;
    bool add = false;  // the gradients are a sum of this step: the next micro-batch is added, else assigned
  };
  // Adds a parameter of `size` elements to a unit. Returns its offset.
  size_t declare(int unit, size_t size, bool held);

  int number_;
  Replicas replicas_;
  std::vector<Flat> flat_;  // [units of the model]
  std::vector<int> units_;
  std::vector<Shard> shards_;
  DeviceArena weight_memory_{Purpose::weights}, gradient_memory_{Purpose::gradients};
  AccumTensor flat_gradients_;
};

// ---- All parameters ---------------------------------------------------------------------------------------

class Parameters {
 public:
  explicit Parameters(ParameterLayout layout = {});

  // Returns the parameter's number. Several that a product uses as one matrix are declared in sequence.
  int declare(const Declaration& declaration);

  void allocate() {
    for (ParameterGroup& group : groups_) group.allocate();
  }

  // Writes the initial values of all shards. Every layout gets the same numbers.
  void initialise(uint64_t seed, cudaStream_t stream);

  ParameterGroup& group(int number = 0) { return groups_[number]; }
  const std::vector<Parameter>& all() const { return parameters_; }
  const Parameter& operator[](int id) const { return parameters_[id]; }
  int64_t global_size() const;  // elements of the whole model
  const ParameterLayout& layout() const { return layout_; }

  // The local slice of a parameter, or of `count` parameters with equal columns as one matrix: [local rows,
  // local columns]. Its data is null while the unit has no memory. Call this at each use: it may move.
  Tensor weights(int id, int count = 1) const;
  Gradient gradients(int id, int count = 1) const;
  // By what the gradients are multiplied; null: by nothing.
  const LossScale* loss_scale() const { return loss_scale_; }
  void set_loss_scale(const LossScale* scale) { loss_scale_ = scale; }
  // All gradients of the unit have been written for a micro-batch. Unless it was the step's `last` one, the
  // next micro-batch adds to them.
  void end_gradients(int unit, bool last);

  // The shards of all groups, and the parts of parameters in a shard, in order.
  std::vector<Shard> shards() const;
  std::vector<ParameterRange> ranges(const Shard& shard) const;
  // All weights that this rank holds now: whole units where they have memory, and shards of the others.
  std::vector<Shard> held() const;
  // The ranges that this rank counts in a sum over all ranks, such as the norm: each element of the model
  // counts on one rank. Where several ranks hold it (a whole unit, a matrix that is not split), the first
  // of them counts it.
  std::vector<ParameterRange> counted_ranges(const Shard& shard) const;

 private:
  ParameterLayout layout_;
  std::vector<Parameter> parameters_;
  std::vector<ParameterGroup> groups_;
  const LossScale* loss_scale_ = nullptr;
};

}  // namespace pentatron
