// Context parallelism as a program has it: the class behind the seam, and which options it refuses.
#pragma once

#include <memory>
#include <string>

#include "all_gather_attention.h"
#include "context_memory.h"
#include "ring_attention.h"
#include "ulysses_ring_attention.h"

namespace pentatron {

// Attention of the ranks of `context`, which share out the tokens, as --cp-exchange says.
inline std::unique_ptr<AttentionCore> context_attention(const TrainingConfig& training,
                                                        const ContextParallelOptions& options,
                                                        Communicator& context, int tensor_ranks = 1) {
  if (context.ranks() == 1) return std::make_unique<AttentionCore>(training.attention);
  const CpLayout layout = options.cp_layout;
  if (options.cp_exchange == CpExchange::ring)
    return std::make_unique<RingAttention>(training, layout, context, tensor_ranks);
  if (options.cp_exchange == CpExchange::all_gather)
    return std::make_unique<AllGatherAttention>(training, layout, context, tensor_ranks);
  if (options.cp_exchange == CpExchange::ulysses)
    return std::make_unique<UlyssesAttention>(training, layout, context, tensor_ranks);
  return std::make_unique<UlyssesRingAttention>(training, options, context, tensor_ranks);
}

// Throws UsageError unless the sequence length is a multiple of `ranks`, in a zigzag of 2 `ranks`, and a
// tensor rank's heads of keys and values, and so those of queries, one of the ranks that split heads.
inline void check_context_parallel(const TrainingConfig& training, const ContextParallelOptions& options,
                                   int ranks, int tensor_ranks = 1) {
  if (ranks == 1) return;
  const bool zigzag = options.cp_layout == CpLayout::zigzag;
  const std::string parts = zigzag ? text("twice the context ranks (2 x ", ranks, ") with --cp-layout zigzag")
                                   : text("the context ranks (", ranks, ")");
  require(training.sequence_length % (zigzag ? 2 * ranks : ranks) == 0, "--seq-len", training.sequence_length,
          "a multiple of ", parts);
  const bool rings = options.cp_exchange == CpExchange::ulysses_ring;
  require(!rings || (ranks % options.ulysses == 0 && options.ulysses != ranks), "--ulysses", options.ulysses,
          "a divisor of the context ranks (", ranks, ") that leaves a ring of two or more");
  const int u = ranks_for_heads(options, ranks);
  const std::string which = rings ? "--ulysses" : "context ranks";
  require(training.model.kv_heads / tensor_ranks % u == 0, "--kv-heads", training.model.kv_heads,
          tensor_ranks > 1 ? text("a multiple of tensor ranks x ", which, " (", tensor_ranks, " x ", u, ")")
                           : text("a multiple of the ", which, " (", u, ")"),
          " with --cp-exchange ", to_string(options.cp_exchange));
}
inline void fit_to_ranks(const Options& all, const ContextParallelOptions& options, int ranks) {
  check_context_parallel(all, options, ranks);
}

}  // namespace pentatron
