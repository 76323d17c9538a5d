// The options of ZeRO.
#pragma once

#include "options/options.h"

namespace pentatron {

struct ZeroOptions {
  int zero_stage = 1;  // 1: optimizer states are sharded, 2: and gradients, 3: and weights
};

inline void declare(CommandLine& line, const Options&, ZeroOptions& o) {
  line.group("ZeRO");
  line.number("--zero-stage", o.zero_stage, 0, 3,
              "1: optimizer states, 2: and gradients, 3: and weights are sharded");
}

inline void fit_to_ranks(const Options&, const ZeroOptions&, int) {}  // any number will do

}  // namespace pentatron
