#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>

#include "device/cuda.h"
#include "kernels/fp8.h"

namespace pentatron {

// The smallest power of two by which numbers up to `largest` become numbers of the format. Below 2^-100,
// whose inverse a float can still be, there is none.
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
__device__ real in_8_bits(float x, float scale, float inverse) {
  constexpr __nv_fp8_interpretation_t kind = format == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2;
  const __half value =
      __nv_cvt_fp8_to_halfraw(__nv_cvt_float_to_fp8(x * inverse, __NV_SATFINITE, kind), kind);
  return real(float(value) * scale);
}

// A block has the square of 128 x 128 at (blockIdx.y, blockIdx.x), and a thread some of its columns, or rows.
template <Fp8Tile tile, Fp8Format format>
__global__ void quantise_kernel(const real* __restrict__ x, int64_t rows, int64_t columns,
                                const accum* __restrict__ largest_parts, real* __restrict__ out) {
  const int64_t first_row = int64_t{blockIdx.y} * fp8_tile, first_column = int64_t{blockIdx.x} * fp8_tile;
  const int height = static_cast<int>(std::min(int64_t{fp8_tile}, rows - first_row)),
            width = static_cast<int>(std::min(int64_t{fp8_tile}, columns - first_column));
  const int64_t begin = first_row * columns + first_column;
  constexpr bool by_row = tile == Fp8Tile::row;
  const int64_t line = by_row ? columns : 1, along = by_row ? 1 : columns;
  const int lines = by_row ? height : width, length = by_row ? width : height;
  const auto largest_of_line = [&](int i) {
    float largest = 0;
    for (int j = 0; j < length; ++j) largest = fmaxf(largest, fabsf(float(x[begin + i * line + j * along])));
    return largest;
  };
  float largest = 0;
  if (tile == Fp8Tile::square)
    for (int i : block_range(lines)) largest = fmaxf(largest, largest_of_line(i));
  if (tile == Fp8Tile::all)
    for (int i : block_range(fp8_parts)) largest = fmaxf(largest, float(largest_parts[i]));
  if (tile == Fp8Tile::square || tile == Fp8Tile::all)
    largest = block_reduce(largest, 0.0f, [](float a, float b) { return fmaxf(a, b); });
  for (int i : block_range(lines)) {
    if (tile == Fp8Tile::row || tile == Fp8Tile::column) largest = largest_of_line(i);
    const float scale = scale_of<format>(largest), inverse = 1 / scale;  // exact: a power of two
    for (int j = 0; j < length; ++j) {
      const int64_t at = begin + i * line + j * along;
      out[at] = in_8_bits<format>(float(x[at]), scale, inverse);
    }
  }
}

template <Fp8Format format>
auto kernel_of(Fp8Tile tile) {
  return tile == Fp8Tile::row      ? quantise_kernel<Fp8Tile::row, format>
         : tile == Fp8Tile::column ? quantise_kernel<Fp8Tile::column, format>
         : tile == Fp8Tile::square ? quantise_kernel<Fp8Tile::square, format>
                                   : quantise_kernel<Fp8Tile::all, format>;
}

__global__ void largest_kernel(const real* __restrict__ x, size_t size, accum* __restrict__ largest_parts) {
  float largest = 0;
  for (size_t i : grid_range(size)) largest = fmaxf(largest, fabsf(float(x[i])));
  largest = block_reduce(largest, 0.0f, [](float a, float b) { return fmaxf(a, b); });
  for ([[maybe_unused]] int once : block_range(1)) largest_parts[blockIdx.x] = largest;
}

void quantise(Tensor x, Fp8Format format, Fp8Tile tile, Tensor out, accum* largest, cudaStream_t stream) {
  if (x.size() == 0) return;
  if (tile == Fp8Tile::all)
    launch(largest_kernel, dim3(fp8_parts), moves(x.bytes()), stream, x.data, x.size(), largest);
  const auto squares = [](int64_t n) { return static_cast<unsigned>((n + fp8_tile - 1) / fp8_tile); };
  const double codes = 1.0 * x.size();  // bytes, as a GPU would write them; their scales are few
  launch(format == Fp8Format::e4m3 ? kernel_of<Fp8Format::e4m3>(tile) : kernel_of<Fp8Format::e5m2>(tile),
         Grid(dim3(squares(x.columns), squares(x.rows)), fp8_tile), moves(x.bytes() + codes), stream, x.data,
         x.rows, x.columns, largest, out.data);
}

}  // namespace pentatron
