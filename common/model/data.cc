#include "model/data.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include "device/errors.h"
#include "kernels/philox.h"

namespace pentatron {
namespace {

constexpr int token_ids = 1 << 16;  // that a file can hold

[[noreturn]] void invalid(const std::string& path, const std::string& expected) {
  throw UsageError("--data", path, expected);
}

// The whole file, mapped read-only. The descriptor need not stay open.
std::span<std::byte> map_file(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) invalid(path, std::string("a readable file (") + std::strerror(errno) + ")");
  struct stat status {};
  const bool known = fstat(file, &status) == 0;
  const bool regular = known && S_ISREG(status.st_mode);
  const size_t bytes = regular ? static_cast<size_t>(status.st_size) : 0;
  void* mapping = bytes > 0 ? mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
  close(file);
  if (!regular) invalid(path, "a regular file");
  if (bytes == 0) invalid(path, "a file that is not empty");
  if (mapping == MAP_FAILED)
    invalid(path, std::string("a file that can be mapped (") + std::strerror(errno) + ")");
  return {static_cast<std::byte*>(mapping), bytes};
}

// llm.c's header: 256 integers of 32 bits, of which the first three are used.
struct LlmcHeader {
  static constexpr size_t bytes = 256 * sizeof(int32_t);
  static constexpr int32_t magic = 20240520;            // 16-bit tokens follow
  static constexpr int32_t magic_of_32_bit = 20240801;  // 32-bit tokens follow
  int32_t magic_found, version, token_count;
};

// The bytes of a .bin file that are tokens.
std::span<const std::byte> tokens_of_bin(const std::string& path, std::span<const std::byte> file) {
  LlmcHeader header{};
  if (file.size() >= sizeof header) std::memcpy(&header, file.data(), sizeof header);
  if (header.magic_found == LlmcHeader::magic_of_32_bit) invalid(path, "16-bit tokens; these have 32 bits");
  if (header.magic_found != LlmcHeader::magic) {
    if (file.size() % 2 != 0) {
      invalid(path, "an even number of bytes, as tokens have 16 bits; it has " + std::to_string(file.size()));
    }
    return file;
  }
  if (file.size() < LlmcHeader::bytes) {
    invalid(path, "a header of 1024 bytes; the file is truncated at " + std::to_string(file.size()));
  }
  if (header.version != 1)
    invalid(path, "version 1 of llm.c's header; it says " + std::to_string(header.version));
  const std::span<const std::byte> tokens = file.subspan(LlmcHeader::bytes);
  if (header.token_count < 0 || tokens.size() != size_t{2} * static_cast<size_t>(header.token_count)) {
    invalid(path, "the " + std::to_string(header.token_count) + " tokens that its header announces; " +
                      std::to_string(tokens.size()) + " bytes follow");
  }
  return tokens;
}

}  // namespace

TokenData::Mapping::~Mapping() { munmap(bytes.data(), bytes.size()); }

TokenData::TokenData(const std::string& path, int vocab_size, int sequence_length)
    : file_(map_file(path)), counts_(token_ids) {
  std::span<const std::byte> tokens = file_.bytes;
  if (path.ends_with(".bin")) {
    tokens = tokens_of_bin(path, tokens);
    bytes_per_token_ = 2;
  }
  tokens_ = tokens.data();
  size_ = static_cast<int64_t>(tokens.size()) / bytes_per_token_;
  if (size_ < sequence_length + 1) {
    invalid(path, "at least " + std::to_string(sequence_length + 1) +
                      " tokens, --seq-len and one more; it has " + std::to_string(size_));
  }
  for (int64_t i = 0; i < size_; ++i) ++counts_[(*this)[i]];
  for (int token = token_ids - 1; token >= vocab_size; --token) {
    if (counts_[token] > 0) {
      invalid(path, "token ids below --vocab-size (" + std::to_string(vocab_size) + "); it has " +
                        std::to_string(token));
    }
  }
}

double TokenData::unigram_entropy() const {
  double entropy = 0;
  for (const int64_t count : counts_) {
    const double frequency = static_cast<double>(count) / static_cast<double>(size_);
    if (count > 0) entropy -= frequency * std::log(frequency);
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
