#include "ranks/gather.h"

namespace pentatron {
namespace {

// Adds elements [c.begin_in_parameter, + c.size) of this rank's slice, which begin at `from`, to their places
// in the global matrix.
template <class T>
void place(const T* from /*[c.size], on the device*/, const Crossing& c, cudaStream_t stream,
           std::vector<double>& global) {
  const PinnedArray<T> host(c.size);
  CUDA_CHECK(cudaMemcpyAsync(host.data(), from, c.size * sizeof(T), cudaMemcpyDeviceToHost, stream));
  CUDA_CHECK(cudaStreamSynchronize(stream));
  const Parameter& p = *c.parameter;
  for (size_t i = 0; i < c.size; ++i) {
    const int64_t local = c.begin_in_parameter + i;
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
  for (const Piece& piece : parameters.pieces()) {
    if (piece.unit != parameter.unit) continue;
    for (const Crossing& c : parameters.counted_crossings(piece)) {
      if (c.parameter != &parameter) continue;
      if (content == Content::weights) place(piece.weights + c.begin_in_piece, c, stream, mine);
      if (content == Content::gradients) place(piece.gradients + c.begin_in_piece, c, stream, mine);
    }
  }
  return world.sum(mine);
}

}  // namespace pentatron
