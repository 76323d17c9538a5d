// Packs. A memory-bound kernel is as fast as its loads and stores, and a GPU moves most with the fewest of
// them when a thread takes 16 bytes at a time. So these kernels work on packs of neighbouring elements:
//
//   for (int j : block_range(columns, width)) {
//     Pack<width> x = load<width>(row + j);              one load of 8 bf16, 4 floats or 2 doubles
//     for (int e = 0; e < width; ++e) x[e] = f(x[e]);    in registers, in `accum`
//     store(row + j, x);
//   }
//
// On the CPU a pack is one element, and the compiler makes vectors of the loop over j.
#pragma once

#include <algorithm>
#include <cstddef>

#include "device/kernel.h"
#include "device/precision.h"

namespace pentatron {

#ifndef CUDA_CPU
constexpr int pack_width = 16 / sizeof(real);
#else
// As on a GPU where a test has several threads in a block.
constexpr int pack_width = cuda_cpu::threads_per_block == 1 ? 1 : 16 / sizeof(real);
#endif

// pack_width, or 1 where rows of `columns` elements are no whole packs, or not aligned to 16 bytes.
template <class... T>
int width_for(size_t columns, const T*... rows) {
  const bool aligned = ((reinterpret_cast<uintptr_t>(rows) % 16 == 0) && ...);
  return aligned && columns % pack_width == 0 ? pack_width : 1;
}

template <int width>
struct Pack {
  accum element[width];
  __device__ accum& operator[](int e) { return element[e]; }
  __device__ const accum& operator[](int e) const { return element[e]; }
  __device__ void operator+=(const Pack& other) {
    for (int e = 0; e < width; ++e) element[e] += other[e];
  }
};

// A pack as it lies in memory. What is longer than 16 bytes (floats beside bf16) takes several accesses.
template <class T, int width>
struct alignas(std::min<size_t>(16, width * sizeof(T))) PackInMemory {
  T element[width];
};

template <int width, class T>
__device__ Pack<width> load(const T* from) {
  const PackInMemory<T, width> in_memory = *reinterpret_cast<const PackInMemory<T, width>*>(from);
  Pack<width> pack;
  for (int e = 0; e < width; ++e) pack[e] = accum(in_memory.element[e]);
  return pack;
}

template <int width, class T>
__device__ void store(T* to, const Pack<width>& pack) {
  PackInMemory<T, width> in_memory;
  for (int e = 0; e < width; ++e) in_memory.element[e] = T(pack[e]);
  *reinterpret_cast<PackInMemory<T, width>*>(to) = in_memory;
}

// The largest of x[0..n), given to every thread of the block.
template <int width, class T>
__device__ accum block_max_of(const T* x, int n) {
  const StridedRange<int> range = block_range(n, width);
  accum largest = -INFINITY;
#pragma omp simd reduction(max : largest)  // NaN forbids the compiler to reorder a maximum by itself
  for (int j = range.first; j < range.last; j += range.stride) {
    const Pack<width> pack = load<width>(x + j);
    for (int e = 0; e < width; ++e) largest = std::max(largest, pack[e]);
  }
  return block_reduce(largest, accum(-INFINITY), [](accum a, accum b) { return a > b ? a : b; });
}

}  // namespace pentatron
