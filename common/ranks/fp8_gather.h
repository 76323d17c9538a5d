// Gathers the input of products in 8 bits (kernels/fp8.h). A rank quantises its rows before it sends them,
// which is the same computation as after. So half the bytes travel, and a 32nd of that: the scales.
#pragma once

#include "kernels/fp8.h"
#include "ranks/comm.h"

namespace pentatron {

class Fp8Gather {
 public:
  // For at most `rows` rows of a rank, and a multiple of 128 columns.
  Fp8Gather(Communicator& communicator, int64_t rows, int64_t columns)
      : communicator_(communicator),
        parts_(communicator.ranks() * part(rows * columns), Purpose::communication) {}

  // Bytes of so many elements: their codes, then their scales.
  static constexpr int64_t part(int64_t elements) { return elements + elements / fp8_tile * sizeof(float); }

  // out = what the rows of x are worth in e4m3, of all ranks in their order. 128 elements of a row share a
  // scale or, with Transpose::yes, of a column; x then has a multiple of 128 rows. Runs on the communicator's
  // stream.
  void all_gather(Tensor x /*[rows, columns]*/, real* out /*[ranks * rows, columns]*/, Transpose transpose) {
    const int64_t size = x.size(), bytes = part(size);
    const auto codes_of = [&](int rank) { return parts_.data() + rank * bytes; };
    const auto scales_of = [&](int rank) { return reinterpret_cast<float*>(codes_of(rank) + size); };
    const cudaStream_t stream = communicator_.stream();
    const int own = communicator_.rank();
    quantise(x, transpose, Fp8Format::e4m3, Fp8Tile::row, {codes_of(own), scales_of(own)}, nullptr, stream);
    communicator_.all_gather(codes_of(own), parts_.data(), bytes);
    for (int rank = 0; rank < communicator_.ranks(); ++rank)
      dequantise(codes_of(rank), scales_of(rank), transpose, {out + rank * size, x.rows, x.columns}, stream);
  }

 private:
  Communicator& communicator_;
  DeviceArray<__nv_fp8_storage_t> parts_;  // [ranks, part]
};

}  // namespace pentatron
