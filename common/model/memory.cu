#include <algorithm>
#include <numeric>

#include "kernels/attention.h"
#include "kernels/optimizer_step.h"
#include "model/batch.h"
#include "model/memory.h"

namespace pentatron {

// ---- What a rank has --------------------------------------------------------------------------------------

Columns columns_of(const ModelConfig& m, int tensor_ranks) {
  const int64_t t = tensor_ranks, size = m.head_size();
  return {m.d_model, m.heads * size / t, m.kv_heads * size / t, m.d_ff / t, m.vocab_size / t, m.heads / t};
}

RankShare::RankShare(const TrainingConfig& training)
    : config(training),
      micro_batches(micro_batches_of_a_rank(training, 1)),
      rows(training.rows()),
      outside(rows),
      columns(columns_of(training.model)),
      parts({{whole_model(training.model)}}) {}

// ---- Parameters -------------------------------------------------------------------------------------------

size_t padded(size_t elements, int replicas) {
  const size_t alignment = replicas * (16 / sizeof(real));
  return (elements + alignment - 1) / alignment * alignment;
}

std::vector<size_t> RankShare::unit_sizes() const {
  const auto& [d, q, kv, f, vocabulary, heads] = columns;
  const int64_t table = vocabulary * d, attention = d * (2 * q + 2 * kv), norms = 2 * d;
  std::vector<size_t> sizes;
  for (const auto& [range, in_flight] : parts) {
    if (range.embedding) sizes.push_back(table);
    sizes.insert(sizes.end(), range.last - range.first, norms + attention + mlp().parameters);
    if (range.head) sizes.push_back(table + d);
  }
  for (size_t& size : sizes) size = padded(size, replicas);
  return sizes;
}

MemoryBytes parameter_memory(const TrainingConfig& config, const std::vector<size_t>& units) {
  const size_t all = std::accumulate(units.begin(), units.end(), size_t{0});
  const int moments = config.optimizer == OptimizerKind::adamw ? 2 : 0, masters = has_master_weights ? 1 : 0;
  return {all * sizeof(real), all * sizeof(accum), all * (moments + masters) * sizeof(accum)};
}

// ---- Activations ------------------------------------------------------------------------------------------

AttentionMemory attention_memory(const TrainingConfig& config, const Columns& c) {
  const int64_t s = config.sequence_length;
  const size_t scores = config.attention == Attention::naive ? c.heads * s * s * sizeof(real) : 0;
  const int size = config.model.head_size(), kv_heads = static_cast<int>(c.kv) / size;
  const AttentionShape shape = {
      config.micro_batch_size, config.sequence_length, {static_cast<int>(c.heads), kv_heads, size}};
  const size_t fast = tensor_core_bytes(config.attention, shape);
  if (config.recompute == Recompute::none) return {config.micro_batch_size * scores, scores + fast};
  return {0, 2 * scores + fast};  // the scores again, and their gradient
}

FeedForwardMemory RankShare::mlp() const {
  if (feed_forward) return *feed_forward;
  const size_t kept = rows * 3 * columns.f * sizeof(real);  // gate, up and their product
  return {3 * columns.d * columns.f, kept, kept, layer_products_bytes(rows, columns.d, 2 * columns.f)};
}

// What its weight gradients are made of: the gradients of q | k | v, of both norms' weights, and in the MLP.
size_t RankShare::gradients_of_layer() const {
  const auto& [d, q, kv, f, vocabulary, heads] = columns;
  return rows * (q + 2 * kv) * sizeof(real) + 2 * d * sizeof(accum) + mlp().gradients;
}

// What a layer keeps beside its input: normed twice, x between, q, k, v, out, statistics, scores; MLP.
static size_t kept_in_layer(const RankShare& s) {
  const auto& [d, q, kv, f, vocabulary, heads] = s.columns;
  const int64_t numbers = s.outside * 3 * d + s.rows * (2 * q + 2 * kv);
  const int64_t statistics = s.outside * 2 + s.rows * heads;
  return numbers * sizeof(real) + statistics * sizeof(accum) + s.attention->kept + s.mlp().kept;
}

// One micro-batch in one part of the model.
static size_t in_flight(const RankShare& s, LayerRange range) {
  const auto& [d, q, kv, f, vocabulary, heads] = s.columns;
  const int64_t layers = range.last - range.first, inputs = layers - (range.embedding ? 0 : 1);
  size_t bytes = (inputs + 2) * s.outside * d * sizeof(real);  // and the output, and its gradient
  if (s.config.recompute != Recompute::full) bytes += layers * kept_in_layer(s);
  if (range.head) {  // normed, logits; statistics of norm and loss, the loss, the norm's gradient
    bytes += (s.outside * d + s.rows * vocabulary) * sizeof(real);
    bytes += (s.outside + s.rows * 3 + 1 + d) * sizeof(accum);
  }
  return bytes;
}

// The activations of all micro-batches, and the work space that they share.
static size_t activations(const RankShare& s) {
  const auto& [d, q, kv, f, vocabulary, heads] = s.columns;
  size_t bytes = s.attention->shared + s.gradients_of_layer();
  for (const ModelPart& part : s.parts) bytes += part.in_flight * in_flight(s, part.range);
  if (s.config.recompute == Recompute::full) bytes += kept_in_layer(s);
  bytes += s.rows * (d + 2 * q + 2 * kv) * sizeof(real);  // a region's output; d_out, d_q, d_k, d_v
  const int64_t dots = s.rows * heads, norms = std::min<int64_t>(s.outside, 256) * d;
  const int64_t angles = int64_t{s.config.sequence_length} * s.config.model.head_size();
  return bytes + (dots + norms + angles) * sizeof(accum);
}

// ---- All of it --------------------------------------------------------------------------------------------

MemoryPrediction predict_memory(RankShare s) {
  if (!s.attention) s.attention = attention_memory(s.config, s.columns);
  MemoryBytes bytes = parameter_memory(s.config, s.unit_sizes());
  bytes[Purpose::optimizer] += (norm_parts + 2) * sizeof(double);         // the norm's parts; StepTotals
  bytes[Purpose::optimizer] += (has_loss_scale ? 6 : 3) * sizeof(accum);  // StepFactors, LossScale
  bytes[Purpose::activations] += activations(s);
  bytes[Purpose::activations] += s.micro_batches * 4 * s.rows * sizeof(int32_t);  // tokens
  const Columns& c = s.columns;
  const size_t of_attention = layer_products_bytes(s.rows, c.d, c.q + 2 * c.kv);
  // Transformer has two handles of cuBLAS: for the products of layers, and for the head's.
  bytes[Purpose::activations] += 2 * blas_workspace + std::max(of_attention, s.mlp().fp8_operands);
  return {bytes += s.added};
}

}  // namespace pentatron
