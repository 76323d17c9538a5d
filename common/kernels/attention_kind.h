// The kinds of attention, for code that knows no CUDA.
#pragma once

#include <cstdint>
#include <string>

namespace pentatron {

// How attention is computed: with its scores in memory, in tiles, or in tiles on tensor cores (attention.h).
enum class Attention { naive, tiled, tensor_core };
// The default of --attention (tensor_cores/attention_kinds.cu): on a CPU `on_cpu`; on a GPU tensor_core if
// build, GPU and head size can, else tiled. Where a small block computed both ways differs, it is tiled, and
// one line says so.
Attention default_attention(int head_size, Attention on_cpu);
inline constexpr int largest_tiled_head = 256;  // larger tiles do not fit into a block's shared memory

constexpr bool has_tensor_core_kernels(int head_size) { return head_size == 64 || head_size == 128; }
// A dry run may model kernels of others (tensor_cores/attention_kinds.cu).
bool models_any_head(const std::string& gpu);
// A line about heads that others' kernels take, and ours do not; empty where ours do.
inline std::string slow_heads(int size) {
  const std::string line =
      " are slow here: kernels on tensor cores are for 64 and 128; --gpu h100-flash models "
      "FlashAttention-2's";
  return has_tensor_core_kernels(size) ? "" : "heads of " + std::to_string(size) + line;
}

}  // namespace pentatron
