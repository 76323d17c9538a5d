// The half of device/kernel.h, which includes it, for a CPU: a block is one thread, or a few for tests.
#pragma once

#include <algorithm>
#include <cstddef>

#include "device/kernel.h"

namespace pentatron {

// A block takes a contiguous part, so that its loop has stride one too.
inline StridedRange<size_t> grid_range(size_t n, int step = 1) {
  const size_t part = (n / step + gridDim.x - 1) / gridDim.x * step, first = std::min(n, part * blockIdx.x);
  return {first + threadIdx.x * step, std::min(n, first + part), size_t{blockDim.x} * step};
}

template <class T>
T lane_sum(T value, int = 1) {
  return value;
}
inline void lane_barrier(int) {}

template <class T>
T* block_memory() {
  return static_cast<T*>(cuda_cpu::shared_memory());
}

template <class T, class Combine>
T block_reduce(T value, T identity, Combine combine) {
  if constexpr (cuda_cpu::threads_per_block == 1) return value;
  T* of_thread = static_cast<T*>(cuda_cpu::shared_scratch());
  __syncthreads();  // the readers of a previous reduction are done
  of_thread[threadIdx.x] = value;
  __syncthreads();
  value = identity;
  for (unsigned i = 0; i < cuda_cpu::threads_per_block; ++i) value = combine(value, of_thread[i]);
  return value;
}

}  // namespace pentatron
