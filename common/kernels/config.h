// What hosts without CUDA have to know of the kernels: the kinds of attention, and fixed sizes.
#pragma once

#include <cstdint>

namespace pentatron {

// How attention is computed: with its scores in memory, in tiles, or in tiles on tensor cores (attention.h).
enum class Attention { naive, tiled, tensor_core };
inline constexpr int largest_tiled_head = 256;  // whose tiles fit into a block's shared memory

// Tensor cores, backward: queries of a tile, and how many numbers the blocks need to take turns.
inline constexpr int backward_queries = 64;
constexpr int64_t backward_turns(int64_t sequences, int64_t heads, int64_t queries) {
  return 1 + sequences * heads * ((queries + backward_queries - 1) / backward_queries);
}

// Partial sums of the gradient norm (sum_of_squares in kernels.h).
inline constexpr int norm_parts = 1024;

}  // namespace pentatron
