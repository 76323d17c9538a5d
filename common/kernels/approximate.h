// Exponentials and quotients that are as exact as `real` needs. On a GPU the exact division has a slow path
// for extreme operands, and the exact exponential takes eight instructions. In bf16, which keeps 8 bits,
// approximations of two instructions do: they keep 22 bits, or 17 of exp(-100).
#pragma once

#include <math.h>

#include "device/precision.h"

namespace pentatron {

inline __device__ accum exp_fast(accum x) {
#if defined(__CUDA_ARCH__) && PRECISION == 16
  return __expf(x);
#else
  return exp(x);
#endif
}

// x / y; 0 if y is infinite.
inline __device__ accum divide_fast(accum x, accum y) {
#if defined(__CUDA_ARCH__) && PRECISION == 16
  return __fdividef(x, y);
#else
  return x / y;
#endif
}

}  // namespace pentatron
