// Warps of 32 lanes on the CPU, for kernels that use tensor cores (tensor_core.h). Such a kernel can't be
// written in ranges: its matrices are spread over the lanes of a warp, and a warp's instructions are
// operations of 32 lanes. Here each thread of a block is a fiber, which runs until it comes to such an
// operation or to a barrier, and then lets the others come. Slow, but the kernel is the one that a GPU runs.
//
// What a GPU leaves open is left to chance, so that a forgotten barrier shows: which warp runs how far ahead,
// and when an asynchronous copy is done between its begin and the wait for it. What a GPU forbids ends the
// process: a misaligned address, lanes of a warp at different operations, threads that wait for each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

namespace cuda_cpu {

inline constexpr unsigned lanes_of_warp = 32;

// Calls the body once for each of `threads` threads (a multiple of 32), as fibers.
void run_fibers(unsigned threads, BlockBody body);

// ---- Inside a fiber ---------------------------------------------------------------------------------------

unsigned fiber();           // which of the block's threads this is
void synchronize_fibers();  // __syncthreads()

// All lanes of a warp come here; the last one performs the operation on what all of them brought.
void together(void (*operation)(void* const* of_lane /*[32]*/), void* argument);

// The instructions of the same names, as the PTX manual defines them (sections "Warp-level matrix
// instructions" and "cp.async"). A register holds two numbers of 16 bits, the first one in its lower
// half; T says which ones: __nv_bfloat16 or __half.
template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void ldmatrix_x4(uint32_t (&registers)[4], const void* row, bool transposed);
float shuffle_xor(float value, int bit);
void cp_async(void* to, const void* from, size_t bytes, bool zeros);
void cp_async_wait_all();

// Numbers in global memory through which blocks take turns: blocks run on several threads. Whoever sees a
// number sees what its writer wrote before it.
int32_t atomic_add(int32_t* to, int32_t term);  // returns what was there
void wait_until(const int32_t* at, int32_t number);
void set_released(int32_t* at, int32_t number);

// Reads of eight rows so far by ldmatrix, and those of them that need a bank of shared memory more than once.
struct RowReads {
  long all, with_conflicts;
};
RowReads row_reads();

}  // namespace cuda_cpu
