// What hosts without CUDA have to know of the kernels: the kinds of attention, and fixed sizes.
#pragma once

#include <algorithm>
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

// Numbers of 8 bits, and how many of them share a scale: 128 or 128 x 128, or a whole tensor (fp8.h).
enum class Fp8Format { e4m3, e5m2 };
enum class Fp8Scales { tile, tensor };
// How the products of layers are made, in fp8.
struct ProductFormat {
  Fp8Format fp8_gradients = Fp8Format::e4m3;
  Fp8Scales fp8_scales = Fp8Scales::tile;
  bool operator==(const ProductFormat&) const = default;
};
inline constexpr int fp8_parts = 256;  // of the search for a tensor's largest element
// Elements of the largest operand of a linear layer's products: x [rows, in], W [out, in], y [rows, out].
// With whole tiles of rows, so that a 128th is enough for the scales; in and out are multiples of 128 in fp8.
constexpr int64_t largest_operand(int64_t rows, int64_t in, int64_t out) {
  return std::max((rows + 127) / 128 * 128 * std::max(in, out), in * out);
}

// Partial sums of the gradient norm (sum_of_squares in kernels.h).
inline constexpr int norm_parts = 1024;

}  // namespace pentatron
