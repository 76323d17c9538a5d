// The options of ZeRO.
#pragma once

#include "options/options.h"

namespace pentatron {

struct ZeroOptions {
  int zero_stage = 1;   // 1: optimizer states are sharded, 2: and gradients, 3: and weights
  int shard_ranks = 0;  // consecutive ranks that share out one copy of the model; 0: all
  int shards(int ranks) const { return shard_ranks > 0 ? shard_ranks : ranks; }
};

inline void declare(CommandLine& line, const Options&, ZeroOptions& o) {
  line.group("ZeRO");
  line.number("--zero-stage", o.zero_stage, 0, 3,
              "1: optimizer states, 2: and gradients, 3: and weights are sharded");
  line.number("--shard-ranks", o.shard_ranks, 0, 1 << 20,
              "so many neighbours hold one copy in shards, 0: all ranks do");
}

// `ranks`: with the same weights.
inline void fit_to_ranks(const Options&, const ZeroOptions& o, int ranks) {
  require(o.shard_ranks == 0 || o.zero_stage > 0, "--shard-ranks", o.shard_ranks, "0 with --zero-stage 0");
  require(ranks % o.shards(ranks) == 0, "--shard-ranks", o.shard_ranks,
          "a divisor of the ranks with the same weights, ", ranks);
}

}  // namespace pentatron
