// What device memory is used for. Memory table, log and prediction list the bytes of each in this order.
#pragma once

#include <array>
#include <cstddef>
#include <numeric>
#include <string_view>

namespace pentatron {

enum class Purpose { weights, gradients, optimizer, activations, communication };

inline constexpr size_t purposes = 5;
inline constexpr std::array<std::string_view, purposes> purpose_names = {"weights", "gradients", "optimizer",
                                                                         "activations", "communication"};

using MemoryBytes = std::array<size_t, purposes>;  // bytes, indexed by Purpose
inline size_t sum_of(const MemoryBytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), size_t{0});
}

}  // namespace pentatron
