// The options of ZeRO.
#pragma once

#include "run/options.h"

namespace pentatron {

struct ZeroOptions : virtual Options {
  int zero_stage = 1;  // 1: optimizer states are sharded, 2: and gradients, 3: and weights
};

inline void declare_options(CommandLine& line, ZeroOptions& o) {
  line.group("ZeRO");
  line.whole("--zero-stage", o.zero_stage, 0, 3,
             "1: optimizer states, 2: and gradients, 3: and weights are sharded");
}

}  // namespace pentatron
