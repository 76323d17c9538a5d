// The options of tensor parallelism.
#pragma once

#include "options/options.h"

namespace pentatron {

struct TensorParallelOptions {
  bool sequence_parallel = false;  // the ranks also split the rows outside their regions
  int tp_overlap = 1;              // chunks of rows of forward's products; 1: they are whole
};

inline void declare(CommandLine& line, const Options&, TensorParallelOptions& o) {
  line.group("Tensor parallelism");
  line.flag("--sequence-parallel", o.sequence_parallel,
            "split the rows of tokens outside of attention and MLP, too");
  line.number(
      "--tp-overlap", o.tp_overlap, 1, 64,
      "into so many chunks of rows forward's products are cut, so that communication hides, 1: whole");
}

}  // namespace pentatron
