#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/rotary.h"
#include "kernels/swiglu.h"
#include "model/memory.h"
#include "model/transformer.h"

namespace pentatron {

std::vector<int> units_of(const std::vector<LayerRange>& ranges) {
  std::vector<int> units;
  for (const LayerRange& range : ranges) {
    if (range.embedding) units.push_back(embedding_unit);
    for (int layer = range.first; layer < range.last; ++layer) units.push_back(unit_of_layer(layer));
    if (range.head) units.push_back(head_unit(range.last));
  }
  std::sort(units.begin(), units.end());
  return units;
}

std::vector<double> rotary_frequencies(const ModelConfig& model) {
  std::vector<double> frequencies = rotary_frequencies(model.rope_theta, model.head_size());
  const auto [factor, low, high, original_positions] = model.rope_scaling;
  if (factor == 1) return frequencies;
  for (double& frequency : frequencies) {
    const double turns = original_positions * frequency / (2 * std::numbers::pi);
    const double stays = std::clamp((turns - low) / (high - low), 0.0, 1.0);  // the part of it that stays
    frequency = stays * frequency + (1 - stays) * frequency / factor;
  }
  return frequencies;
}

TransformerParameters declare_transformer(const ModelConfig& model, FeedForward& feed_forward,
                                          Parameters& parameters) {
  const int d = model.d_model, q = model.heads * model.head_size(), kv = model.kv_heads * model.head_size();
  const double into = initial_deviation(d), out_of = initial_deviation(q) / std::sqrt(2.0 * model.layers);
  const auto norm = [&](const std::string& name, int unit) {
    return parameters.declare({name, unit, 1, d, TensorSplit::held_outside, 0.0, false});
  };
  TransformerParameters ids;
  ids.embedding = parameters.declare(
      {"model.embed_tokens.weight", embedding_unit, model.vocab_size, d, TensorSplit::by_vocabulary, into});
  for (int layer = 0; layer < model.layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    const int unit = unit_of_layer(layer);
    TransformerParameters::Layer of_layer;
    of_layer.norm1 = norm(prefix + "input_layernorm.weight", unit);
    of_layer.norm2 = norm(prefix + "post_attention_layernorm.weight", unit);
    const auto matrix = [&](const char* name, int rows, int columns, TensorSplit split, double deviation) {
      return parameters.declare({prefix + name, unit, rows, columns, split, deviation});
    };
    of_layer.q = matrix("self_attn.q_proj.weight", q, d, TensorSplit::by_output, into);
    matrix("self_attn.k_proj.weight", kv, d, TensorSplit::by_output, into);
    matrix("self_attn.v_proj.weight", kv, d, TensorSplit::by_output, into);
    of_layer.o = matrix("self_attn.o_proj.weight", d, q, TensorSplit::by_input, out_of);
    feed_forward.declare(parameters, model, layer);
    ids.layers.push_back(of_layer);
  }
  ids.final_norm = norm("model.norm.weight", head_unit(model.layers));
  ids.head = parameters.declare(
      {"lm_head.weight", head_unit(model.layers), model.vocab_size, d, TensorSplit::by_vocabulary, into});
  return ids;
}

// Elements of the largest operand of layers' products. UsageError if fp8's tiles don't fill their columns.
static int64_t layer_operand(const TrainingConfig& config, int tensor_ranks, int64_t tokens,
                             const FeedForward& feed_forward) {
  const Columns c = columns_of(config.model, tensor_ranks);
  const auto check = [](const char* option, int64_t columns) {
    if (has_fp8_products && columns % fp8_tile != 0)
      throw UsageError(option, std::to_string(columns) + " columns of a rank", "a multiple of 128 in fp8");
  };
  check("--d-model", c.d), check("--heads", c.q), check("--kv-heads", c.kv), check("--d-ff", c.f);
  const int64_t rows = config.micro_batch_size * tokens;
  return std::max(largest_operand(rows, c.d, c.q + 2 * c.kv), feed_forward.largest_operand(rows, c.d));
}

Transformer::Transformer(const TrainingConfig& config, const TransformerParameters& ids,
                         Parameters& parameters, int64_t tokens, Seams seams, cudaStream_t stream)
    : model_(config.model),
      ids_(ids),
      parameters_(parameters),
      recompute_(config.recompute),
      seams_(seams),
      stream_(stream),
      blas_(stream, layer_operand(config, parameters.layout().tensor_ranks, tokens, *seams.feed_forward)),
      head_blas_(stream) {
  const int size = model_.head_size(), tensor_ranks = parameters.layout().tensor_ranks, d = model_.d_model;
  const HeadShape heads = {model_.heads / tensor_ranks, model_.kv_heads / tensor_ranks, size};
  shape_ = {config.micro_batch_size, static_cast<int>(tokens), heads};

  rotary_table_ = memory_.matrix<accum>(config.sequence_length, size);
  fill_rotary_table(rotary_frequencies(model_), rotary_table_, stream);
  branch_ = memory_.matrix<real>(rows(), d);
  norm_partials_ = memory_.matrix<accum>(rmsnorm_bands(outside()), d);
  const auto [score_rows, score_columns] = seams_.attention->score_shape(shape_);
  if (recompute_ != Recompute::none)
    shared_scores_ = {memory_.matrix<real>(score_rows, score_columns), false};
  attention_gradients_ = {memory_.matrix<real>(rows(), heads.heads * size),
                          memory_.matrix<real>(rows(), heads.heads * size),
                          memory_.matrix<real>(rows(), heads.kv_heads * size),
                          memory_.matrix<real>(rows(), heads.kv_heads * size),
                          seams_.attention->backward_memory(memory_, shape_),
                          memory_.matrix<accum>(rows(), heads.heads)};
  shared_gradients_ = allocate_gradients(memory_);
  if (recompute_ == Recompute::full)
    recomputed_ = std::make_unique<LayerActivations>(allocate_layer(memory_));
}

LayerGradients Transformer::allocate_gradients(DeviceArena& arena) const {
  LayerGradients g;
  g.qkv = arena.matrix<real>(rows(), shape_.head.qkv_columns());
  g.feed_forward = seams_.feed_forward->allocate_gradients(arena, rows());
  g.norms = arena.matrix<accum>(2, model_.d_model);
  return g;
}

// Allocates everything but the input, which make_activations or its caller allocates.
LayerActivations Transformer::allocate_layer(DeviceArena& arena) const {
  const int d = model_.d_model, q = shape_.head.heads * shape_.head.head_size;
  const int kv = shape_.head.kv_heads * shape_.head.head_size;
  LayerActivations a;
  a.rstd1 = arena.matrix<accum>(outside(), 1);
  a.rstd2 = arena.matrix<accum>(outside(), 1);
  a.normed1 = arena.matrix<real>(outside(), d);
  a.normed2 = arena.matrix<real>(outside(), d);
  a.middle = arena.matrix<real>(outside(), d);
  a.attention = {arena.matrix<real>(rows(), q),
                 arena.matrix<real>(rows(), kv),
                 arena.matrix<real>(rows(), kv),
                 arena.matrix<real>(rows(), q),
                 arena.matrix<accum>(rows(), shape_.head.heads),
                 shared_scores_};
  if (recompute_ == Recompute::none) {
    const auto [score_rows, score_columns] = seams_.attention->score_shape(shape_);
    a.attention.scores = {arena.matrix<real>(shape_.batch * score_rows, score_columns), true};
  }
  a.feed_forward = seams_.feed_forward->allocate_kept(arena, rows());
  return a;
}

std::unique_ptr<Activations> Transformer::make_activations(LayerRange range, WeightGradients when) const {
  auto a = std::make_unique<Activations>(range, seams_.hooks, parameters_, when);
  const int d = model_.d_model;
  const bool on_request = when == WeightGradients::on_request;
  for (int layer = range.first; layer < range.last; ++layer) {
    a->layers.push_back(recomputed_ ? *recomputed_ : allocate_layer(a->memory));
    if (layer > range.first || range.embedding) a->layers.back().input = a->memory.matrix<real>(outside(), d);
    a->gradients.push_back(on_request ? allocate_gradients(a->memory) : shared_gradients_);
    if (on_request) {
      a->gradients.back().attention_out = a->memory.matrix<real>(rows(), d);
      a->gradients.back().feed_forward_out = a->memory.matrix<real>(rows(), d);
    }
  }
  a->output = a->memory.matrix<real>(outside(), d);
  a->gradient = a->memory.matrix<real>(outside(), d);
  if (range.embedding && on_request) a->embedding_out = a->memory.matrix<real>(rows(), d);
  if (range.head) {
    a->final_rstd = a->memory.matrix<accum>(outside(), 1);
    a->final_normed = a->memory.matrix<real>(outside(), d);
    a->logits = a->memory.matrix<real>(rows(), parameters_[ids_.head].local_rows);
    a->loss_statistics = a->memory.matrix<accum>(3, rows());
    a->loss = a->memory.matrix<accum>(1, 1);
    a->final_norm_gradient = a->memory.matrix<accum>(1, d);
  }
  return a;
}

Tensor Transformer::forward(const Batch& batch, Activations& a) {
  trace::here.micro_batch = batch.number;
  trace::here.pass = 'f';
  const LayerRange range = a.range;
  if (range.embedding) embedding_forward(batch, a.input());
  Residual x = {a.input(), {}};
  for (int layer = range.first; layer < range.last; ++layer) {
    const int unit = unit_of_layer(layer);
    trace::here.layer = layer;
    before_weights(unit, Pass::forward);
    x = layer_forward(layer, batch, x, a.layers[layer - range.first], false);
    after_weights(unit, Pass::forward);
  }
  trace::here.layer = -1;
  if (range.head) {
    head_forward(batch, x, a);
  } else {
    residual_add(x.before, x.branch, a.output, stream_);
  }
  trace::here.pass = 'o';
  return a.logits;
}

void Transformer::backward(const Batch& batch, Activations& a) {
  trace::here.micro_batch = batch.number;
  trace::here.pass = 'b';
  const LayerRange range = a.range;
  if (range.head) head_backward(batch, a);
  for (int layer = range.last - 1; layer >= range.first; --layer) {
    const int unit = unit_of_layer(layer);
    trace::here.layer = layer;
    before_weights(unit, Pass::backward);
    const LayerActivations& kept = a.layers[layer - range.first];
    if (recomputed_) layer_forward(layer, batch, {kept.input, {}}, kept, true);
    layer_backward(layer, batch, a);
    after_weights(unit, Pass::backward);
    a.queue.close(unit, batch.last);
  }
  trace::here.layer = -1;
  if (range.embedding) embedding_backward(batch, a);
  trace::here.pass = 'o';
}

void Transformer::before_weights(int unit, Pass pass) {
  for (UnitHooks* hooks : seams_.hooks) hooks->before_weights(unit, pass);
}
void Transformer::after_weights(int unit, Pass pass) {
  for (UnitHooks* hooks : seams_.hooks) hooks->after_weights(unit, pass);
}

void Transformer::embedding_forward(const Batch& batch, Tensor x) {
  before_weights(embedding_unit, Pass::forward);
  pentatron::embedding_forward(parameters_.weights(ids_.embedding), batch.tokens, first_token(ids_.embedding),
                               branch_, stream_);
  after_weights(embedding_unit, Pass::forward);
  const Tensor sum = seams_.region->leave(branch_);
  CUDA_CHECK(cudaMemcpyAsync(x.data, sum.data, x.bytes(), cudaMemcpyDeviceToDevice, stream_));
}

void Transformer::embedding_backward(const Batch& batch, Activations& a) {
  const Tensor d_rows = copied(seams_.region->leave_backward(a.gradient), a.embedding_out);
  a.queue.push(embedding_unit, [this, d_rows, batch] {
    pentatron::embedding_backward(d_rows, batch.tokens, batch.by_token, first_token(ids_.embedding),
                                  parameters_.gradients(ids_.embedding), stream_);
  });
  a.queue.close(embedding_unit, batch.last);
}

Residual Transformer::layer_forward(int layer, const Batch& batch, Residual x, const LayerActivations& a,
                                    bool recomputing) {
  const TransformerParameters::Layer& id = ids_.layers[layer];
  TensorRegion& region = *seams_.region;
  const AttentionTensors& t = a.attention;

  norm_forward(id.norm1, x, a.input, a.normed1, a.rstd1);
  const Tensor qkv = shared_gradients_.qkv;
  region.enter_linear(blas_, a.normed1, parameters_.weights(id.q, 3), qkv);
  rotary_forward(qkv, batch.positions, rotary_table_, shape_.head, t.q, t.k, t.v, stream_);
  seams_.attention->forward(blas_, shape_, t);
  const Tensor attended = region.leave_linear(blas_, t.out, parameters_.weights(id.o), branch_);

  norm_forward(id.norm2, {a.input, attended}, a.middle, a.normed2, a.rstd2);
  return {a.middle, seams_.feed_forward->forward(blas_, parameters_, layer, batch, a.normed2, a.feed_forward,
                                                 recomputing, region, branch_)};
}

void Transformer::norm_forward(int norm, Residual from, Tensor x, Tensor normed, AccumTensor rstd) {
  rmsnorm_forward(from.before, from.branch, parameters_.weights(norm).data, model_.norm_epsilon, x, normed,
                  rstd.data, stream_);
}

void Transformer::layer_backward(int layer, const Batch& batch, Activations& activations) {
  const TransformerParameters::Layer& id = ids_.layers[layer];
  TensorRegion& region = *seams_.region;
  const int unit = unit_of_layer(layer), i = layer - activations.range.first;
  const LayerActivations& a = activations.layers[i];
  WgradQueue& queue = activations.queue;
  const LayerGradients& of_layer = activations.gradients[i];
  const Tensor d_stream = activations.gradient;
  const auto drain = [&queue] { queue.drain(); };

  // MLP. Since x = before + mlp(norm(before)), the stream's gradient gets the MLP's part added to it.
  const Tensor d_mlp_out = copied(region.leave_backward(d_stream), of_layer.feed_forward_out);
  seams_.feed_forward->backward(blas_, parameters_, layer, batch, d_mlp_out, a.normed2, a.feed_forward,
                                of_layer.feed_forward, region, queue, branch_);
  norm_backward(unit, id.norm2, region.enter_backward(branch_, drain), a.middle, a.rstd2, true, d_stream,
                of_layer.norms.row_range(1, 1), queue);

  // Attention, in the same way.
  const AttentionTensors& t = a.attention;
  const AttentionGradients& g = attention_gradients_;
  const Tensor d_partial = copied(region.leave_backward(d_stream), of_layer.attention_out),
               d_qkv = of_layer.qkv;
  linear_dgrad(blas_, d_partial, parameters_.weights(id.o), g.d_out);
  queue.push(unit, [=, this] { linear_wgrad(blas_, d_partial, t.out, parameters_.gradients(id.o)); });
  seams_.attention->backward(blas_, shape_, t, g);
  rotary_backward(g.d_q, g.d_k, g.d_v, batch.positions, rotary_table_, shape_.head, d_qkv, stream_);
  queue.prefetch(region, a.normed1);
  linear_dgrad(blas_, d_qkv, parameters_.weights(id.q, 3), branch_);
  queue.push(unit, [=, this, &region, normed = a.normed1] {
    linear_wgrad(blas_, d_qkv, region.entered(normed), parameters_.gradients(id.q, 3));
  });
  norm_backward(unit, id.norm1, region.enter_backward(branch_, drain), a.input, a.rstd1, true, d_stream,
                of_layer.norms.row_range(0, 1), queue);
}

// ---- The MLP of a layer -----------------------------------------------------------------------------------

void FeedForward::declare(Parameters& parameters, const ModelConfig& model, int layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + "." + name_;
  const int unit = unit_of_layer(layer), d = model.d_model, f = width_ * model.d_ff;
  const double into = initial_deviation(d), out_of = initial_deviation(f) / std::sqrt(2.0 * model.layers);
  gate_.resize(std::max<size_t>(gate_.size(), layer + 1));
  gate_[layer] = parameters.declare({prefix + "gate_proj.weight", unit, f, d, TensorSplit::by_output, into});
  f_ = parameters[gate_[layer]].local_rows;
  parameters.declare({prefix + "up_proj.weight", unit, f, d, TensorSplit::by_output, into});
  parameters.declare({prefix + "down_proj.weight", unit, d, f, TensorSplit::by_input, out_of});
}

FeedForwardTensors FeedForward::allocate_kept(DeviceArena& arena, int64_t rows) const {
  return {arena.matrix<real>(rows, 2 * f_), arena.matrix<real>(rows, f_), nullptr};
}

Tensor FeedForward::forward(const Blas& blas, const Parameters& parameters, int layer, const Batch&,
                            Tensor normed, const FeedForwardTensors& kept, bool recomputing,
                            TensorRegion& region, Tensor partial) {
  const Tensor gate_up = kept.gate_up, product = kept.product;
  region.enter_linear(blas, normed, parameters.weights(gate_[layer], 2), gate_up);
  swiglu_forward(gate_up, product, blas.stream());
  if (recomputing) return {};
  return region.leave_linear(blas, product, parameters.weights(gate_[layer] + 2), partial);
}

void FeedForward::backward(const Blas& blas, const Parameters& parameters, int layer, const Batch&,
                           Tensor d_partial, Tensor normed, const FeedForwardTensors& kept,
                           const FeedForwardGradients& gradients, TensorRegion& region, WgradQueue& queue,
                           Tensor d_h) {
  const int unit = unit_of_layer(layer), gate = gate_[layer], down = gate + 2;
  const Tensor gate_up = kept.gate_up, product = kept.product;
  const Tensor d_gate_up = gradients.gate_up, d_product = gradients.product;
  linear_dgrad(blas, d_partial, parameters.weights(down), d_product);
  queue.push(unit,
             [=, &blas, &parameters] { linear_wgrad(blas, d_partial, product, parameters.gradients(down)); });
  swiglu_backward(d_product, gate_up, d_gate_up, blas.stream());
  queue.prefetch(region, normed);
  linear_dgrad(blas, d_gate_up, parameters.weights(gate, 2), d_h);
  queue.push(unit, [=, &blas, &parameters, &region] {
    linear_wgrad(blas, d_gate_up, region.entered(normed), parameters.gradients(gate, 2));
  });
}

// ---- Head and norms ---------------------------------------------------------------------------------------

Tensor Transformer::copied(Tensor gradient, Tensor copy) const {
  if (copy.data == nullptr) return gradient;
  CUDA_CHECK(cudaMemcpyAsync(copy.data, gradient.data, gradient.bytes(), cudaMemcpyDeviceToDevice, stream_));
  return copy;
}

void Transformer::head_forward(const Batch& batch, Residual x, Activations& a) {
  const int unit = head_unit(model_.layers);
  before_weights(unit, Pass::forward);
  norm_forward(ids_.final_norm, x, a.output, a.final_normed, a.final_rstd);
  seams_.region->enter_linear(head_blas_, a.final_normed, parameters_.weights(ids_.head), a.logits);
  after_weights(unit, Pass::forward);
  cross_entropy_statistics(a.logits, batch.targets, first_token(ids_.head), a.loss_statistics, stream_);
  seams_.region->combine(a.loss_statistics);
  cross_entropy_loss(a.loss_statistics, batch.targets, batch.inverse_target_tokens, a.loss.data, stream_);
}

void Transformer::head_backward(const Batch& batch, Activations& a) {
  const int unit = head_unit(model_.layers);
  TensorRegion& region = *seams_.region;
  before_weights(unit, Pass::backward);
  cross_entropy_backward(a.logits, batch.targets, first_token(ids_.head), batch.inverse_target_tokens,
                         parameters_.loss_scale(), a.loss_statistics, stream_);
  a.queue.prefetch(region, a.final_normed);
  linear_dgrad(head_blas_, a.logits, parameters_.weights(ids_.head), branch_);
  a.queue.push(unit, [this, &region, d_logits = a.logits, normed = a.final_normed] {
    linear_wgrad(head_blas_, d_logits, region.entered(normed), parameters_.gradients(ids_.head));
  });
  const Tensor d_normed = region.enter_backward(branch_, [&a] { a.queue.drain(); });
  norm_backward(unit, ids_.final_norm, d_normed, a.output, a.final_rstd, false, a.gradient,
                a.final_norm_gradient, a.queue);
  after_weights(unit, Pass::backward);
  a.queue.close(unit, batch.last);
}

void Transformer::norm_backward(int unit, int norm, Tensor d_normed, Tensor x, AccumTensor rstd,
                                bool accumulate, Tensor d_x, AccumTensor weight_gradient, WgradQueue& queue) {
  rmsnorm_backward(d_normed, x, parameters_.weights(norm).data, rstd.data, accumulate, d_x, norm_partials_,
                   weight_gradient.data, stream_);
  queue.push(unit,
             [=, this] { pentatron::accumulate(weight_gradient, parameters_.gradients(norm), stream_); });
}

}  // namespace pentatron
