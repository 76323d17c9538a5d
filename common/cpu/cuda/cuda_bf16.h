// bfloat16 for machines without CUDA's header: the upper half of a float, converted as CUDA converts it.
#pragma once

#include <bit>
#include <cstdint>

#include "cuda_runtime.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};

// Rounds to nearest, ties to even. Free of branches, so that loops over it are vectorised.
inline unsigned short __cuda_cpu_round_to_bfloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<unsigned short>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}

struct __nv_bfloat16 {
  __nv_bfloat16() = default;
  __nv_bfloat16(float value) : __x(__cuda_cpu_round_to_bfloat16(value)) {}
  __nv_bfloat16(const __nv_bfloat16_raw& raw) : __x(raw.x) {}
  operator __nv_bfloat16_raw() const { return {__x}; }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(__x) << 16); }

 protected:
  unsigned short __x;
};

// CUDA rounds after each of these, float arithmetic would not: convert to float and say what is meant.
__nv_bfloat16 operator+(const __nv_bfloat16&, const __nv_bfloat16&) = delete;
__nv_bfloat16 operator-(const __nv_bfloat16&, const __nv_bfloat16&) = delete;
__nv_bfloat16 operator*(const __nv_bfloat16&, const __nv_bfloat16&) = delete;
__nv_bfloat16 operator/(const __nv_bfloat16&, const __nv_bfloat16&) = delete;

inline __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
inline float __bfloat162float(__nv_bfloat16 value) { return static_cast<float>(value); }
