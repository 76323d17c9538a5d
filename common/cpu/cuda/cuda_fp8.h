// e4m3 of CUDA's header, for machines without it (Micikevicius et al., "FP8 Formats for Deep Learning",
// 2022): 4 bits of exponent and 3 of fraction, up to 448, and no infinity.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda_fp16.h"

using __nv_fp8_storage_t = unsigned char;
enum __nv_saturation_t { __NV_NOSAT, __NV_SATFINITE };
enum __nv_fp8_interpretation_t { __NV_E4M3 };

// Rounds to nearest, ties to even. What is too large becomes the largest number (SATFINITE), or not a number.
inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t saturate,
                                                __nv_fp8_interpretation_t) {
  constexpr uint32_t fraction = 3, bias = 7, largest = 0x7e, not_a_number = 0x7f;
  const uint32_t bits = std::bit_cast<uint32_t>(value), size = bits & 0x7fffffffu;
  // As in cuda_fp16.h: the exponent's bias changes, and bits of the fraction go.
  const uint32_t lost = 23 - fraction, smallest_normal = (128 - bias) << 23;
  const uint32_t normal =
      (size - ((127 - bias) << 23) + (1u << (lost - 1)) - 1 + ((size >> lost) & 1u)) >> lost;
  // Below, the fraction counts in units, and a float whose last bit is such a unit rounds the sum.
  const uint32_t rounder = (127 + 23 - fraction + 1 - bias) << 23;
  const uint32_t small =
      std::bit_cast<uint32_t>(std::bit_cast<float>(size) + std::bit_cast<float>(rounder)) - rounder;
  const uint32_t code = size < smallest_normal ? small : normal;
  const uint32_t there =
      code > largest || size >= 0x7f800000u ? (saturate == __NV_SATFINITE ? largest : not_a_number) : code;
  return static_cast<__nv_fp8_storage_t>(size > 0x7f800000u ? not_a_number : there | ((bits >> 24) & 0x80u));
}

inline __half_raw __nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t code, __nv_fp8_interpretation_t) {
  const uint32_t sign = (code & 0x80u) << 8, size = code & 0x7fu;
  // These are the bits of a half whose exponent is 8 too small. Below its normal numbers e4m3 counts in units
  // of 2^-9, and these are normal numbers of a half.
  const float small = static_cast<float>(static_cast<int>(size)) * 0x1p-9f;
  const uint32_t of_small = (std::bit_cast<uint32_t>(small) >> 13) - (112 << 10);
  const uint32_t of_size = size >= 8 ? (size << 7) + (8 << 10) : size > 0 ? of_small : 0;
  return {static_cast<unsigned short>(size == 0x7f ? 0x7fffu : sign | of_size)};
}
