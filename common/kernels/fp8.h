// Numbers of 8 bits for the products of layers (Micikevicius et al., "FP8 Formats for Deep Learning", 2022).
// e4m3 has 3 bits of fraction and reaches 448; e5m2 has 2, and reaches 57344. Elements share a scale, so that
// the largest of them uses that range; the fewer share one, the less a single large element costs the others.
// As in DeepSeek-V3 (2024, section 3.3), 128 elements along the sum of a product share one in activations and
// gradients, and 128 x 128 in weights. Scales are powers of two, so nothing is rounded but to 8 bits.
//
// Here a product is emulated: quantise() writes what the numbers of 8 bits are worth, and bf16 holds that
// exactly; sums are in fp32. In time and memory traffic it counts as on a GPU that multiplies 8 bits.
#pragma once

#include <cuda_runtime.h>

#include "device/tensor.h"
#include "kernels/config.h"

namespace pentatron {

// Which elements share a scale: 128 of a row, 128 of a column, a square of them, or all.
enum class Fp8Tile { row, column, square, all };
constexpr int fp8_tile = 128;

// out = x in 8 bits, and back. A tile with an infinity becomes not a number. The last tile of a row or column
// may be shorter. largest: work space for Fp8Tile::all.
void quantise(Tensor x, Fp8Format format, Fp8Tile tile, Tensor out /*as x*/, accum* largest /*[fp8_parts]*/,
              cudaStream_t stream);

}  // namespace pentatron
