#include "model/memory.h"

#include <algorithm>

namespace pentatron {
namespace {

FeedForwardMemory dense_mlp(const TrainingConfig& config, const RankShare& share) {
  const Columns c = columns_of(config.model, share.tensor_ranks);
  const int64_t rows = rows_of(config, share).inside;
  const Elements kept = {rows * 3 * c.f};  // gate, up and their product
  return {{3 * c.d * c.f}, kept, kept, largest_operand(rows, c.d, 2 * c.f)};
}

// A group's parameters of each unit on this rank (embedding, layers, head with its norm).
std::vector<int64_t> unit_sizes(const TrainingConfig& config, const RankShare& share, size_t group) {
  const Columns c = columns_of(config.model, share.tensor_ranks);
  const bool first = group == 0;
  const int64_t table = c.vocabulary * c.d, attention = c.d * (2 * c.q + 2 * c.kv), norms = 2 * c.d;
  const int64_t layer = (first ? attention + norms : 0) + share.feed_forward->parameters[group];
  std::vector<int64_t> sizes;
  for (const ModelPart& part : share.parts) {
    if (part.range.embedding && first) sizes.push_back(table);
    sizes.insert(sizes.end(), part.range.last - part.range.first, layer);
    if (part.range.head && first) sizes.push_back(table + c.d);
  }
  return sizes;
}

// The ranks that share out a sequence in attention, where some split the heads instead of the tokens.
int ranks_of_sequence(const RankShare& share) { return share.token_ranks / share.head_ranks; }

// Columns of the scores that attention has for the model: none in tiles, or where a sequence is split.
int64_t score_columns(const TrainingConfig& config, const RankShare& share) {
  const bool whole = ranks_of_sequence(share) == 1;
  return config.attention == Attention::naive && whole ? config.sequence_length : 0;
}

// What a layer keeps beside its input: normed twice, stream between, q, k, v, out, statistics, scores; MLP.
Elements kept_in_layer(const TrainingConfig& config, const RankShare& share) {
  const Columns c = columns_of(config.model, share.tensor_ranks);
  const Rows r = rows_of(config, share);
  Elements kept = {r.outside * 3 * c.d + r.inside * (2 * c.q + 2 * c.kv), r.outside * 2 + r.inside * c.heads};
  if (config.recompute == Recompute::none) kept.real += r.inside * c.heads * score_columns(config, share);
  return kept + share.feed_forward->kept;
}

// What its weight gradients are made of: the gradients of q | k | v, of both norms' weights, and in the MLP.
Elements gradients_of_layer(const TrainingConfig& config, const RankShare& share) {
  const Columns c = columns_of(config.model, share.tensor_ranks);
  return Elements{rows_of(config, share).inside * (c.q + 2 * c.kv), 2 * c.d} + share.feed_forward->gradients;
}

// One micro-batch in one part of the model.
Elements in_flight(const TrainingConfig& config, const RankShare& share, const ModelPart& part) {
  const Columns c = columns_of(config.model, share.tensor_ranks);
  const Rows r = rows_of(config, share);
  const int64_t layers = part.range.last - part.range.first, inputs = layers - (part.range.embedding ? 0 : 1);
  Elements sum = {(inputs + 2) * r.outside * c.d};  // and the output, and its gradient
  if (config.recompute != Recompute::full) sum += kept_in_layer(config, share) * layers;
  if (share.gradients_on_request)
    sum += (gradients_of_layer(config, share) + Elements{2 * r.inside * c.d}) * layers;
  if (part.range.head) sum += {r.outside * c.d + r.inside * c.vocabulary, r.outside + r.inside * 3 + 1 + c.d};
  if (part.range.embedding && share.gradients_on_request) sum.real += r.inside * c.d;
  return sum;
}

// The activations of all micro-batches, and the work space that they share.
Elements activations(const TrainingConfig& config, const RankShare& share) {
  const Columns c = columns_of(config.model, share.tensor_ranks);
  const Rows r = rows_of(config, share);
  const int64_t s = config.sequence_length;
  const int64_t heads = c.heads / share.head_ranks;  // in attention
  const int64_t scores_of_one_sequence = heads * s * score_columns(config, share);
  Elements sum = share.work + gradients_of_layer(config, share);
  for (const ModelPart& part : share.parts) {
    sum += in_flight(config, share, part) * part.in_flight;
    sum.real += part.inputs * r.outside * c.d;
  }
  sum.real += r.inside * (c.d + 2 * c.q + 2 * c.kv) + scores_of_one_sequence;  // of attention
  if (config.recompute != Recompute::none) sum.real += scores_of_one_sequence;
  if (config.recompute == Recompute::full) sum += kept_in_layer(config, share);
  sum.accum += r.inside * c.heads + std::min<int64_t>(r.outside, 256) * c.d + s * config.model.head_size();
  if (config.attention == Attention::tensor_core) {  // BackwardMemory
    const int64_t kv_heads = c.kv / config.model.head_size() / share.head_ranks;
    sum.int32 += backward_turns(config.micro_batch_size, heads, kv_heads, s / ranks_of_sequence(share));
    if (ranks_of_sequence(share) == 1) sum.accum += r.inside * (c.q + (c.kv < c.q ? 2 * c.kv : 0));
  }
  return sum;
}

}  // namespace

Rows rows_of(const TrainingConfig& config, const RankShare& share) {
  const int64_t rows = int64_t{config.micro_batch_size} * config.sequence_length / share.token_ranks;
  return {rows, rows / share.outside_ranks};
}

Columns columns_of(const ModelConfig& m, int tensor_ranks) {
  const int64_t t = tensor_ranks, size = m.head_size();
  return {m.d_model, m.heads * size / t, m.kv_heads * size / t, m.d_ff / t, m.vocab_size / t, m.heads / t};
}

MemoryBytes MemoryPrediction::total() const {
  MemoryBytes sum = resident;
  for (size_t i = 0; i < purposes; ++i) sum[i] += unit_buffers[i];
  return sum;
}

MemoryPrediction predict_memory(const TrainingConfig& config, ElementSizes element, int micro_batches,
                                RankShare share) {
  if (share.parts.empty()) share.parts = {{whole_model(config.model)}};
  if (!share.feed_forward) share.feed_forward = dense_mlp(config, share);

  size_t all = 0, largest_units = 0;           // elements
  std::array<size_t, 4> shared_out_from = {};  // elements of a state that is shared out from 1, 2, 3 on
  for (size_t group = 0; group < share.replicas.size(); ++group) {
    const int replicas = share.replicas[group];
    const size_t alignment = replicas * (16 / element.real);  // units are padded: their shards are equal
    size_t of_group = 0, largest = 0;
    for (const int64_t size : unit_sizes(config, share, group)) {
      const size_t unit = (size + alignment - 1) / alignment * alignment;
      of_group += unit;
      largest = std::max(largest, unit);
    }
    all += of_group;
    largest_units += largest;
    for (int from = 1; from <= 3; ++from)
      shared_out_from[from] += of_group / (share.sharded_states >= from ? replicas : 1);
  }
  const size_t states = (config.optimizer == OptimizerKind::adamw ? 2 : 0) + (element.master_weights ? 1 : 0);
  const size_t norm_and_totals =
      (norm_parts + 2) * sizeof(double) + (element.loss_scale ? 6 : 3) * element.accum;
  const size_t tokens = 4 * rows_of(config, share).inside * sizeof(int32_t) * micro_batches;

  size_t operands = 0;  // bytes
  if (element.fp8) {
    const Columns c = columns_of(config.model, share.tensor_ranks);
    const int64_t of_attention = largest_operand(rows_of(config, share).inside, c.d, c.q + 2 * c.kv);
    const int64_t largest = std::max(of_attention, share.feed_forward->operand);
    operands = 2 * (largest * element.real + largest / 128 * sizeof(float));
  }

  MemoryPrediction prediction;
  prediction.resident = {shared_out_from[3] * element.real, shared_out_from[2] * element.accum,
                         shared_out_from[1] * states * element.accum + norm_and_totals,
                         activations(config, share).bytes(element) + tokens + element.workspace + operands,
                         share.buffers.bytes(element)};
  if (share.sharded_states >= 3)  // two gathered units, or all
    prediction.unit_buffers[0] = (share.gathers_once_a_step ? all : 2 * largest_units) * element.real;
  if (share.sharded_states >= 2)  // one is written, the other one reduced
    prediction.unit_buffers[1] = 2 * largest_units * element.accum;
  return prediction;
}

}  // namespace pentatron
