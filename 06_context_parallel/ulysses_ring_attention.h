// Ulysses inside a ring (Fang & Zhao, "USP", 2024, arXiv 2405.07719). The number of heads limits Ulysses, and
// a ring has a hop for each rank. Here u neighbours exchange tokens for heads, and the c / u ranks with the
// same heads are a ring:
//
//   context ranks, u = 2        0 1  2 3  4 5  6 7
//   all-to-alls among           0 1, 2 3, 4 5, 6 7     neighbours: the fast links
//   rings                       0 2 4 6, 1 3 5 7       u times fewer hops, of as many bytes in all
//
// The u neighbours have the tokens of one rank of a ring of c / u ranks, one part after the other.
#pragma once

#include "ulysses_attention.h"

namespace pentatron {

// What the attention of such a rank needs first.
struct UlyssesRing {
  UlyssesRing(const TrainingConfig& training, const ContextParallelOptions& options, Communicator& context,
              int tensor_ranks)
      : heads(context.world(), members(context, options.ulysses, false), "context heads"),
        ring(context.world(), members(context, options.ulysses, true), "context ring"),
        attention(training, options.cp_layout, ring, tensor_ranks * options.ulysses) {}

  // The context ranks, as numbers in the world, that are neighbours of this one, or in a ring with it.
  static std::vector<int> members(const Communicator& context, int u, bool is_ring) {
    std::vector<int> ranks;
    for (int i = 0; i < context.ranks(); ++i) {
      const bool together = is_ring ? i % u == context.rank() % u : i / u == context.rank() / u;
      if (together) ranks.push_back(context.members()[i]);
    }
    return ranks;
  }

  Communicator heads, ring;
  RingAttention attention;
};

class UlyssesRingAttention : private UlyssesRing, public UlyssesAttention {
 public:
  UlyssesRingAttention(const TrainingConfig& training, const ContextParallelOptions& options,
                       Communicator& context, int tensor_ranks)
      : UlyssesRing(training, options, context, tensor_ranks),
        UlyssesAttention(training, options.cp_layout, heads, tensor_ranks, &attention) {}
};

}  // namespace pentatron
