// Each warp owns some rows of a tile that is held fixed (of queries in forward), and has in registers what it
// sums up for them. Together, the warps of a block go through tiles of the other kind (of keys) in shared
// memory; while one of these is computed with, the next one is on its way.
//
//               fixed tile      looped tiles                               looped      sums
//      warp 0   q, rows  0..31    x k^T = scores -> softmax -> weights     x v   ->    out, rows  0..31
//      warp 1   q, rows 32..63    x k^T = scores -> softmax -> weights     x v   ->    out, rows 32..63
//      ...      (shared memory)           (registers)                                  (registers)
//
// Every product is one of two: of two tiles in shared memory (multiply_tiles: scores), or of what such a
// product has left in registers with a tile in shared memory (multiply_sums: out). Scores never leave the
// lanes that computed them, since mma takes its left factor in the layout in which it leaves a result
// (tensor_core.h).
//
//      forward             scores = q k^T                          out += weights v
//      backward, queries   scores = q k^T   d_weights = d_out v^T  d_q += d_scores k
//      backward, keys      scores = k q^T   d_weights = v d_out^T  d_v += weights d_out   d_k += d_scores q
//
// A tile is [rows, size] bfloat16 without gaps. To read it, ldmatrix takes 16 bytes of each of 8 rows, and
// these would all be in the same banks of shared memory. So the 16-byte chunks of a row are permuted
// (swizzled): chunk c of row r lies at place c ^ (r % 8), and any chunk of 8 rows in sequence is in 8
// different places:
//
//      row 0   0 1 2 3 4 5 6 7          row 2   2 3 0 1 6 7 4 5
//      row 1   1 0 3 2 5 4 7 6          row 3   3 2 1 0 7 6 5 4   ...
//
// All exponentials are powers of 2: `scale` is log2(e) / sqrt(size).
#include <cmath>

#include "kernels/attention_tensor_core.h"
#include "kernels/attention_tiled.h"
#include "kernels/tensor_core.h"

namespace pentatron {

static constexpr int cpu = 0;  // its compute capability

void require_tensor_cores() {
  const cudaDeviceProp device = this_device();
  if (has_tensor_core_attention && (device.major >= 8 || is_dry_run())) return;
  throw UsageError("--attention", "tensor-core",
                   "naive or tiled with " + std::string(precision_name) + " on " + device.name +
                       "; it takes PRECISION=bf16 on a GPU of compute capability 8.0 or later");
}

bool can_run_tensor_core_attention() {
  const int capability = this_device().major;
  return has_tensor_core_attention && (capability >= 8 || capability == cpu);
}

#if PRECISION == 16

// The sums of a warp: rows x columns of D as mma leaves them, four of each in a lane.
template <int rows, int columns>
using Sums = float[rows / 16][columns / 8][4];

// Where sums[i][j][e] of this lane is.
__device__ inline int row_of(int i, int e) { return 16 * i + lane() / 4 + e / 2 * 8; }
__device__ inline int column_of(int j, int e) { return 8 * j + lane() % 4 * 2 + e % 2; }

// f(sum, row, column) of each of this lane.
template <int m, int n, class Function>
__device__ void for_each(float (&sums)[m][n][4], Function f) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(sums[i][j][e], row_of(i, e), column_of(j, e));
    }
  }
}

constexpr int chunk_size = 8;  // elements: 16 bytes

template <int size, class T>
__device__ T* chunk_of(T* tile /*[rows, size]*/, int row, int chunk) {
  return tile + row * size + (chunk ^ (row % 8)) * chunk_size;
}

// Begins to fetch a tile: `rows` of them are there, the rest becomes zeros.
template <int size, int tile_rows, int threads>
__device__ void begin_load(const real* __restrict__ from /*[rows, leading]*/, int leading, int rows,
                           real* to /*[tile_rows, size]*/) {
  constexpr int chunks = size / chunk_size, step = threads / chunks;  // rows
  static_assert(step % 8 == 0, "a thread's chunks are at the same place in each of its rows");
  const int first = thread_of_block() / chunks, chunk = thread_of_block() % chunks;
  from += static_cast<size_t>(first) * leading + chunk * chunk_size;
  to = chunk_of<size>(to, first, chunk);
#pragma unroll 1  // the addresses would take registers
  for (int row = first; row < tile_rows; row += step) {
    begin_copy_16(to, from, row < rows);
    from += step * leading;
    to += step * size;
  }
}

// Of two matrices that lie alike (k and v, or q and d_out), a tile each.
template <int size, int tile_rows, int threads>
__device__ void begin_load_pair(const real* __restrict__ first, const real* __restrict__ second, size_t start,
                                int leading, int rows, real* to /*[2, tile_rows, size]*/) {
  begin_load<size, tile_rows, threads>(first + start, leading, rows, to);
  begin_load<size, tile_rows, threads>(second + start, leading, rows, to + tile_rows * size);
}

// Products are made of parts of 16 x 16 of a tile, which ldmatrix takes as four matrices: upper left, lower
// left, upper right, lower right. This is the row whose address this lane gives. (16 rows on, chunks are
// permuted likewise; and two chunks on, an even number c, is at place ^ c.)
template <int size>
__device__ const real* part_of(const real* tile /*[rows, size]*/, int i, int j) {
  const int in_first = lane() % 16 * size + (lane() / 16 ^ lane() % 8) * chunk_size;
  return tile + (16 * i * size + (in_first ^ 2 * j * chunk_size));
}

// sums += a b^T. In both, features are contiguous: that is how mma takes the rows of A and the columns of B.
template <int size, int m, int n>
__device__ void multiply_tiles(const real* a /*[16 m, size]*/, const real* b /*[8 n, size]*/,
                               float (&sums)[m][n][4]) {
#pragma unroll 2  // all at once, addresses and factors would take too many registers
  for (int k = 0; k < size / 16; ++k) {
    uint32_t left[m][4], right[4];
#pragma unroll
    for (int i = 0; i < m; ++i) load_matrices(left[i], part_of<size>(a, i, k));
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      load_matrices(right, part_of<size>(b, j, k));
#pragma unroll
      for (int i = 0; i < m; ++i) {
        mma(sums[i][2 * j], left[i], right[0], right[2]);
        mma(sums[i][2 * j + 1], left[i], right[1], right[3]);
      }
    }
  }
}

// Two neighbours among sums are the left factor of a product over their 16 columns.
__device__ inline void as_left_factor(const float (&left_half)[4], const float (&right_half)[4],
                                      uint32_t (&factor)[4]) {
  factor[0] = pack(left_half[0], left_half[1]);
  factor[1] = pack(left_half[2], left_half[3]);
  factor[2] = pack(right_half[0], right_half[1]);
  factor[3] = pack(right_half[2], right_half[3]);
}

// sums += weights b. A column of B is a column of b, so it is loaded transposed.
template <int size, int m, int n>
__device__ void multiply_sums(const float (&weights)[m][n][4], const real* b /*[8 n, size]*/,
                              float (&sums)[m][size / 8][4]) {
#pragma unroll
  for (int k = 0; k < n / 2; ++k) {
    uint32_t left[m][4], right[4];
#pragma unroll
    for (int i = 0; i < m; ++i) as_left_factor(weights[i][2 * k], weights[i][2 * k + 1], left[i]);
#pragma unroll
    for (int j = 0; j < size / 16; ++j) {
      load_matrices_transposed(right, part_of<size>(b, k, j));
#pragma unroll
      for (int i = 0; i < m; ++i) {
        mma(sums[i][2 * j], left[i], right[0], right[1]);
        mma(sums[i][2 * j + 1], left[i], right[2], right[3]);
      }
    }
  }
}

// A row of sums is spread over four lanes.
__device__ inline float sum_of_row(float of_lane) {
  of_lane += shuffle_xor(of_lane, 1);
  return of_lane + shuffle_xor(of_lane, 2);
}
__device__ inline float max_of_row(float of_lane) {
  of_lane = fmaxf(of_lane, shuffle_xor(of_lane, 1));
  return fmaxf(of_lane, shuffle_xor(of_lane, 2));
}

// Two neighbours in memory, written at once.
template <class Result>
struct alignas(2 * sizeof(Result)) Pair {
  Result first, second;
};

// to (+)= sums, the rows that are there.
template <int m, int n, class Result>
__device__ void store(const float (&sums)[m][n][4], int rows, bool add,
                      Result* __restrict__ to /*[rows, leading]*/, int leading) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int row = row_of(i, e);
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < n; ++j) {
        auto* at = reinterpret_cast<Pair<Result>*>(to + static_cast<size_t>(row) * leading + column_of(j, e));
        const Pair<Result> before = add ? *at : Pair<Result>{0.0f, 0.0f};
        *at = {Result(float(before.first) + sums[i][j][e]), Result(float(before.second) + sums[i][j][e + 1])};
      }
    }
  }
}

constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;

// How a kernel cuts its work: a block of `warps` holds a tile of `fixed` rows, `rows` of each warp, and loops
// over tiles of `looped` rows. The more rows, the fewer reads of shared memory for a product; but a lane has
// 255 registers, and a warp's sums and scores are in them.
template <int rows_of_warp, int looped_rows>
struct Cut {
  static constexpr int warps = 4, threads = warps * lanes_of_warp;
  static constexpr int rows = rows_of_warp, fixed = warps * rows, looped = looped_rows;
};

// ---- Forward ----------------------------------------------------------------------------------------------

template <int size>
using ForwardCut = Cut<32, size == 64 ? 64 : 32>;

// Scores become 2^(scale (score - largest)), where `largest` now includes this tile; what was summed with the
// largest before is scaled down. `sum` is that of this lane's exponentials.
template <int m, int n, int columns>
__device__ void online_softmax(float scale, float (&scores)[m][n][4], float (&largest)[m][2],
                               float (&sum)[m][2], float (&out)[m][columns][4]) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = 2 * half, second = first + 1;
      float now = largest[i][half];
#pragma unroll
      for (int j = 0; j < n; ++j) now = fmaxf(now, fmaxf(scores[i][j][first], scores[i][j][second]));
      now = max_of_row(now);
      const float factor = exp2_fast(scale * (largest[i][half] - now));  // 0 at first
      largest[i][half] = now;
      sum[i][half] *= factor;
#pragma unroll
      for (int j = 0; j < columns; ++j) out[i][j][first] *= factor, out[i][j][second] *= factor;
#pragma unroll
      for (int j = 0; j < n; ++j) {
#pragma unroll
        for (int e = first; e <= second; ++e) {
          scores[i][j][e] = exp2_fast(scale * scores[i][j][e] - scale * now);
          sum[i][half] += scores[i][j][e];
        }
      }
    }
  }
}

// One block a (sequence, head, tile of queries); it loops over the tiles of keys. The last queries, which see
// most keys, come first, so that no block that takes long begins late.
template <int size, class Result>
__global__ void __launch_bounds__(ForwardCut<size>::threads, 2)
    tensor_core_forward_kernel(const real* __restrict__ q, const real* __restrict__ k,
                               const real* __restrict__ v, int queries, int keys, int query_stride,
                               int key_stride, bool diagonal, int heads, int kv_heads, float scale,
                               Result* __restrict__ out, accum* __restrict__ lse) {
  using Of = ForwardCut<size>;
  constexpr int looped = Of::looped, tile_size = looped * size;
  const int tiles = (queries + Of::fixed - 1) / Of::fixed;
  const int first_query = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * Of::fixed;
  const int head = blockIdx.x / tiles % heads, sequence = blockIdx.x / tiles / heads;
  const int leading = heads * size, kv_leading = kv_heads * size, of_warp = warp() * Of::rows;
  const int first_row = sequence * query_stride + first_query;
  const size_t kv = static_cast<size_t>(sequence) * key_stride * kv_leading +
                    static_cast<size_t>(head / (heads / kv_heads)) * size;

  real* const q_tile = block_memory<real>();         // [fixed, size]
  real* const kv_tiles = q_tile + Of::fixed * size;  // k, v: [looped, size]; twice
  const auto tile_at = [&](int first_key) { return kv_tiles + first_key / looped % 2 * (2 * tile_size); };
  const auto begin_load_keys = [&](int first_key) {
    begin_load_pair<size, looped, Of::threads>(k, v, kv + static_cast<size_t>(first_key) * kv_leading,
                                               kv_leading, keys - first_key, tile_at(first_key));
  };

  Sums<Of::rows, size> sums = {};
  float largest[Of::rows / 16][2], sum[Of::rows / 16][2] = {};
  for (auto& of_rows : largest) of_rows[0] = of_rows[1] = -INFINITY;

  begin_load<size, Of::fixed, Of::threads>(q + static_cast<size_t>(first_row) * leading + head * size,
                                           leading, queries - first_query, q_tile);
  begin_load_keys(0);
  const int visible_keys = diagonal ? std::min(keys, first_query + Of::fixed) : keys;
  for (int first_key = 0; first_key < visible_keys; first_key += looped) {
    wait_for_copies();
    synchronize_block();  // this tile is here, and all have used the one before: the next one may come there
    if (first_key + looped < visible_keys) begin_load_keys(first_key + looped);
    const real* const k_tile = tile_at(first_key);
    // This warp's query i sees key j of the tile where j <= i + ahead.
    const int ahead = diagonal ? first_query + of_warp - first_key : looped;
    if (ahead + Of::rows <= 0) continue;
    Sums<Of::rows, looped> scores = {};
    multiply_tiles<size>(q_tile + of_warp * size, k_tile, scores);
    if (ahead < looped - 1 || keys - first_key < looped) {
      for_each(scores, [&](float& score, int query, int key) {
        if (key > query + ahead || key >= keys - first_key) score = -INFINITY;
      });
    }
    online_softmax(scale, scores, largest, sum, sums);
    multiply_sums<size>(scores, k_tile + tile_size, sums);
  }

  const int first_of_warp = first_row + of_warp, rows = queries - first_query - of_warp;
#pragma unroll
  for (int i = 0; i < Of::rows / 16; ++i) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const float of_row = sum_of_row(sum[i][e / 2]), share = 1 / of_row;
      const int row = row_of(i, e);
      if (row < rows && lane() % 4 == 0) {
        lse[(first_of_warp + row) * heads + head] = ln_2 * (scale * largest[i][e / 2]) + logf(of_row);
      }
#pragma unroll
      for (int j = 0; j < size / 8; ++j) sums[i][j][e] *= share, sums[i][j][e + 1] *= share;
    }
  }
  store(sums, rows, false, out + static_cast<size_t>(first_of_warp) * leading + head * size, leading);
}

// ---- Backward ---------------------------------------------------------------------------------------------

// A score becomes the probability 2^(scale score - log2(e) lse), and its d_probability the d_score without
// the factor 1 / sqrt(size).
__device__ inline void differentiate(float scale, float lse, float dot, float& score, float& d_probability) {
  score = exp2_fast(scale * score - log2_e * lse);
  d_probability = score * (d_probability - dot);
}

template <int size>
using QueriesCut = Cut<32, size == 64 ? 64 : 32>;

// d_q. As forward: one block a (sequence, head, tile of queries); it loops over the tiles of keys.
template <int size, class Result>
__global__ void __launch_bounds__(QueriesCut<size>::threads, 2)
    tensor_core_backward_queries_kernel(const real* __restrict__ q, const real* __restrict__ k,
                                        const real* __restrict__ v, const real* __restrict__ d_out,
                                        const accum* __restrict__ lse, const accum* __restrict__ dots,
                                        int queries, int keys, int query_stride, int key_stride,
                                        bool diagonal, int heads, int kv_heads, float scale, bool add,
                                        Result* __restrict__ d_q) {
  using Of = QueriesCut<size>;
  constexpr int looped = Of::looped, tile_size = looped * size, fixed_size = Of::fixed * size;
  const int tiles = (queries + Of::fixed - 1) / Of::fixed;
  const int first_query = (tiles - 1 - static_cast<int>(blockIdx.x) % tiles) * Of::fixed;
  const int head = blockIdx.x / tiles % heads, sequence = blockIdx.x / tiles / heads;
  const int leading = heads * size, kv_leading = kv_heads * size, of_warp = warp() * Of::rows;
  const int first_row = sequence * query_stride + first_query;
  const int first_of_warp = first_row + of_warp, rows = queries - first_query - of_warp;
  const size_t kv = static_cast<size_t>(sequence) * key_stride * kv_leading +
                    static_cast<size_t>(head / (heads / kv_heads)) * size;

  real* const q_tile = block_memory<real>();       // q, d_out: [fixed, size]
  real* const kv_tiles = q_tile + 2 * fixed_size;  // k, v: [looped, size]; twice
  const auto tile_at = [&](int first_key) { return kv_tiles + first_key / looped % 2 * (2 * tile_size); };
  const auto begin_load_keys = [&](int first_key) {
    begin_load_pair<size, looped, Of::threads>(k, v, kv + static_cast<size_t>(first_key) * kv_leading,
                                               kv_leading, keys - first_key, tile_at(first_key));
  };

  begin_load_pair<size, Of::fixed, Of::threads>(q, d_out,
                                                static_cast<size_t>(first_row) * leading + head * size,
                                                leading, queries - first_query, q_tile);
  begin_load_keys(0);
  float lse_of[Of::rows / 16][2], dot_of[Of::rows / 16][2];  // of the rows of this lane
#pragma unroll
  for (int i = 0; i < Of::rows / 16; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row_of(i, 2 * half), at = (first_of_warp + row) * heads + head;
      lse_of[i][half] = row < rows ? lse[at] : 0;
      dot_of[i][half] = row < rows ? dots[at] : 0;
    }
  }

  Sums<Of::rows, size> sums = {};
  const int visible_keys = diagonal ? std::min(keys, first_query + Of::fixed) : keys;
  for (int first_key = 0; first_key < visible_keys; first_key += looped) {
    wait_for_copies();
    synchronize_block();
    if (first_key + looped < visible_keys) begin_load_keys(first_key + looped);
    const real* const k_tile = tile_at(first_key);
    const int ahead = diagonal ? first_query + of_warp - first_key : looped;
    if (ahead + Of::rows <= 0) continue;
    Sums<Of::rows, looped> scores = {}, d_scores = {};
    multiply_tiles<size>(q_tile + of_warp * size, k_tile, scores);
    multiply_tiles<size>(q_tile + fixed_size + of_warp * size, k_tile + tile_size, d_scores);
    if (ahead < looped - 1 || keys - first_key < looped) {
      for_each(scores, [&](float& score, int query, int key) {
        if (key > query + ahead || key >= keys - first_key) score = -INFINITY;
      });
    }
#pragma unroll
    for (int i = 0; i < Of::rows / 16; ++i) {
#pragma unroll
      for (int j = 0; j < looped / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          differentiate(scale, lse_of[i][e / 2], dot_of[i][e / 2], scores[i][j][e], d_scores[i][j][e]);
        }
      }
    }
    multiply_sums<size>(d_scores, k_tile, sums);
  }
  for_each(sums, [&](float& sum, int, int) { sum *= ln_2 * scale; });
  store(sums, rows, add, d_q + static_cast<size_t>(first_of_warp) * leading + head * size, leading);
}

template <int size>
using KeysCut = Cut<size == 64 ? 32 : 16, size == 64 ? 32 : 64>;

// lse and dots of a tile of queries, and zeros beyond the last one, which contributes nothing.
template <int tile_rows>
__device__ void begin_load_statistics(const accum* __restrict__ lse /*[rows, heads]*/,
                                      const accum* __restrict__ dots, int heads, int rows,
                                      accum* to /*[2, tile_rows]*/) {
  const int row = thread_of_block();
  if (row >= tile_rows) return;
  begin_copy_4(to + row, lse + static_cast<size_t>(row) * heads, row < rows);
  begin_copy_4(to + tile_rows + row, dots + static_cast<size_t>(row) * heads, row < rows);
}

// d_k and d_v. One block a (sequence, key and value head, tile of keys); it loops over the heads of its group
// and the tiles of queries that see these keys. Scores are those of forward transposed: a row for each key.
template <int size, class Result>
__global__ void __launch_bounds__(KeysCut<size>::threads, 2)
    tensor_core_backward_keys_kernel(const real* __restrict__ q, const real* __restrict__ k,
                                     const real* __restrict__ v, const real* __restrict__ d_out,
                                     const accum* __restrict__ lse, const accum* __restrict__ dots,
                                     int queries, int keys, int query_stride, int key_stride, bool diagonal,
                                     int heads, int kv_heads, float scale, bool add, Result* __restrict__ d_k,
                                     Result* __restrict__ d_v) {
  using Of = KeysCut<size>;
  constexpr int looped = Of::looped, tile_size = looped * size, fixed_size = Of::fixed * size;
  const int tiles = (keys + Of::fixed - 1) / Of::fixed, first_key = blockIdx.x % tiles * Of::fixed;
  const int kv_head = blockIdx.x / tiles % kv_heads, sequence = blockIdx.x / tiles / kv_heads;
  const int leading = heads * size, kv_leading = kv_heads * size, of_warp = warp() * Of::rows;
  const int first_row = sequence * key_stride + first_key, group = heads / kv_heads;
  const int unseen = diagonal ? first_key / looped * looped : 0;  // queries before all that see these keys
  const int tiles_of_head = std::max(0, (queries - unseen + looped - 1) / looped);

  real* const k_tile = block_memory<real>();      // k, v: [fixed, size]
  real* const q_tiles = k_tile + 2 * fixed_size;  // q, d_out: [looped, size]; twice
  accum* const statistics = reinterpret_cast<accum*>(q_tiles + 4 * tile_size);  // lse, dots: [looped]; twice
  const auto begin_load_queries = [&](int tile) {
    const int head = kv_head * group + tile / tiles_of_head;
    const int first_query = unseen + tile % tiles_of_head * looped,
              row = sequence * query_stride + first_query;
    begin_load_pair<size, looped, Of::threads>(q, d_out, static_cast<size_t>(row) * leading + head * size,
                                               leading, queries - first_query,
                                               q_tiles + tile % 2 * (2 * tile_size));
    begin_load_statistics<looped>(lse + row * heads + head, dots + row * heads + head, heads,
                                  queries - first_query, statistics + tile % 2 * (2 * looped));
  };

  Sums<Of::rows, size> sums_k = {}, sums_v = {};
  if (tiles_of_head > 0) {
    begin_load_pair<size, Of::fixed, Of::threads>(
        k, v, static_cast<size_t>(first_row) * kv_leading + kv_head * size, kv_leading, keys - first_key,
        k_tile);
    begin_load_queries(0);
  }
  for (int tile = 0; tile < group * tiles_of_head; ++tile) {
    wait_for_copies();
    synchronize_block();
    if (tile + 1 < group * tiles_of_head) begin_load_queries(tile + 1);
    const real* const q_tile = q_tiles + tile % 2 * (2 * tile_size);
    const accum* const lse_tile = statistics + tile % 2 * (2 * looped);
    // This warp's key i is seen by query j of the tile where i <= j + ahead.
    const int first_query = unseen + tile % tiles_of_head * looped;
    const int ahead = diagonal ? first_query - first_key - of_warp : Of::rows;
    if (ahead + looped <= 0) continue;
    Sums<Of::rows, looped> scores = {}, d_scores = {};
    multiply_tiles<size>(k_tile + of_warp * size, q_tile, scores);
    multiply_tiles<size>(k_tile + fixed_size + of_warp * size, q_tile + tile_size, d_scores);
    if (ahead < Of::rows - 1) {
      for_each(scores, [&](float& score, int key, int query) {
        if (key > query + ahead) score = -INFINITY;
      });
    }
#pragma unroll
    for (int j = 0; j < looped / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float lse_of = lse_tile[column_of(j, e)], dot_of = lse_tile[looped + column_of(j, e)];
#pragma unroll
        for (int i = 0; i < Of::rows / 16; ++i) {
          differentiate(scale, lse_of, dot_of, scores[i][j][e], d_scores[i][j][e]);
        }
      }
    }
    multiply_sums<size>(scores, q_tile + tile_size, sums_v);
    multiply_sums<size>(d_scores, q_tile, sums_k);
  }
  for_each(sums_k, [&](float& sum, int, int) { sum *= ln_2 * scale; });
  const int rows = keys - first_key - of_warp;
  const size_t start = static_cast<size_t>(first_row + of_warp) * kv_leading + kv_head * size;
  store(sums_k, rows, add, d_k + start, kv_leading);
  store(sums_v, rows, add, d_v + start, kv_leading);
}

// ---- Launches ---------------------------------------------------------------------------------------------

namespace {

// Calls f(std::integral_constant<int, size>) for the sizes that there are kernels for.
template <class Function>
void for_head_size(int size, Function f) {
  if (size == 64) return f(std::integral_constant<int, 64>());
  if (size == 128) return f(std::integral_constant<int, 128>());
  fail("attention on tensor cores", ("head size " + std::to_string(size)).c_str(), __FILE__, __LINE__);
}

// Blocks of a grid: every tile of `rows` of every head of every sequence.
dim3 tiles_of(const AttentionBlock& block, int rows, int heads, int tile) {
  return dim3(static_cast<unsigned>((rows + tile - 1) / tile) * heads * block.batch);
}

size_t tile_bytes(int rows, int size) { return sizeof(real) * rows * size; }

float scale_of(int size) { return static_cast<float>(log2_e / std::sqrt(size)); }

}  // namespace

template <class Result>
void tensor_core_forward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, Matrix<Result> out,
                         AccumTensor lse, cudaStream_t stream) {
  const int heads = block.head.heads, kv_heads = block.head.kv_heads;
  for_head_size(block.head.head_size, [&](auto head_size) {
    constexpr int size = head_size;
    using Of = ForwardCut<size>;
    launch_with_memory(in_warps<Of::threads, tensor_core_forward_kernel<size, Result>>(),
                       Grid(tiles_of(block, block.queries, heads, Of::fixed), Of::threads),
                       tile_bytes(Of::fixed + 4 * Of::looped, size),
                       attention_cost(block, 2, Cost::Unit::tensor_cores, false), stream, q.data, k.data,
                       v.data, block.queries, block.keys, block.query_stride, block.key_stride,
                       block.diagonal, heads, kv_heads, scale_of(size), out.data, lse.data);
  });
}

template <class Result>
void tensor_core_backward(const AttentionBlock& block, Tensor q, Tensor k, Tensor v, AccumTensor lse,
                          Tensor d_out, AccumTensor dots, bool add, Matrix<Result> d_q, Matrix<Result> d_k,
                          Matrix<Result> d_v, cudaStream_t stream) {
  const int heads = block.head.heads, kv_heads = block.head.kv_heads;
  for_head_size(block.head.head_size, [&](auto head_size) {
    constexpr int size = head_size;
    using OfKeys = KeysCut<size>;
    launch_with_memory(
        in_warps<OfKeys::threads, tensor_core_backward_keys_kernel<size, Result>>(),
        Grid(tiles_of(block, block.keys, kv_heads, OfKeys::fixed), OfKeys::threads),
        tile_bytes(2 * OfKeys::fixed + 4 * OfKeys::looped, size) + 4 * OfKeys::looped * sizeof(accum),
        attention_cost(block, 4, Cost::Unit::tensor_cores, true), stream, q.data, k.data, v.data, d_out.data,
        lse.data, dots.data, block.queries, block.keys, block.query_stride, block.key_stride, block.diagonal,
        heads, kv_heads, scale_of(size), add, d_k.data, d_v.data);
    using OfQueries = QueriesCut<size>;
    launch_with_memory(in_warps<OfQueries::threads, tensor_core_backward_queries_kernel<size, Result>>(),
                       Grid(tiles_of(block, block.queries, heads, OfQueries::fixed), OfQueries::threads),
                       tile_bytes(2 * OfQueries::fixed + 4 * OfQueries::looped, size),
                       attention_cost(block, 3, Cost::Unit::tensor_cores, true), stream, q.data, k.data,
                       v.data, d_out.data, lse.data, dots.data, block.queries, block.keys, block.query_stride,
                       block.key_stride, block.diagonal, heads, kv_heads, scale_of(size), add, d_q.data);
  });
}

template void tensor_core_forward(const AttentionBlock&, Tensor, Tensor, Tensor, Tensor, AccumTensor,
                                  cudaStream_t);
template void tensor_core_forward(const AttentionBlock&, Tensor, Tensor, Tensor, AccumTensor, AccumTensor,
                                  cudaStream_t);
template void tensor_core_backward(const AttentionBlock&, Tensor, Tensor, Tensor, AccumTensor, Tensor,
                                   AccumTensor, bool, Tensor, Tensor, Tensor, cudaStream_t);
template void tensor_core_backward(const AttentionBlock&, Tensor, Tensor, Tensor, AccumTensor, Tensor,
                                   AccumTensor, bool, AccumTensor, AccumTensor, AccumTensor, cudaStream_t);

double tensor_core_error(int head_size, cudaStream_t stream) {
  constexpr int rows = 150, heads = 2, kv_heads = 1;  // no tile fits exactly
  const AttentionBlock block = {1, rows, rows, rows, rows, {heads, kv_heads, head_size}, true};
  DeviceArena memory(Purpose::activations);
  const auto random = [&](const char* name, int columns) {
    const Tensor x = memory.matrix<real>(rows, columns);
    fill_normal(x.data, 0, x.size(), {columns, 0, 0, columns}, philox_key(1, name), 1, stream);
    return x;
  };
  const int of_queries = heads * head_size, of_keys = kv_heads * head_size;
  const Tensor q = random("q", of_queries), k = random("k", of_keys), v = random("v", of_keys),
               d_out = random("d_out", of_queries);
  const AccumTensor lse = memory.matrix<accum>(rows, heads), dots = memory.matrix<accum>(rows, heads);
  // out, d_q, d_k, d_v, end to end
  const auto results = [&](auto forward, auto backward) {
    std::vector<std::vector<double>> all;
    const Tensor out = memory.matrix<real>(rows, of_queries), d_q = memory.matrix<real>(rows, of_queries),
                 d_k = memory.matrix<real>(rows, of_keys), d_v = memory.matrix<real>(rows, of_keys);
    forward(block, q, k, v, out, lse, stream);
    attention_dots(out, d_out, dots, stream);
    backward(block, q, k, v, lse, d_out, dots, false, d_q, d_k, d_v, stream);
    for (const Tensor& x : {out, d_q, d_k, d_v}) {
      PinnedArray<real> host(x.size());
      CUDA_CHECK(cudaMemcpyAsync(host.data(), x.data, x.bytes(), cudaMemcpyDeviceToHost, stream));
      CUDA_CHECK(cudaStreamSynchronize(stream));
      all.emplace_back();
      for (size_t i = 0; i < x.size(); ++i) all.back().push_back(static_cast<float>(host[i]));
    }
    return all;
  };
  const auto expected = results(tiled_forward<real>, tiled_backward<real>);
  const auto computed = results(tensor_core_forward<real>, tensor_core_backward<real>);
  double error = 0;
  for (size_t x = 0; x < expected.size(); ++x) {
    double largest = 0, difference = 0;
    for (size_t i = 0; i < expected[x].size(); ++i) {
      const double of_element = std::abs(computed[x][i] - expected[x][i]);
      if (!(of_element <= difference)) difference = of_element;  // NaN, too
      largest = std::max(largest, std::abs(expected[x][i]));
    }
    if (!(difference / largest <= error)) error = difference / largest;
  }
  return error;
}

#else

double tensor_core_error(int, cudaStream_t) { return INFINITY; }

#endif

}  // namespace pentatron
