// Products of several linear layers in one launch, each with weights and rows of its own.
#pragma once

#include <vector>

#include "kernels/matmul.h"

namespace pentatron {

// The three products of a linear layer (matmul.h) for several layers in one launch (in fp8 one each).
using Addresses = Matrix<void*>;  // work space for those of the matrices, [3, layers]
void grouped_linear_forward(const Blas& blas, const std::vector<Tensor>& x, const std::vector<Tensor>& weight,
                            const std::vector<Tensor>& y, Addresses addresses);
void grouped_linear_dgrad(const Blas& blas, const std::vector<Tensor>& d_y, const std::vector<Tensor>& weight,
                          const std::vector<Tensor>& d_x, Addresses addresses);
// With 16 bits a launch each: cuBLAS has no such product of bf16 or fp16 matrices whose result is fp32.
void grouped_linear_wgrad(const Blas& blas, const std::vector<Tensor>& d_y, const std::vector<Tensor>& x,
                          const std::vector<Gradient>& d_weight, Addresses addresses);

}  // namespace pentatron
