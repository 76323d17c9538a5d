// CRC-32, the checksum of zlib, gzip and Python's zlib.crc32, of an array that many ranks write.
//
// It reads the bytes as a polynomial over the numbers 0 and 1, modulo another one. That is linear: if each
// rank takes all bytes but its own to be 0, the exclusive or of what the ranks find belongs to the whole
// array. So no rank has to see what another one has written (zlib's crc32_combine rests on the same).
#pragma once

#include <cstddef>
#include <cstdint>

namespace pentatron {

// Of an array in which all bytes that are not added are 0.
class PartialChecksum {
 public:
  // Adds bytes that begin at `place` of the array. Places ascend.
  void add(const std::byte* data, size_t bytes, uint64_t place);
  // Of the array, which has `size` bytes; not yet the CRC-32 (below).
  uint32_t up_to(uint64_t size) {
    move_to(size);
    return remainder_;
  }

 private:
  void move_to(uint64_t place);

  uint64_t place_ = 0;  // of the next byte
  uint32_t remainder_ = 0;
  uint64_t gap_ = 0;     // bytes that were left out last,
  uint32_t factor_ = 0;  // and what they multiply the remainder by: rows of a slice have equal gaps
};

// The CRC-32 of an array. `parts`: the exclusive or of the parts' up_to(size).
uint32_t crc32_of(uint32_t parts, uint64_t size);
uint32_t crc32(const std::byte* data, uint64_t size);

}  // namespace pentatron
