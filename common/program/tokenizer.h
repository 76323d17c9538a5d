// Text for token numbers, by the tokenizer.json of Hugging Face's tokenizers. Only decoding, which is a
// look-up: each token stands for some bytes. Text becomes tokens before the training (make tokens).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace pentatron {

class Tokenizer {
 public:
  // Throws UsageError, naming --data, if the file is none of a byte-level BPE (GPT-2's, Llama 3's), or of one
  // that falls back to bytes (Llama 2's).
  explicit Tokenizer(const std::string& path);

  // The bytes of a token; of a number that is none, U+FFFD.
  const std::string& operator[](int32_t token) const;
  // The token of a text, or -1.
  int32_t find(const std::string& bytes) const;

 private:
  std::vector<std::string> bytes_;  // [tokens]
};

// The tokenizer that came with --data: tokenizer.json in the folder of tokens.bin. Empty: none did.
std::string tokenizer_beside(const std::string& data);

}  // namespace pentatron
