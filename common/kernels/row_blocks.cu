#include "kernels/row_blocks.h"

namespace pentatron {

void linear_forward_blocks(const Blas& blas, RowBlocks x, Tensor weight, RowBlocks y) {
  if (!blas.has_batches()) {
    const auto block = [](const RowBlocks& all, int64_t i) {
      return Tensor{all.first.data + i * all.stride * all.first.columns, all.first.rows, all.first.columns};
    };
    for (int64_t i = 0; i < x.count; ++i) {
      blas.product({block(x, i), Transpose::no}, {weight, Transpose::no}, 0, block(y, i), "gemm_forward",
                   /*same_b=*/i > 0);
    }
    return;
  }
  const auto m = static_cast<int>(x.first.rows), n = static_cast<int>(weight.rows),
             k = static_cast<int>(weight.columns);
  const Cost cost = products(m * x.count, n, k, 1, sizeof(real), sizeof(real), false, blas.of_layers());
  batched_product(blas, Transpose::no, Transpose::yes, m, n, k, 1, {x.first.data, real_type, k, x.stride * k},
                  {weight.data, real_type, k, 0}, 0, {y.first.data, real_type, n, y.stride * n},
                  static_cast<int>(x.count), "gemm_forward", &cost);
}

}  // namespace pentatron
