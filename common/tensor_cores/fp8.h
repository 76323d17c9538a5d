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

// A matrix [rows, columns] in 8 bits. The last tile of a row may be shorter. An element is its code
// times the scale of its tile. Scales lie as cublasLtMatmul reads them: of a row's tile at [column / 128,
// row], of a square at [row / 128, column / 128], with rows of scales padded to a multiple of 4.
struct Fp8Matrix {
  __nv_fp8_storage_t* codes;
  float* scales;
  real* values = nullptr;  // if not null, dequantised elements are written here, and no code and scale
  auto device_pointers() { return std::tie(codes, scales, values); }  // a kernel takes it as an argument
};

// out = x, or its transpose, in 8 bits. A tile with an infinity becomes NaN.
void quantise(Tensor x, Transpose transpose, Fp8Tile tile, Fp8Matrix out, cudaStream_t stream);

}  // namespace pentatron
