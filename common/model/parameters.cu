#include <numeric>

#include "kernels/kernels.h"
#include "model/parameters.h"

namespace pentatron {
namespace {

// The part of `size` that rank `rank` of `ranks` holds begins at rank * size / ranks; sizes are checked to
// divide.
int64_t share(int64_t size, int ranks) { return size / ranks; }

size_t round_up(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

}  // namespace

int Parameters::declare(const Declaration& declaration) {
  Parameter p{declaration, 0, 0, declaration.rows, declaration.columns, 0};
  switch (p.tensor_split) {
    case TensorSplit::by_output:
    case TensorSplit::by_vocabulary:
      p.local_rows = share(p.rows, mesh_.tensor_ranks);
      p.first_row = mesh_.tensor_rank * p.local_rows;
      break;
    case TensorSplit::by_input:
      p.local_columns = share(p.columns, mesh_.tensor_ranks);
      p.first_column = mesh_.tensor_rank * p.local_columns;
      break;
    case TensorSplit::held_outside:
    case TensorSplit::held_inside:
      break;
  }
  const bool elsewhere =
      p.expert != not_an_expert && p.expert / (mesh_.experts / mesh_.expert_ranks) != mesh_.expert_rank;
  if (elsewhere) p.local_rows = 0;
  if (p.unit >= units()) {
    storage_.resize(p.unit + 1);
    used_.resize(p.unit + 1);
  }
  size_t& used = used_[p.unit][static_cast<int>(p.span())];
  p.offset = used;
  used += p.local_size();
  parameters_.push_back(p);
  return static_cast<int>(parameters_.size()) - 1;
}

size_t Parameters::span_size(int unit, Span span) const {
  constexpr size_t elements_in_16_bytes =
      16 / sizeof(real);  // 16 bytes of weights are at least 16 bytes of gradients
  return round_up(used_[unit][static_cast<int>(span)], shards(span) * elements_in_16_bytes);
}

real* Parameters::allocate_weights(size_t size) { return weight_memory_.matrix<real>(1, size).data; }

accum* Parameters::allocate_gradients(size_t size) {
  resident_gradients_.push_back(gradient_memory_.matrix<accum>(1, size));
  return resident_gradients_.back().data;
}

void Parameters::allocate(Span span, const std::vector<int>& units) {
  size_t size = 0;
  for (const int unit : units) size += span_size(unit, span);
  if (size == 0) return;
  real* weights = allocate_weights(size);
  accum* gradients = allocate_gradients(size);
  flat_gradients_[static_cast<int>(span)] = resident_gradients_.back();
  for (const int unit : units) {
    const size_t of_unit = span_size(unit, span);
    if (of_unit == 0) continue;
    storage_[unit].weights[static_cast<int>(span)] = weights;
    storage_[unit].gradients[static_cast<int>(span)] = gradients;
    pieces_.push_back({unit, span, 0, of_unit, weights, gradients, false});
    weights += of_unit;
    gradients += of_unit;
  }
}

void Parameters::initialise(uint64_t seed, cudaStream_t stream) {
  for (const Piece& piece : pieces_) {
    fill_constant(piece.weights, piece.end - piece.begin, 0, stream);  // for the padding
    for (const Crossing& c : crossings(piece)) {
      const Parameter& p = *c.parameter;
      if (p.standard_deviation == 0) {
        fill_constant(piece.weights + c.begin_in_piece, c.size, 1, stream);
      } else {
        const GlobalSlice slice = {p.local_columns, p.first_row, p.first_column, p.columns};
        fill_normal(piece.weights + c.begin_in_piece, c.begin_in_parameter, c.size, slice,
                    philox_key(seed, p.name), p.standard_deviation, stream);
      }
    }
  }
}

void Parameters::zero_gradients(cudaStream_t stream) {
  for (const Statistics& gradients : resident_gradients_) {
    CUDA_CHECK(cudaMemsetAsync(gradients.data, 0, gradients.bytes(), stream));
  }
}

bool Parameters::counts(const Piece& piece) const { return piece.sharded || shard(piece.span) == 0; }

bool Parameters::counts(const Parameter& parameter) const {
  return !held_by_all(parameter.tensor_split) || mesh_.tensor_rank == 0;
}

std::vector<int> Parameters::all_units() const {
  std::vector<int> all(units());
  std::iota(all.begin(), all.end(), 0);
  return all;
}

int Parameters::find(const std::string& name) const {
  for (size_t id = 0; id < parameters_.size(); ++id) {
    if (parameters_[id].name == name) return static_cast<int>(id);
  }
  return -1;
}

int64_t Parameters::global_size() const {
  return std::accumulate(parameters_.begin(), parameters_.end(), int64_t{0},
                         [](int64_t sum, const Parameter& p) { return sum + p.rows * p.columns; });
}

Tensor Parameters::weights(int id, int count) const {
  const Parameter& p = parameters_[id];
  int64_t rows = 0;
  for (int i = id; i < id + count; ++i) rows += parameters_[i].local_rows;
  return {storage_[p.unit].weights[static_cast<int>(p.span())] + p.offset, rows, p.local_columns};
}

Statistics Parameters::gradients(int id, int count) const {
  const Tensor shape = weights(id, count);
  const Parameter& p = parameters_[id];
  return {storage_[p.unit].gradients[static_cast<int>(p.span())] + p.offset, shape.rows, shape.columns};
}

Statistics Parameters::unit_gradients(int unit, Span span) const {
  return {storage_[unit].gradients[static_cast<int>(span)], 1, static_cast<int64_t>(span_size(unit, span))};
}

std::vector<Crossing> Parameters::crossings(const Piece& piece) const {
  std::vector<Crossing> result;
  for (const Parameter& p : parameters_) {
    if (p.unit != piece.unit || p.span() != piece.span) continue;
    const size_t begin = std::max(piece.begin, p.offset),
                 end = std::min(piece.end, p.offset + p.local_size());
    if (begin < end) result.push_back({&p, begin - p.offset, begin - piece.begin, end - begin});
  }
  return result;
}

std::vector<Crossing> Parameters::counted_crossings(const Piece& piece) const {
  if (!counts(piece)) return {};
  std::vector<Crossing> result = crossings(piece);
  std::erase_if(result, [this](const Crossing& c) { return !counts(*c.parameter); });
  return result;
}

}  // namespace pentatron
