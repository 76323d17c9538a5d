// The instructions of a warp that tensor cores need, one function each, which all of its 32 lanes call: PTX
// on a GPU of compute capability 8.0 or later, emulated on the CPU (cpu/cuda/cuda_warps.h).
//
// mma multiplies matrices that lie in the registers of a warp, D += A B with A of 16 x 16 and B of 16 x 8
// bfloat16 (or half, in fp16 builds), and D of 16 x 8 float. Each lane has a part of each, its fragment
// ("mma.m16n8k16" in the PTX manual). A register holds two neighbours of a row of A or of a column of B. Lane
// 4 g + t has, with g < 8 and t < 4:
//
//        A      k = 2t, 2t+1   2t+8, 2t+9          B        column g             D        column 2t, 2t+1
//      row g        a[0]          a[2]           k = 2t, 2t+1    b0            row g         d[0], d[1]
//      row g+8      a[1]          a[3]           k = 2t+8, 2t+9  b1            row g+8       d[2], d[3]
//
// The layout of D is that of A's halves: two D side by side, rounded and packed in pairs, are an
// A. So a product can be multiplied again without leaving the registers of its lanes (as_left_factor).
//
// ldmatrix loads such fragments from shared memory, four 8 x 8 matrices at a time: lanes 8 m to 8 m + 7 give
// the addresses of the rows (16 bytes) of matrix m, and lane 4 g + t gets elements 2t and 2t+1 of row g of
// each. That is how A lies, and B if its columns are rows in memory. Where B's rows are rows in memory, the
// transposed form is needed: lane 4 g + t gets rows 2t and 2t+1 of column g.
//
// cp.async copies from global to shared memory while the lanes go on computing.
#pragma once

#ifdef CUDA_CPU
#include <cuda_warps.h>
#endif

#include <bit>

#include "device/kernel.h"
#include "device/precision.h"

namespace pentatron {

constexpr unsigned lanes_of_warp = 32;

#ifdef REAL_IS_HALF
using real16 = __half;
#define MMA_TYPE "f16"
#else
using real16 = __nv_bfloat16;
#define MMA_TYPE "bf16"
#endif

#ifndef CUDA_CPU

inline __device__ unsigned thread_of_block() { return threadIdx.x; }
inline __device__ void synchronize_block() { __syncthreads(); }

// On an earlier GPU there are no such instructions; what is launched there is checked by the host.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800

inline __device__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE
      ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

inline __device__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

inline __device__ void load_matrices(uint32_t (&registers)[4], const real16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
}
inline __device__ void load_matrices_transposed(uint32_t (&registers)[4], const real16* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
               : "r"(shared_address(row))
               : "memory");
}

// Begins to copy 16 bytes of global memory, or to write zeros where there are none (`from` is then not read).
inline __device__ void begin_copy_16(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}
inline __device__ void begin_copy_4(void* to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(there ? 4 : 0)
               : "memory");
}
// Waits for the copies that this thread has begun; for those of others, synchronize_block() then does.
inline __device__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

inline __device__ float exp2_fast(float x) {  // 2^x, good to 2 units in the last place
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

#else

inline __device__ void mma(float (&)[4], const uint32_t (&)[4], uint32_t, uint32_t) {}
inline __device__ void load_matrices(uint32_t (&)[4], const real16*) {}
inline __device__ void load_matrices_transposed(uint32_t (&)[4], const real16*) {}
inline __device__ void begin_copy_16(void*, const void*, bool) {}
inline __device__ void begin_copy_4(void*, const void*, bool) {}
inline __device__ void wait_for_copies() {}
inline __device__ float exp2_fast(float x) { return x; }

#endif

// Adds to two neighbours in global memory, without waiting for the result.
inline __device__ void add_pair(float* to, float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  atomicAdd(reinterpret_cast<float2*>(to), make_float2(first, second));
#else
  atomicAdd(to, first), atomicAdd(to + 1, second);
#endif
}

// Blocks that take turns. What all threads of a block have done before it sets a turn, with a
// synchronize_block() in between, is seen by those that have waited for it.
inline __device__ int32_t take_number(int32_t* next) { return atomicAdd(next, 1); }
inline __device__ void wait_for_turn(const int32_t* turn, int32_t number) {
  int32_t now = 0;
  do {
    asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
  } while (now != number);
}
inline __device__ void set_turn(int32_t* turn, int32_t number) {
  asm volatile("st.release.gpu.s32 [%0], %1;" ::"l"(turn), "r"(number) : "memory");
}

// The value of the lane whose number differs in one bit.
inline __device__ float shuffle_xor(float value, int bit) { return __shfl_xor_sync(0xffffffff, value, bit); }

// Two numbers, rounded, in a register.
inline __device__ uint32_t pack(float low, float high) {
#ifdef REAL_IS_HALF
  const __half2 pair = __floats2half2_rn(low, high);
#else
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#endif
  return reinterpret_cast<const uint32_t&>(pair);
}

// `kernel`, for blocks of `threads` threads.
template <int threads, auto kernel>
constexpr auto in_warps() {
  return kernel;
}

#else

inline unsigned thread_of_block() { return cuda_cpu::fiber(); }
inline void synchronize_block() { cuda_cpu::synchronize_fibers(); }
inline void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda_cpu::mma_m16n8k16<real16>(d, a, b0, b1);
}
inline void load_matrices(uint32_t (&registers)[4], const real16* row) {
  cuda_cpu::ldmatrix_x4(registers, row, false);
}
inline void load_matrices_transposed(uint32_t (&registers)[4], const real16* row) {
  cuda_cpu::ldmatrix_x4(registers, row, true);
}
inline void begin_copy_16(void* to, const void* from, bool there) {
  cuda_cpu::cp_async(to, from, 16, !there);
}
inline void begin_copy_4(void* to, const void* from, bool there) { cuda_cpu::cp_async(to, from, 4, !there); }
inline void wait_for_copies() { cuda_cpu::cp_async_wait_all(); }
inline float exp2_fast(float x) { return exp2f(x); }
inline void add_pair(float* to, float first, float second) { to[0] += first, to[1] += second; }
inline int32_t take_number(int32_t* next) { return cuda_cpu::atomic_add(next, 1); }
inline void wait_for_turn(const int32_t* turn, int32_t number) { cuda_cpu::wait_until(turn, number); }
inline void set_turn(int32_t* turn, int32_t number) { cuda_cpu::set_released(turn, number); }
inline float shuffle_xor(float value, int bit) { return cuda_cpu::shuffle_xor(value, bit); }
inline uint32_t pack(float low, float high) {
  const auto bits = [](float x) { return uint32_t{std::bit_cast<uint16_t>(real16(x))}; };
  return bits(low) | bits(high) << 16;
}

template <int threads, auto kernel>
struct InWarps;
template <int threads, class... Parameters, void (*kernel)(Parameters...)>
struct InWarps<threads, kernel> {
  static void run(Parameters... arguments) {
    if (threadIdx.x > 0) return;  // of the threads that a test may ask for, one runs all fibers
    const auto body = [&] { kernel(arguments...); };
    const auto call = [](const void* bound) { (*static_cast<decltype(body)*>(bound))(); };
    cuda_cpu::run_fibers(threads, {call, &body});
  }
};
template <int threads, auto kernel>
constexpr auto in_warps() {
  return InWarps<threads, kernel>::run;
}

#endif

// The first or second number of a register.
inline __device__ float unpack(uint32_t pair, int which) {
  return float(std::bit_cast<real16>(static_cast<uint16_t>(which == 0 ? pair : pair >> 16)));
}

inline __device__ int lane() { return static_cast<int>(thread_of_block() % lanes_of_warp); }
inline __device__ int warp() { return static_cast<int>(thread_of_block() / lanes_of_warp); }

}  // namespace pentatron
