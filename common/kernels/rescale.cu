#include "kernels/pack.h"
#include "kernels/rescale.h"

namespace pentatron {

__global__ void cross_entropy_rescale_kernel(In<accum> largest /*[rows]*/, size_t rows,
                                             Out<accum> statistics /*[3, rows]*/) {
  for (size_t row : grid_range(rows)) {
    statistics[rows + row] *= exp(statistics[row] - largest[row]);
    statistics[row] = largest[row];
  }
}

void cross_entropy_rescale(const accum* largest, AccumTensor statistics, cudaStream_t stream) {
  launch(cross_entropy_rescale_kernel, elementwise_grid(statistics.columns),
         moves(5 * accum_bytes * statistics.columns), stream, largest, statistics.columns, statistics.data);
}

}  // namespace pentatron
