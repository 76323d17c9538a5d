#include "model/data.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "device/errors.h"
#include "kernels/philox.h"

namespace pentatron {
namespace {

// The bytes of a .bin file that are tokens. Sets the bytes of one.
std::span<const std::byte> tokens_of_bin(const std::string& path, std::span<const std::byte> file,
                                         int vocab_size, int& bytes_per_token) {
  constexpr size_t header_bytes = 256 * sizeof(int32_t);
  std::array<int32_t, 3> header = {};  // the first integers of llm.c's header
  if (file.size() >= sizeof header) std::memcpy(header.data(), file.data(), sizeof header);
  const auto [magic, version, count] = header;
  bytes_per_token = magic == 20240801 ? 4 : 2;
  if (magic != 20240520 && magic != 20240801) {
    require(file.size() % 2 == 0, "--data", path, "an even number of bytes, as tokens have 16 bits; it has ",
            file.size());
    const auto* const ids = reinterpret_cast<const uint16_t*>(file.data());
    const size_t looked_at = std::min<size_t>(file.size() / 2, 1 << 12);
    bool is_wide = looked_at > 1;  // in 32 or 64 bits, small numbers have zeros between them
    for (size_t i = 1; i < looked_at; i += 2) is_wide &= ids[i] == 0;
    require(!is_wide && vocab_size <= 1 << 16, "--data", path,
            "llm.c's header, as make tokens writes it, before tokens of 32 bits; without it they have 16, ",
            is_wide ? "and here every second one is 0" : text("too few for --vocab-size ", vocab_size));
    return file;
  }
  require(count >= 0 && file.size() == header_bytes + static_cast<size_t>(bytes_per_token) * count, "--data",
          path, "a header of 1024 bytes and the ", count, " tokens that it announces; it has ", file.size(),
          " bytes");
  return file.subspan(header_bytes);
}

}  // namespace

TokenData::TokenData(const std::string& path, int vocab_size, int sequence_length)
    : path_(path), vocab_size_(vocab_size), file_("--data", path) {
  std::span<const std::byte> tokens = file_.bytes();
  if (path.ends_with(".bin")) {
    tokens = tokens_of_bin(path, tokens, vocab_size, bytes_per_token_);
  } else {
    const size_t zero = file_.text().substr(0, 1 << 16).find('\0');
    require(zero == std::string_view::npos, "--data", path, "a text, which has no byte 0 (here it is byte ",
            zero, "), or a file named *.bin of tokens alone, as make tokens and NumPy's tofile write it");
  }
  tokens_ = tokens.data();
  size_ = static_cast<int64_t>(tokens.size()) / bytes_per_token_;
  require(size_ > sequence_length, "--data", path, "at least ", sequence_length + 1,
          " tokens, --seq-len and one more; it has ", size_);
}

void TokenData::refuse(int64_t i) const {
  require(false, "--data", path_, "token ids below --vocab-size (", vocab_size_, "); token ", i, " is ",
          at(i));
}

void fill_sequences(const TokenData& data, uint64_t seed, int64_t step, int64_t first_sequence,
                    int sequence_length, std::span<int32_t> tokens, std::span<int32_t> targets) {
  const PhiloxKey key = philox_key(seed, "data");
  const uint64_t windows = data.size() - sequence_length;  // places where one can start
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
