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

// Bytes of each purpose.
struct MemoryBytes : std::array<size_t, purposes> {
  using array::operator[];
  size_t& operator[](Purpose purpose) { return at(static_cast<size_t>(purpose)); }
  size_t operator[](Purpose purpose) const { return at(static_cast<size_t>(purpose)); }
  MemoryBytes& operator+=(const MemoryBytes& other) {
    for (size_t i = 0; i < purposes; ++i) (*this)[i] += other[i];
    return *this;
  }
};
inline size_t sum_of(const MemoryBytes& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), size_t{0});
}

}  // namespace pentatron
