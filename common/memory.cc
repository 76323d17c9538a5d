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
  size_t bytes(ElementSizes element) const { return real * element.real + accum * element.accum; }
};

// Rows of tokens of one micro-batch: inside the tensor regions, and outside of them on this rank.
struct Rows {
  int64_t inside, outside;
};

Rows rows(const Options& options, const Sharding& sharding) {
  const int64_t all = int64_t{options.micro_batch_size} * options.sequence_length;
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

// This rank's parameters of each unit: embedding, layers, head with its norm.
std::vector<int64_t> unit_sizes(const ModelConfig& m, const Sharding& sharding) {
  const Columns c = columns(m, sharding);
  const int64_t table = c.vocabulary * c.d, layer = c.d * (2 * c.q + 2 * c.kv + 3 * c.f + 2);
  std::vector<int64_t> sizes(m.layers + 2, layer);
  sizes.front() = table;
  sizes.back() = table + c.d;
  return sizes;
}

// Elements of the activations of one micro-batch and of the work space.
Elements activations(const Options& options, const Sharding& sharding) {
  const Columns c = columns(options.model, sharding);
  const Rows r = rows(options, sharding);
  const int64_t layers = options.model.layers, s = options.sequence_length;
  const int64_t scores_of_one_sequence = c.heads * s * s;

  // Every micro-batch: what the layers keep (their inputs; normed twice and the stream between them; q, k, v,
  // out; gate, up, product), the output, its gradient, and the head's part.
  const bool keeps_scores = options.recompute == Recompute::none;
  const int64_t layers_kept = options.recompute == Recompute::full ? 1 : layers;
  Elements sum;
  sum.real = layers * r.outside * c.d +
             layers_kept * (r.outside * 3 * c.d + r.inside * (2 * c.q + 2 * c.kv + 3 * c.f)) +
             r.outside * 3 * c.d + r.inside * c.vocabulary;
  if (keeps_scores) sum.real += layers * options.micro_batch_size * scores_of_one_sequence;
  sum.accum = layers_kept * (r.outside * 2 + r.inside * c.heads) + r.outside + r.inside * 3 + 1;

  // Once: gradients of what a layer keeps, and other work space.
  sum.real += r.inside * (c.q + 2 * c.kv + c.d + 2 * c.q + 2 * c.kv + 3 * c.f) + scores_of_one_sequence;
  if (!keeps_scores) sum.real += scores_of_one_sequence;
  sum.accum += r.inside * c.heads + (std::min<int64_t>(r.outside, 256) + 2 * layers + 1) * c.d +
               s * options.model.head_size();
  return sum;
}

// What tensor parallelism gathers into.
Elements communication(const Options& options, const Sharding& sharding) {
  if (sharding.tensor_ranks == 1) return {};
  const Rows r = rows(options, sharding);
  return {sharding.sequence_parallel ? 2 * r.inside * options.model.d_model : 0, r.inside};
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
  const size_t tokens =
      4 * sizeof(int32_t) * options.micro_batch_size * options.sequence_length * micro_batches;

  MemoryPrediction prediction;
  prediction.resident = {shared_from(3) * element.real, shared_from(2) * element.accum,
                         shared_from(1) * states * element.accum + norm_and_totals,
                         activations(options, sharding).bytes(element) + tokens,
                         communication(options, sharding).bytes(element)};
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
