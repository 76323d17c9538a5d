// Attention in tiles, which holds a tile's scores only: with the ordinary operations of a GPU
// (attention_tiled.cu), and on tensor cores (attention_tensor_core.cu). attention_kinds.cu chooses between
// these two and the naive kind. Arguments are those of kernels/attention.h.
#pragma once

#include "kernels/attention.h"

namespace pentatron {

template <class Result>
void tiled_forward(const AttentionBlock& block, const AttentionTensorsOf<Result>& t, cudaStream_t stream);
template <class Result>
void tiled_backward(const AttentionBlock& block, const AttentionTensors& t,
                    const AttentionGradientsOf<Result>& g, bool add, cudaStream_t stream);

// What backward on tensor cores needs beside its results: with `turns` the blocks take turns, so that the
// order of sums is fixed. Where Result is not `accum`, the sums of d_q, and of heads in groups of d_k and
// d_v.
struct TensorCoreMemory {
  Matrix<int32_t> turns;      // [1, backward_turns]
  AccumTensor d_q, d_k, d_v;  // as q, k and v
};

// On tensor cores, in 16 bits with sums in float, heads have 64 or 128 features.
constexpr bool has_tensor_core_attention = PRECISION == 16;
template <class Result>
void tensor_core_forward(const AttentionBlock& block, const AttentionTensorsOf<Result>& t,
                         cudaStream_t stream);
template <class Result>  // g.memory.other: a TensorCoreMemory
void tensor_core_backward(const AttentionBlock& block, const AttentionTensors& t,
                          const AttentionGradientsOf<Result>& g, bool add, cudaStream_t stream);

// For tests: also true on the CPU, which emulates the instructions.
bool can_run_tensor_core_attention();

// In backward: queries of a tile, and how many numbers the blocks need to take turns, which they
// do at tiles of queries of each head, and at tiles of keys of each key head.
inline constexpr int backward_queries = 64;
constexpr int64_t backward_turns(int64_t sequences, int64_t heads, int64_t kv_heads, int64_t tokens) {
  return 1 + sequences * (heads + kv_heads) * ((tokens + backward_queries - 1) / backward_queries);
}

// How far they are from the tiled kernels in a small block of random numbers: the largest difference of out,
// d_q, d_k and d_v, each over its largest element. Rounding alone makes less than this tolerance.
constexpr double tensor_core_tolerance = 0.03;
double tensor_core_error(int head_size, cudaStream_t stream);

// The fastest attention for heads of this size, in a bf16 build on a GPU. `error`: tensor_core_error, or
// infinite where tensor cores cannot be used.
Attention fastest_attention(int head_size, double error);

// ---- How both are cut -------------------------------------------------------------------------------------

// Where a block of threads works, on tensor cores. Its tile is the tile-th of those that take longest.
struct Place {
  int tile, head, sequence;
};
// The place of the block that is the number-th to begin. A long block that began last would work alone. So of
// a section of pairs of sequence and head all blocks that take longest come first, then all that are second.
// The last section has the rest of the pairs, too. Backward takes turns in this order: the tiles of a pair
// begin one after the other, and so do the heads of a tile.
constexpr Place place_of(int number, int tiles, int heads, int sequences, int section) {
  const int pairs = sequences * heads, last = std::max(pairs / section, 1) - 1;
  const int before = std::min(number / (section * tiles), last) * section;  // pairs
  const int here = before < last * section ? section : pairs - before, in_section = number - before * tiles;
  const int pair = before + in_section % here;
  return {in_section / here, pair % heads, pair / heads};
}

// More pairs would compete for the L2 cache: an H100's has 50 MB, and q, k, v, d_out and, in float, d_q of 32
// pairs of 2048 tokens and heads of 64 have as much.
constexpr int section_of(int tokens, int size) { return std::clamp(32 * 2048 * 64 / (tokens * size), 4, 32); }

// A block of so many warps has so many queries, forward, or keys, backward. size: of a head.
constexpr int tensor_core_tile(int size, bool backward, int warps) {
  return !backward ? 128 : size == 64 ? 96 : 16 * warps;
}

// Blocks of threads that have a tile of `rows` (queries or keys) of a head of a sequence each.
inline dim3 tiles_of(const AttentionBlock& b, int rows, int heads, int tile) {
  return dim3(static_cast<unsigned>((rows + tile - 1) / tile) * heads * b.batch);
}

// How many blocks the work would fill if all were as long as the longest.
inline double longest_blocks(const AttentionBlock& b, bool backward, int warps) {
  const int tile = tensor_core_tile(b.head.head_size, backward, warps);
  const double tiles = tiles_of(b, backward ? b.keys : b.queries, b.head.heads, tile).x;
  return b.diagonal ? (tiles + b.batch * b.head.heads) / 2 : tiles;  // the i-th has i parts of a head
}

// Warps of a block. In backward of heads of 128 eight share 128 keys, where a block may have the memory, and
// where such blocks are enough for an H100's 132 multiprocessors. (Tests of few blocks set this number.)
inline double enough_blocks = 132;
inline int tensor_core_warps(const AttentionBlock& b, bool backward) {
  const bool wide = backward && b.head.head_size == 128 && largest_block_memory() >= 130 << 10 &&
                    longest_blocks(b, backward, 8) >= enough_blocks;
  return wide ? 8 : 4;
}

// Cost of `count` products of queries, keys and head size; the half above a diagonal is not counted.
inline Cost attention_cost(const AttentionBlock& b, int count, Cost::Unit unit, bool backward) {
  const double pairs = double(b.batch) * b.head.heads * b.queries * b.keys / (b.diagonal ? 2 : 1);
  const double rows = double(b.head.heads) * b.queries + double(b.head.kv_heads) * b.keys;
  return {.bytes = 2 * real_bytes * b.batch * rows * b.head.head_size,  // q, out, k, v
          .flops = count * 2 * pairs * b.head.head_size,
          .unit = unit,
          .backward = backward,
          .head_size = b.head.head_size,
          .blocks = longest_blocks(b, backward, tensor_core_warps(b, backward))};
}

}  // namespace pentatron
