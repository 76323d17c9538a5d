#include "kernels/columns.h"
#include "kernels/pack.h"

namespace pentatron {

// Element j of the row lies in part j / part_columns, and each part has `rows` rows.
template <int width, class T>
__global__ void split_columns_kernel(In<T> x, int64_t rows, int columns, int part_columns, Out<T> packed) {
  const int64_t row = blockIdx.x;
  for (int j : block_range(columns, width)) {
    const int64_t part = j / part_columns;
    store(packed + (part * rows + row) * part_columns + j % part_columns, load<width>(x + row * columns + j));
  }
}

template <int width>
__global__ void join_columns_kernel(In<real> packed, int64_t rows, int columns, int part_columns,
                                    Out<real> x) {
  const int64_t row = blockIdx.x;
  for (int j : block_range(columns, width)) {
    const int64_t part = j / part_columns;
    store(x + row * columns + j, load<width>(packed + (part * rows + row) * part_columns + j % part_columns));
  }
}

template <class T>
void split_columns(Matrix<T> x, int parts, T* packed, cudaStream_t stream) {
  const int columns = static_cast<int>(x.columns), width = width_for(columns / parts, x.data, packed);
  launch(width == 1 ? split_columns_kernel<1, T> : split_columns_kernel<pack_width, T>,
         block_a_row(x.rows, columns / width), moves(2 * x.bytes()), stream, x.data, x.rows, columns,
         columns / parts, packed);
}

void join_columns(const real* packed, int parts, Tensor x, cudaStream_t stream) {
  const int columns = static_cast<int>(x.columns), width = width_for(columns / parts, x.data, packed);
  launch(width == 1 ? join_columns_kernel<1> : join_columns_kernel<pack_width>,
         block_a_row(x.rows, columns / width), moves(2 * x.bytes()), stream, packed, x.rows, columns,
         columns / parts, x.data);
}

template void split_columns(Tensor, int, real*, cudaStream_t);
#if PRECISION == 16
template void split_columns(AccumTensor, int, accum*, cudaStream_t);
#endif

}  // namespace pentatron
