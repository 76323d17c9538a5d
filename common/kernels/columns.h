// Parts of the columns of a matrix, for ranks that exchange them.
#pragma once

#include "device/tensor.h"

namespace pentatron {

// Copies `parts` equal parts of the columns of x one after the other, or back. T: real or accum.
template <class T>
void split_columns(Matrix<T> x /*[rows, parts*columns]*/, int parts, T* packed /*[parts, rows, columns]*/,
                   cudaStream_t stream);
void join_columns(const real* packed, int parts, Tensor x, cudaStream_t stream);

}  // namespace pentatron
