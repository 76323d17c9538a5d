#include <map>

#include "ranks/gather.h"

namespace pentatron {
namespace {

// Adds `range` of this rank's slice of a parameter, whose elements begin at `from`, to its place in the
// global matrix. Waits for the stream.
template <class T>
void place(const T* from /*[range.size], on the device*/, const ParameterRange& range, cudaStream_t stream,
           double* global /*[p.rows, p.columns]*/) {
  const PinnedArray<T> host(range.size);
  CUDA_CHECK(cudaMemcpyAsync(host.data(), from, range.size * sizeof(T), cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  const Parameter& p = *range.parameter;
  for (size_t i = 0; i < range.size; ++i) {
    const int64_t local = range.begin_in_parameter + i;
    const int64_t row = p.first_row + local / p.local_columns,
                  column = p.first_column + local % p.local_columns;
    global[row * p.columns + column] += static_cast<double>(static_cast<accum>(host[i]));
  }
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
    for (const ParameterRange& range : parameters.counted_ranges(shard)) {
      double* const global = all.data() + begins.at(range.parameter);
      if (content == Content::weights) place(shard.weights + range.begin_in_shard, range, stream, global);
      if (content == Content::gradients) place(shard.gradients + range.begin_in_shard, range, stream, global);
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
