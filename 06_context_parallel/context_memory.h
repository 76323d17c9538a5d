// What context parallelism changes in the memory of a rank (memory.h): its part of the tokens, what attention
// keeps, and the buffers of the classes that bring keys and values together.
#pragma once

#include "context_blocks.h"
#include "model/memory.h"
#include "options.h"

namespace pentatron {

// Bytes of AttentionBlocks: a block's results and, if `real` is narrower, their sum; naive scores twice.
inline size_t attention_blocks_bytes(const TrainingConfig& training, const ContextPart& part) {
  const auto& [rows, sequence, c] = part;
  const size_t scores = training.attention == Attention::naive ? c.heads * sequence * sequence : 0;
  const int sums = std::is_same_v<real, accum> ? 1 : 2;
  return 2 * scores * sizeof(real) + rows * (sums * c.q + c.heads) * sizeof(accum);
}

// Bytes of keys and values of one rank's rows, in `T`.
template <class T>
size_t keys_values_bytes(const ContextPart& part) {
  return 2 * part.rows * part.columns.kv * sizeof(T);
}

inline size_t ring_bytes(const TrainingConfig& training, int ranks, int tensor_ranks) {
  const ContextPart part = context_part(training, ranks, tensor_ranks);
  return 2 * keys_values_bytes<real>(part) + 3 * keys_values_bytes<accum>(part) +
         attention_blocks_bytes(training, part);
}

inline size_t all_gather_bytes(const TrainingConfig& training, int ranks, int tensor_ranks) {
  const ContextPart part = context_part(training, ranks, tensor_ranks);
  return ranks * (keys_values_bytes<real>(part) + keys_values_bytes<accum>(part)) +
         attention_blocks_bytes(training, part);
}

inline size_t ulysses_bytes(const TrainingConfig& training, int ranks, int tensor_ranks) {
  const auto& [rows, sequence, c] = context_part(training, ranks, tensor_ranks);
  return rows * (c.q + 2 * c.kv) * sizeof(real) + rows * c.heads * sizeof(accum);
}

// What predict_memory needs of one of `ranks` context ranks, where `share` is a rank's without them. They
// have the same parameters.
inline RankShare context_parallel_share(RankShare share, const ContextParallelOptions& options, int ranks,
                                        int tensor_ranks = 1) {
  if (ranks == 1) return share;
  const TrainingConfig& training = share.config;
  share.replicas *= ranks;
  share.rows /= ranks;
  share.outside /= ranks;

  // In attention u ranks have a u-th of the heads each, and so many in a ring a part of the sequence.
  const int u = ranks_for_heads(options, ranks), ring = ranks / u;
  const Columns c = columns_of(training.model, tensor_ranks * u);
  share.attention = attention_memory(training, c);
  if (ring > 1) {  // no scores are kept, and results are `accum`
    const int size = training.model.head_size(), heads = static_cast<int>(c.heads);
    const HeadShape head = {heads, static_cast<int>(c.kv) / size, size};
    const int tokens = training.sequence_length / ring;
    share.attention = {
        0, tensor_core_bytes(training.attention, {training.micro_batch_size, tokens, head}, true)};
  }

  size_t& buffers = share.added[Purpose::communication];
  if (u > 1) buffers += ulysses_bytes(training, ranks, tensor_ranks);
  if (options.cp_exchange == CpExchange::all_gather) {
    buffers += all_gather_bytes(training, ranks, tensor_ranks);
  } else if (ring > 1) {
    buffers += ring_bytes(training, ring, tensor_ranks * u);
  }
  return share;
}

}  // namespace pentatron
