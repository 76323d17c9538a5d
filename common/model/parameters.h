// The model's parameters, declared once: a name, a global shape, the unit that uses it, and how each axis of
// the mesh treats it. Everything else follows from the declarations: the slice that a rank holds, its initial
// value, where it lies, what the optimizer updates, what counts in the gradient norm, and how a full tensor
// is gathered.
//
// A unit (the embedding, one layer, the head) is what techniques move as a whole. Its parameters lie one
// after the other in two flat spans, of weights and, likewise, of gradients: the dense parameters, whose
// gradients are summed over data x context, and the experts, summed over their own group. A bucket or a ZeRO
// shard is a range of a span; a piece is the range that this rank's optimizer owns.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "device/tensor.h"

namespace pentatron {

// What the tensor axis does with a parameter. A column-split linear layer of Megatron's is split by output, a
// row-split one by input; an embedding or head by vocabulary. The rest is held by all ranks: outside the
// tensor regions (norms: each rank's gradient is partial exactly when sequence parallelism splits the rows)
// or inside (a router: always partial).
enum class TensorSplit { by_output, by_input, by_vocabulary, held_outside, held_inside };
constexpr bool held_by_all(TensorSplit split) {
  return split == TensorSplit::held_outside || split == TensorSplit::held_inside;
}

constexpr int not_an_expert = -1;

struct Declaration {
  std::string name;       // as in Hugging Face's Llama
  int unit;               // 0: embedding, 1 + i: layer i, 1 + layers: head
  int64_t rows, columns;  // global shape: [output features, input features], or [1, features] for a norm
  TensorSplit tensor_split;
  int expert = not_an_expert;       // the expert axis holds it on the one rank that owns this expert
  double standard_deviation = 0.0;  // of the initial values; 0: they are all one
  bool decays = true;               // weight decay applies
};

// This rank's place on the axes that split parameters or share out their optimizer.
struct ParameterMesh {
  int tensor_rank = 0, tensor_ranks = 1;
  int expert_rank = 0, expert_ranks = 1;
  int experts = 0;
  // Data x context, over which gradients are summed; for the experts their own group. Spans are padded so
  // that this many equal shards exist.
  int shard_rank = 0, shard_ranks = 1;
  int expert_shard_rank = 0, expert_shard_ranks = 1;
};

enum class Span { dense, experts };
constexpr int spans = 2;

struct Parameter : Declaration {
  int64_t first_row, first_column;    // where the slice begins in the global matrix
  int64_t local_rows, local_columns;  // its shape, 0 rows where another expert rank owns it
  size_t offset;                      // elements from the beginning of its span
  Span span() const { return expert == not_an_expert ? Span::dense : Span::experts; }
  size_t local_size() const { return static_cast<size_t>(local_rows) * local_columns; }
};

// A unit's two spans in memory. Null until something binds them: all at once here, unit by unit under ZeRO.
struct UnitStorage {
  real* weights[spans] = {};
  accum* gradients[spans] = {};
};

// A range of a span that this rank's optimizer updates.
struct Piece {
  int unit;
  Span span;
  size_t begin, end;  // elements of the span
  real* weights;      // element `begin`
  accum* gradients;   // likewise
  bool sharded;       // other data x context ranks own the rest of the span
};

// The part of a parameter that lies in a piece.
struct Crossing {
  const Parameter* parameter;
  size_t begin_in_parameter, begin_in_piece, size;  // elements
};

class Parameters {
 public:
  explicit Parameters(ParameterMesh mesh = {}) : mesh_(mesh) {}

  // Returns the parameter's number. Parameters that one product reads together are declared one after the
  // other.
  int declare(const Declaration& declaration);

  // Allocates and binds weights and gradients of these units, in ascending order, whole, and makes a piece of
  // each span. The gradients of a span lie one unit after the other.
  void allocate(Span span, const std::vector<int>& units);
  void allocate(const std::vector<int>& units) {
    for (const Span span : {Span::dense, Span::experts}) allocate(span, units);
  }
  void allocate() { allocate(all_units()); }

  // Memory that lives as long as this object. Gradients are resident: every step begins by zeroing them.
  real* allocate_weights(size_t size);
  accum* allocate_gradients(size_t size);

  // Initial values of all pieces: the same numbers in every layout.
  void initialise(uint64_t seed, cudaStream_t stream);

  void zero_gradients(cudaStream_t stream);

  int units() const { return static_cast<int>(storage_.size()); }
  std::vector<int> all_units() const;  // 0, 1, ... units() - 1
  const std::vector<Parameter>& all() const { return parameters_; }
  const Parameter& operator[](int id) const { return parameters_[id]; }
  int find(const std::string& name) const;  // -1 where there is none
  int64_t global_size() const;              // elements of the whole model
  const ParameterMesh& mesh() const { return mesh_; }

  // Elements of a span with its padding, which is never read as a weight and has zero gradients; of one shard
  // of it.
  size_t span_size(int unit, Span span) const;
  size_t shard_size(int unit, Span span) const { return span_size(unit, span) / shards(span); }
  int shards(Span span) const { return span == Span::dense ? mesh_.shard_ranks : mesh_.expert_shard_ranks; }
  int shard(Span span) const { return span == Span::dense ? mesh_.shard_rank : mesh_.expert_shard_rank; }

  // The local slice of a parameter, or of `count` parameters with the same columns as one matrix. Looked up
  // at each use, never kept, because ZeRO binds other memory.
  Tensor weights(int id, int count = 1) const;
  Statistics gradients(int id, int count = 1) const;

  // The gradients of a unit's span, and those of all units in the order of units (after `allocate`); [1,
  // size].
  Statistics unit_gradients(int unit, Span span) const;
  Statistics flat_gradients(Span span) const { return flat_gradients_[static_cast<int>(span)]; }

  UnitStorage& storage(int unit) { return storage_[unit]; }
  std::vector<Piece>& pieces() { return pieces_; }
  const std::vector<Piece>& pieces() const { return pieces_; }

  // The walk that optimizer, clipping, norm and gathering share: which parameters a piece crosses, in order.
  std::vector<Crossing> crossings(const Piece& piece) const;
  // Those that this rank counts when something is summed over all ranks, so that each element of the model
  // counts once.
  std::vector<Crossing> counted_crossings(const Piece& piece) const;

 private:
  // A piece that is not sharded is held by every rank of its group, and one of them counts it; likewise the
  // parameters that the tensor ranks do not split.
  bool counts(const Piece& piece) const;
  bool counts(const Parameter& parameter) const;

  ParameterMesh mesh_;
  std::vector<Parameter> parameters_;
  std::vector<UnitStorage> storage_;             // [units]
  std::vector<std::array<size_t, spans>> used_;  // [units]: elements declared so far
  std::vector<Piece> pieces_;
  DeviceArena weight_memory_{Purpose::weights}, gradient_memory_{Purpose::gradients};
  std::vector<Statistics> resident_gradients_;
  std::array<Statistics, spans> flat_gradients_;  // those that `allocate` made last
};

}  // namespace pentatron
