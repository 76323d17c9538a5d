// Sums and copies of elements, and the first values of weights.
#pragma once

#include "device/tensor.h"
#include "kernels/philox.h"

namespace pentatron {

void residual_add(Tensor x, Tensor branch, Tensor out /*all [rows, d]*/,
                  cudaStream_t stream);                                            // out = x + branch
void accumulate(const accum* term, accum* sum, size_t size, cudaStream_t stream);  // sum += term
void accumulate(AccumTensor term, Gradient gradient, cudaStream_t stream);         // gradient (+)= term

// A local matrix of `columns` columns is the slice of a global one that begins at (first_row, first_column).
struct GlobalSlice {
  int64_t columns, first_row, first_column, global_columns;
};
// weights[i] = element first + i of the local matrix, a normal number times standard_deviation. It depends on
// (key, global index) alone, so every slicing of the global matrix gives the same bits.
void fill_normal(real* weights /*[size]*/, size_t first, size_t size, GlobalSlice slice, PhiloxKey key,
                 double standard_deviation, cudaStream_t stream);
void fill_constant(real* weights, size_t size, double value, cudaStream_t stream);

}  // namespace pentatron
