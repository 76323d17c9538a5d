// Numbers of 8 bits for the products of layers: e4m3, with 3 bits of fraction, which reaches 448
// (Micikevicius et al., "FP8 Formats for Deep Learning", 2022). Elements share a scale, so that the largest
// of them uses that range; the fewer share one, the less a single large element costs the others. As in
// DeepSeek-V3 (2024, section 3.3), 128 elements along the sum of a product share one in activations and
// gradients, and 128 x 128 in weights. Scales are powers of two, so scaling rounds nothing; only the
// conversion to 8 bits does.
//
// Where cuBLAS can, it multiplies codes and scales (codes_product.h). Elsewhere a product is emulated:
// quantise() writes dequantised values, which bf16 holds exactly; sums are in fp32. On the CPU that
// counts, in time and memory traffic, as on a GPU that multiplies codes, whichever GPU is modelled.
#pragma once

#include <cuda_fp8.h>

#include <tuple>

#include "kernels/matmul.h"

namespace pentatron {

// Which elements of an operand share a scale: 128 of a row, or a square of them.
enum class Fp8Tile { row, square };
constexpr int fp8_tile = 128;

// cuBLAS wants codes of sizes that are multiples of 16. A number of tokens is padded to one.
constexpr int64_t padded_to_16(int64_t size) { return (size + 15) / 16 * 16; }

// A matrix [rows, columns] in 8 bits: codes are [padded_to_16(rows), padded_to_16(columns)], of which the
// last columns are zeros, and the last rows are anything. The last tile of a row may be shorter. An element
// is its code times the scale of its tile. Scales lie as cublasLtMatmul reads them: of a row's tile at
// [column / 128, row] with padded rows, of a square at [row / 128, column / 128], with rows of scales padded
// to a multiple of 4.
struct Fp8Matrix {
  __nv_fp8_storage_t* codes;
  float* scales;
  real* values = nullptr;  // if not null, dequantised elements are written here, and no code and scale
  auto device_pointers() { return std::tie(codes, scales, values); }  // a kernel takes it as an argument
};

// out = x, or its transpose, in 8 bits. A tile with an infinity becomes NaN.
void quantise(Tensor x, Transpose transpose, Fp8Tile tile, Fp8Matrix out, cudaStream_t stream);

// Of a linear layer's products a is always rows of tokens. So is b in that of the weight gradient, where both
// are transposed; else it is the weight.
inline Fp8Tile tile_of_b(const Operand& a) { return a.transposed() ? Fp8Tile::row : Fp8Tile::square; }

// Elements of the largest operand of the products x [rows, in], W [out, in], y [rows, out].
int64_t largest_operand(int64_t rows, int64_t in, int64_t out);

// The handle for the products of layers, which fp8 builds, and no others, compute in fp8.
class LayerBlas : public Blas {
 public:
  LayerBlas(cudaStream_t stream, int64_t largest /*largest_operand of its products*/);
  bool of_layers() const override { return true; }
  bool has_batches() const override { return !has_fp8_products; }
  // Quantises a and, unless it is that of the product before, b.
  void product(const Operand& a, const Operand& b, accum beta, ProductResult c, const char* name,
               bool same_b) const override;
  // Work space for the first (0) or second operand: for codes and scales or, without `codes`, dequantised.
  Fp8Matrix operand(int which, bool codes) const;

 private:
  DeviceArena memory_{Purpose::activations};
  int64_t largest_;
  real* operands_[2] = {};  // [largest_], values; or the codes of both, and a padded result
  float* scales_[2] = {};
};

}  // namespace pentatron
