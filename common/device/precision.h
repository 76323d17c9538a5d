// The two number types of a build. `real` is the type of weights and activations; `accum` that of gradients,
// optimizer states, row statistics and sums. PRECISION=fp64|fp32|bf16|fp16|fp8 (Makefile) defines PRECISION
// as 64, 32 or 16, REAL_IS_HALF for fp16, and PRODUCTS_IN_FP8 for fp8, which is bf16 but for the products of
// layers. What no precision changes is compiled without PRECISION: both types are then incomplete.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <library_types.h>
#include <math.h>

#include <type_traits>

namespace pentatron {

size_t gradient_bytes();  // an element's, for files that know no precision

#ifndef PRECISION
struct real;
struct accum;
#else

#ifdef PRODUCTS_IN_FP8
constexpr bool has_fp8_products = true;
#else
constexpr bool has_fp8_products = false;
#endif

#if PRECISION == 64
using real = double;
constexpr cudaDataType_t real_type = CUDA_R_64F;
constexpr const char* precision_name = "fp64";
#elif PRECISION == 32
using real = float;
constexpr cudaDataType_t real_type = CUDA_R_32F;
constexpr const char* precision_name = "fp32";
#elif PRECISION == 16 && defined(REAL_IS_HALF)
using real = __half;
constexpr cudaDataType_t real_type = CUDA_R_16F;
constexpr const char* precision_name = "fp16";
#elif PRECISION == 16
using real = __nv_bfloat16;
constexpr cudaDataType_t real_type = CUDA_R_16BF;
constexpr const char* precision_name = has_fp8_products ? "fp8" : "bf16";
#else
#error "PRECISION must be 64, 32 or 16"
#endif

using accum = std::conditional_t<PRECISION == 64, double, float>;
constexpr double real_bytes = sizeof(real), accum_bytes = sizeof(accum);  // an element's

// CUDA's name of either type.
template <class T>
constexpr cudaDataType_t data_type = std::is_same_v<T, real> ? real_type : CUDA_R_32F;

// With 16 bits the optimizer has its own copy of the weights in `accum` (Micikevicius et al., 2017).
constexpr bool has_master_weights = PRECISION == 16;

// fp16 has no numbers between 0 and 6e-8, where many gradients lie: they are computed times a factor.
constexpr bool has_loss_scale = std::is_same_v<real, __half>;

// Exponentials and quotients that are as exact as `real` needs. On a GPU the exact division has a slow path
// for extreme operands, and the exact exponential takes eight instructions. In bf16, which keeps 8 bits,
// approximations of two instructions do: they keep 22 bits, or 17 of exp(-100).
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

#endif  // PRECISION

}  // namespace pentatron
