// What hosts without CUDA have to know of the kernels: the kinds of attention, and fixed sizes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pentatron {

// How attention is computed: with its scores in memory, in tiles, or in tiles on tensor cores (attention.h).
enum class Attention { naive, tiled, tensor_core };
// The default of --attention (tensor_cores/attention_kinds.cu): on a CPU `on_cpu`; on a GPU tensor_core if
// build, GPU and head size can, else tiled. Where a small block computed both ways differs, it is tiled, and
// one line says so.
Attention default_attention(int head_size, Attention on_cpu);
inline constexpr int largest_tiled_head = 256;  // whose tiles fit into a block's shared memory

// Elements of the largest operand of a linear layer's products: x [rows, in], W [out, in], y [rows, out].
// With whole tiles of rows, so that a 128th is enough for the scales; in and out are multiples of 128 in fp8.
constexpr int64_t largest_operand(int64_t rows, int64_t in, int64_t out) {
  return std::max((rows + 127) / 128 * 128 * std::max(in, out), in * out);
}

// Partial sums of the gradient norm (sum_of_squares in optimizer.h).
inline constexpr int norm_parts = 1024;

}  // namespace pentatron
