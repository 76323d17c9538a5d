#include "run/entropy.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

namespace pentatron {

double unigram_entropy(const TokenData& data) {
  constexpr int64_t block = 1 << 14, most_blocks = 64;
  const int64_t blocks = std::min(most_blocks, (data.size() + block - 1) / block);
  std::unordered_map<uint32_t, int64_t> counts;
  int64_t all = 0;
  for (int64_t i = 0; i < blocks; ++i) {  // of a small file everything
    const int64_t begin = blocks < most_blocks ? i * block : i * (data.size() / blocks);
    const int64_t end = std::min(begin + block, data.size());
    for (int64_t j = begin; j < end; ++j) ++counts[data.at(j)];
    all += end - begin;
  }
  double entropy = 0;
  for (const auto& [token, count] : counts) {
    const double frequency = static_cast<double>(count) / static_cast<double>(all);
    entropy -= frequency * std::log(frequency);
  }
  return entropy;
}

}  // namespace pentatron
