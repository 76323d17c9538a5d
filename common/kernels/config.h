// What hosts without CUDA have to know of the kernels: the kinds of attention, and fixed sizes.
#pragma once

#include <cstdint>

namespace pentatron {

// How attention is computed: with its scores in memory, in tiles, or in tiles on tensor cores (attention.h).
enum class Attention { naive, tiled, tensor_core };
// The default of --attention (tensor_cores/attention_kinds.cu): on a CPU `on_cpu`; on a GPU tensor_core if
// build, GPU and head size can, else tiled. Where a small block computed both ways differs, it is tiled, and
// one line says so.
Attention default_attention(int head_size, Attention on_cpu);
inline constexpr int largest_tiled_head = 256;  // whose tiles fit into a block's shared memory

// Partial sums of the gradient norm (sum_of_squares in optimizer_step.h).
inline constexpr int norm_parts = 1024;

}  // namespace pentatron
