#include <algorithm>
#include <cmath>

#include "device/kernel.h"
#include "kernels/fp8.h"
#include "kernels/pack.h"

namespace pentatron {

// The smallest power of two that, as a divisor, makes numbers of the format of those up to `largest`. It is
// at least 2^-100, so that its inverse is a normal float.
template <Fp8Format format>
__device__ float scale_of(float largest) {
  if (largest == 0) return 1;
  if (largest == INFINITY) return NAN;
  constexpr int smallest = -100;
  const float most = format == Fp8Format::e4m3 ? 448.0f : 57344.0f;
  int exponent = 0, of_most = 0;
  const float fraction = frexpf(largest, &exponent), fraction_of_most = frexpf(most, &of_most);
  return ldexpf(1, std::max(smallest, exponent - of_most + (fraction > fraction_of_most ? 1 : 0)));
}

template <Fp8Format format>
constexpr __nv_fp8_interpretation_t interpretation = format == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2;

template <Fp8Format format>
__device__ __forceinline__ real worth(__nv_fp8_storage_t code, float scale) {
  return real(float(__half(__nv_cvt_fp8_to_halfraw(code, interpretation<format>))) * scale);
}

// The square of 128 x 128 of a matrix that a block has. at(): the index of the square's element (i, j) in the
// matrix. of(): that of the same element in the matrix x of which it is the transpose, or a copy.
struct Square {
  int64_t tiles_of_row, tile_row, tile_column;
  int64_t first_row, first_column, rows, columns;
  bool transposed;
  int height, width;
  __device__ Square(int64_t rows, int64_t columns, Transpose transpose)
      : tiles_of_row((columns + fp8_tile - 1) / fp8_tile),
        tile_row(blockIdx.x / tiles_of_row),
        tile_column(blockIdx.x % tiles_of_row),
        first_row(tile_row * fp8_tile),
        first_column(tile_column * fp8_tile),
        rows(rows),
        columns(columns),
        transposed(transpose == Transpose::yes),
        height(static_cast<int>(std::min(int64_t{fp8_tile}, rows - first_row))),
        width(static_cast<int>(std::min(int64_t{fp8_tile}, columns - first_column))) {}
  __device__ int64_t at(int i, int j) const { return (first_row + i) * columns + first_column + j; }
  __device__ int64_t of(int i, int j) const {
    return transposed ? (first_column + j) * rows + first_row + i : at(i, j);
  }
  // Where the scale of row i's tile is.
  __device__ int64_t scale_of_row(int i) const { return tile_column * rows + first_row + i; }
};

// A block's part of x begins a row every 65 words of the shared memory, so that the lanes of a warp, which
// read neighbours of a row or of a column, use different banks.
constexpr int row_of_square = fp8_tile + 2;

// The square as it lies in x is read by packs, half a warp a row (a pack is 8 elements). Then a warp has a
// row of the result, which is a column of the square if x is transposed.
template <Fp8Tile tile, Fp8Format format, int width>
__global__ void quantise_kernel(const real* __restrict__ x, int64_t rows, int64_t columns,
                                Transpose transpose, const accum* __restrict__ largest_parts, Fp8Matrix out) {
  const Square square(rows, columns, transpose);
  const bool transposed = square.transposed;
  const int lanes = lanes_for(fp8_tile / width);
  real* const values = block_memory<real>();
  float largest = 0;
  for (int i : warp_range(transposed ? square.width : square.height, lanes)) {
    for (int j : lane_range(transposed ? square.height : square.width, width, lanes)) {
      const Pack<width> pack = load<width>(x + (transposed ? square.of(j, i) : square.of(i, j)));
      for (int e = 0; e < width; ++e) largest = fmaxf(largest, fabsf(float(pack[e])));
      constexpr int part = std::min(2, width);
      for (int e = 0; e < width; e += part) {
        Pack<part> word;
        for (int k = 0; k < part; ++k) word[k] = pack[e + k];
        store(values + i * row_of_square + j + e, word);
      }
    }
  }
  if (tile == Fp8Tile::all)
    for (int i : block_range(fp8_parts)) largest = fmaxf(largest, float(largest_parts[i]));
  if (tile == Fp8Tile::row) {
    __syncthreads();
  } else {
    largest = block_reduce(largest, 0.0f, [](float a, float b) { return fmaxf(a, b); });
  }

  const int64_t padded = (square.tiles_of_row + 3) / 4 * 4;
  for (int i : warp_range(square.height)) {
    const real* const row = values + (transposed ? i : i * row_of_square);
    const int step = transposed ? row_of_square : 1;
    if (tile == Fp8Tile::row) {
      largest = 0;
      for (int j : lane_range(square.width)) largest = fmaxf(largest, fabsf(float(row[j * step])));
      largest = lane_max(largest);
    }
    const float scale = scale_of<format>(largest), inverse = 1 / scale;  // exact: a power of two
    for (int j : lane_range(square.width)) {
      const __nv_fp8_storage_t code =
          __nv_cvt_float_to_fp8(float(row[j * step]) * inverse, __NV_SATFINITE, interpretation<format>);
      if (out.values) {
        out.values[square.at(i, j)] = worth<format>(code, scale);
      } else {
        out.codes[square.at(i, j)] = code;
      }
    }
    const bool has_scale =
        !out.values && (tile == Fp8Tile::row || (i == 0 && (tile == Fp8Tile::square || blockIdx.x == 0)));
    for ([[maybe_unused]] int once : lane_range(has_scale ? 1 : 0))
      out.scales[tile == Fp8Tile::row      ? square.scale_of_row(i)
                 : tile == Fp8Tile::square ? square.tile_row * padded + square.tile_column
                                           : 0] = scale;
  }
}

__global__ void dequantise_kernel(const __nv_fp8_storage_t* __restrict__ codes,
                                  const float* __restrict__ scales, int64_t rows, int64_t columns,
                                  Transpose transpose, real* __restrict__ out) {
  const Square square(rows, columns, transpose);
  // The lanes of a warp write neighbours.
  const bool by_row = !square.transposed;
  for (int a : warp_range(by_row ? square.height : square.width)) {
    for (int b : lane_range(by_row ? square.width : square.height)) {
      const int i = by_row ? a : b, j = by_row ? b : a;
      out[square.of(i, j)] = worth<Fp8Format::e4m3>(codes[square.at(i, j)], scales[square.scale_of_row(i)]);
    }
  }
}

template <Fp8Format format, int width>
auto kernel_of(Fp8Tile tile) {
  return tile == Fp8Tile::row      ? quantise_kernel<Fp8Tile::row, format, width>
         : tile == Fp8Tile::square ? quantise_kernel<Fp8Tile::square, format, width>
                                   : quantise_kernel<Fp8Tile::all, format, width>;
}
template <Fp8Format format>
auto kernel_of(Fp8Tile tile, int width) {
  return width == 1 ? kernel_of<format, 1>(tile) : kernel_of<format, pack_width>(tile);
}

__global__ void largest_kernel(const real* __restrict__ x, size_t size, accum* __restrict__ largest_parts) {
  float largest = 0;
  for (size_t i : grid_range(size)) largest = fmaxf(largest, fabsf(float(x[i])));
  largest = block_reduce(largest, 0.0f, [](float a, float b) { return fmaxf(a, b); });
  for ([[maybe_unused]] int once : block_range(1)) largest_parts[blockIdx.x] = largest;
}

static Grid squares(int64_t rows, int64_t columns) {
  const auto tiles = [](int64_t n) { return static_cast<unsigned>((n + fp8_tile - 1) / fp8_tile); };
  return {dim3(tiles(columns) * tiles(rows)), fp8_tile};
}

void quantise(Tensor x, Transpose transpose, Fp8Format format, Fp8Tile tile, Fp8Matrix out, accum* largest,
              cudaStream_t stream) {
  if (x.size() == 0) return;
  if (tile == Fp8Tile::all)
    launch(largest_kernel, dim3(fp8_parts), moves(x.bytes()), stream, x.data, x.size(), largest);
  const auto [rows, columns] =
      transpose == Transpose::yes ? std::pair(x.columns, x.rows) : std::pair(x.rows, x.columns);
  const double codes = 1.0 * x.size();  // bytes, as a GPU would write them; their scales are few
  const int width = width_for(x.columns, x.data);
  launch_with_memory(format == Fp8Format::e4m3 ? kernel_of<Fp8Format::e4m3>(tile, width)
                                               : kernel_of<Fp8Format::e5m2>(tile, width),
                     squares(rows, columns), fp8_tile * row_of_square * sizeof(real),
                     moves(x.bytes() + codes), stream, x.data, rows, columns, transpose, largest, out);
}

void dequantise(const __nv_fp8_storage_t* codes, const float* scales, Transpose transpose, Tensor out,
                cudaStream_t stream) {
  const auto [rows, columns] =
      transpose == Transpose::yes ? std::pair(out.columns, out.rows) : std::pair(out.rows, out.columns);
  launch(dequantise_kernel, squares(rows, columns), moves(out.bytes() + 1.0 * out.size()), stream, codes,
         scales, rows, columns, transpose, out.data);
}

}  // namespace pentatron
