// The options of tensor parallelism.
#pragma once

#include "program/options.h"

namespace pentatron {

// Whether tensor parallelism cuts forward's products into chunks, so that their communication hides.
enum class TpOverlap { none, chunks };
inline const Names<TpOverlap> tp_overlap_names = {{"none", TpOverlap::none}, {"chunks", TpOverlap::chunks}};
inline std::string_view to_string(TpOverlap overlap) { return name_of(tp_overlap_names, overlap); }

struct TensorParallelOptions : virtual Options {
  bool sequence_parallel = false;  // the ranks also split the rows outside their regions
  bool fp8_communication = false;  // what they gather for products is sent in fp8
  TpOverlap tp_overlap = TpOverlap::none;
  int tp_chunks = 2;  // of --tp-overlap chunks
};

inline void declare_options(CommandLine& line, TensorParallelOptions& o) {
  line.group("Tensor parallelism");
  line.flag("--sequence-parallel", o.sequence_parallel,
            "split the rows of tokens outside of attention and MLP, too");
  line.flag("--fp8-communication", o.fp8_communication,
            "in fp8: with --sequence-parallel, inputs of products are gathered in 8 bits");
  line.choice("--tp-overlap", o.tp_overlap, tp_overlap_names,
              "whether forward's products are cut, so that their communication hides");
  line.whole("--tp-chunks", o.tp_chunks, 2, 64, "into so many chunks of rows");
}

inline void complete_options(TensorParallelOptions& o, const CommandLine& line) {
  require(!line.given("--tp-chunks") || o.tp_overlap != TpOverlap::none, "--tp-chunks", o.tp_chunks,
          "none without --tp-overlap chunks");
  if (!o.fp8_communication) return;
  require(o.sequence_parallel, "--fp8-communication", "given", "together with --sequence-parallel");
  require(o.fp8_scales != Fp8Scales::tensor, "--fp8-communication", "given",
          "none with --fp8-scales tensor, whose scale no rank has");
}

}  // namespace pentatron
