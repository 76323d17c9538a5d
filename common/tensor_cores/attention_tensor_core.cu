// Attention in tiles on tensor cores (FlashAttention-2; Dao, 2023).
//
// Each warp owns some rows of a tile that is held fixed (of queries in forward), and has in registers what it
// sums up for them. Together, the warps of a block go through tiles of the other kind (of keys) in
// shared memory; while one of these is computed with, the next one is on its way.
//
//               fixed tile      looped tiles                               looped      sums
//      warp 0   q, rows  0..31    x k^T = scores -> softmax -> weights     x v   ->    out, rows  0..31
//      warp 1   q, rows 32..63    x k^T = scores -> softmax -> weights     x v   ->    out, rows 32..63
//      ...      (shared memory)           (registers)                                  (registers)
//
// Scores stay in the lanes that computed them: mma takes its left factor as it leaves a result
// (tensor_core.h).
//
// Backward holds keys fixed and goes through the queries. It has two sums, d_k and d_v, and a warp has no
// registers for both. So two warps share some keys. One has their k in registers, the other one their v, and
// the weights go from one to the other:
//
//      first warp     k q^T     = scores -> weights                                d_v += weights d_out
//      second warp    v d_out^T = d_weights -> weights (d_weights - dots) = d_scores   d_k += d_scores q
//      then all of a block                                                         d_q += d_scores^T k
//
// These are five products, each computed once. d_q lies in global memory, in float. The blocks of a head add
// to it one after the other, in the order of their keys, and the heads of a group to d_k and d_v (Turn). So
// results repeat bit for bit.
//
// With causality a block may take many times as long as another one. Those that take longest begin first: a
// long one that began last would work alone (place_of).
//
// All exponentials are powers of 2: `scale` is log2(e) / sqrt(size).
#include <cmath>

#include "kernels/elementwise.h"
#include "tensor_cores/attention_tiles.h"
#include "tensor_cores/tensor_core_tiles.h"

namespace pentatron {

#if PRECISION == 16

// A row of sums is spread over four lanes.
__device__ inline float sum_of_row(float of_lane) {
  of_lane += shuffle_xor(of_lane, 1);
  return of_lane + shuffle_xor(of_lane, 2);
}
__device__ inline float max_of_row(float of_lane) {
  of_lane = fmaxf(of_lane, shuffle_xor(of_lane, 1));
  return fmaxf(of_lane, shuffle_xor(of_lane, 2));
}

constexpr float log2_e = 1.44269504f, ln_2 = 0.693147181f;

// ---- Forward ----------------------------------------------------------------------------------------------

// How a kernel cuts its work: a block of `warps` holds a tile of `fixed` rows, `rows` of each warp, and loops
// over tiles of `looped` rows. The more rows, the fewer reads of shared memory for a product; but a lane has
// 255 registers, and a warp's sums and scores are in them.
template <int size>
struct ForwardCut {
  static constexpr int warps = 4, threads = warps * lanes_of_warp;
  static constexpr int fixed = tensor_core_tile(size, false, warps), rows = fixed / warps,
                       looped = size == 64 ? 64 : 32;
};

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

// One block a (sequence, head, tile of queries); it loops over the tiles of keys. The last queries see most
// of them.
template <int size, class Result>
__global__ void __launch_bounds__(ForwardCut<size>::threads, 2)
    tensor_core_forward_kernel(In<real> q /*[rows, heads*size]*/, In<real> k /*[rows, kv_heads*size]*/,
                               In<real> v /*as k*/, AttentionBlock block, float scale,
                               Out<Result> out /*as q*/, Out<accum> lse /*[rows, heads]*/) {
  using Of = ForwardCut<size>;
  const int queries = block.queries, keys = block.keys;
  const int heads = block.head.heads, kv_heads = block.head.kv_heads;
  constexpr int looped = Of::looped, tile_size = looped * size;
  const int tiles = (queries + Of::fixed - 1) / Of::fixed;
  const auto [tile, head, sequence] =
      place_of(static_cast<int>(blockIdx.x), tiles, heads, block.batch, section_of(queries, size));
  const int first_query = (tiles - 1 - tile) * Of::fixed;
  const int leading = heads * size, kv_leading = kv_heads * size, of_warp = warp() * Of::rows;
  const int first_row = sequence * block.stride + first_query;
  const size_t kv =
      static_cast<size_t>(sequence) * block.stride * kv_leading + head / (heads / kv_heads) * size;

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
  const int visible_keys = block.diagonal ? std::min(keys, first_query + Of::fixed) : keys;
  begin_load_keys(0);
  for (int first_key = 0; first_key < visible_keys; first_key += looped) {
    wait_for_copies();
    synchronize_block();  // this tile is here, and all have used the one before: the next one may come there
    if (first_key + looped < visible_keys) begin_load_keys(first_key + looped);
    const real* const k_tile = tile_at(first_key);
    // This warp's query i sees key j of the tile where j <= i + ahead.
    const int ahead = block.diagonal ? first_query + of_warp - first_key : looped;
    if (ahead + Of::rows <= 0) continue;
    Sums<Of::rows, looped> scores = {};
#pragma unroll 2  // all at once, addresses and factors would take too many registers
    for (int column = 0; column < size; column += 16) {
      Factor<Of::rows, 16> left;
      load_factor<size>(q_tile + of_warp * size, column, left);
      multiply<size, Transpose::yes>(left, k_tile, column, scores);
    }
    if (ahead < looped - 1 || keys - first_key < looped) {
      for_each(scores, [&](float& score, int query, int key) {
        if (key > query + ahead || key >= keys - first_key) score = -INFINITY;
      });
    }
    online_softmax(scale, scores, largest, sum, sums);
    Factor<Of::rows, looped> weights;
    as_factor(scores, weights);
    multiply<size, Transpose::no>(weights, k_tile + tile_size, 0, sums);
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
  store(sums, rows, Store::assign, out + static_cast<size_t>(first_of_warp) * leading + head * size, leading);
}

// ---- Backward ---------------------------------------------------------------------------------------------

// Two warps have `rows` keys, a block `fixed`. They loop over tiles of `looped` queries, `part` at a time. In
// a lane's 255 registers are rows x size / 32 sums, half as many of k or v, and rows x part / 32 scores.
template <int size, int warps>
struct BackwardCut {
  static constexpr int threads = warps * lanes_of_warp;
  static constexpr int fixed = tensor_core_tile(size, true, warps), rows = 2 * fixed / warps,
                       looped = backward_queries, part = 16;
};

// lse and dots of a tile of queries, and zeros beyond the last one, which contributes nothing.
template <int tile_rows>
__device__ void begin_load_statistics(In<accum> lse /*[rows, heads]*/, In<accum> dots, int heads, int rows,
                                      accum* to /*[2, tile_rows]*/) {
  const int row = thread_of_block();
  if (row >= tile_rows) return;
  begin_copy_4(to + row, lse + static_cast<size_t>(row) * heads, row < rows);
  begin_copy_4(to + tile_rows + row, dots + static_cast<size_t>(row) * heads, row < rows);
}

// Scores, a row for each key, become weights: 2^(scale score - log2(e) lse), or 0 of a key that its query
// does not see. Query j sees the keys up to j + ahead, of the `keys` that are there.
template <int m, int n>
__device__ void as_weights(float scale, const accum* lse /*[8 n]*/, int ahead, int keys,
                           float (&scores)[m][n][4]) {
  for_each(scores,
           [&](float& score, int, int query) { score = exp2_fast(scale * score - log2_e * lse[query]); });
  if (ahead >= 16 * m - 1 && keys >= 16 * m) return;
  for_each(scores, [&](float& weight, int key, int query) {
    if (key > query + ahead || key >= keys) weight = 0;
  });
}

// Register r of part (i, k) of a factor that is stored as rows of a tile, from (row, column) on.
template <int size>
__device__ uint32_t& in_tile(real* tile /*[rows, size]*/, int row, int column, int i, int k, int r) {
  real* const chunk = chunk_of<size>(tile, row + row_of(i, r % 2 * 2), column / chunk_size + 2 * k + r / 2);
  return *reinterpret_cast<uint32_t*>(chunk + column_of(0, 0));
}

template <int size, int m, int depth>
__device__ void store_factor(const uint32_t (&factor)[m][depth][4], int row, int column, real* tile) {
  for_registers<m, depth>(
      [&](int i, int k, int r) { in_tile<size>(tile, row, column, i, k, r) = factor[i][k][r]; });
}

// d_weights become d_scores, weights * (d_weights - dots), without their factor 1 / sqrt(size).
template <int size, int m, int n>
__device__ void differentiate(real* weights /*[rows, size]*/, int row, int column,
                              const accum* dots /*[8 n]*/, float (&d_weights)[m][n][4]) {
  for_registers<m, n>([&](int i, int j, int e) {
    const uint32_t pair = in_tile<size>(weights, row, column, i, j / 2, j % 2 * 2 + e / 2);
    d_weights[i][j][e] = unpack(pair, e % 2) * (d_weights[i][j][e] - dots[column_of(j, e)]);
  });
}

// How a block adds to a tile of queries of d_q, or of keys of d_k or d_v.
template <class Result>
struct Turn {
  int32_t* number;  // of blocks that have added
  int before;       // so many add before this one
  bool rounds;      // this one is the last one, and rounds the sums to the result
  bool add;         // to what was there before all of them
  accum* sums;      // [rows, leading]; the tile begins at `start`
  Result* result;   // likewise
  size_t start;
};

template <class Result, int m, int n>
__device__ void add_in_turn(float (&sums)[m][n][4], int rows, size_t at, int leading,
                            const Turn<Result>& turn) {
  if (turn.rounds) {
    if (turn.before > 0) {
      for_each(sums, [&](float& sum, int i, int j) {
        if (i < rows) sum += turn.sums[at + i * leading + j];
      });
    }
    store(sums, rows, turn.add ? Store::add : Store::assign, turn.result + at, leading);
  } else {
    const bool first = turn.before == 0 && (!turn.add || !std::is_same_v<Result, accum>);
    store(sums, rows, first ? Store::assign : Store::add_without_waiting, turn.sums + at, leading);
  }
}

// d_q += scale d_scores^T k, of a tile of queries. A warp has 32 queries and a part of the columns.
template <int size, int keys, int warps, class Result>
__device__ void add_to_d_q(const real* d_scores /*[keys, backward_queries]*/, const real* k /*[keys, size]*/,
                           float scale, int rows, int leading, const Turn<Result>& turn) {
  constexpr int m = 2, columns = size == 64 ? 32 : 16, parts = warps / 2;
  const int first_row = warp() / parts * (16 * m), first_column = warp() % parts * (size / parts);
  wait_for_turn(turn.number, turn.before);
#pragma unroll 1
  for (int column = first_column; column < first_column + size / parts; column += columns) {
    Sums<16 * m, columns> sums = {};
#pragma unroll
    for (int i = 0; i < keys / 16; ++i) {
      Factor<16 * m, 16> left;
#pragma unroll
      for (int j = 0; j < m; ++j) {
        load_matrices_transposed(left[j][0],
                                 part_of<backward_queries, true>(d_scores, i, first_row / 16 + j));
      }
      multiply<size, Transpose::no>(left, k + 16 * i * size, column, sums);
    }
    for_each(sums, [&](float& sum, int, int) { sum *= scale; });
    const size_t at = turn.start + (first_row * leading + column);
    add_in_turn(sums, rows - first_row, at, leading, turn);
  }
}

// d_q, d_k and d_v. One block a (sequence, query head, tile of keys). It loops over the tiles of queries that
// see these keys. The first keys are seen by most queries. The last queries see all keys, so each block
// begins with them. It adds to d_q after the blocks of earlier keys, and to d_k and d_v after those of
// earlier heads of its group. They have begun before it: blocks take numbers as they begin.
template <int size, int warps, class Result>
__global__ void __launch_bounds__(BackwardCut<size, warps>::threads, 8 / warps)
    tensor_core_backward_kernel(In<real> q /*[rows, heads*size]*/, In<real> k /*[rows, kv_heads*size]*/,
                                In<real> v /*as k*/, In<real> d_out /*as q*/, In<accum> lse /*[rows, heads]*/,
                                In<accum> dots /*as lse*/, AttentionBlock block, int group, float scale,
                                bool add, int32_t* next_number /*[1]*/, int32_t* turns /*[backward_turns]*/,
                                accum* d_q_sums /*as q*/, accum* d_k_sums /*as k*/, accum* d_v_sums /*as k*/,
                                Result* d_q /*as q*/, Result* d_k /*as k*/, Result* d_v /*as k*/) {
  using Of = BackwardCut<size, warps>;
  const int queries = block.queries, keys = block.keys;
  const int heads = block.head.heads, kv_heads = block.head.kv_heads;
  constexpr int looped = Of::looped, part = Of::part, tile_size = looped * size;
  const int leading = heads * size, kv_leading = kv_heads * size;
  const int tiles = (keys + Of::fixed - 1) / Of::fixed, query_tiles = (queries + looped - 1) / looped;
  const int which = warp() % 2, of_pair = warp() / 2 * Of::rows;  // of a pair's warps; the pair's first key

  real* const k_tile = block_memory<real>();        // [fixed, size]
  real* const v_tile = k_tile + Of::fixed * size;   // [fixed, size], until it is in registers; then
  real* const weights = v_tile;                     // [fixed, looped], which become d_scores in place
  real* const q_tiles = v_tile + Of::fixed * size;  // q, d_out: [looped, size]; twice
  accum* const statistics = reinterpret_cast<accum*>(q_tiles + 4 * tile_size);  // lse, dots: [looped]; twice
  // Registers are scarce, and block memory is not.
  Place* const place = reinterpret_cast<Place*>(statistics + 4 * looped);
  if (thread_of_block() == 0) {
    *place = place_of(take_number(next_number), tiles, heads, block.batch, section_of(queries, size));
  }
  synchronize_block();
  const auto first_key = [&] { return place->tile * Of::fixed; };
  const auto key_column = [&] { return place->head / group * size; };
  // A step is a tile of queries: from the last one to the first that sees these keys.
  const auto first_query_of = [&](int step) { return (query_tiles - 1 - step) * looped; };
  const auto steps = [&] { return query_tiles - (block.diagonal ? first_key() / looped : 0); };
  const auto begin_load_queries = [&](int step) {
    const int head = place->head, first_query = first_query_of(step), buffer = step % 2;
    const int row = place->sequence * block.stride + first_query;
    begin_load_pair<size, looped, Of::threads>(q, d_out, static_cast<size_t>(row) * leading + head * size,
                                               leading, queries - first_query,
                                               q_tiles + buffer * (2 * tile_size));
    begin_load_statistics<looped>(lse + row * heads + head, dots + row * heads + head, heads,
                                  queries - first_query, statistics + buffer * (2 * looped));
  };
  const auto turn_of = [&](int step) {
    const int head = place->head, first_query = first_query_of(step);
    const int last_tile =
        block.diagonal ? std::min(tiles - 1, (first_query + looped - 1) / Of::fixed) : tiles - 1;
    const size_t row = static_cast<size_t>(place->sequence) * block.stride + first_query;
    const int number = (place->sequence * heads + head) * query_tiles + first_query / looped;
    const bool rounds = place->tile == last_tile && !std::is_same_v<Result, accum>;
    return Turn<Result>{turns + number, place->tile, rounds, add, d_q_sums, d_q, row * leading + head * size};
  };

  Factor<Of::rows, size> fixed;
  Sums<Of::rows, size> sums = {};
  const auto first_row = [&] { return static_cast<size_t>(place->sequence) * block.stride + first_key(); };
  begin_load_pair<size, Of::fixed, Of::threads>(k, v, first_row() * kv_leading + key_column(), kv_leading,
                                                keys - first_key(), k_tile);
  begin_load_queries(0);
  wait_for_copies();
  synchronize_block();
  load_factor<size>((which == 0 ? k_tile : v_tile) + of_pair * size, 0, fixed);
  synchronize_block();

#pragma unroll 1
  for (int step = 0; step < steps(); ++step) {
    if (step + 1 < steps()) begin_load_queries(step + 1);
#pragma unroll 1
    for (int of_part = 0; of_part < looped; of_part += part) {
      const real* const q_part = q_tiles + step % 2 * 2 * tile_size + of_part * size;  // then that of d_out
      const accum* const lse_or_dots = statistics + (step % 2 * 2 + which) * looped + of_part;
      Sums<Of::rows, part> scores = {};  // of the second warp: d_weights, then d_scores
      multiply<size, Transpose::yes>(fixed, q_part + which * tile_size, 0, scores);
      Factor<Of::rows, part> factor;
      if (which == 0) {
        const int ahead = block.diagonal ? first_query_of(step) + of_part - first_key() - of_pair : Of::rows;
        as_weights(scale, lse_or_dots, ahead, keys - first_key() - of_pair, scores);
        as_factor(scores, factor);
        store_factor<looped>(factor, of_pair, of_part, weights);
      }
      synchronize_block();
      if (which == 1) differentiate<looped>(weights, of_pair, of_part, lse_or_dots, scores);
      as_factor(scores, factor);  // again: to keep both would take more registers
      if (which == 1) store_factor<looped>(factor, of_pair, of_part, weights);
      multiply<size, Transpose::no>(factor, q_part + (1 - which) * tile_size, 0, sums);
    }
    synchronize_block();  // all d_scores are there
    add_to_d_q<size, Of::fixed, warps>(weights, k_tile, ln_2 * scale, queries - first_query_of(step), leading,
                                       turn_of(step));
    wait_for_copies();
    synchronize_block();  // the next tile is here; all have used this one, and have added
    if (thread_of_block() == 0) set_turn(turn_of(step).number, place->tile + 1);
  }
  if (which == 1) for_each(sums, [&](float& sum, int, int) { sum *= ln_2 * scale; });
  int32_t* const turn = turns + block.batch * heads * query_tiles +
                        (place->sequence * kv_heads + place->head / group) * tiles + place->tile;
  const int before = place->head % group;
  const size_t start = (first_row() + of_pair) * kv_leading + key_column();
  wait_for_turn(turn, before);
  add_in_turn(sums, keys - first_key() - of_pair, start, kv_leading,
              Turn<Result>{turn, before, before == group - 1 && !std::is_same_v<Result, accum>, add,
                           which == 0 ? d_v_sums : d_k_sums, which == 0 ? d_v : d_k, start});
  synchronize_block();
  if (thread_of_block() == 0) set_turn(turn, before + 1);
}

// ---- Launches ---------------------------------------------------------------------------------------------

namespace {

// Calls f(std::integral_constant<int, size>) for the sizes that there are kernels for. A dry run computes
// nothing, and counts others', too (check_sizes).
template <class Function>
void for_head_size(int size, Function f) {
  if (size == 64) return f(std::integral_constant<int, 64>());
  if (size == 128 || is_dry_run()) return f(std::integral_constant<int, 128>());
  fail("attention on tensor cores", ("head size " + std::to_string(size)).c_str(), __FILE__, __LINE__);
}

float scale_of(int size) { return static_cast<float>(log2_e / std::sqrt(size)); }

}  // namespace

template <class Result>
void tensor_core_forward(const AttentionBlock& block, const AttentionTensorsOf<Result>& t,
                         cudaStream_t stream) {
  for_head_size(block.head.head_size, [&](auto head_size) {
    constexpr int size = head_size;
    using Of = ForwardCut<size>;
    launch_with_memory(in_warps<Of::threads, tensor_core_forward_kernel<size, Result>>(),
                       Grid(tiles_of(block, block.queries, block.head.heads, Of::fixed), Of::threads),
                       sizeof(real) * (Of::fixed + 4 * Of::looped) * size,
                       attention_cost(block, 2, Cost::Unit::tensor_cores, false), stream, t.q.data, t.k.data,
                       t.v.data, block, scale_of(size), t.out.data, t.lse.data);
  });
}

template <class Result>
void tensor_core_backward(const AttentionBlock& block, const AttentionTensors& t,
                          const AttentionGradientsOf<Result>& g, bool add, cudaStream_t stream) {
  TensorCoreMemory to = *static_cast<const TensorCoreMemory*>(g.memory.other.get());
  if constexpr (std::is_same_v<Result, accum>) to = {to.turns, g.d_q, g.d_k, g.d_v};
  CUDA_CHECK(cudaMemsetAsync(to.turns.data, 0, to.turns.bytes(), stream));
  for_head_size(block.head.head_size, [&](auto head_size) {
    constexpr int size = head_size;
    const auto launch_backward = [&](auto of_block) {
      constexpr int warps = of_block;
      using Of = BackwardCut<size, warps>;
      launch_with_memory(in_warps<Of::threads, tensor_core_backward_kernel<size, warps, Result>>(),
                         Grid(tiles_of(block, block.keys, block.head.heads, Of::fixed), Of::threads),
                         sizeof(real) * (2 * Of::fixed + 4 * Of::looped) * size +
                             sizeof(accum) * 4 * Of::looped + sizeof(Place),
                         attention_cost(block, 5, Cost::Unit::tensor_cores, true), stream, t.q.data, t.k.data,
                         t.v.data, g.d_out.data, t.lse.data, g.d_out_dot_out.data, block,
                         block.head.heads / block.head.kv_heads, scale_of(size), add, to.turns.data,
                         to.turns.data + 1, to.d_q.data, to.d_k.data, to.d_v.data, g.d_q.data, g.d_k.data,
                         g.d_v.data);
    };
    if constexpr (size == 128) {
      if (tensor_core_warps(block, true) == 8) return launch_backward(std::integral_constant<int, 8>());
    }
    launch_backward(std::integral_constant<int, 4>());
  });
}

template decltype(tensor_core_forward<real>) tensor_core_forward<real>;
template decltype(tensor_core_forward<accum>) tensor_core_forward<accum>;
template decltype(tensor_core_backward<real>) tensor_core_backward<real>;
template decltype(tensor_core_backward<accum>) tensor_core_backward<accum>;

double tensor_core_error(int head_size, cudaStream_t stream) {
  constexpr int rows = 150, heads = 2, kv_heads = 1;  // no tile fits exactly
  const AttentionBlock block = {1, rows, rows, rows, {heads, kv_heads, head_size}, true};
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
  const auto results = [&](auto forward, auto backward) {
    const AttentionTensors t = {q, k, v, memory.matrix<real>(rows, of_queries), lse, {}};
    const AttentionGradients g = {d_out,
                                  memory.matrix<real>(rows, of_queries),
                                  memory.matrix<real>(rows, of_keys),
                                  memory.matrix<real>(rows, of_keys),
                                  backward_memory(Attention::tensor_core, memory, {1, rows, block.head}),
                                  dots};
    forward(block, t, stream);
    attention_dots(t.out, d_out, dots, stream);
    backward(block, t, g, false, stream);
    std::vector<PinnedArray<real>> all;
    for (const Tensor& x : {t.out, g.d_q, g.d_k, g.d_v}) {
      const auto& host = all.emplace_back(x.size());
      CUDA_CHECK(cudaMemcpyAsync(host.data(), x.data, x.bytes(), cudaMemcpyDeviceToHost, stream));
    }
    CUDA_CHECK(cudaStreamSynchronize(stream));
    return all;
  };
  const auto expected = results(tiled_forward<real>, tiled_backward<real>);
  const auto computed = results(tensor_core_forward<real>, tensor_core_backward<real>);
  double error = 0;
  for (size_t x = 0; x < expected.size(); ++x) {
    double largest = 0, difference = 0;
    for (size_t i = 0; i < expected[x].size(); ++i) {
      const double want = float(expected[x][i]), of_element = std::abs(float(computed[x][i]) - want);
      if (!(of_element <= difference)) difference = of_element;  // NaN, too
      largest = std::max(largest, std::abs(want));
    }
    if (!(difference / largest <= error)) error = difference / largest;
  }
  return error;
}

#else

double tensor_core_error(int, cudaStream_t) { return INFINITY; }

#endif

}  // namespace pentatron
