#include "model/checksum.h"

#include <array>
#include <cstring>

namespace pentatron {
namespace {

// Bit 31 is the coefficient of 1, bit 0 that of x^31; x^32 is equal to this.
constexpr uint32_t polynomial = 0xedb88320;
constexpr uint32_t one = 1u << 31;

constexpr uint32_t times_x(uint32_t a) { return a >> 1 ^ (a & 1 ? polynomial : 0); }

uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (; a != 0; a <<= 1, b = times_x(b)) sum ^= a & one ? b : 0;
  return sum;
}

// x to the power of 8 `bytes`: so many zeros multiply a remainder by it.
uint32_t shift_by(uint64_t bytes) {
  uint32_t result = one, square = one >> 8;
  for (; bytes > 0; bytes /= 2, square = product(square, square)) {
    if (bytes % 2 == 1) result = product(result, square);
  }
  return result;
}

// tables[k][b]: what the byte b adds to the remainder if k bytes follow it. So 16 bytes are taken at once.
constexpr int at_once = 16;
constexpr auto tables = [] {
  std::array<std::array<uint32_t, 256>, at_once> t = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t remainder = byte;
    for (auto& table : t) {
      for (int bit = 0; bit < 8; ++bit) remainder = times_x(remainder);
      table[byte] = remainder;
    }
  }
  return t;
}();

}  // namespace

void PartialChecksum::move_to(uint64_t place) {
  if (place == place_) return;
  if (place - place_ != gap_) gap_ = place - place_, factor_ = shift_by(gap_);
  remainder_ = product(remainder_, factor_);
  place_ = place;
}

void PartialChecksum::add(const std::byte* data, size_t bytes, uint64_t place) {
  move_to(place);
  place_ += bytes;
  uint32_t r = remainder_;
  for (; bytes >= at_once; bytes -= at_once, data += at_once) {
    uint64_t next[2];
    std::memcpy(next, data, at_once);
    next[0] ^= r;
    r = 0;
    for (int i = 0; i < at_once; ++i) r ^= tables[at_once - 1 - i][next[i / 8] >> 8 * (i % 8) & 255];
  }
  for (; bytes > 0; --bytes, ++data) r = r >> 8 ^ tables[0][(r ^ static_cast<uint32_t>(*data)) & 255];
  remainder_ = r;
}

uint32_t crc32_of(uint32_t parts, uint64_t size) {
  return parts ^ product(~0u, shift_by(size)) ^ ~0u;  // it begins with 32 ones, and ends with their opposite
}

uint32_t crc32(const std::byte* data, uint64_t size) {
  PartialChecksum whole;
  whole.add(data, size, 0);
  return crc32_of(whole.up_to(size), size);
}

}  // namespace pentatron
