// What hosts without CUDA have to know of the kernels: the kinds of attention, and fixed sizes.
#pragma once

namespace pentatron {

// How attention is computed: with its scores in memory, in tiles, or in tiles on tensor cores (attention.h).
enum class Attention { naive, tiled, tensor_core };
inline constexpr int largest_tiled_head = 256;  // whose tiles fit into a block's shared memory

// Partial sums of the gradient norm (sum_of_squares in kernels.h).
inline constexpr int norm_parts = 1024;

}  // namespace pentatron
