// Philox4x32-10, a counter-based random number generator (Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011). It has no state: number i of a sequence is a function of (key, i).
// So a rank that holds a slice of a parameter, or of a batch, draws the numbers of the whole. A constexpr
// function is one of the device, too (--expt-relaxed-constexpr).
#pragma once

#include <cstdint>
#include <string_view>

namespace pentatron {

struct PhiloxKey {
  uint32_t word[2];
};

struct PhiloxBlock {
  uint32_t word[4];
};

// The 128 random bits that belong to `counter` under `key`.
constexpr PhiloxBlock philox4x32(PhiloxBlock counter, PhiloxKey key) {
  constexpr int rounds = 10;
  for (int round = 0; round < rounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter.word[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter.word[2];
    counter = {{static_cast<uint32_t>(b >> 32) ^ counter.word[1] ^ key.word[0], static_cast<uint32_t>(b),
                static_cast<uint32_t>(a >> 32) ^ counter.word[3] ^ key.word[1], static_cast<uint32_t>(a)}};
    key.word[0] += 0x9E3779B9;  // the Weyl sequences that change the key from round to round:
    key.word[1] += 0xBB67AE85;  // the golden ratio and sqrt(3) - 1
  }
  return counter;
}

// The same, for a counter of two 64-bit numbers.
constexpr PhiloxBlock philox4x32(uint64_t high, uint64_t low, PhiloxKey key) {
  return philox4x32({{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                      static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)}},
                    key);
}

// The key of one use of a seed ("data", or a parameter's name). Different uses get unrelated sequences: the
// name is hashed (64-bit FNV-1a), and the seed and the hash are mixed by the generator itself.
constexpr PhiloxKey philox_key(uint64_t seed, std::string_view use) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : use) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  const PhiloxBlock mixed =
      philox4x32(0, hash, {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}});
  return {{mixed.word[0], mixed.word[1]}};
}

}  // namespace pentatron
