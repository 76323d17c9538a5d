#include <map>

#include "ranks/gather.h"

namespace pentatron {
namespace {

// The elements of a shard, as doubles. Waits for the stream.
template <class T>
std::vector<double> to_host(const T* shard /*[size], on the device*/, size_t size, cudaStream_t stream) {
  const PinnedArray<T> host(size);
  CUDA_CHECK(cudaMemcpyAsync(host.data(), shard, size * sizeof(T), cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  std::vector<double> values;
  for (size_t i = 0; i < size; ++i) values.push_back(static_cast<double>(static_cast<accum>(host[i])));
  return values;
}

}  // namespace

std::vector<std::vector<double>> gather_parameters(const World& world, const Parameters& parameters,
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
