// Tells the compiler that glibc has vector versions of the elementary functions (libmvec, link with -lmvec),
// so that the loops of kernels that call them are vectorised. glibc's own headers say so only under
// -ffast-math, which would also break infinities and NaN; this needs no more than -fno-math-errno.
#pragma once

#include <cmath>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
extern "C" {
#define CUDA_CPU_VECTOR_FUNCTION __attribute__((simd("notinbranch")))
CUDA_CPU_VECTOR_FUNCTION float expf(float) noexcept;
CUDA_CPU_VECTOR_FUNCTION float logf(float) noexcept;
CUDA_CPU_VECTOR_FUNCTION float sinf(float) noexcept;
CUDA_CPU_VECTOR_FUNCTION float cosf(float) noexcept;
CUDA_CPU_VECTOR_FUNCTION float powf(float, float) noexcept;
CUDA_CPU_VECTOR_FUNCTION double exp(double) noexcept;
CUDA_CPU_VECTOR_FUNCTION double log(double) noexcept;
CUDA_CPU_VECTOR_FUNCTION double sin(double) noexcept;
CUDA_CPU_VECTOR_FUNCTION double cos(double) noexcept;
CUDA_CPU_VECTOR_FUNCTION double pow(double, double) noexcept;
#undef CUDA_CPU_VECTOR_FUNCTION
}
#endif
