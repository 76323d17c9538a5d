// IEEE half precision for machines without CUDA's header: 5 bits of exponent and 10 of fraction, converted as
// CUDA converts it.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

struct __half_raw {
  unsigned short x;
};

// Rounds to nearest, ties to even. Free of branches, so that loops over it are vectorised.
inline unsigned short __cuda_cpu_round_to_half(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value), size = bits & 0x7fffffffu;
  // A normal half: the exponent's bias goes from 127 to 15, and 13 bits of fraction go.
  const uint32_t normal = (size - (112u << 23) + 0xfffu + ((size >> 13) & 1u)) >> 13;
  // Below 2^-14 the fraction counts in units of 2^-24, which is that of 0.5 in a float: the sum rounds.
  const uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3f000000u;
  uint32_t half = size < 0x38800000u ? small : normal;
  half = size >= 0x47800000u ? 0x7c00u : half;  // 65536 and more, infinity
  half = size > 0x7f800000u ? 0x7fffu : half | ((bits >> 16) & 0x8000u);
  return static_cast<unsigned short>(half);
}

inline float __cuda_cpu_float_of_half(unsigned short half) {
  const uint32_t size = (half & 0x7fffu) << 13;
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(size) * 0x1p112f);
  const uint32_t bits = size >= (0x7c00u << 13) ? size | 0x7f800000u : finite;
  return std::bit_cast<float>(bits | (half & 0x8000u) << 16);
}

struct __half {
  __half() = default;
  __half(float value) : __x(__cuda_cpu_round_to_half(value)) {}
  __half(const __half_raw& raw) : __x(raw.x) {}
  operator __half_raw() const { return {__x}; }
  operator float() const { return __cuda_cpu_float_of_half(__x); }

 protected:
  unsigned short __x;
};

// CUDA rounds after each of these, float arithmetic would not: convert to float and say what is meant.
__half operator+(const __half&, const __half&) = delete;
__half operator-(const __half&, const __half&) = delete;
__half operator*(const __half&, const __half&) = delete;
__half operator/(const __half&, const __half&) = delete;

inline __half __float2half(float value) { return __half(value); }
inline float __half2float(__half value) { return static_cast<float>(value); }
