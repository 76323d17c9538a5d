// Numbers of 8 bits against a table that another library made (make_fp8_table.py), and tiles that share a
// scale against a plain loop.
// precisions: fp64 fp32 bf16 fp8
#include <cuda_fp8.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>

#include "catch.h"
#include "device.h"
#include "device/mapped_file.h"
#include "reference.h"
#include "tensor_cores/codes_product.h"

namespace pentatron {
namespace {

// What a code means, and the largest float that is rounded to it.
struct Code {
  float value, last;
};

// From code 0 on; those with a sign are the same, and what comes after the last is not a number.
std::vector<Code> table() {
  std::ifstream file(in_tree("tests") + "/golden/fp8.txt");
  std::vector<Code> codes;
  std::string number;
  for (Code code = {}; file >> number >> code.value >> code.last;) codes.push_back(code);
  return codes;
}

__half_raw half_of(unsigned code) {
  return __nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(code), __NV_E4M3);
}
double dequantised(unsigned code) { return float(__half(half_of(code))); }

// x in 8 bits, in double: a multiple of the unit at its size, and of no smaller one than the smallest.
double rounded_to_fp8(double x) {
  if (x == 0) return x;
  const double unit = std::ldexp(1, std::max(std::ilogb(x), -6) - 3);
  return std::nearbyint(x / unit) * unit;  // to even
}

[[maybe_unused]] HostMatrix quantised(const HostMatrix& x, Fp8Tile tile) {
  HostMatrix out(x.rows, x.columns);
  const int64_t width = fp8_tile, height = tile == Fp8Tile::row ? 1 : fp8_tile;
  for (int64_t row = 0; row < x.rows; row += height) {
    for (int64_t column = 0; column < x.columns; column += width) {
      const auto each = [&](const auto& visit) {
        for (int64_t i = row; i < std::min(row + height, x.rows); ++i)
          for (int64_t j = column; j < std::min(column + width, x.columns); ++j) visit(i, j);
      };
      double largest = 0, scale = 0x1p-100;
      each([&](int64_t i, int64_t j) { largest = std::max(largest, std::abs(x(i, j))); });
      while (largest > scale * 448) scale *= 2;
      each([&](int64_t i, int64_t j) { out(i, j) = scale * rounded_to_fp8(x(i, j) / scale); });
    }
  }
  return out;
}

[[maybe_unused]] HostMatrix transposed(const HostMatrix& x) {
  HostMatrix out(x.columns, x.rows);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.columns; ++j) out(j, i) = x(i, j);
  return out;
}

}  // namespace

TEST_CASE("fp8: all codes, and what other numbers are rounded to", "[01][kernels]") {
  const std::vector<Code> codes = table();
  REQUIRE(codes.size() == 0x7f);
  const auto check = [&](float size) {
    const auto code =
        static_cast<unsigned>(std::ranges::lower_bound(codes, size, {}, &Code::last) - codes.begin());
    for (const float sign : {1.0f, -1.0f}) {
      CAPTURE(sign * size, code);
      const auto convert = [&](__nv_saturation_t saturate) {
        return dequantised(__nv_cvt_float_to_fp8(sign * size, saturate, __NV_E4M3));
      };
      if (code < codes.size()) {
        REQUIRE(convert(__NV_NOSAT) == sign * codes[code].value);
      } else {
        REQUIRE(std::isnan(convert(__NV_NOSAT)));
      }
      REQUIRE(convert(__NV_SATFINITE) == sign * codes[std::min(code, 0x7eu)].value);
    }
  };
  for (unsigned code = 0; code < codes.size(); ++code) {
    CAPTURE(code);
    REQUIRE(dequantised(code) == codes[code].value);
    REQUIRE(half_of(0x80 | code).x == (0x8000 | half_of(code).x));
    for (const float size : {codes[code].value, codes[code].last, std::nextafter(codes[code].last, INFINITY)})
      check(size);
  }
  for (uint32_t bits = 0; bits <= std::bit_cast<uint32_t>(INFINITY); bits += 1 << 15)
    check(std::bit_cast<float>(bits));
  for (const unsigned not_a_number : {0x7f, 0xff}) REQUIRE(std::isnan(dequantised(not_a_number)));
  for (const __nv_saturation_t saturate : {__NV_NOSAT, __NV_SATFINITE})
    REQUIRE(std::isnan(dequantised(__nv_cvt_float_to_fp8(NAN, saturate, __NV_E4M3))));
}

#ifndef REAL_IS_HALF  // which has not the range

TEST_CASE("fp8: tiles that share a scale", "[01][kernels]") {
  Device device;
  Random random;
  for (const auto& [rows, columns] : {std::pair{1, 128}, {3, 256}, {128, 128}, {257, 384}, {300, 5}}) {
    HostMatrix x = random.normal<real>(rows, columns);
    // Elements of very different sizes, floats as on a GPU, and a tile of zeros.
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) x(i, j) = std::ldexp(float(x(i, j)), int(i * 7 + j) % 40 - 20);
    for (int64_t j = 0; j < std::min(columns, 128); ++j) x(rows - 1, j) = 0;
    if (rows > 128) x(0, 1) = 0x1p-126, x(0, 2) = 0x1p-110;
    if (rows > 128)
      for (int64_t j = 128; j < columns; ++j) x(1, j) = j % 2 * 0x1p-105;  // a tile of the smallest scale
    const Tensor on_device = device.upload<real>(x);
    for (const Fp8Tile tile : {Fp8Tile::row, Fp8Tile::square}) {
      for (const Transpose transpose : {Transpose::no, Transpose::yes}) {
        CAPTURE(rows, columns, int(tile), int(transpose));
        const HostMatrix want = quantised(transpose == Transpose::yes ? transposed(x) : x, tile);
        const Tensor values = device.fresh<real>(want.rows, want.columns);
        quantise(on_device, transpose, tile, {nullptr, nullptr, values.data}, device.stream);
        REQUIRE(device.download(values) == want);

        // The same as codes, and scales where cublasLtMatmul looks for them: those of rows have the rows
        // side by side, those of squares begin a row at each multiple of four.
        const int64_t tiles = (want.columns + 127) / 128, of_squares = (tiles + 3) / 4 * 4;
        const int64_t row_of_codes = padded_to_16(want.columns);
        const Matrix<float> memory = device.fresh<float>(want.rows, row_of_codes / 4 + 1);
        const Matrix<float> scales = device.fresh<float>(padded_to_16(want.rows), of_squares);
        auto* const codes = reinterpret_cast<__nv_fp8_storage_t*>(memory.data);
        quantise(on_device, transpose, tile, {codes, scales.data}, device.stream);
        const PinnedArray<__nv_fp8_storage_t> host_codes(memory.bytes());
        CUDA_CHECK(
            cudaMemcpyAsync(host_codes.data(), codes, memory.bytes(), cudaMemcpyDeviceToHost, device.stream));
        const HostMatrix host_scales = device.download(scales);
        REQUIRE(host_codes[want.rows * row_of_codes] == 0xff);  // not written
        HostMatrix got(want.rows, want.columns);
        for (int64_t i = 0; i < want.rows; ++i) {
          for (int64_t j = 0; j < want.columns; ++j) {
            const int64_t of_tile =
                tile == Fp8Tile::row ? j / 128 * padded_to_16(want.rows) + i : i / 128 * of_squares + j / 128;
            got(i, j) = dequantised(host_codes[i * row_of_codes + j]) * host_scales.values[of_tile];
          }
          for (int64_t j = want.columns; j < row_of_codes; ++j)
            REQUIRE(host_codes[i * row_of_codes + j] == 0);  // which adds nothing to a product
        }
        REQUIRE(got == want);
      }
    }
  }
}

// Its own tile is lost, and no other one.
TEST_CASE("fp8: infinity is not hidden", "[01][kernels]") {
  Device device;
  HostMatrix x(128, 256, 1);
  x(3, 7) = INFINITY;
  const Tensor out = device.fresh<real>(128, 256);
  quantise(device.upload<real>(x), Transpose::no, Fp8Tile::row, {nullptr, nullptr, out.data}, device.stream);
  const HostMatrix got = device.download(out);
  CHECK(std::isnan(got(3, 0)));
  CHECK(std::isnan(got(3, 7)));
  CHECK(got(3, 128) == 1);
  CHECK(got(4, 7) == 1);
}

#endif

#ifdef PRODUCTS_IN_FP8

namespace {

HostMatrix times(const HostMatrix& a, const HostMatrix& b) {
  HostMatrix out(a.rows, b.columns);
  for (int64_t i = 0; i < a.rows; ++i)
    for (int64_t k = 0; k < a.columns; ++k)
      for (int64_t j = 0; j < b.columns; ++j) out(i, j) += a(i, k) * b(k, j);
  return out;
}

HostMatrix squared(HostMatrix x) {
  for (double& value : x.values) value *= value;
  return x;
}

// Scales are powers of two, so they decide only what becomes too small. Here these are rows, columns and
// squares that share a scale with larger ones, or not.
HostMatrix uneven(HostMatrix x) {
  const auto factor = [](int64_t i) { return i % 3 == 1 || i / 128 == 1 ? 0x1p-12 : 1; };
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.columns; ++j) x(i, j) *= factor(i) * factor(j);
  return x;
}

}  // namespace

TEST_CASE("fp8: the products of a linear layer", "[01][fp8]") {
  const int rows = GENERATE(200, 208);  // cuBLAS multiplies codes of sizes that are multiples of 16
  CAPTURE(rows);
  Device device;
  Random random;
  constexpr int in = 256, out = 384;
  const HostMatrix x = uneven(random.normal<real>(rows, in)), w = uneven(random.normal<real>(out, in)),
                   d_y = uneven(random.normal<real>(rows, out));
  const Tensor device_x = device.upload<real>(x), device_w = device.upload<real>(w),
               device_d_y = device.upload<real>(d_y), y = device.fresh<real>(rows, out),
               d_x = device.fresh<real>(rows, in);
  const AccumTensor d_w = device.fresh<accum>(out, in);
#ifndef CUDA_CPU
  constexpr double of_sum =
      0x1p-13;  // Hopper's tensor cores sum 8 bits with about 14 (DeepSeek-V3, section 3.3.2)
  if (this_device().major == 9) {
    const LayerBlas blas(device.stream, largest_operand(rows, in, out));
    CHECK(CodesProduct(blas, {device_x, Transpose::no}, {device_w, Transpose::no}, y).possible());
    CHECK(CodesProduct(blas, {device_d_y, Transpose::yes}, {device_x, Transpose::yes}, d_w).possible());
  }
#else
  constexpr double of_sum = epsilon<accum>();
#endif
  for (const bool of_layers : {true, false}) {  // those of the head are not in fp8
    CAPTURE(of_layers);
    const LayerBlas in_fp8(device.stream, largest_operand(rows, in, out));
    const Blas plain(device.stream);
    const Blas& blas = of_layers ? in_fp8 : plain;
    const auto operand = [&](const HostMatrix& matrix, Fp8Tile tile = Fp8Tile::row) {
      return of_layers ? quantised(matrix, tile) : matrix;
    };
    // The terms of some elements are small. Each is off by as much as its own ones allow.
    const auto close = [&]<class T>(const Matrix<T>& result, const HostMatrix& a, const HostMatrix& b) {
      HostMatrix got = device.download(result), want = times(a, b);
      const HostMatrix squares = times(squared(a), squared(b));
      for (size_t i = 0; i < want.values.size(); ++i) {
        const double typical = std::sqrt(squares.values[i]);
        got.values[i] /= typical, want.values[i] /= typical;
      }
      const double sum_epsilon = of_layers ? of_sum : epsilon<accum>();
      require_close(got, want, tolerance(epsilon<T>(), sum_epsilon, a.columns, 0));
    };
    const HostMatrix weight = operand(w, Fp8Tile::square);
    linear_forward(blas, device_x, device_w, y);
    close(y, operand(x), transposed(weight));
    linear_dgrad(blas, device_d_y, device_w, d_x);
    close(d_x, operand(d_y), weight);
    linear_wgrad(blas, device_d_y, device_x, {d_w, false});
    close(d_w, operand(transposed(d_y)), transposed(operand(transposed(x))));
  }
}

// In modelled time 200 tokens are 208. The rows that count are copied, where the result has rows of tokens.
TEST_CASE("fp8: padded rows are counted", "[01][fp8]") {
  Device device;
  constexpr int in = 256, out = 384, padded = 208;
  const LayerBlas blas(device.stream, largest_operand(padded, in, out));
  const Tensor w = device.fresh<real>(out, in);
  const AccumTensor d_w = device.fresh<accum>(out, in);
  for (const int rows : {200, padded}) {
    const Tensor x = device.fresh<real>(rows, in), y = device.fresh<real>(rows, out);
    const double of_x = in * (3.0 * rows + padded), of_w = out * in * (3.0 + 1),  // quantised, then read
        of_y = out * (3.0 * rows + padded), copied = rows < padded ? 4.0 * rows : 0;
    const auto check = [&](double bytes, const auto& launch) {
      CAPTURE(rows, bytes);
      const DeclaredCosts before = declared_costs;
      launch();
      CHECK(declared_costs.flops - before.flops == 2.0 * padded * in * out);
      CHECK(declared_costs.bytes - before.bytes == bytes);
    };
    check(of_x + of_w + out * (2.0 * padded + copied), [&] { linear_forward(blas, x, w, y); });
    check(of_y + of_w + in * (2.0 * padded + copied), [&] { linear_dgrad(blas, y, w, x); });
    check(of_y + of_x + 4.0 * out * in, [&] { linear_wgrad(blas, y, x, {d_w, false}); });
  }
}

#endif

}  // namespace pentatron
