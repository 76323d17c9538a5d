#include <numeric>

#include "kernels/elementwise.h"
#include "model/parameters.h"

namespace pentatron {

// ---- ParameterGroup ---------------------------------------------------------------------------------------

size_t ParameterGroup::declare(int unit, size_t size, bool held) {
  if (unit >= std::ssize(flat_)) flat_.resize(unit + 1);
  const size_t offset = flat_[unit].used;
  flat_[unit].used += size;
  if (held && size > 0 && (units_.empty() || units_.back() < unit)) units_.push_back(unit);
  return offset;
}

size_t ParameterGroup::size(int unit) const {
  if (unit >= std::ssize(flat_)) return 0;
  // A multiple of 16 bytes of weights is one of gradients, too: an `accum` is never smaller than a `real`.
  const size_t multiple = replicas_.ranks * (16 / sizeof(real));
  return (flat_[unit].used + multiple - 1) / multiple * multiple;
}

size_t ParameterGroup::largest_size() const {
  size_t largest = 0;
  for (const int unit : units_) largest = std::max(largest, size(unit));
  return largest;
}

void ParameterGroup::allocate() {
  size_t all = 0;
  for (const int unit : units_) all += size(unit);
  if (all == 0) return;
  real* weights_end = allocate_weights(all);
  accum* gradients_end = allocate_gradients(all);
  flat_gradients_ = {gradients_end, 1, static_cast<int64_t>(all)};
  for (const int unit : units_) {
    weights(unit) = weights_end;
    gradients(unit) = gradients_end;
    add_shard(unit, 0, size(unit), weights_end, gradients_end);
    weights_end += size(unit);
    gradients_end += size(unit);
  }
}

// ---- Parameters -------------------------------------------------------------------------------------------

Parameters::Parameters(ParameterLayout layout) : layout_(std::move(layout)) {
  for (const Replicas& replicas : layout_.groups)
    groups_.emplace_back(static_cast<int>(groups_.size()), replicas);
}

int Parameters::declare(const Declaration& declaration) {
  Parameter p{declaration, 0, 0, declaration.rows, declaration.columns, 0};
  if (p.tensor_split == TensorSplit::by_output || p.tensor_split == TensorSplit::by_vocabulary) {
    p.local_rows = p.rows / layout_.tensor_ranks;  // sizes are checked to divide
    p.first_row = layout_.tensor_rank * p.local_rows;
  } else if (p.tensor_split == TensorSplit::by_input) {
    p.local_columns = p.columns / layout_.tensor_ranks;
    p.first_column = layout_.tensor_rank * p.local_columns;
  }
  if (!p.held) p.local_rows = 0;
  const std::vector<int>& units = layout_.units;
  const bool unit_is_here = units.empty() || std::binary_search(units.begin(), units.end(), p.unit);
  p.offset = groups_[p.group].declare(p.unit, p.local_size(), unit_is_here);
  parameters_.push_back(p);
  return static_cast<int>(parameters_.size()) - 1;
}

void Parameters::initialise(uint64_t seed, cudaStream_t stream) {
  for (const Shard& shard : shards()) {
    fill_constant(shard.weights, shard.size(), 0, stream);  // so that the padding is zero
    for (const ParameterRange& range : ranges(shard)) {
      const Parameter& p = *range.parameter;
      real* const weights = shard.weights + range.begin_in_shard;
      if (p.standard_deviation == 0) {
        fill_constant(weights, range.size, p.own_step ? 0 : 1, stream);
      } else {
        const GlobalSlice slice = {p.local_columns, p.first_row, p.first_column, p.columns};
        fill_normal(weights, range.begin_in_parameter, range.size, slice, philox_key(seed, p.name),
                    p.standard_deviation, stream);
      }
    }
  }
}

void Parameters::end_gradients(int unit, bool last) {
  for (ParameterGroup& group : groups_) {
    if (unit < std::ssize(group.flat_)) group.flat_[unit].add = !last;
  }
}

int64_t Parameters::global_size() const {
  return std::accumulate(parameters_.begin(), parameters_.end(), int64_t{0},
                         [](int64_t sum, const Parameter& p) { return sum + p.rows * p.columns; });
}

Tensor Parameters::weights(int id, int count) const {
  const Parameter& p = parameters_[id];
  int64_t rows = 0;
  for (int i = id; i < id + count; ++i) rows += parameters_[i].local_rows;
  real* const flat = groups_[p.group].flat_[p.unit].weights;
  return {flat == nullptr ? nullptr : flat + p.offset, rows, p.local_columns};
}

Gradient Parameters::gradients(int id, int count) const {
  const Tensor shape = weights(id, count);
  const Parameter& p = parameters_[id];
  const ParameterGroup::Flat& flat = groups_[p.group].flat_[p.unit];
  accum* const data = flat.gradients == nullptr ? nullptr : flat.gradients + p.offset;
  return {{data, shape.rows, shape.columns}, flat.add};
}

std::vector<Shard> Parameters::shards() const {
  std::vector<Shard> all;
  for (const ParameterGroup& group : groups_)
    all.insert(all.end(), group.shards_.begin(), group.shards_.end());
  return all;
}

std::vector<Shard> Parameters::held() const {
  std::vector<Shard> all = shards();
  for (Shard& shard : all) {
    const ParameterGroup& group = groups_[shard.group];
    real* const whole = group.flat_[shard.unit].weights;
    if (whole != nullptr) shard = {shard.group, shard.unit, 0, group.size(shard.unit), whole, nullptr};
  }
  return all;
}

std::vector<ParameterRange> Parameters::ranges(const Shard& shard) const {
  std::vector<ParameterRange> result;
  for (const Parameter& p : parameters_) {
    if (p.unit != shard.unit || p.group != shard.group) continue;
    const size_t begin = std::max(shard.begin, p.offset),
                 end = std::min(shard.end, p.offset + p.local_size());
    if (begin < end) result.push_back({&p, begin - p.offset, begin - shard.begin, end - begin});
  }
  return result;
}

std::vector<ParameterRange> Parameters::counted_ranges(const Shard& shard) const {
  const ParameterGroup& group = groups_[shard.group];
  const Replicas& replicas = group.replicas();
  const bool whole = shard.size() == group.size(shard.unit);  // all replicas hold it; the first counts it
  if (replicas.shard_group > 0 || (whole && replicas.rank > 0)) return {};
  std::vector<ParameterRange> result = ranges(shard);
  if (layout_.tensor_rank > 0)  // all tensor ranks hold these, so only the first counts them
    std::erase_if(result, [](const ParameterRange& r) { return held_by_all(r.parameter->tensor_split); });
  return result;
}

}  // namespace pentatron
