#include "kernels/columns.h"
#include "kernels/pack.h"

namespace pentatron {

// Between a matrix [rows, columns] and its parts, each [rows, part_columns]: element j of a row lies in part
// j / part_columns.
template <int width, class T>
__global__ void copy_columns_kernel(In<T> from /*the matrix, or the parts*/, int64_t rows, int columns,
                                    int part_columns, bool to_parts, Out<T> to /*the other*/) {
  const int64_t row = blockIdx.x;
  for (int j : block_range(columns, width)) {
    const int64_t part = j / part_columns, in_matrix = row * columns + j,
                  in_part = (part * rows + row) * part_columns + j % part_columns;
    store(to + (to_parts ? in_part : in_matrix), load<width>(from + (to_parts ? in_matrix : in_part)));
  }
}

template <class T>
static void copy_columns(const T* from, Matrix<T> shape, int parts, bool to_parts, T* to,
                         cudaStream_t stream) {
  const int columns = static_cast<int>(shape.columns), width = width_for(columns / parts, from, to);
  launch(width == 1 ? copy_columns_kernel<1, T> : copy_columns_kernel<pack_width, T>,
         block_a_row(shape.rows, columns / width), moves(2 * shape.bytes()), stream, from, shape.rows,
         columns, columns / parts, to_parts, to);
}

template <class T>
void split_columns(Matrix<T> x, int parts, T* packed, cudaStream_t stream) {
  copy_columns(x.data, x, parts, true, packed, stream);
}
void join_columns(const real* packed, int parts, Tensor x, cudaStream_t stream) {
  copy_columns(packed, x, parts, false, x.data, stream);
}

template void split_columns(Tensor, int, real*, cudaStream_t);
#if PRECISION == 16
template void split_columns(AccumTensor, int, accum*, cudaStream_t);
#endif

}  // namespace pentatron
