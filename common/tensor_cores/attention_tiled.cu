// Attention in tiles. A block of threads takes some queries and loops over the keys, one tile at a time. It
// holds only one tile's scores. The softmax is online: a running maximum, and sums that are scaled down when
// it grows (Milakov and Gimelshein, 2018). Backward recomputes the probabilities from lse (FlashAttention and
// FlashAttention-2; Dao, 2022 and 2023). So memory is linear in the sequence. Tiles above the diagonal are
// skipped. kernels/README.md derives this.
#include <cmath>

#include "device/kernel.h"
#include "tensor_cores/attention_tiles.h"

namespace pentatron {

// Every product here is of matrices in block memory, [tile, tile] or [tile, columns], where `columns` is the
// head size rounded up. A thread computes a patch of it in registers: on a GPU 4 x 4, on the CPU 4 vectors.
//
// A kernel holds one tile fixed and loops over the others. The fixed tile lies transposed, [columns, tile],
// those looped over as they come, [tile, columns]; scores, [looped, fixed], and sums, [fixed, columns], then
// both have a contiguous factor on the right, and no tile is needed in two forms.
constexpr int patch_rows = 4;
#ifndef CUDA_CPU
constexpr int patch_columns = 4;
#else
constexpr int patch_columns = 64 / sizeof(accum);
#endif
using Patch = accum[patch_rows][patch_columns];

// patch += a b. Element (i, k) of a lies at a[i * row_stride + k * depth_stride], b's rows `leading` apart.
__device__ inline void multiply_add(In<accum> a, int row_stride, int depth_stride, In<accum> b, int leading,
                                    int depth, Patch& patch) {
  for (int k = 0; k < depth; ++k) {
    for (int i = 0; i < patch_rows; ++i) {
      const accum factor = a[i * row_stride + k * depth_stride];
#pragma omp simd
      for (int j = 0; j < patch_columns; ++j) patch[i][j] += factor * b[k * leading + j];
    }
  }
}

// A tile of rows of one head, and zeros beyond the last row and beyond the head: products need no bounds.
template <Transpose transpose = Transpose::no>
__device__ void load(In<real> from /*[rows, leading]*/, int leading, int rows, int size, int tile,
                     int columns, Out<accum> to /*[tile, columns], or transposed*/) {
  const auto at = [&](int row, int j) {
    return transpose == Transpose::yes ? j * tile + row : row * columns + j;
  };
  for (int row : warp_range(tile)) {
    const int there = row < rows ? size : 0;
    for (int j : lane_range(there)) to[at(row, j)] = accum(from[static_cast<size_t>(row) * leading + j]);
    for (int j : lane_range(columns - there)) to[at(row, there + j)] = 0;
  }
}

__device__ inline void fill(accum* to, int size, accum value) {
  for (int i : block_range(size)) to[i] = value;
}

// sum = factor * sum + weights^T looped; without `factor`, 1 everywhere.
__device__ inline void accumulate_tile(In<accum> weights /*[tile looped, tile fixed]*/,
                                       In<accum> looped /*[tile, columns]*/, In<accum> factor /*[tile]*/,
                                       int tile, int columns, Out<accum> sum /*[tile fixed, columns]*/) {
  const int patches = columns / patch_columns;
  for (int p : block_range(tile / patch_rows * patches)) {
    const int row = p / patches * patch_rows, column = p % patches * patch_columns;
    Patch patch = {};
    multiply_add(weights + row, 1, tile, looped + column, columns, tile, patch);
    for (int i = 0; i < patch_rows; ++i) {
      const accum scale = factor ? factor[row + i] : 1;
      accum* to = sum + (row + i) * columns + column;
      for (int j = 0; j < patch_columns; ++j) to[j] = scale * to[j] + patch[i][j];
    }
  }
}

// Which keys of a tile the queries of a tile see.
struct Mask {
  int keys;   // of the tile and those after it
  int ahead;  // query i sees the keys up to i + ahead
  __device__ Mask(const AttentionBlock& block, int first_query, int first_key)
      : keys(block.keys - first_key), ahead(block.diagonal ? first_query - first_key : block.keys) {}
  __device__ bool shows(int query, int key) const {  // && would be branches
    return (key < keys) & (key <= query + ahead);
  }
};

// ---- Forward ----------------------------------------------------------------------------------------------

// scores = scale * k q^T, and -infinity where the query does not see the key.
__device__ inline void tile_scores(In<accum> k /*[tile, columns]*/, In<accum> q /*[columns, tile]*/,
                                   accum scale, Mask mask, int tile, int columns,
                                   Out<accum> scores /*[tile keys, tile queries]*/) {
  const int patches = tile / patch_columns;
  for (int p : block_range(tile / patch_rows * patches)) {
    const int row = p / patches * patch_rows, column = p % patches * patch_columns;
    Patch patch = {};
    multiply_add(k + row * columns, columns, 1, q + column, tile, columns, patch);
    for (int i = 0; i < patch_rows; ++i) {
      const int key = row + i;
      for (int j = 0; j < patch_columns; ++j) {
        scores[key * tile + column + j] = mask.shows(column + j, key) ? scale * patch[i][j] : -INFINITY;
      }
    }
  }
}

// Scores become exp(score - largest), where `largest` now includes this tile; `factor` is what sums made with
// the largest before have to be scaled by, and `sum` is that of the exponentials. A thread owns some queries.
__device__ inline void online_softmax(int tile, Out<accum> scores /*[tile keys, tile queries]*/,
                                      Out<accum> largest /*[tile]*/, Out<accum> factor, Out<accum> sum) {
  for (int i : block_range(tile)) factor[i] = largest[i];
  for (int key = 0; key < tile; ++key) {
    for (int i : block_range(tile)) largest[i] = std::max(largest[i], scores[key * tile + i]);
  }
  for (int i : block_range(tile)) {
    factor[i] = exp_fast(factor[i] - largest[i]);  // 0 at first
    sum[i] *= factor[i];
  }
  __syncthreads();  // all take part in the exponentials
  for (int key : warp_range(tile)) {
    for (int i : lane_range(tile)) scores[key * tile + i] = exp_fast(scores[key * tile + i] - largest[i]);
  }
  __syncthreads();
  for (int key = 0; key < tile; ++key) {
    for (int i : block_range(tile)) sum[i] += scores[key * tile + i];
  }
}

// One block a (sequence, head, tile of queries); it loops over the tiles of keys.
template <class Result>
__global__ void tiled_forward_kernel(In<real> q /*[rows, heads*size]*/, In<real> k /*[rows, kv_heads*size]*/,
                                     In<real> v /*as k*/, AttentionBlock block, accum scale, int tile,
                                     int columns, Out<Result> out /*as q*/,
                                     Out<accum> lse /*[rows, heads]*/) {
  const auto [heads, kv_heads, size] = block.head;
  const int queries = block.queries, keys = block.keys;
  const int tiles = (queries + tile - 1) / tile, first_query = blockIdx.x % tiles * tile;
  const int head = blockIdx.x / tiles % heads, sequence = blockIdx.x / tiles / heads;
  const size_t first_row = static_cast<size_t>(sequence) * block.stride + first_query;
  const size_t kv_start =
      (static_cast<size_t>(sequence) * block.stride * kv_heads + head / (heads / kv_heads)) * size;
  const int rows = std::min(tile, queries - first_query), kv_leading = kv_heads * size;

  accum* const q_tile = block_memory<accum>();  // [columns, tile]
  accum* const k_tile = q_tile + tile * columns;
  accum* const v_tile = k_tile + tile * columns;
  accum* const out_tile = v_tile + tile * columns;  // [tile, columns], not yet divided by `sum`
  accum* const scores = out_tile + tile * columns;
  accum* const largest = scores + tile * tile;
  accum* const factor = largest + tile;
  accum* const sum = factor + tile;

  load<Transpose::yes>(q + (first_row * heads + head) * size, heads * size, rows, size, tile, columns,
                       q_tile);
  fill(out_tile, tile * columns, 0);
  fill(largest, tile, -INFINITY);  // the first tile sets it: each query sees a key there
  fill(sum, tile, 0);
  const int visible_keys = block.diagonal ? std::min(keys, first_query + tile) : keys;
  for (int first_key = 0; first_key < visible_keys; first_key += tile) {
    const size_t kv = kv_start + static_cast<size_t>(first_key) * kv_leading;
    __syncthreads();  // the tiles before have been used
    load(k + kv, kv_leading, keys - first_key, size, tile, columns, k_tile);
    load(v + kv, kv_leading, keys - first_key, size, tile, columns, v_tile);
    __syncthreads();
    tile_scores(k_tile, q_tile, scale, Mask(block, first_query, first_key), tile, columns, scores);
    __syncthreads();
    online_softmax(tile, scores, largest, factor, sum);
    accumulate_tile(scores, v_tile, factor, tile, columns, out_tile);
  }
  __syncthreads();
  for (int row : warp_range(rows)) {
    Result* const out_row = out + ((first_row + row) * heads + head) * size;
    for (int j : lane_range(size)) out_row[j] = Result(divide_fast(out_tile[row * columns + j], sum[row]));
  }
  for (int row : block_range(rows)) lse[(first_row + row) * heads + head] = largest[row] + log(sum[row]);
}

// ---- Backward ---------------------------------------------------------------------------------------------

// probabilities = exp(scale * a1 b1 - lse) and d_scores = scale * probabilities * (a2 b2 - dots) of a tile:
// (a1, a2) is (q, d_out) and (b1, b2) is (k, v)^T or, where keys are looped over, the other way round.
template <bool keys_looped>
__device__ void tile_gradients(In<accum> a1 /*[tile, columns]*/, In<accum> a2,
                               In<accum> b1 /*[columns, tile]*/, In<accum> b2, In<accum> lse /*[tile]*/,
                               In<accum> dots, accum scale, Mask mask, int tile, int columns,
                               Out<accum> probabilities /*[tile looped, tile fixed]*/, Out<accum> d_scores) {
  const int patches = tile / patch_columns;
  for (int p : block_range(tile / patch_rows * patches)) {
    const int row = p / patches * patch_rows, column = p % patches * patch_columns;
    Patch scores = {}, d_probabilities = {};
    multiply_add(a1 + row * columns, columns, 1, b1 + column, tile, columns, scores);
    multiply_add(a2 + row * columns, columns, 1, b2 + column, tile, columns, d_probabilities);
    for (int i = 0; i < patch_rows; ++i) {
#pragma omp simd
      for (int j = 0; j < patch_columns; ++j) {
        const int looped = row + i, fixed = column + j;
        const int query = keys_looped ? fixed : looped, key = keys_looped ? looped : fixed;
        const accum exponent = scale * scores[i][j] - lse[query];
        const accum probability = exp_fast(mask.shows(query, key) ? exponent : -INFINITY);
        probabilities[looped * tile + fixed] = probability;
        d_scores[looped * tile + fixed] = scale * probability * (d_probabilities[i][j] - dots[query]);
      }
    }
  }
}

// to (+)= rows of a tile.
template <class Result>
__device__ void store(In<accum> from /*[tile, columns]*/, int columns, int rows, int size, bool add,
                      Out<Result> to /*[rows, leading]*/, int leading) {
  for (int row : warp_range(rows)) {
    Result* const to_row = to + static_cast<size_t>(row) * leading;
    for (int j : lane_range(size)) {
      to_row[j] = Result((add ? accum(to_row[j]) : accum(0)) + from[row * columns + j]);
    }
  }
}

// lse and dots of a tile of queries, and zeros beyond the last one, which contributes nothing.
__device__ inline void load_statistics(In<accum> lse /*[rows, heads]*/, In<accum> dots, int heads, int rows,
                                       int tile, Out<accum> lse_tile, Out<accum> dots_tile) {
  for (int i : block_range(tile)) {
    lse_tile[i] = i < rows ? lse[static_cast<size_t>(i) * heads] : 0;
    dots_tile[i] = i < rows ? dots[static_cast<size_t>(i) * heads] : 0;
  }
}

// d_k and d_v. One block a (sequence, key and value head, tile of keys); it loops over the heads of its group
// and the tiles of queries that see these keys.
template <class Result>
__global__ void tiled_backward_keys_kernel(In<real> q /*[rows, heads*size]*/,
                                           In<real> k /*[rows, kv_heads*size]*/, In<real> v /*as k*/,
                                           In<real> d_out /*as q*/, In<accum> lse /*[rows, heads]*/,
                                           In<accum> dots /*as lse*/, AttentionBlock block, accum scale,
                                           int tile, int columns, bool add, Out<Result> d_k /*as k*/,
                                           Out<Result> d_v /*as k*/) {
  const auto [heads, kv_heads, size] = block.head;
  const int queries = block.queries, keys = block.keys;
  const int tiles = (keys + tile - 1) / tile, first_key = blockIdx.x % tiles * tile;
  const int kv_head = blockIdx.x / tiles % kv_heads, sequence = blockIdx.x / tiles / kv_heads;
  const size_t first_row = static_cast<size_t>(sequence) * block.stride + first_key;
  const size_t kv = (first_row * kv_heads + kv_head) * size;
  const int rows = std::min(tile, keys - first_key), q_leading = heads * size, kv_leading = kv_heads * size;

  accum* const k_tile = block_memory<accum>();  // [columns, tile], and so is v_tile
  accum* const v_tile = k_tile + tile * columns;
  accum* const q_tile = v_tile + tile * columns;  // [tile, columns], and so are the next ones
  accum* const d_out_tile = q_tile + tile * columns;
  accum* const d_k_tile = d_out_tile + tile * columns;
  accum* const d_v_tile = d_k_tile + tile * columns;
  accum* const probabilities = d_v_tile + tile * columns;  // [tile queries, tile keys]
  accum* const d_scores = probabilities + tile * tile;
  accum* const lse_tile = d_scores + tile * tile;
  accum* const dots_tile = lse_tile + tile;

  load<Transpose::yes>(k + kv, kv_leading, rows, size, tile, columns, k_tile);
  load<Transpose::yes>(v + kv, kv_leading, rows, size, tile, columns, v_tile);
  fill(d_k_tile, 2 * tile * columns, 0);  // and d_v_tile
  for (int head = kv_head * (heads / kv_heads); head < (kv_head + 1) * (heads / kv_heads); ++head) {
    for (int first_query = block.diagonal ? first_key : 0; first_query < queries; first_query += tile) {
      const size_t row = static_cast<size_t>(sequence) * block.stride + first_query;
      const size_t start = (row * heads + head) * size;
      __syncthreads();  // the tiles before have been used
      load(q + start, q_leading, queries - first_query, size, tile, columns, q_tile);
      load(d_out + start, q_leading, queries - first_query, size, tile, columns, d_out_tile);
      load_statistics(lse + row * heads + head, dots + row * heads + head, heads, queries - first_query, tile,
                      lse_tile, dots_tile);
      __syncthreads();
      tile_gradients<false>(q_tile, d_out_tile, k_tile, v_tile, lse_tile, dots_tile, scale,
                            Mask(block, first_query, first_key), tile, columns, probabilities, d_scores);
      __syncthreads();
      accumulate_tile(probabilities, d_out_tile, nullptr, tile, columns, d_v_tile);
      accumulate_tile(d_scores, q_tile, nullptr, tile, columns, d_k_tile);
    }
  }
  __syncthreads();
  store(d_k_tile, columns, rows, size, add, d_k + kv, kv_leading);
  store(d_v_tile, columns, rows, size, add, d_v + kv, kv_leading);
}

// d_q. One block a (sequence, head, tile of queries); it loops over the tiles of keys that these see.
template <class Result>
__global__ void tiled_backward_queries_kernel(In<real> q /*[rows, heads*size]*/,
                                              In<real> k /*[rows, kv_heads*size]*/, In<real> v /*as k*/,
                                              In<real> d_out /*as q*/, In<accum> lse /*[rows, heads]*/,
                                              In<accum> dots /*as lse*/, AttentionBlock block, accum scale,
                                              int tile, int columns, bool add, Out<Result> d_q /*as q*/) {
  const auto [heads, kv_heads, size] = block.head;
  const int queries = block.queries, keys = block.keys;
  const int tiles = (queries + tile - 1) / tile, first_query = blockIdx.x % tiles * tile;
  const int head = blockIdx.x / tiles % heads, sequence = blockIdx.x / tiles / heads;
  const size_t first_row = static_cast<size_t>(sequence) * block.stride + first_query;
  const size_t start = (first_row * heads + head) * size;
  const size_t kv_start =
      (static_cast<size_t>(sequence) * block.stride * kv_heads + head / (heads / kv_heads)) * size;
  const int rows = std::min(tile, queries - first_query), q_leading = heads * size,
            kv_leading = kv_heads * size;

  accum* const q_tile = block_memory<accum>();  // [columns, tile], and so is d_out_tile
  accum* const d_out_tile = q_tile + tile * columns;
  accum* const k_tile = d_out_tile + tile * columns;  // [tile, columns], and so are the next ones
  accum* const v_tile = k_tile + tile * columns;
  accum* const d_q_tile = v_tile + tile * columns;
  accum* const probabilities = d_q_tile + tile * columns;  // [tile keys, tile queries]
  accum* const d_scores = probabilities + tile * tile;
  accum* const lse_tile = d_scores + tile * tile;
  accum* const dots_tile = lse_tile + tile;

  load<Transpose::yes>(q + start, q_leading, rows, size, tile, columns, q_tile);
  load<Transpose::yes>(d_out + start, q_leading, rows, size, tile, columns, d_out_tile);
  load_statistics(lse + first_row * heads + head, dots + first_row * heads + head, heads, rows, tile,
                  lse_tile, dots_tile);
  fill(d_q_tile, tile * columns, 0);
  const int visible_keys = block.diagonal ? std::min(keys, first_query + tile) : keys;
  for (int first_key = 0; first_key < visible_keys; first_key += tile) {
    const size_t kv = kv_start + static_cast<size_t>(first_key) * kv_leading;
    __syncthreads();  // the tiles before have been used
    load(k + kv, kv_leading, keys - first_key, size, tile, columns, k_tile);
    load(v + kv, kv_leading, keys - first_key, size, tile, columns, v_tile);
    __syncthreads();
    tile_gradients<true>(k_tile, v_tile, q_tile, d_out_tile, lse_tile, dots_tile, scale,
                         Mask(block, first_query, first_key), tile, columns, probabilities, d_scores);
    __syncthreads();
    accumulate_tile(d_scores, k_tile, nullptr, tile, columns, d_q_tile);
  }
  __syncthreads();
  store(d_q_tile, columns, rows, size, add, d_q + start, q_leading);
}

// ---- Launches ---------------------------------------------------------------------------------------------

// Sizes of a kernel's tiles: rows, columns, and bytes of all of them together.
struct Tiling {
  int tile, columns;
  size_t bytes;
};

// The largest tiles of which a block's memory has room for `matrices` [tile, columns], `squares` [tile, tile]
// and `vectors` [tile]; but not longer than need be: what lies beyond the rows is computed, too.
static Tiling choose_tiling(const AttentionBlock& block, int matrices, int squares, int vectors) {
  const int columns = (block.head.head_size + patch_columns - 1) / patch_columns * patch_columns;
  const auto bytes = [&](int tile) {
    return sizeof(accum) * tile * (matrices * columns + squares * tile + vectors);
  };
  const auto too_large = [&](int tile) {
    return bytes(tile) > size_t(largest_block_memory()) || tile / 2 >= std::max(block.queries, block.keys);
  };
  int tile = 64;
  while (tile > patch_columns && too_large(tile)) tile /= 2;
  return {tile, columns, bytes(tile)};
}

template <class Result>
void tiled_forward(const AttentionBlock& block, const AttentionTensorsOf<Result>& t, cudaStream_t stream) {
  const auto [tile, columns, bytes] = choose_tiling(block, 4, 1, 3);
  launch_with_memory(tiled_forward_kernel<Result>, tiles_of(block, block.queries, block.head.heads, tile),
                     bytes, attention_cost(block, 2, Cost::Unit::cores, false), stream, t.q.data, t.k.data,
                     t.v.data, block, 1 / std::sqrt(block.head.head_size), tile, columns, t.out.data,
                     t.lse.data);
}

template <class Result>
void tiled_backward(const AttentionBlock& block, const AttentionTensors& t,
                    const AttentionGradientsOf<Result>& g, bool add, cudaStream_t stream) {
  const double scale = 1 / std::sqrt(block.head.head_size);
  const Tiling over_keys = choose_tiling(block, 6, 2, 2), over_queries = choose_tiling(block, 5, 2, 2);
  launch_with_memory(tiled_backward_keys_kernel<Result>,
                     tiles_of(block, block.keys, block.head.kv_heads, over_keys.tile), over_keys.bytes,
                     attention_cost(block, 4, Cost::Unit::cores, true), stream, t.q.data, t.k.data, t.v.data,
                     g.d_out.data, t.lse.data, g.d_out_dot_out.data, block, scale, over_keys.tile,
                     over_keys.columns, add, g.d_k.data, g.d_v.data);
  launch_with_memory(tiled_backward_queries_kernel<Result>,
                     tiles_of(block, block.queries, block.head.heads, over_queries.tile), over_queries.bytes,
                     attention_cost(block, 3, Cost::Unit::cores, true), stream, t.q.data, t.k.data, t.v.data,
                     g.d_out.data, t.lse.data, g.d_out_dot_out.data, block, scale, over_queries.tile,
                     over_queries.columns, add, g.d_q.data);
}

template decltype(tiled_forward<real>) tiled_forward<real>;
template decltype(tiled_backward<real>) tiled_backward<real>;
#if PRECISION == 16
template decltype(tiled_forward<accum>) tiled_forward<accum>;
template decltype(tiled_backward<accum>) tiled_backward<accum>;
#endif

}  // namespace pentatron
