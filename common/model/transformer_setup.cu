// What comes before the first step: the model's parameters are declared, and its activations allocated.
#include <algorithm>
#include <cmath>
#include <numbers>

#include "kernels/norm.h"
#include "kernels/rotary.h"
#include "model/transformer.h"

namespace pentatron {

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
    return parameters.declare({name, unit, 1, d, TensorSplit::replicated_outside, 0.0, false});
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

// ---- Memory -----------------------------------------------------------------------------------------------

Transformer::Transformer(const TrainingConfig& config, const TransformerParameters& ids,
                         Parameters& parameters, int64_t tokens, Seams seams, cudaStream_t stream)
    : model_(config.model),
      ids_(ids),
      parameters_(parameters),
      recompute_(config.recompute),
      seams_(seams),
      stream_(stream),
      blas_(stream) {
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
  layer_blas_ = layer_products(stream, d,
                               {{"--d-model", d},
                                {"--heads", heads.heads * size},
                                {"--kv-heads", heads.kv_heads * size},
                                {"--d-ff", model_.d_ff / tensor_ranks}},
                               {shared_gradients_.qkv, shared_gradients_.feed_forward.gate_up});
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

FeedForwardTensors FeedForward::allocate_kept(DeviceArena& arena, int64_t rows) const {
  return {arena.matrix<real>(rows, 2 * f_), arena.matrix<real>(rows, f_), nullptr};
}

std::unique_ptr<Activations> Transformer::make_activations(LayerRange range) const {
  auto a = std::make_unique<Activations>();
  a->range = range;
  a->queue = std::make_unique<WgradQueue>(seams_.hooks, parameters_);
  const int d = model_.d_model;
  for (int layer = range.first; layer < range.last; ++layer) {
    a->layers.push_back(recomputed_ ? *recomputed_ : allocate_layer(a->memory));
    if (layer > range.first || range.embedding) a->layers.back().input = a->memory.matrix<real>(outside(), d);
    a->layer_gradients.push_back(shared_gradients_);
  }
  a->output = a->memory.matrix<real>(outside(), d);
  a->d_residual = a->memory.matrix<real>(outside(), d);
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

}  // namespace pentatron
