// The options of tensor parallelism.
#pragma once

#include "program/options.h"

namespace pentatron {

struct TensorParallelOptions : virtual Options {
  bool sequence_parallel = false;  // the ranks also split the rows outside their regions
  bool fp8_communication = false;  // what they gather for products is sent in fp8
  int tp_overlap = 1;              // chunks of rows of forward's products; 1: they are whole
};

inline void declare_options(CommandLine& line, TensorParallelOptions& o) {
  line.group("Tensor parallelism");
  line.flag("--sequence-parallel", o.sequence_parallel,
            "split the rows of tokens outside of attention and MLP, too");
  line.flag("--fp8-communication", o.fp8_communication,
            "in fp8: with --sequence-parallel, inputs of products are gathered in 8 bits");
  line.whole("--tp-overlap", o.tp_overlap, 1, 64,
             "chunks of rows of forward's products, so that their communication hides, 1: none");
}

inline void complete_options(TensorParallelOptions& o, const CommandLine&) {
  if (!o.fp8_communication) return;
  require(o.sequence_parallel, "--fp8-communication", "given", "together with --sequence-parallel");
  require(o.fp8_scales != Fp8Scales::tensor, "--fp8-communication", "given",
          "none with --fp8-scales tensor, whose scale no rank has");
}

}  // namespace pentatron
