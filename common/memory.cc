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

// What a micro-batch of R = b*s rows keeps in each layer beside the layer's input.
Elements kept_in_layer(const ModelConfig& m, int64_t batch, int64_t sequence, bool scores) {
  const int64_t rows = batch * sequence, d = m.d_model, q = m.heads * m.head_size(),
                kv = m.kv_heads * m.head_size();
  const int64_t normed_and_middle = 3 * d, attention = 2 * q + 2 * kv, mlp = 3 * m.d_ff;
  const int64_t score_elements = scores ? batch * m.heads * sequence * sequence : 0;
  return {rows * (normed_and_middle + attention + mlp) + score_elements, rows * (2 + m.heads)};
}

// Parameters of each unit: embedding, layers, head with its norm.
std::vector<int64_t> unit_sizes(const ModelConfig& m) {
  const int64_t ends = int64_t{m.vocab_size} * m.d_model, head = ends + m.d_model;
  std::vector<int64_t> sizes(m.layers + 2, (parameter_count(m) - ends - head) / m.layers);
  sizes.front() = ends;
  sizes.back() = head;
  return sizes;
}

// Elements of the activations of one micro-batch and of the work space.
Elements activations(const Options& options) {
  const ModelConfig& m = options.model;
  const int64_t batch = options.micro_batch_size, s = options.sequence_length, rows = batch * s,
                layers = m.layers;
  const int64_t d = m.d_model, f = m.d_ff, q = m.heads * m.head_size(), kv = m.kv_heads * m.head_size();
  const bool naive = options.attention == Attention::naive;
  const int64_t scores_of_one_sequence = naive ? m.heads * s * s : 0;

  // Every micro-batch: each layer's input and what it keeps, the output, its gradient, and the head's part.
  const bool keeps_scores = naive && options.recompute == Recompute::none;
  const Elements layer = kept_in_layer(m, batch, s, keeps_scores);
  const int64_t layers_kept = options.recompute == Recompute::full ? 1 : layers;
  Elements sum;
  sum.real = layers * rows * d + layers_kept * layer.real + rows * (3 * d + m.vocab_size);
  sum.accum = layers_kept * layer.accum + rows * 4 + 1;

  // Once: gradients of what a layer keeps, and other work space.
  sum.real +=
      rows * (q + 2 * kv) + rows * d + rows * (2 * q + 2 * kv) + rows * 3 * f + scores_of_one_sequence;
  if (!keeps_scores) sum.real += scores_of_one_sequence;
  sum.accum += rows * m.heads + (std::min<int64_t>(rows, 256) + 2 * layers + 1) * d + s * m.head_size();
  return sum;
}

}  // namespace

MemoryBytes MemoryPrediction::total() const {
  MemoryBytes sum = resident;
  for (size_t i = 0; i < purposes; ++i) sum[i] += transient[i];
  return sum;
}

MemoryPrediction predict_memory(const Options& options, ElementSizes element, int micro_batches,
                                ZeroSplit zero) {
  const int64_t alignment =
      zero.ranks * static_cast<int64_t>(16 / element.real);  // of a unit, so that its shards are equal
  size_t parameters = 0, largest_unit = 0;
  for (const int64_t size : unit_sizes(options.model)) {
    const size_t padded = (size + alignment - 1) / alignment * alignment;
    parameters += padded;
    largest_unit = std::max(largest_unit, padded);
  }
  const auto shared_from = [&](int stage) {
    return zero.stage >= stage ? parameters / zero.ranks : parameters;
  };
  const size_t states =
      (options.optimizer == OptimizerKind::adamw ? 2 : 0) + (element.master_weights ? 1 : 0);
  const size_t norm_and_totals = (norm_parts + 2) * sizeof(double) + element.accum;
  const size_t tokens =
      4 * sizeof(int32_t) * options.micro_batch_size * options.sequence_length * micro_batches;

  MemoryPrediction prediction;
  prediction.resident = {shared_from(3) * element.real, shared_from(2) * element.accum,
                         shared_from(1) * states * element.accum + norm_and_totals,
                         activations(options).bytes(element) + tokens, 0};
  if (zero.stage >= 3) prediction.transient[0] = 2 * largest_unit * element.real;  // two gathered units
  if (zero.stage >= 2)
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
