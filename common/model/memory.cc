#include "model/memory.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "program/log.h"

namespace pentatron {
namespace {

// Numbers of elements, of the types that there are; int32: of where rows go.
struct Elements {
  int64_t real = 0, accum = 0, int32 = 0;
  Elements operator+(Elements b) const { return {real + b.real, accum + b.accum, int32 + b.int32}; }
  Elements operator*(int64_t times) const { return {real * times, accum * times, int32 * times}; }
  Elements& operator+=(Elements b) { return *this = *this + b; }
  size_t bytes(ElementSizes element) const {
    return real * element.real + accum * element.accum + int32 * sizeof(int32_t);
  }
};

// Rows of tokens of one micro-batch: inside the tensor regions, and outside of them on this rank.
struct Rows {
  int64_t inside, outside;
};

Rows rows(const Options& options, const Sharding& sharding) {
  const int64_t all = int64_t{options.micro_batch_size} * options.sequence_length / sharding.context_ranks;
  return {all, sharding.sequence_parallel ? all / sharding.tensor_ranks : all};
}

// Columns of a rank's part of queries, keys (and values), MLP and vocabulary, and its heads.
struct Columns {
  int64_t d, q, kv, f, vocabulary, heads;
};

Columns columns(const ModelConfig& m, const Sharding& sharding) {
  const int64_t t = sharding.tensor_ranks, size = m.head_size();
  return {m.d_model, m.heads * size / t, m.kv_heads * size / t, m.d_ff / t, m.vocab_size / t, m.heads / t};
}

std::vector<ModelPart> parts(const ModelConfig& m, const Sharding& sharding) {
  if (sharding.parts.empty()) return {ModelPart{.layers = m.layers}};
  return sharding.parts;
}

// This rank's parameters of each unit (embedding, layers, head with its norm): those of its experts, or all
// others.
std::vector<int64_t> unit_sizes(const Options& options, const Sharding& sharding, bool of_experts) {
  const ModelConfig& m = options.model;
  const Columns c = columns(m, sharding);
  const int64_t table = c.vocabulary * c.d, mlp = 3 * c.d * c.f;
  std::vector<int64_t> sizes;
  for (const ModelPart& part : parts(m, sharding)) {
    if (part.embedding) sizes.push_back(of_experts ? 0 : table);
    for (int layer = part.first; layer < part.first + part.layers; ++layer) {
      const int64_t instead = m.has_experts(layer) ? m.experts * c.d : mlp;  // a router
      if (of_experts)
        sizes.push_back(m.has_experts(layer) ? m.experts / options.ep * mlp : 0);
      else
        sizes.push_back(c.d * (2 * c.q + 2 * c.kv + 2) + instead);
    }
    if (part.head) sizes.push_back(of_experts ? 0 : table + c.d);
  }
  return sizes;
}

// Columns of the scores that attention has for the model: none in tiles or blocks.
int64_t score_columns(const Options& options, const Sharding& sharding) {
  const bool whole = options.attention == Attention::naive && sharding.context_ranks == 1;
  return whole ? options.sequence_length : 0;
}

// The units of one kind, each padded so that its shards are equal: all together, and the largest.
struct SpanSize {
  size_t all = 0, largest = 0;
};
SpanSize span(const std::vector<int64_t>& sizes, int64_t shards, ElementSizes element) {
  const int64_t alignment = shards * static_cast<int64_t>(16 / element.real);
  SpanSize result;
  for (const int64_t size : sizes) {
    const size_t padded = (size + alignment - 1) / alignment * alignment;
    result.all += padded;
    result.largest = std::max(result.largest, padded);
  }
  return result;
}

// Layers, and how many of them have a dense MLP and experts.
struct Layers {
  int64_t all, dense, experts;
};
Layers layers_of(const ModelConfig& m, const ModelPart& part) {
  int64_t experts = 0;
  for (int layer = part.first; layer < part.first + part.layers; ++layer) experts += m.has_experts(layer);
  return {part.layers, part.layers - experts, experts};
}
// Memory that serves any layer.
Layers any_layer(const ModelConfig& m) {
  return {1, m.experts == 0 || m.moe_every > 1 ? 1 : 0, m.experts > 0 ? 1 : 0};
}

// What the layers keep beside their inputs: normed twice and the stream between them; q, k, v, out; gate, up,
// product; statistics; and perhaps the scores. With experts: probabilities, what was chosen and its places,
// fractions; arrivals with gate, up, product; and what came back.
Elements kept_in_layers(const Options& options, const Sharding& sharding, Columns c, Rows r, Layers layers) {
  Elements each = {r.outside * 3 * c.d + r.inside * (2 * c.q + 2 * c.kv), r.outside * 2 + r.inside * c.heads};
  if (options.recompute == Recompute::none)
    each.real += r.inside * c.heads * score_columns(options, sharding);
  const Elements dense = {r.inside * 3 * c.f, 0};
  const int64_t e = options.model.experts, copies = r.inside * options.model.top_k;
  const Elements experts = {expert_capacity(options, r.inside) * (c.d + 3 * c.f) + copies * c.d,
                            (r.inside + 1) * e, 2 * copies};
  return each * layers.all + dense * layers.dense + experts * layers.experts;
}

// What the weight gradients of layers are made of: the gradients of q | k | v and of gate, up, product; of
// both norms' weights. With experts: of what they return, of gate, up, product, and of the router's logits.
Elements gradients_of_layers(const Options& options, Columns c, Rows r, Layers layers) {
  const Elements each = {r.inside * (c.q + 2 * c.kv), 2 * c.d}, dense = {r.inside * 3 * c.f, 0};
  const Elements experts = {expert_capacity(options, r.inside) * (c.d + 3 * c.f),
                            r.inside * options.model.experts};
  return each * layers.all + dense * layers.dense + experts * layers.experts;
}

// What all layers with experts share: the gradients of copies and of what was chosen, the loss, and counts,
// which are made in 256 bands.
Elements work_of_experts(const Options& options, Columns c, Rows r) {
  const int64_t e = options.model.experts, copies = r.inside * options.model.top_k;
  if (e == 0) return {};
  return {copies * c.d, copies + 1, (2 + std::min<int64_t>(r.inside, 256)) * e};
}

// One micro-batch in one part of the model.
Elements in_flight(const Options& options, const Sharding& sharding, const ModelPart& part) {
  const Columns c = columns(options.model, sharding);
  const Rows r = rows(options, sharding);
  const int64_t inputs = part.layers - (part.embedding ? 0 : 1);
  Elements sum = {(inputs + 2) * r.outside * c.d, 0};  // and the output, and its gradient
  const Layers layers = layers_of(options.model, part);
  if (options.recompute != Recompute::full) sum += kept_in_layers(options, sharding, c, r, layers);
  if (part.head) sum += {r.outside * c.d + r.inside * c.vocabulary, r.outside + r.inside * 3 + 1 + c.d};
  if (!sharding.deferred_weight_gradients) return sum;
  sum += gradients_of_layers(options, c, r, layers) + Elements{2 * r.inside * c.d, 0} * part.layers;
  if (part.embedding) sum.real += r.inside * c.d;
  return sum;
}

// Elements of the activations of all micro-batches, and of the work space that they share.
Elements activations(const Options& options, const Sharding& sharding) {
  const Columns c = columns(options.model, sharding);
  const Rows r = rows(options, sharding);
  const int64_t s = options.sequence_length;
  const int64_t scores_of_one_sequence = c.heads * s * score_columns(options, sharding);
  Elements sum;
  for (const ModelPart& part : parts(options.model, sharding)) {
    sum += in_flight(options, sharding, part) * part.in_flight;
    sum.real += part.inputs * r.outside * c.d;
  }
  sum += gradients_of_layers(options, c, r, any_layer(options.model)) + work_of_experts(options, c, r);
  sum.real += r.inside * (c.d + 2 * c.q + 2 * c.kv) + scores_of_one_sequence;  // of attention
  if (options.recompute != Recompute::none) sum.real += scores_of_one_sequence;
  if (options.recompute == Recompute::full)
    sum += kept_in_layers(options, sharding, c, r, any_layer(options.model));
  sum.accum += r.inside * c.heads + std::min<int64_t>(r.outside, 256) * c.d + s * options.model.head_size();
  return sum;
}

// What tensor parallelism gathers into; what ring attention needs: keys, values and their gradients on their
// way, and one block's results; what experts send and receive from.
Elements communication(const Options& options, const Sharding& sharding, bool wide_sums) {
  const Rows r = rows(options, sharding);
  const Columns c = columns(options.model, sharding);
  Elements sum;
  if (sharding.tensor_ranks > 1) sum += {sharding.sequence_parallel ? 2 * r.inside * c.d : 0, r.inside};
  if (sharding.context_ranks > 1) {
    const bool ring = options.cp_exchange == CpExchange::ring;
    const int64_t kv = 2 * r.inside * c.kv, block = options.sequence_length / sharding.context_ranks;
    sum += {kv * (ring ? 2 : sharding.context_ranks), kv * (ring ? 3 : sharding.context_ranks)};
    sum.accum += r.inside * (c.q * (wide_sums ? 2 : 1) + c.heads);
    if (options.attention == Attention::naive) sum.real += 2 * c.heads * block * block;
  }
  if (options.ep > 1) sum.real += (r.inside * options.model.top_k + expert_capacity(options, r.inside)) * c.d;
  return sum;
}

}  // namespace

MemoryBytes MemoryPrediction::total() const {
  MemoryBytes sum = resident;
  for (size_t i = 0; i < purposes; ++i) sum[i] += transient[i];
  return sum;
}

MemoryPrediction predict_memory(const Options& options, ElementSizes element, int micro_batches,
                                Sharding sharding) {
  const int copies_of_expert = sharding.data_ranks / options.ep;
  const SpanSize dense = span(unit_sizes(options, sharding, false), sharding.data_ranks, element);
  const SpanSize experts = span(unit_sizes(options, sharding, true), copies_of_expert, element);
  const size_t largest_units = dense.largest + experts.largest;
  const auto shared_from = [&](int stage) {
    const bool shared = sharding.zero_stage >= stage;
    return dense.all / (shared ? sharding.data_ranks : 1) + experts.all / (shared ? copies_of_expert : 1);
  };
  const size_t states =
      (options.optimizer == OptimizerKind::adamw ? 2 : 0) + (element.master_weights ? 1 : 0);
  const size_t norm_and_totals = (norm_parts + 2) * sizeof(double) + element.accum;
  const size_t tokens = 4 * sizeof(int32_t) * rows(options, sharding).inside * micro_batches;

  MemoryPrediction prediction;
  prediction.resident = {shared_from(3) * element.real, shared_from(2) * element.accum,
                         shared_from(1) * states * element.accum + norm_and_totals,
                         activations(options, sharding).bytes(element) + tokens,
                         communication(options, sharding, element.accum > element.real).bytes(element)};
  if (sharding.zero_stage >= 3)
    prediction.transient[0] =  // two gathered units, or all
        (sharding.gathered_weights_kept ? dense.all + experts.all : 2 * largest_units) * element.real;
  if (sharding.zero_stage >= 2)
    prediction.transient[1] = 2 * largest_units * element.accum;  // one written, one reduced
  return prediction;
}

int64_t expert_capacity(const Options& options, int64_t rows) {
  const ModelConfig& m = options.model;
  const int64_t own = m.experts / options.ep, all = rows * options.ep * std::min<int64_t>(m.top_k, own);
  if (options.expert_capacity == 0) return all;
  return std::min(all, static_cast<int64_t>(std::ceil(options.expert_capacity * (rows * m.top_k))));
}

void require_memory(const MemoryPrediction& predicted, size_t available) {
  const MemoryBytes bytes = predicted.total();
  const size_t total = std::accumulate(bytes.begin(), bytes.end(), size_t{0});
  if (total <= available) return;
  throw UsageError(
      "--model, --micro-batch-size, --seq-len", "a run that needs " + human_bytes(static_cast<double>(total)),
      "at most the " + human_bytes(static_cast<double>(available)) + " of device memory that are free");
}

}  // namespace pentatron
