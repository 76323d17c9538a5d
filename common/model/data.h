// Training tokens, memory-mapped from a file, and the sequences cut out of them.
//
// In a text file each byte is a token. A file named *.bin holds 16-bit token ids: either nothing else
// (nanoGPT's form), or after a header of 256 32-bit integers (llm.c's form). Sequence i of step s is a window
// of the text that depends on (seed, s, i) alone. So any rank can cut its slice of the global batch without
// communication.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace pentatron {

class TokenData {
 public:
  // Throws UsageError, naming --data, if the file cannot be read, is damaged, holds less than one window of
  // sequence_length + 1 tokens, or holds a token that is not below vocab_size.
  TokenData(const std::string& path, int vocab_size, int sequence_length);

  int64_t size() const { return size_; }  // tokens

  int32_t operator[](int64_t i) const {
    return bytes_per_token_ == 1 ? static_cast<const uint8_t*>(tokens_)[i]
                                 : static_cast<const uint16_t*>(tokens_)[i];
  }

  // Entropy of the token frequencies, in nats per token. A model that knows only how frequent each token is
  // reaches this loss, so training must get below it.
  double unigram_entropy() const;

 private:
  // A file mapped into memory, read-only.
  struct Mapping {
    std::span<std::byte> bytes;
    explicit Mapping(std::span<std::byte> mapped) : bytes(mapped) {}
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
  };

  Mapping file_;
  const void* tokens_ = nullptr;  // [size_] of bytes_per_token_, inside file_
  int bytes_per_token_ = 1;       // 1 or 2
  int64_t size_ = 0;              // tokens
  std::vector<int64_t> counts_;   // [65536]: how often each token id occurs
};

// Fills `tokens` and `targets` with sequences of the global batch of `step`: first_sequence and those after
// it, as many as fit.
void fill_sequences(
    const TokenData& data, uint64_t seed, int64_t step, int64_t first_sequence, int sequence_length,
    std::span<int32_t> tokens,    // [sequences, sequence_length]
    std::span<int32_t> targets);  // [sequences, sequence_length], the token that follows each token

}  // namespace pentatron
