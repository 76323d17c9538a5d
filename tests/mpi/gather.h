// Gathers all parameters, whole, on the host of every rank. Each rank contributes what it updates: it
// walks over its shards and the parameters in them, as the optimizer does. So this file does not know how
// a technique lays the shards out.
#pragma once

#include <map>
#include <vector>

#include "model.h"
#include "model/parameters.h"
#include "ranks/comm.h"

namespace pentatron {

enum class Content { weights, gradients };

// Returns each parameter's elements, [rows, columns] of its global shape, by its id. All ranks call this.
// The host waits for `stream`, which made the content.
inline std::vector<std::vector<double>> gather_parameters(const World& world, const Parameters& parameters,
                                                          Content content, cudaStream_t stream) {
  std::map<const Parameter*, size_t> begins;  // of each parameter in `all`, so that one sum does
  size_t size = 0;
  for (const Parameter& p : parameters.all()) {
    begins[&p] = size;
    size += p.rows * p.columns;
  }
  std::vector<double> all(size);
  for (const Shard& shard : parameters.shards()) {
    const std::vector<double> values = content == Content::weights
                                           ? to_host(shard.weights, shard.size(), stream)
                                           : to_host(shard.gradients, shard.size(), stream);
    for (const ParameterRange& range : parameters.counted_ranges(shard)) {
      const Parameter& p = *range.parameter;
      double* const global = all.data() + begins.at(&p);  // [p.rows, p.columns]
      for (size_t i = 0; i < range.size; ++i) {
        const int64_t local = range.begin_in_parameter + i;
        const int64_t row = p.first_row + local / p.local_columns,
                      column = p.first_column + local % p.local_columns;
        global[row * p.columns + column] += values[range.begin_in_shard + i];
      }
    }
  }
  all = world.sum(all);
  std::vector<std::vector<double>> result;
  for (const Parameter& p : parameters.all()) {
    const auto begin = all.begin() + static_cast<ptrdiff_t>(begins[&p]);
    result.emplace_back(begin, begin + p.rows * p.columns);
  }
  return result;
}

}  // namespace pentatron
