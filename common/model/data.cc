#include "model/data.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <unordered_map>

#include "device/errors.h"
#include "kernels/philox.h"

namespace pentatron {
namespace {

constexpr int largest_16_bit = 1 << 16;  // vocabulary whose tokens have 16 bits

[[noreturn]] void invalid(const std::string& path, const std::string& expected) {
  throw UsageError("--data", path, expected);
}

// llm.c's header: 256 integers of 32 bits, of which the first three are used.
struct LlmcHeader {
  static constexpr size_t bytes = 256 * sizeof(int32_t);
  static constexpr int32_t magic = 20240520;            // 16-bit tokens follow
  static constexpr int32_t magic_of_32_bit = 20240801;  // 32-bit tokens follow
  int32_t magic_found, version, token_count;
};

// The bytes of a .bin file that are tokens. Sets the bytes of one.
std::span<const std::byte> tokens_of_bin(const std::string& path, std::span<const std::byte> file,
                                         int vocab_size, int& bytes_per_token) {
  LlmcHeader header{};
  if (file.size() >= sizeof header) std::memcpy(&header, file.data(), sizeof header);
  const bool has_32_bits = header.magic_found == LlmcHeader::magic_of_32_bit;
  if (!has_32_bits && header.magic_found != LlmcHeader::magic) {
    bytes_per_token = vocab_size > largest_16_bit ? 4 : 2;
    if (file.size() % bytes_per_token != 0) {
      invalid(path, "a multiple of " + std::to_string(bytes_per_token) + " bytes, as tokens have " +
                        std::to_string(8 * bytes_per_token) + " bits; it has " + std::to_string(file.size()));
    }
    return file;
  }
  bytes_per_token = has_32_bits ? 4 : 2;
  if (file.size() < LlmcHeader::bytes) {
    invalid(path, "a header of 1024 bytes; the file is truncated at " + std::to_string(file.size()));
  }
  if (header.version != 1)
    invalid(path, "version 1 of llm.c's header; it says " + std::to_string(header.version));
  const std::span<const std::byte> tokens = file.subspan(LlmcHeader::bytes);
  if (header.token_count < 0 || tokens.size() != static_cast<size_t>(bytes_per_token) * header.token_count) {
    invalid(path, "the " + std::to_string(header.token_count) + " tokens that its header announces; " +
                      std::to_string(tokens.size()) + " bytes follow");
  }
  return tokens;
}

}  // namespace

TokenData::TokenData(const std::string& path, int vocab_size, int sequence_length)
    : path_(path), vocab_size_(vocab_size), file_("--data", path) {
  std::span<const std::byte> tokens = file_.bytes();
  if (path.ends_with(".bin")) tokens = tokens_of_bin(path, tokens, vocab_size, bytes_per_token_);
  tokens_ = tokens.data();
  size_ = static_cast<int64_t>(tokens.size()) / bytes_per_token_;
  if (size_ < sequence_length + 1) {
    invalid(path, "at least " + std::to_string(sequence_length + 1) +
                      " tokens, --seq-len and one more; it has " + std::to_string(size_));
  }
}

void TokenData::refuse(int64_t i) const {
  invalid(path_, "token ids below --vocab-size (" + std::to_string(vocab_size_) + "); token " +
                     std::to_string(i) + " is " + std::to_string(at(i)));
}

double TokenData::unigram_entropy() const {
  constexpr int64_t block = 1 << 14, most_blocks = 64;
  const int64_t blocks = std::min(most_blocks, (size_ + block - 1) / block);
  std::unordered_map<uint32_t, int64_t> counts;
  int64_t all = 0;
  for (int64_t i = 0; i < blocks; ++i) {  // of a small file everything
    const int64_t begin = blocks < most_blocks ? i * block : i * (size_ / blocks);
    const int64_t end = std::min(begin + block, size_);
    for (int64_t j = begin; j < end; ++j) ++counts[at(j)];
    all += end - begin;
  }
  double entropy = 0;
  for (const auto& [token, count] : counts) {
    const double frequency = static_cast<double>(count) / static_cast<double>(all);
    entropy -= frequency * std::log(frequency);
  }
  return entropy;
}

void fill_sequences(const TokenData& data, uint64_t seed, int64_t step, int64_t first_sequence,
                    int sequence_length, std::span<int32_t> tokens, std::span<int32_t> targets) {
  const PhiloxKey key = philox_key(seed, "data");
  const uint64_t windows =
      static_cast<uint64_t>(data.size() - sequence_length);  // places where one can start
  const int64_t sequences = static_cast<int64_t>(tokens.size()) / sequence_length;
  for (int64_t i = 0; i < sequences; ++i) {
    const PhiloxBlock random = philox4x32(step, first_sequence + i, key);
    const uint64_t start = (uint64_t{random.word[1]} << 32 | random.word[0]) % windows;
    for (int j = 0; j < sequence_length; ++j) {
      tokens[i * sequence_length + j] = data[start + j];
      targets[i * sequence_length + j] = data[start + j + 1];
    }
  }
}

}  // namespace pentatron
