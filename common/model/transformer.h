// Llama's decoder (Touvron et al., 2023), forward and backward by hand: RMSNorm, rotary positions,
// grouped-query attention, SwiGLU, no biases, an untied head. Activations are rows of tokens, [batch x
// sequence, features].
//
//   a layer:   h = enter(norm(x));  x += leave(attention(h Wqkv) Wo)
//              h = enter(norm(x));  x += leave(swiglu(h Wgate, h Wup) Wdown)
//
// This is single-device code that calls the seams (seams.h). It works on a range of layers, with or without
// embedding and head; 01 has all of it.
#pragma once

#include <memory>
#include <vector>

#include "model/batch.h"
#include "model/seams.h"

namespace pentatron {

// What one layer keeps for backward.
struct LayerActivations {
  Tensor input;              // [outside, d]: the residual stream before the layer
  AccumTensor rstd1, rstd2;  // [outside, 1]
  Tensor normed1, normed2;   // [outside, d]: what enters attention and MLP
  AttentionTensors attention;
  Tensor middle;  // [outside, d]: the residual stream between attention and MLP
  FeedForwardTensors feed_forward;
};

// The units of some ranges (config.h), ascending if the ranges are.
std::vector<int> units_of(const std::vector<LayerRange>& ranges);

// What the weight gradients of a layer are made of, beside what the layer keeps. All layers share one, unless
// weight gradients are made on request, when the layer below has long begun.
struct LayerGradients {
  Tensor qkv;  // [rows, q | k | v]
  FeedForwardGradients feed_forward;
  AccumTensor norms;  // [2, d]: the gradients of both norms' weights
  // On request only: copies of the gradients of what attention and MLP add to the residual stream, because
  // the stream's own gradient goes on changing.
  Tensor attention_out, feed_forward_out;  // [rows, d]
};

// What one micro-batch keeps for backward, its input and output, and its loss. Made by
// Transformer::make_activations, and reused from step to step.
struct Activations {
  Activations(LayerRange of, const std::vector<UnitHooks*>& hooks, WeightGradients when)
      : range(of), queue(hooks, when) {}

  const LayerRange range;
  WgradQueue queue;
  std::vector<LayerActivations> layers;   // [layers of the range]
  std::vector<LayerGradients> gradients;  // likewise
  Tensor output;                          // [outside, d]: the residual stream after the range
  Tensor gradient;                        // [outside, d]: of `output` before backward, of `input()` after it
  // Where the range has the head:
  AccumTensor final_rstd;           // [outside, 1]
  Tensor final_normed;              // [outside, d]
  Tensor logits;                    // [rows, vocabulary of this rank]; after backward their gradient
  AccumTensor loss_statistics;      // [3, rows]: of the cross-entropy
  AccumTensor loss;                 // [1, 1]: this micro-batch's part of the loss; assigned, never added to
  AccumTensor final_norm_gradient;  // [1, d]
  // Where it has the embedding and weight gradients are made on request:
  Tensor embedding_out;  // [rows, d]: a copy of its gradient

  Tensor& input() { return layers.front().input; }

  DeviceArena memory{Purpose::activations};
};

// The numbers under which a model's parameters are declared.
struct TransformerParameters {
  struct Layer {
    int norm1, norm2, q /* then k and v */, o;
  };
  int embedding, final_norm, head;
  std::vector<Layer> layers;
};

// Declares the parameters of the whole model, in the order of their use.
TransformerParameters declare_transformer(const ModelConfig& model, FeedForward& feed_forward,
                                          Parameters& parameters);

// The residual stream before a norm: what it was, and what the region before is to add to it. The norm adds
// it, so that the sum is not read from memory once more. Without a branch, `before` is the stream.
struct Residual {
  Tensor before, branch;  // [outside, d]
};

class Transformer {
 public:
  // For micro-batches of sequences of which this rank has `tokens`.
  Transformer(const TrainingConfig& config, const TransformerParameters& ids, Parameters& parameters,
              int64_t tokens, Seams seams, cudaStream_t stream);

  // For micro-batches that go through a range of one layer or more. Without the embedding, the input is
  // somebody else's memory: input() is to be set. Weight gradients on request do not go with full
  // recomputation, which throws away what they need.
  std::unique_ptr<Activations> make_activations(
      LayerRange range, WeightGradients when = WeightGradients::during_backward) const;

  // From the tokens or activations.input() to activations.output or, where the range has the head, to the
  // loss. Returns activations.logits.
  Tensor forward(const Batch& batch, Activations& activations);

  // From the loss or activations.gradient to the weight gradients (added to) and, without embedding, to
  // activations.gradient.
  void backward(const Batch& batch, Activations& activations);
  // Adds the weight gradients, where they are made on request.
  void backward_weights(Activations& activations) { activations.queue.issue_all(); }

  // Elements of [outside, d]: what one stage hands to the next.
  size_t boundary_size() const { return static_cast<size_t>(outside()) * model_.d_model; }

 private:
  LayerActivations allocate_layer(DeviceArena& arena, int layer) const;
  LayerGradients allocate_gradients(DeviceArena& arena, int layer) const;
  void embedding_forward(const Batch& batch, Tensor x);
  void embedding_backward(const Batch& batch, Activations& a);
  // a.input = x, and the stream after the layer. When recomputing, stops as soon as everything backward needs
  // is there.
  Residual layer_forward(int layer, const Batch& batch, Residual x, const LayerActivations& a,
                         bool recomputing);
  // x = from, and its norm.
  void norm_forward(int norm, Residual from, Tensor x, Tensor normed, AccumTensor rstd);
  void layer_backward(int layer, const Batch& batch, Activations& a);
  void head_forward(const Batch& batch, Residual x, Activations& a);
  void head_backward(const Batch& batch, Activations& a);
  // d_x (+)= the gradient of a norm's input; its weight gradient, already summed over rows, joins the queue.
  void norm_backward(int unit, int norm, Tensor d_normed, Tensor x, AccumTensor rstd, bool accumulate,
                     Tensor d_x, AccumTensor weight_gradient, WgradQueue& queue);
  // The gradient, or its copy where there is memory for one.
  Tensor copied(Tensor gradient, Tensor copy) const;
  void before_weights(int unit, Pass pass);
  void after_weights(int unit, Pass pass);

  int64_t rows() const { return static_cast<int64_t>(shape_.batch) * shape_.sequence; }
  int64_t outside() const { return seams_.region->rows_outside(rows()); }
  int first_token(int id) const { return static_cast<int>(parameters_[id].first_row); }

  ModelConfig model_;
  TransformerParameters ids_;
  Parameters& parameters_;
  AttentionShape shape_;
  Recompute recompute_;
  Seams seams_;
  cudaStream_t stream_;
  Blas blas_;

  // Work space that all micro-batches share.
  DeviceArena memory_{Purpose::activations};
  AccumTensor rotary_table_;  // [positions, head_size]
  Tensor branch_;             // [rows, d]: output of a region, gradient of its input
  Scores shared_scores_;      // unless they are kept
  AttentionGradients attention_gradients_;
  LayerGradients shared_gradients_;               // `qkv` is the product in forward, too
  AccumTensor norm_partials_;                     // [rmsnorm_bands, d]
  std::unique_ptr<LayerActivations> recomputed_;  // full recomputation: what a layer does not keep
};

}  // namespace pentatron
