// Launches, and the ranges and block reductions with which a kernel is written once, for GPU and CPU.
//
// On a GPU the threads of a block stride through a range, and a block reduction combines their values by
// warp shuffles. On the CPU a block is one thread (cpu/cuda/cuda_kernel.h): a range has stride one, its
// loop is vectorised, and a block reduction returns its argument. So kernels never use threadIdx.
#pragma once

#include <math.h>  // the overloads for float and double, under the names that kernels use

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "device/cuda.h"

namespace pentatron {

// ---- Launching a kernel -----------------------------------------------------------------------------------

constexpr unsigned threads_per_block = 256;

struct Grid {
  dim3 blocks;
  unsigned threads;  // each block has so many: a multiple of 32
  Grid(dim3 blocks, unsigned threads = threads_per_block) : blocks(blocks), threads(threads) {}
};

// Blocks for n elements: a thread takes about eight, and there are no more blocks than keep a GPU busy.
inline dim3 elementwise_grid(size_t n) {
  constexpr size_t elements_per_block = 8 * threads_per_block;
  return dim3(
      static_cast<unsigned>(std::clamp<size_t>((n + elements_per_block - 1) / elements_per_block, 1, 16384)));
}

// One block for each row of so many elements or packs. A short row has a small block: few threads are idle.
inline Grid block_a_row(int64_t rows, int64_t elements) {
  return {dim3(static_cast<unsigned>(rows)),
          static_cast<unsigned>(std::clamp<int64_t>((elements + 31) / 32 * 32, 32, threads_per_block))};
}

// kernel<<<grid.blocks, grid.threads, 0, stream>>>(arguments...), spelled so that g++ can parse it, visible
// in a trace, and with its cost. launch_with_memory gives each block `bytes` that its threads share.
template <class... Parameters, class... Arguments>
void launch_with_memory(void (*kernel)(Parameters...), Grid grid, size_t bytes, const Cost& cost,
                        cudaStream_t stream, Arguments... arguments) {
  trace::Operation operation(stream, trace::kernel_name(reinterpret_cast<const void*>(kernel)), cost);
  if (bytes > 0) {  // more than 48 KiB has to be asked for
    CUDA_CHECK(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks;
  config.blockDim = dim3(grid.threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), operation.name(),
             __FILE__, __LINE__);
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), Grid grid, const Cost& cost, cudaStream_t stream,
            Arguments... arguments) {
  launch_with_memory(kernel, grid, 0, cost, stream, arguments...);
}

// ---- Inside a kernel --------------------------------------------------------------------------------------

// Arguments of a kernel that point to what it only reads, and to what it writes (and may read). No two of
// them overlap, so a load need not wait for an earlier store.
template <class T>
using In = const T* __restrict__;
template <class T>
using Out = T* __restrict__;

// What `for (Index i : range)` visits: first, first + stride, ... below last.
template <class Index>
struct StridedRange {
  struct Iterator {
    Index i, stride;
    __device__ Index operator*() const { return i; }
    __device__ void operator++() { i += stride; }
    __device__ bool operator!=(const Iterator& end) const { return i < end.i; }
  };
  Index first, last, stride;
  __device__ Iterator begin() const { return {first, stride}; }
  __device__ Iterator end() const { return {last, stride}; }
};

#ifndef CUDA_CPU
constexpr int warp_size = 32;
#else
constexpr int warp_size = 1;  // and a block is one warp, unless a test asks for several threads
#endif

// `for (int i : block_range(n))`: 0 <= i < n, shared out over the threads of this block. With a `step`, which
// divides n, only its multiples: a thread that gets i takes the elements from i to i + step - 1.
inline __device__ StridedRange<int> block_range(int n, int step = 1) {
  return {static_cast<int>(threadIdx.x) * step, n, static_cast<int>(blockDim.x) * step};
}

inline __device__ bool is_first_thread() { return threadIdx.x == 0; }

// A matrix shared out: `for (int row : warp_range(rows)) for (int j : lane_range(columns))` gives rows to the
// warps of this block and columns to their lanes. Where rows are short, a warp is cut into several of fewer.
inline __device__ StridedRange<int> warp_range(int n, int lanes = warp_size) {
  return {static_cast<int>(threadIdx.x) / lanes, n, static_cast<int>(blockDim.x) / lanes};
}
inline __device__ StridedRange<int> lane_range(int n, int step = 1, int lanes = warp_size) {
  return {static_cast<int>(threadIdx.x) % lanes * step, n, lanes * step};
}
// Lanes for rows of n elements (or packs): the next power of two, at most a warp's.
inline __device__ int lanes_for(int n) {
  int lanes = 1;
  while (lanes < n && lanes < warp_size) lanes *= 2;
  return lanes;
}

#ifndef CUDA_CPU

// `for (size_t i : grid_range(n))`: as block_range, over all threads of the grid.
inline __device__ StridedRange<size_t> grid_range(size_t n, int step = 1) {
  return {(blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x) * step, n,
          gridDim.x * static_cast<size_t>(blockDim.x) * step};
}

// Sums over the lanes of a warp, or of a part of it. All these lanes call this, and each gets the sum.
template <class T>
__device__ T lane_sum(T value, int lanes = warp_size) {
  const unsigned part = 0xffffffffu >> (32 - lanes) << (threadIdx.x % 32 / lanes * lanes);
  for (int bit = lanes / 2; bit > 0; bit /= 2) value += __shfl_xor_sync(part, value, bit);
  return value;
}

// Waits for these lanes. After it each of them sees what the others wrote before.
inline __device__ void lane_barrier(int lanes) {
  __syncwarp(0xffffffffu >> (32 - lanes) << (threadIdx.x % 32 / lanes * lanes));
}

// The memory that launch_with_memory gave to this block.
template <class T>
__device__ T* block_memory() {
  extern __shared__ __align__(16) unsigned char memory_of_block[];
  return reinterpret_cast<T*>(memory_of_block);
}

// Combines one value a thread; every thread of the block gets the result. Lanes of a warp exchange values in
// registers, each with the lane whose number differs in one bit; then warps, through shared memory.
template <class T, class Combine>
__device__ T block_reduce(T value, T identity, Combine combine) {
  constexpr unsigned all_lanes = 0xffffffff;
  __shared__ T of_warp[32];
  for (int bit = 16; bit > 0; bit /= 2) value = combine(value, __shfl_xor_sync(all_lanes, value, bit));
  __syncthreads();  // the readers of a previous reduction are done
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : identity;
  for (int bit = 16; bit > 0; bit /= 2) value = combine(value, __shfl_xor_sync(all_lanes, value, bit));
  return value;
}

#endif

}  // namespace pentatron

#ifdef CUDA_CPU
#include <cuda_kernel.h>  // the same five on the CPU
#endif

namespace pentatron {

template <class T>
__device__ T block_sum(T value) {
  return block_reduce(value, T(0), [](T a, T b) { return a + b; });
}

}  // namespace pentatron
