// The model's parameters, declared once: a name, a global shape, the unit that uses it, and how it is split.
// Everything else follows from the declarations: the slice that a rank holds, its initial value, where it
// lies, what the optimizer updates, what counts in the gradient norm, and how a full tensor is gathered.
//
//   unit     the embedding, one layer, or the head: what a technique moves as a whole
//   group    parameters whose gradients are summed over the same ranks; one device has one group
//   shard    what this rank's optimizer updates of a unit: all of it, or one of equal parts
//
// A group's parameters of a unit lie one after the other as one flat array of weights and, likewise, one of
// gradients (PyTorch's FSDP calls this a flat parameter).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/tensor.h"

namespace pentatron {

// What the tensor axis does with a parameter (one device: read past this until 04). A column-split linear
// layer of Megatron's is split by output, a row-split one by input; an embedding or head by vocabulary. The
// rest is held by all tensor ranks: outside the tensor regions (norms: each rank's gradient is partial
// exactly when the rows are split there) or inside (always partial).
enum class TensorSplit { by_output, by_input, by_vocabulary, held_outside, held_inside };
constexpr bool held_by_all(TensorSplit split) {
  return split == TensorSplit::held_outside || split == TensorSplit::held_inside;
}

struct Declaration {
  std::string name;       // as in Hugging Face's Llama
  int unit;               // 0: embedding, 1 + i: layer i, 1 + layers: head
  int64_t rows, columns;  // global shape: [output features, input features], or [1, features] for a norm
  TensorSplit tensor_split;
  double standard_deviation = 0.0;  // of the initial values; 0: they are all one
  bool decays = true;               // weight decay applies
  int group = 0;
  bool held = true;  // false: only other ranks hold it
};

struct Parameter : Declaration {
  int64_t first_row, first_column;    // where the slice begins in the global matrix
  int64_t local_rows, local_columns;  // its shape; 0 rows where it is not held
  size_t offset;                      // elements from the beginning of the unit's flat array
  size_t local_size() const { return static_cast<size_t>(local_rows) * local_columns; }
};

// Elements [begin, end) of a unit's flat arrays, which this rank's optimizer updates.
struct Shard {
  int group, unit;
  size_t begin, end;
  real* weights;     // element `begin`
  accum* gradients;  // likewise
  size_t size() const { return end - begin; }
};

// The elements of one parameter that lie in a shard.
struct ParameterRange {
  const Parameter* parameter;
  size_t begin_in_parameter, begin_in_shard, size;
};

// Ranks that hold the same parameters and work on different tokens: the sum of their gradients is the
// gradient.
struct Replicas {
  int rank = 0, ranks = 1;
};

class ParameterGroup {
 public:
  ParameterGroup(int number, Replicas replicas) : number_(number), replicas_(replicas) {}

  const Replicas& replicas() const { return replicas_; }
  // With parameters of this group on this rank, ascending.
  const std::vector<int>& units() const { return units_; }
  // Elements of a unit's flat arrays. They are padded, so that equal shards exist for all replicas and begin
  // at multiples of 16 bytes. Padding is never read as a weight and has zero gradients.
  size_t size(int unit) const;
  size_t shard_size(int unit) const { return size(unit) / replicas_.ranks; }
  size_t largest_size() const;  // of all units

  // Where a unit's flat arrays are now, and null while they are nowhere. A technique may bind other memory at
  // any time, so nobody else keeps these pointers.
  real*& weights(int unit) { return flat_[unit].weights; }
  accum*& gradients(int unit) { return flat_[unit].gradients; }

  // Allocates and binds all units whole: each is a shard. Their gradients lie end to end in flat_gradients().
  void allocate();
  AccumTensor flat_gradients() const { return flat_gradients_; }  // [1, size of all units]
  // Or a technique allocates itself, and says what the optimizer is to update. The memory lives as long as
  // this object. Gradients are resident: every step begins by zeroing them.
  real* allocate_weights(size_t size);
  accum* allocate_gradients(size_t size);
  void add_shard(int unit, size_t begin, size_t end, real* weights, accum* gradients);

 private:
  friend class Parameters;
  struct Flat {
    size_t used = 0;  // elements declared so far
    real* weights = nullptr;
    accum* gradients = nullptr;
  };
  // Returns the offset of a parameter of so many elements.
  size_t declare(int unit, size_t size, bool held);

  int number_;
  Replicas replicas_;
  std::vector<Flat> flat_;  // [units of the model]
  std::vector<int> units_;
  std::vector<Shard> shards_;
  DeviceArena weight_memory_{Purpose::weights}, gradient_memory_{Purpose::gradients};
  std::vector<AccumTensor> resident_gradients_;
  AccumTensor flat_gradients_;
};

// How the parameters are split over ranks, and this rank's place. The default is one device.
struct ParameterLayout {
  int tensor_rank = 0, tensor_ranks = 1;
  std::vector<Replicas> groups = {{}};  // [groups]
  std::vector<int> units = {};          // that this rank holds, ascending; none: all
};

class Parameters {
 public:
  explicit Parameters(ParameterLayout layout = {});

  // Returns the parameter's number. Parameters that one product reads together are declared one after the
  // other.
  int declare(const Declaration& declaration);

  void allocate() {
    for (ParameterGroup& group : groups_) group.allocate();
  }

  // Initial values of all shards: the same numbers in every layout.
  void initialise(uint64_t seed, cudaStream_t stream);

  void zero_gradients(cudaStream_t stream);

  ParameterGroup& group(int number = 0) { return groups_[number]; }
  const std::vector<Parameter>& all() const { return parameters_; }
  const Parameter& operator[](int id) const { return parameters_[id]; }
  int64_t global_size() const;  // elements of the whole model
  const ParameterLayout& layout() const { return layout_; }

  // The local slice of a parameter, or of `count` parameters with the same columns as one matrix. Looked up
  // at each use, never kept; without memory while its unit is bound to none.
  Tensor weights(int id, int count = 1) const;
  AccumTensor gradients(int id, int count = 1) const;

  // The walk that optimizer, clipping, norm and gathering share: the shards of all groups, and the parameters
  // that lie in each, in order.
  std::vector<Shard> shards() const;
  std::vector<ParameterRange> ranges(const Shard& shard) const;
  // Those that this rank counts when something is summed over all ranks, so that each element of the model
  // counts once.
  std::vector<ParameterRange> counted_ranges(const Shard& shard) const;

 private:
  ParameterLayout layout_;
  std::vector<Parameter> parameters_;
  std::vector<ParameterGroup> groups_;
};

}  // namespace pentatron
