// RMSNorm (Zhang and Sennrich, 2019), with the residual connection before it.
#pragma once

#include "device/tensor.h"

namespace pentatron {

// x = before + branch (a residual connection), and out = x * rstd * weight with rstd = 1 / sqrt(mean(x^2) +
// epsilon) of each row, in one pass over memory. Without a branch, `before` is x itself.
void rmsnorm_forward(Tensor before /*[rows, d]*/, Tensor branch /*[rows, d], or none*/,
                     const real* weight /*[d]*/, double epsilon, Tensor x /*[rows, d]*/,
                     Tensor out /*[rows, d]*/, accum* rstd /*[rows]*/, cudaStream_t stream);

// Rows of `partials` for rmsnorm_backward, which sums the rows in that many bands, on any device.
inline int64_t rmsnorm_bands(int64_t rows) { return std::min<int64_t>(rows, 256); }

// d_x: the gradient of x, added or (unless `accumulate`) assigned. weight_gradient is assigned.
void rmsnorm_backward(Tensor d_out /*[rows, d]*/, Tensor x /*[rows, d]*/, const real* weight /*[d]*/,
                      const accum* rstd /*[rows]*/, bool accumulate, Tensor d_x /*[rows, d]*/,
                      AccumTensor partials /*[rmsnorm_bands(rows), d]*/, accum* weight_gradient /*[d]*/,
                      cudaStream_t stream);

}  // namespace pentatron
