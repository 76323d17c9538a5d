// Numbers of 8 bits against a table that another library made (make_fp8_table.py), and tiles that share a
// scale against a plain loop.
#include <cuda_fp8.h>

#include <bit>
#include <cmath>
#include <fstream>

#include "catch.h"
#include "device.h"
#include "kernels/codes_product.h"
#include "reference.h"

namespace pentatron {
namespace {

struct TableEntry {
  Fp8Format format;
  float value;
  unsigned code;
};

// The first 256 entries of a format are its codes.
std::vector<TableEntry> table() {
  std::ifstream file(std::string(PENTATRON_TESTS) + "/golden/fp8.txt");
  std::vector<TableEntry> entries;
  std::string format;
  for (unsigned bits = 0, code = 0; file >> format >> std::hex >> bits >> code;)
    entries.push_back(
        {format == "e4m3" ? Fp8Format::e4m3 : Fp8Format::e5m2, std::bit_cast<float>(uint32_t{bits}), code});
  return entries;
}

__nv_fp8_interpretation_t kind_of(Fp8Format format) {
  return format == Fp8Format::e4m3 ? __NV_E4M3 : __NV_E5M2;
}

double worth(unsigned code, Fp8Format format) {
  const auto storage = static_cast<__nv_fp8_storage_t>(code);
  return float(__half(__nv_cvt_fp8_to_halfraw(storage, kind_of(format))));
}

double largest_number(Fp8Format format) { return format == Fp8Format::e4m3 ? 448 : 57344; }

// x in 8 bits, in double: a multiple of the unit at its size, and of no smaller one than the smallest.
double rounded_to(double x, Fp8Format format) {
  const int fraction = format == Fp8Format::e4m3 ? 3 : 2, smallest = format == Fp8Format::e4m3 ? -6 : -14;
  if (x == 0) return x;
  const double unit = std::ldexp(1, std::max(std::ilogb(x), smallest) - fraction);
  return std::nearbyint(x / unit) * unit;  // to even
}

[[maybe_unused]] HostMatrix quantised(const HostMatrix& x, Fp8Format format, Fp8Tile tile) {
  HostMatrix out(x.rows, x.columns);
  const int64_t width = tile == Fp8Tile::all ? x.columns : fp8_tile, height = tile == Fp8Tile::all ? x.rows
                                                                              : tile == Fp8Tile::row
                                                                                  ? 1
                                                                                  : fp8_tile;
  for (int64_t row = 0; row < x.rows; row += height) {
    for (int64_t column = 0; column < x.columns; column += width) {
      const auto each = [&](const auto& visit) {
        for (int64_t i = row; i < std::min(row + height, x.rows); ++i)
          for (int64_t j = column; j < std::min(column + width, x.columns); ++j) visit(i, j);
      };
      double largest = 0, scale = 0x1p-100;
      each([&](int64_t i, int64_t j) { largest = std::max(largest, std::abs(x(i, j))); });
      while (largest > scale * largest_number(format)) scale *= 2;
      each([&](int64_t i, int64_t j) { out(i, j) = scale * rounded_to(x(i, j) / scale, format); });
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
  std::map<Fp8Format, int> seen;
  for (const auto& [format, value, code] : table()) {
    CAPTURE(int(format), value, code);
    const bool is_code = seen[format]++ < 256;
    if (is_code) {
      const double got = worth(code, format);
      REQUIRE(
          (std::isnan(value) ? std::isnan(got) : got == value && std::signbit(got) == std::signbit(value)));
    }
    const auto convert = [&](__nv_saturation_t saturate) {
      return worth(__nv_cvt_float_to_fp8(value, saturate, kind_of(format)), format);
    };
    const double want = worth(code, format), got = convert(__NV_NOSAT), saturated = convert(__NV_SATFINITE);
    REQUIRE((std::isnan(want) ? std::isnan(got) : got == want));
    if (std::isnan(value)) {
      REQUIRE(std::isnan(saturated));
    } else {
      REQUIRE(saturated == (std::isfinite(want) ? want : std::copysign(largest_number(format), value)));
    }
  }
  REQUIRE(seen[Fp8Format::e4m3] > 1000);
  REQUIRE(seen[Fp8Format::e5m2] > 1000);
}

#ifndef REAL_IS_HALF  // which has not the range

TEST_CASE("fp8: tiles that share a scale", "[01][kernels]") {
  Device device;
  Random random;
  const AccumTensor largest = device.fresh<accum>(1, fp8_parts);
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
    for (const Fp8Format format : {Fp8Format::e4m3, Fp8Format::e5m2}) {
      for (const Fp8Tile tile : {Fp8Tile::row, Fp8Tile::square, Fp8Tile::all}) {
        for (const Transpose transpose : {Transpose::no, Transpose::yes}) {
          CAPTURE(rows, columns, int(format), int(tile), int(transpose));
          const HostMatrix want = quantised(transpose == Transpose::yes ? transposed(x) : x, format, tile);
          const Tensor values = device.fresh<real>(want.rows, want.columns);
          quantise(on_device, transpose, format, tile, {nullptr, nullptr, values.data}, largest.data,
                   device.stream);
          REQUIRE(device.download(values) == want);

          // The same as codes, and scales where cublasLtMatmul looks for them: those of rows have the rows
          // side by side, those of squares begin a row at each multiple of four.
          const int64_t tiles = (want.columns + 127) / 128, padded = (tiles + 3) / 4 * 4;
          const Matrix<float> memory = device.fresh<float>(want.rows, want.columns / 4 + 1);
          const Matrix<float> scales = device.fresh<float>(want.rows, padded);
          auto* const codes = reinterpret_cast<__nv_fp8_storage_t*>(memory.data);
          quantise(on_device, transpose, format, tile, {codes, scales.data}, largest.data, device.stream);
          const PinnedArray<__nv_fp8_storage_t> host_codes(memory.bytes());
          CUDA_CHECK(cudaMemcpyAsync(host_codes.data(), codes, memory.bytes(), cudaMemcpyDeviceToHost,
                                     device.stream));
          const HostMatrix host_scales = device.download(scales);
          REQUIRE(host_codes[want.values.size()] == 0xff);  // not written
          HostMatrix got(want.rows, want.columns);
          for (int64_t i = 0; i < want.rows; ++i) {
            for (int64_t j = 0; j < want.columns; ++j) {
              const double scale = host_scales.values[tile == Fp8Tile::all   ? 0
                                                      : tile == Fp8Tile::row ? j / 128 * want.rows + i
                                                                             : i / 128 * padded + j / 128];
              got(i, j) = worth(host_codes[i * want.columns + j], format) * scale;
            }
          }
          REQUIRE(got == want);

          if (format != Fp8Format::e4m3 || tile != Fp8Tile::row) continue;
          const Tensor back = device.fresh<real>(rows, columns);
          dequantise(codes, scales.data, transpose, back, device.stream);
          REQUIRE(device.download(back) == (transpose == Transpose::yes ? transposed(want) : want));
        }
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
  quantise(device.upload<real>(x), Transpose::no, Fp8Format::e4m3, Fp8Tile::row, {nullptr, nullptr, out.data},
           nullptr, device.stream);
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
  const int rows = GENERATE(200, 208);  // cuBLAS multiplies codes if sizes are multiples of 16
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
  if (this_device().major == 9 && rows % 16 == 0) {
    const Blas blas(device.stream, {{}, largest_operand(rows, in, out)});
    const Operand operands[] = {{device_d_y, Transpose::yes, Fp8Tile::row, Fp8Format::e4m3},
                                {device_x, Transpose::yes, Fp8Tile::row, Fp8Format::e4m3}};
    CHECK(CodesProduct(blas, operands[0], operands[1], d_w).possible());
  }
#else
  constexpr double of_sum = epsilon<accum>();
#endif
  for (const Fp8Format gradients : {Fp8Format::e4m3, Fp8Format::e5m2}) {
    for (const Fp8Scales scales : {Fp8Scales::tile, Fp8Scales::tensor}) {
      const Blas blas(device.stream, {{gradients, scales}, largest_operand(rows, in, out)});
      for (const int layer : {0, -1}) {  // -1: not a layer's, and so not in fp8
        CAPTURE(int(gradients), int(scales), layer);
        trace::here.layer = layer;
        const auto operand = [&](const HostMatrix& matrix, Fp8Format format, Fp8Tile tile = Fp8Tile::row) {
          if (layer < 0) return matrix;
          return quantised(matrix, format, scales == Fp8Scales::tensor ? Fp8Tile::all : tile);
        };
        // The terms of some elements are small. Each is off by as much as its own ones allow.
        const auto close = [&]<class T>(const Matrix<T>& result, const HostMatrix& a, const HostMatrix& b) {
          HostMatrix got = device.download(result), want = times(a, b);
          const HostMatrix squares = times(squared(a), squared(b));
          for (size_t i = 0; i < want.values.size(); ++i) {
            const double typical = std::sqrt(squares.values[i]);
            got.values[i] /= typical, want.values[i] /= typical;
          }
          const double sum_epsilon = layer < 0 ? epsilon<accum>() : of_sum;
          require_close(got, want, tolerance(epsilon<T>(), sum_epsilon, a.columns, 0));
        };
        const HostMatrix weight = operand(w, Fp8Format::e4m3, Fp8Tile::square);
        linear_forward(blas, device_x, device_w, y);
        close(y, operand(x, Fp8Format::e4m3), transposed(weight));
        linear_dgrad(blas, device_d_y, device_w, d_x);
        close(d_x, operand(d_y, gradients), weight);
        linear_wgrad(blas, device_d_y, device_x, {d_w, false});
        close(d_w, operand(transposed(d_y), gradients), transposed(operand(transposed(x), Fp8Format::e4m3)));
      }
    }
  }
}

// A few channels are a hundred times as large as the others. One scale a tensor leaves these few bits.
TEST_CASE("fp8: outliers break one scale a tensor, and no tiles", "[01][fp8]") {
  Device device;
  Random random;
  HostMatrix x = random.normal<real>(256, 512);
  const AccumTensor largest = device.fresh<accum>(1, fp8_parts);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t j = 0; j < x.columns; ++j)
      x(i, j) = j == 200 ? rounded<real>(HostMatrix(1, 1, 1e4 * x(i, j)))(0, 0) : 0x1p-7 * x(i, j);
  const Tensor on_device = device.upload<real>(x), out = device.fresh<real>(256, 512);
  const auto error = [&](Fp8Tile tile) {  // of the columns that share no tile with the outlier
    quantise(on_device, Transpose::no, Fp8Format::e4m3, tile, {nullptr, nullptr, out.data}, largest.data,
             device.stream);
    const HostMatrix got = device.download(out);
    double sum = 0, all = 0;
    for (int64_t i = 0; i < x.rows; ++i) {
      for (int64_t j = 0; j < 128; ++j) {
        sum += (got(i, j) - x(i, j)) * (got(i, j) - x(i, j));
        all += x(i, j) * x(i, j);
      }
    }
    return std::sqrt(sum / all);
  };
  CHECK(error(Fp8Tile::row) < 0.03);
  CHECK(error(Fp8Tile::all) > 0.5);
}

#endif

}  // namespace pentatron
