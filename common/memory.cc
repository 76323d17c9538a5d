#include "memory.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "log.h"

namespace pentatron {
namespace {

// Numbers of elements, of the two types that there are.
struct Elements {
  int64_t real = 0, accum = 0;
  Elements operator+(Elements b) const { return {real + b.real, accum + b.accum}; }
  Elements operator*(int64_t times) const { return {real * times, accum * times}; }
  Elements& operator+=(Elements b) { return *this = *this + b; }
  size_t bytes(ElementSizes element) const { return real * element.real + accum * element.accum; }
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

// This rank's parameters of each unit: embedding, layers, head with its norm.
std::vector<int64_t> unit_sizes(const ModelConfig& m, const Sharding& sharding) {
  const Columns c = columns(m, sharding);
  const int64_t table = c.vocabulary * c.d, layer = c.d * (2 * c.q + 2 * c.kv + 3 * c.f + 2);
  std::vector<int64_t> sizes;
  for (const ModelPart& part : parts(m, sharding)) {
    if (part.embedding) sizes.push_back(table);
    sizes.insert(sizes.end(), part.layers, layer);
    if (part.head) sizes.push_back(table + c.d);
  }
  return sizes;
}

// Columns of the scores that attention has for the model: none in tiles or blocks.
int64_t score_columns(const Options& options, const Sharding& sharding) {
  const bool whole = options.attention == Attention::naive && sharding.context_ranks == 1;
  return whole ? options.sequence_length : 0;
}

// What a layer keeps beside its input: normed twice and the stream between them; q, k, v, out; gate, up,
// product; statistics; and perhaps the scores.
Elements kept_in_layer(const Options& options, const Sharding& sharding, Columns c, Rows r) {
  Elements sum = {r.outside * 3 * c.d + r.inside * (2 * c.q + 2 * c.kv + 3 * c.f),
                  r.outside * 2 + r.inside * c.heads};
  if (options.recompute == Recompute::none) sum.real += r.inside * c.heads * score_columns(options, sharding);
  return sum;
}

// What the weight gradients of a layer are made of: the gradients of q | k | v and of gate, up, product; of
// both norms' weights.
Elements gradients_of_layer(Columns c, Rows r) { return {r.inside * (c.q + 2 * c.kv + 3 * c.f), 2 * c.d}; }

// One micro-batch in one part of the model.
Elements in_flight(const Options& options, const Sharding& sharding, const ModelPart& part) {
  const Columns c = columns(options.model, sharding);
  const Rows r = rows(options, sharding);
  const int64_t inputs = part.layers - (part.embedding ? 0 : 1);
  Elements sum = {(inputs + 2) * r.outside * c.d, 0};  // and the output, and its gradient
  if (options.recompute != Recompute::full) sum += kept_in_layer(options, sharding, c, r) * part.layers;
  if (part.head) sum += {r.outside * c.d + r.inside * c.vocabulary, r.outside + r.inside * 3 + 1 + c.d};
  if (!sharding.deferred_weight_gradients) return sum;
  sum += (gradients_of_layer(c, r) + Elements{2 * r.inside * c.d, 0}) * part.layers;
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
  sum += gradients_of_layer(c, r);
  sum.real += r.inside * (c.d + 2 * c.q + 2 * c.kv) + scores_of_one_sequence;  // of attention
  if (options.recompute != Recompute::none) sum.real += scores_of_one_sequence;
  if (options.recompute == Recompute::full) sum += kept_in_layer(options, sharding, c, r);
  sum.accum += r.inside * c.heads + std::min<int64_t>(r.outside, 256) * c.d + s * options.model.head_size();
  return sum;
}

// What tensor parallelism gathers into, and what ring attention needs: keys, values and their gradients on
// their way, and one block's results.
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
  const int64_t alignment =
      sharding.data_ranks *
      static_cast<int64_t>(16 / element.real);  // of a unit, so that its shards are equal
  size_t parameters = 0, largest_unit = 0;
  for (const int64_t size : unit_sizes(options.model, sharding)) {
    const size_t padded = (size + alignment - 1) / alignment * alignment;
    parameters += padded;
    largest_unit = std::max(largest_unit, padded);
  }
  const auto shared_from = [&](int stage) {
    return sharding.zero_stage >= stage ? parameters / sharding.data_ranks : parameters;
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
    prediction.transient[0] = 2 * largest_unit * element.real;  // two gathered units
  if (sharding.zero_stage >= 2)
    prediction.transient[1] = 2 * largest_unit * element.accum;  // one written, one reduced
  return prediction;
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
