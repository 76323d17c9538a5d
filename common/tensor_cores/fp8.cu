#include <algorithm>
#include <atomic>
#include <cmath>
#include <iostream>

#include "kernels/pack.h"
#include "tensor_cores/codes_product.h"
#include "tensor_cores/fp8.h"

namespace pentatron {

// The smallest power of two that, as a divisor, makes numbers of e4m3 of those up to `largest`: they reach
// 448, which is 0.875 x 2^9. It is at least 2^-100, so that its inverse is a normal float.
static __device__ float scale_of(float largest) {
  if (largest == 0) return 1;
  if (largest == INFINITY) return NAN;
  int exponent = 0;
  const float fraction = frexpf(largest, &exponent);
  return ldexpf(1, std::max(-100, exponent - 9 + (fraction > 0.875f ? 1 : 0)));
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
  // Where the element's code is, the scale of row i's tile, and that of the square.
  __device__ int64_t code_at(int i, int j) const {
    return at(i, j) + (first_row + i) * (padded_to_16(columns) - columns);
  }
  __device__ int64_t scale_of_row(int i) const { return tile_column * padded_to_16(rows) + first_row + i; }
  __device__ int64_t scale_of_square() const { return tile_row * ((tiles_of_row + 3) / 4 * 4) + tile_column; }
};

// Where row i of a block's part of x begins in shared memory. Lanes that read every fourth element of a
// column use different banks, as each fourth row begins a word (two elements) later.
constexpr __device__ int row_of_square(int i) { return i * fp8_tile + i / 4 * 2; }

// The largest value of the lanes of a warp, given to all of them.
#ifndef CUDA_CPU
static __device__ float lane_max(float value) {
  for (int bit = 16; bit > 0; bit /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, bit));
  return value;
}
#else
static float lane_max(float value) { return value; }
#endif

// The square as it lies in x is read by packs, half a warp a row (a pack is 8 elements). Then a warp has a
// row of the result, which is a column of the square if x is transposed.
template <Fp8Tile tile, int width>
__global__ void quantise_kernel(const real* __restrict__ x /*[rows, columns]*/, int64_t rows, int64_t columns,
                                Transpose transpose, Fp8Matrix out) {
  constexpr int word = std::min(2, width);     // elements, in bf16
  constexpr int of_lane = std::min(4, width);  // neighbours of the result, which a lane writes at once
  const Square square(rows, columns, transpose);
  const bool transposed = square.transposed;
  const int lanes = lanes_for(fp8_tile / width);
  real* const values = block_memory<real>();
  float largest = 0;
  for (int i : warp_range(transposed ? square.width : square.height, lanes)) {
    for (int j : lane_range(transposed ? square.height : square.width, width, lanes)) {
      const Pack<width> pack = load<width>(x + (transposed ? square.of(j, i) : square.of(i, j)));
      for (int e = 0; e < width; ++e) largest = fmaxf(largest, fabsf(float(pack[e])));
      for (int e = 0; e < width; e += word) {
        Pack<word> part;
        for (int k = 0; k < word; ++k) part[k] = pack[e + k];
        store(values + row_of_square(i) + j + e, part);
      }
    }
  }
  if (tile == Fp8Tile::row) {
    __syncthreads();
  } else {
    largest = block_reduce(largest, 0.0f, [](float a, float b) { return fmaxf(a, b); });
  }

  for (int i : warp_range(square.height)) {
    const auto load_part = [&](int j) {
      Pack<of_lane> x;
      for (int e = 0; e < of_lane; e += word) {
        Pack<word> of_row = {};
        if (!transposed) of_row = load<word>(values + row_of_square(i) + j + e);
        for (int k = 0; k < word; ++k)
          x[e + k] = transposed ? accum(values[row_of_square(j + e + k) + i]) : of_row[k];
      }
      return x;
    };
    if (tile == Fp8Tile::row) {
      largest = 0;
      for (int j : lane_range(square.width, of_lane)) {
        const Pack<of_lane> x = load_part(j);
        for (int e = 0; e < of_lane; ++e) largest = fmaxf(largest, fabsf(float(x[e])));
      }
      largest = lane_max(largest);
    }
    const float scale = scale_of(largest), inverse = 1 / scale;  // exact: a power of two
    for (int j : lane_range(square.width, of_lane)) {
      const Pack<of_lane> x = load_part(j);
      PackInMemory<__nv_fp8_storage_t, of_lane> codes;
      Pack<of_lane> dequantised;
      for (int e = 0; e < of_lane; ++e) {
        codes.element[e] = __nv_cvt_float_to_fp8(float(x[e]) * inverse, __NV_SATFINITE, __NV_E4M3);
        dequantised[e] = float(__half(__nv_cvt_fp8_to_halfraw(codes.element[e], __NV_E4M3))) * scale;
      }
      if (out.values) {
        store(out.values + square.at(i, j), dequantised);
      } else {
        *reinterpret_cast<decltype(codes)*>(out.codes + square.code_at(i, j)) = codes;
      }
    }
    const bool has_scale = !out.values && (tile == Fp8Tile::row || i == 0);
    for ([[maybe_unused]] int once : lane_range(has_scale ? 1 : 0))
      out.scales[tile == Fp8Tile::row ? square.scale_of_row(i) : square.scale_of_square()] = scale;
  }
}

template <int width>
auto kernel_of(Fp8Tile tile) {
  return tile == Fp8Tile::row ? quantise_kernel<Fp8Tile::row, width>
                              : quantise_kernel<Fp8Tile::square, width>;
}

void quantise(Tensor x, Transpose transpose, Fp8Tile tile, Fp8Matrix out, cudaStream_t stream) {
  if (x.size() == 0) return;
  const auto [rows, columns] =
      transpose == Transpose::yes ? std::pair(x.columns, x.rows) : std::pair(x.rows, x.columns);
  const auto tiles = [](int64_t n) { return static_cast<unsigned>((n + fp8_tile - 1) / fp8_tile); };
  if (!out.values && columns % 16 != 0)
    CUDA_CHECK(cudaMemsetAsync(out.codes, 0, rows * padded_to_16(columns), stream));
  const Grid squares(dim3(tiles(rows) * tiles(columns)), fp8_tile);
  const int width = columns % 4 == 0 ? width_for(x.columns, x.data) : 1;
  const auto kernel = width == 1 ? kernel_of<1>(tile) : kernel_of<pack_width>(tile);
  const double codes = 1.0 * x.size();  // bytes, as a GPU would write them; their scales are few
  launch_with_memory(kernel, squares, row_of_square(fp8_tile) * sizeof(real), moves(x.bytes() + codes),
                     stream, x.data, rows, columns, transpose, out);
}

LayerBlas::LayerBlas(cudaStream_t stream, int64_t largest) : Blas(stream), largest_(largest) {
  if constexpr (has_fp8_products) {
    for (real*& operand : operands_) operand = memory_.matrix<real>(1, largest).data;
    for (float*& scales : scales_) scales = memory_.matrix<float>(1, largest / fp8_tile).data;
  }
}

Fp8Matrix LayerBlas::operand(int which, bool codes) const {
  auto* const memory = reinterpret_cast<__nv_fp8_storage_t*>(operands_[0]);
  return {memory + which * largest_, scales_[which], codes ? nullptr : operands_[which]};
}

// With whole tiles of rows, so that a 128th is enough for the scales; in and out are multiples of 128.
int64_t largest_operand(int64_t rows, int64_t in, int64_t out) {
  return std::max((rows + 127) / 128 * 128 * std::max(in, out), in * out);
}

size_t layer_products_bytes(int64_t rows, int64_t in, int64_t out) {
  const int64_t elements = largest_operand(rows, in, out);
  return has_fp8_products ? 2 * (elements * sizeof(real) + elements / fp8_tile * sizeof(float)) : 0;
}

std::unique_ptr<Blas> layer_products(cudaStream_t stream, int64_t d, const std::vector<Width>& widths,
                                     const std::vector<Tensor>& outputs) {
  for (const auto& [option, columns] : widths) {
    if (has_fp8_products && columns % fp8_tile != 0)
      throw UsageError(option, std::to_string(columns) + " columns of a rank", "a multiple of 128 in fp8");
  }
  int64_t largest = 0;
  for (const Tensor& out : outputs) largest = std::max(largest, largest_operand(out.rows, d, out.columns));
  return std::make_unique<LayerBlas>(stream, largest);
}

// Says it once. On the CPU all products are emulated.
static void tell_of_emulation([[maybe_unused]] const Operand& a, [[maybe_unused]] const Operand& b) {
#ifndef CUDA_CPU
  static std::atomic<bool> told = false;
  if (told.exchange(true)) return;
  std::cerr << "fp8: cuBLAS can't multiply [" << a.rows() << ", " << a.columns() << "] x [" << b.columns()
            << ", " << b.rows() << "]; such products are emulated\n";
#endif
}

void LayerBlas::product(const Operand& a, const Operand& b, accum beta, ProductResult c, const char* name,
                        bool same_b) const {
  if (!has_fp8_products) return Blas::product(a, b, beta, c, name);
  if (c.rows == 0) return;
  CodesProduct codes(*this, a, b, c);
  const auto quantised = [&](int which, const Operand& x, Fp8Tile tile, bool is_new) {
    const Fp8Matrix out = operand(which, codes.possible());
    if (is_new) quantise(x.x, x.transpose, tile, out, stream());
    return Operand{{out.values, x.rows(), x.columns()}, Transpose::no};
  };
  const Operand a_values = quantised(0, a, Fp8Tile::row, true),
                b_values = quantised(1, b, tile_of_b(a), !same_b);
  // A result with rows of tokens is assigned. If it is padded, the rows that count are copied.
  const bool pads = padded_to_16(c.rows) != c.rows;
  const size_t bytes = c.rows * c.columns * c.size;
  Cost cost =
      products(padded_to_16(c.rows), c.columns, padded_to_16(a.columns()), 1, 1, c.size, beta != 0, true);
  if (pads) cost.bytes += 2.0 * bytes, cost.result_bytes += 2.0 * bytes;
  trace::Operation operation(stream(), name, cost);
  if (codes.possible()) {
    codes.run(beta, pads ? operands_[1] : c.data);
    if (pads) CUDA_CHECK(cudaMemcpyAsync(c.data, operands_[1], bytes, cudaMemcpyDeviceToDevice, stream()));
  } else {
    tell_of_emulation(a, b);
    gemm(a_values, b_values, beta, c);
  }
}

}  // namespace pentatron
