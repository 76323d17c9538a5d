#include "ranks/gather.h"

namespace pentatron {
namespace {

// Adds elements [range.begin_in_parameter, + range.size) of this rank's slice, which begin at `from`, to
// their places in the global matrix.
template <class T>
void place(const T* from /*[range.size], on the device*/, const ParameterRange& range, cudaStream_t stream,
           std::vector<double>& global) {
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

std::vector<double> gather_parameter(const World& world, const Parameters& parameters, int id,
                                     Content content, cudaStream_t stream) {
  const Parameter& parameter = parameters[id];
  std::vector<double> mine(parameter.rows * parameter.columns);
  for (const Shard& shard : parameters.shards()) {
    if (shard.unit != parameter.unit) continue;
    for (const ParameterRange& range : parameters.counted_ranges(shard)) {
      if (range.parameter != &parameter) continue;
      if (content == Content::weights) place(shard.weights + range.begin_in_shard, range, stream, mine);
      if (content == Content::gradients) place(shard.gradients + range.begin_in_shard, range, stream, mine);
    }
  }
  return world.sum(mine);
}

}  // namespace pentatron
