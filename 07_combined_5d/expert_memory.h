// The memory of experts: how many rows one may get, and what a rank has to hold.
#pragma once

#include <algorithm>
#include <cmath>

#include "model/memory.h"
#include "options.h"

namespace pentatron {

// Rows that a rank has room for, when it has `rows` tokens of a micro-batch. By default this is the worst
// case: all tokens of all ranks that share out the experts come here. Otherwise it is options.expert_buffer
// even shares, and an even share is rows * top_k.
inline int64_t expert_buffer_rows(const ModelConfig& model, const ExpertOptions& options, int64_t rows) {
  const int64_t own = model.experts / options.ep;
  const int64_t all = options.ep * rows * std::min<int64_t>(model.top_k, own);
  if (options.expert_buffer == 0) return all;
  return std::min(all, static_cast<int64_t>(std::ceil(options.expert_buffer * (rows * model.top_k))));
}

// Adds the experts to the memory that `share` describes: replicas[0] / options.ep ranks hold the same
// experts. replicas[1] becomes that number.
inline RankShare expert_parallel_share(const TrainingConfig& training, const ExpertOptions& options,
                                       RankShare share) {
  const ModelConfig& model = training.model;
  if (model.experts == 0) return share;
  const Columns c = columns_of(model, share.tensor_ranks);
  const int64_t r = rows_of(training, share).inside, e = model.experts, copies = r * model.top_k;
  const int64_t buffer = expert_buffer_rows(model, options, r), mlp = 3 * c.d * c.f;
  const int64_t bias = model.has_balance_bias() ? e : 0, shared = model.shared_experts;
  share.feed_forward = FeedForwardMemory{
      {e * c.d + bias + shared * mlp, e / options.ep * mlp},  // router and shared experts; the other experts
      {buffer * (c.d + 3 * c.f) + copies * c.d + shared * r * 3 * c.f, (r + 1) * e, 2 * copies},
      {buffer * (c.d + 3 * c.f) + shared * r * 3 * c.f, r * e},
      std::max(largest_operand(buffer, c.d, 2 * c.f),
               shared > 0 ? largest_operand(r, c.d, 2 * c.f * shared) : 0)};
  share.replicas.push_back(share.replicas[0] / options.ep);
  // Gradients of copies and of chosen probabilities, the loss, and the counts, made in at most 64 bands. An
  // address is as long as two integers.
  const int64_t addresses = 3 * e / options.ep;
  share.work += {copies * c.d, copies + 1, (2 + std::min<int64_t>(r, 64)) * e + 2 * addresses};
  if (options.ep > 1) share.buffers.real += (copies + buffer) * c.d;
  return share;
}

}  // namespace pentatron
