// A linear layer (matmul.h) for some rows of a matrix.
#pragma once

#include "kernels/matmul.h"

namespace pentatron {

// `count` blocks of rows of a matrix; each begins `stride` rows after the one before.
struct RowBlocks {
  Tensor first;  // [rows of a block, columns]
  int64_t count = 1, stride = 0;
};

// linear_forward for some rows of x.
void linear_forward_blocks(const Blas& blas, RowBlocks x, Tensor weight, RowBlocks y);

}  // namespace pentatron
