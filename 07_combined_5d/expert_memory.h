// The memory of experts: how many rows one may get, and what a rank has to hold.
#pragma once

#include <algorithm>
#include <cmath>

#include "kernels/matmul.h"
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

// What predict_memory (memory.h) needs of an MLP of experts. Those that a rank has for itself are units of
// another size (expert_units).
inline RankShare expert_parallel_share(RankShare share, const ExpertOptions& options) {
  const ModelConfig& model = share.config.model;
  if (model.experts == 0) return share;
  const Columns& c = share.columns;
  const int64_t r = share.rows, e = model.experts, copies = r * model.top_k;
  const int64_t buffer = expert_buffer_rows(model, options, r), shared = model.shared_experts;
  const int64_t bias = model.has_balance_bias() ? e : 0;
  // Rows of the own experts; gate, up and their product of the shared ones.
  const size_t rows = (buffer * (c.d + 3 * c.f) + shared * r * 3 * c.f) * sizeof(real);
  share.feed_forward = FeedForwardMemory{
      .parameters = e * c.d + bias + shared * 3 * c.d * c.f,  // router and shared experts
      .kept = rows + copies * c.d * sizeof(real) + (r + 1) * e * sizeof(accum) + 2 * copies * sizeof(int32_t),
      .gradients = rows + r * e * sizeof(accum),
      .fp8_operands = std::max(layer_products_bytes(buffer, c.d, 2 * c.f),
                               shared > 0 ? layer_products_bytes(r, c.d, 2 * c.f * shared) : 0)};
  // Gradients of copies and of chosen probabilities, the loss, and the counts, made in at most 64 bands.
  const int64_t counts = (2 + std::min<int64_t>(r, 64)) * e, addresses = 3 * e / options.ep;
  share.added[Purpose::activations] += copies * c.d * sizeof(real) + (copies + 1) * sizeof(accum) +
                                       counts * sizeof(int32_t) + addresses * sizeof(void*);
  if (options.ep > 1) share.added[Purpose::communication] += (copies + buffer) * c.d * sizeof(real);
  return share;
}

// Elements of the units of experts that a rank has, padded: a layer's each. replicas / ep ranks have the
// same.
inline std::vector<size_t> expert_units(const RankShare& share, const ExpertOptions& options) {
  const int64_t own = share.config.model.experts / options.ep, mlp = 3 * share.columns.d * share.columns.f;
  std::vector<size_t> units;
  for (const auto& [range, in_flight] : share.parts)
    units.insert(units.end(), range.last - range.first, padded(own * mlp, share.replicas / options.ep));
  return units;
}

}  // namespace pentatron
