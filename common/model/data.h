// Training tokens, memory-mapped from a file, and the sequences cut out of them.
//
// In a text file each byte is a token. A file named *.bin holds token ids: either nothing else, in 16 bits
// each (nanoGPT's form), or after a header of 256 32-bit integers, in 16 or 32 bits (llm.c's form). Sequence
// i of step s is a window of the text that depends on (seed, s, i) alone: ranks need not communicate.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "device/mapped_file.h"

namespace pentatron {

class TokenData {
 public:
  // Looks at the first tokens alone. UsageError if the file can't be read, is damaged, has another form, or
  // lacks sequence_length + 1 tokens.
  TokenData(const std::string& path, int vocab_size, int sequence_length);

  int64_t size() const { return size_; }  // tokens
  std::string checksum() const { return file_.checksum(); }

  // Throws UsageError if token i is not below vocab_size.
  int32_t operator[](int64_t i) const {
    const uint32_t token = at(i);
    if (token >= vocab_size_) [[unlikely]]
      refuse(i);
    return static_cast<int32_t>(token);
  }

  // Token i as the file has it.
  uint32_t at(int64_t i) const {
    return bytes_per_token_ == 1   ? static_cast<const uint8_t*>(tokens_)[i]
           : bytes_per_token_ == 2 ? static_cast<const uint16_t*>(tokens_)[i]
                                   : static_cast<const uint32_t*>(tokens_)[i];
  }

 private:
  void refuse(int64_t i) const;

  std::string path_;
  uint32_t vocab_size_;
  MappedFile file_;
  const void* tokens_ = nullptr;  // [size_] of bytes_per_token_, inside file_
  int bytes_per_token_ = 1;       // 1, 2 or 4
  int64_t size_ = 0;              // tokens
};

// Fills both with sequences of the global batch of `step`, from first_sequence on, as many as fit.
void fill_sequences(const TokenData& data, uint64_t seed, int64_t step, int64_t first_sequence,
                    int sequence_length, std::span<int32_t> tokens /*[sequences, sequence_length]*/,
                    std::span<int32_t> targets /*likewise, the token that follows each token*/);

}  // namespace pentatron
