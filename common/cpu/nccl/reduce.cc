#include "reduce.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

namespace nccl_mpi {
namespace {

// T is the element, Accum what it is combined in. By tiles that stay in the cache, so that the inner loops
// are plain vectors and the order of the ranks is kept.
template <class T, class Accum, class Combine>
void reduce_with(T* out, std::span<const void* const> contributions, size_t count, Combine combine) {
  constexpr size_t tile = 1024;
  Accum sum[tile];
  for (size_t first = 0; first < count; first += tile) {
    const size_t n = std::min(tile, count - first);
    for (size_t rank = 0; rank < contributions.size(); ++rank) {
      const T* in = static_cast<const T*>(contributions[rank]) + first;
      for (size_t i = 0; i < n; ++i) {
        const Accum value = static_cast<Accum>(in[i]);
        sum[i] = rank == 0 ? value : combine(sum[i], value);
      }
    }
    for (size_t i = 0; i < n; ++i) out[first + i] = static_cast<T>(sum[i]);
  }
}

template <class T, class Accum = T>
void reduce_type(void* out, std::span<const void* const> contributions, size_t count, ncclRedOp_t op) {
  const auto sum = [](Accum a, Accum b) { return static_cast<Accum>(a + b); };
  const auto max = [](Accum a, Accum b) { return a < b ? b : a; };
  T* const to = static_cast<T*>(out);
  if (op == ncclSum) reduce_with<T, Accum>(to, contributions, count, sum);
  if (op == ncclMax) reduce_with<T, Accum>(to, contributions, count, max);
}

}  // namespace

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclFloat32:
      return 4;
    case ncclFloat64:
      return 8;
    default:
      return 0;
  }
}

void reduce(void* out, std::span<const void* const> contributions, size_t count, ncclDataType_t type,
            ncclRedOp_t op) {
  switch (type) {
    case ncclInt32:
      return reduce_type<int32_t>(out, contributions, count, op);
    case ncclFloat32:
      return reduce_type<float>(out, contributions, count, op);
    case ncclFloat64:
      return reduce_type<double>(out, contributions, count, op);
    case ncclFloat16:
      return reduce_type<__half, float>(out, contributions, count, op);
    case ncclBfloat16:
      return reduce_type<__nv_bfloat16, float>(out, contributions, count, op);
    default:
      return;  // refused at the call
  }
}

}  // namespace nccl_mpi
