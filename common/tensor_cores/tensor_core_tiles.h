// Tiles of `real16` in shared memory, their products, and the sums of these in the registers of a warp.
//
// A tile is [rows, size] real16 without gaps. To read it, ldmatrix takes 16 bytes of each of 8 rows, which
// would all be in the same banks of shared memory. So the 16-byte chunks of a row are permuted (swizzled):
// chunk c of row r lies at c ^ (r % 8), and any chunk of 8 rows in sequence is in 8 different places:
//
//      row 0   0 1 2 3 4 5 6 7          row 2   2 3 0 1 6 7 4 5
//      row 1   1 0 3 2 5 4 7 6          row 3   3 2 1 0 7 6 5 4   ...
#pragma once

#include <type_traits>

#include "kernels/matmul.h"
#include "tensor_cores/tensor_core.h"

namespace pentatron {

// The sums of a warp: rows x columns of D as mma leaves them, four of each in a lane.
template <int rows, int columns>
using Sums = float[rows / 16][columns / 8][4];

// Where sums[i][j][e] of this lane is.
__device__ inline int row_of(int i, int e) { return 16 * i + lane() / 4 + e / 2 * 8; }
__device__ inline int column_of(int j, int e) { return 8 * j + lane() % 4 * 2 + e % 2; }

// f(i, j, e) for i < m, j < n and e < 4, unrolled, as registers have no addresses.
template <int m, int n, class Function>
__device__ void for_registers(Function f) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int j = 0; j < n; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) f(i, j, e);
    }
  }
}

// f(sum, row, column) of each of this lane.
template <int m, int n, class Function>
__device__ void for_each(float (&sums)[m][n][4], Function f) {
  for_registers<m, n>([&](int i, int j, int e) { f(sums[i][j][e], row_of(i, e), column_of(j, e)); });
}

constexpr int chunk_size = 8;  // elements: 16 bytes

template <int size, class T>
__device__ T* chunk_of(T* tile /*[rows, size]*/, int row, int chunk) {
  return tile + row * size + (chunk ^ (row % 8)) * chunk_size;
}

// Begins to fetch a tile: `rows` of them are there, the rest becomes zeros.
template <int size, int tile_rows, int threads>
__device__ void begin_load(In<real> from /*[rows, leading]*/, int leading, int rows,
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
__device__ void begin_load_pair(In<real> first, In<real> second, size_t start, int leading, int rows,
                                real* to /*[2, tile_rows, size]*/) {
  begin_load<size, tile_rows, threads>(first + start, leading, rows, to);
  begin_load<size, tile_rows, threads>(second + start, leading, rows, to + tile_rows * size);
}

// Products are made of parts of 16 x 16 of a tile, which ldmatrix takes as four matrices. The second one is
// that below the first one or, `across`, that to its right. This is the row whose address this lane gives.
// (16 rows on, chunks are permuted likewise; and two chunks on, an even number c, is at place ^ c.)
template <int size, bool across = false>
__device__ const real* part_of(const real* tile /*[rows, size]*/, int i, int j) {
  const int row = across ? lane() % 8 + lane() / 16 * 8 : lane() % 16,
            chunk = across ? lane() / 8 % 2 : lane() / 16;
  const int in_first = row * size + (chunk ^ row % 8) * chunk_size;
  return tile + (16 * i * size + (in_first ^ 2 * j * chunk_size));
}

// The left factor of a product in the registers of a warp: rows x depth, rounded and packed.
template <int rows, int depth>
using Factor = uint32_t[rows / 16][depth / 16][4];

template <int size, int m, int depth>
__device__ void load_factor(const real* tile /*[16 m, size]*/, int first_column,
                            uint32_t (&factor)[m][depth][4]) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int k = 0; k < depth; ++k) {
      load_matrices(factor[i][k], part_of<size>(tile, i, first_column / 16 + k));
    }
  }
}

// Two neighbours among sums, of 8 columns each, are 16 columns of a factor.
template <int m, int n>
__device__ void as_factor(const float (&sums)[m][n][4], uint32_t (&factor)[m][n / 2][4]) {
  for_registers<m, n / 2>([&](int i, int k, int r) {
    const float(&of_half)[4] = sums[i][2 * k + r / 2];
    factor[i][k][r] = pack(of_half[r % 2 * 2], of_half[r % 2 * 2 + 1]);
  });
}

// sums += left b or left b^T, of the columns of b from first_column on. b^T is what mma takes for B as it is,
// since a row of b is a column of B; otherwise b is loaded transposed.
template <int size, Transpose transpose, int m, int depth, int n>
__device__ void multiply(const uint32_t (&left)[m][depth][4], const real* b /*[rows, size]*/,
                         int first_column, float (&sums)[m][n][4]) {
#pragma unroll
  for (int k = 0; k < depth; ++k) {
#pragma unroll
    for (int j = 0; j < n / 2; ++j) {
      uint32_t right[4];
      if constexpr (transpose == Transpose::yes) {
        load_matrices(right, part_of<size, true>(b, j, first_column / 16 + k));
      } else {
        load_matrices_transposed(right, part_of<size>(b, k, first_column / 16 + j));
      }
#pragma unroll
      for (int i = 0; i < m; ++i) {
        mma(sums[i][2 * j], left[i][k], right[0], right[1]);
        mma(sums[i][2 * j + 1], left[i][k], right[2], right[3]);
      }
    }
  }
}

// Two neighbours in memory, written at once.
template <class Result>
struct alignas(2 * sizeof(Result)) Pair {
  Result first, second;
};

enum class Store { assign, add, add_without_waiting };

// to (+)= sums, the rows that are there.
template <int m, int n, class Result>
__device__ void store(const float (&sums)[m][n][4], int rows, Store how, Out<Result> to /*[rows, leading]*/,
                      int leading) {
#pragma unroll
  for (int i = 0; i < m; ++i) {
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      const int row = row_of(i, e);
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < n; ++j) {
        Result* const first = to + row * leading + column_of(j, e);
        auto* const at = reinterpret_cast<Pair<Result>*>(first);
        if constexpr (std::is_same_v<Result, accum>) {
          if (how == Store::add_without_waiting) {
            add_pair(first, sums[i][j][e], sums[i][j][e + 1]);
            continue;
          }
        }
        const Pair<Result> before = how == Store::add ? *at : Pair<Result>{0.0f, 0.0f};
        *at = {Result(float(before.first) + sums[i][j][e]), Result(float(before.second) + sums[i][j][e + 1])};
      }
    }
  }
}

}  // namespace pentatron
