// Llama's decoder (Touvron et al., 2023), forward and backward by hand: RMSNorm, rotary positions,
// grouped-query attention, SwiGLU, no biases, an untied head. Activations are rows of tokens, [batch x
// sequence, features].
//
//   a layer:   h = enter(norm(x));  x += leave(attention(h Wqkv) Wo)
//              h = enter(norm(x));  x += leave(swiglu(h Wgate, h Wup) Wdown)
//
// This is single-device code that calls the seams (seams.h). A transformer is built for a range of layers,
// with or without embedding and head, so a pipeline stage is just a smaller one.
#pragma once

#include <memory>
#include <vector>

#include "batch.h"
#include "seams.h"

namespace pentatron {

// What one layer keeps for backward.
struct LayerActivations {
  Tensor input;             // [outside, d]: the residual stream before the layer
  Statistics rstd1, rstd2;  // [outside, 1]
  Tensor normed1, normed2;  // [outside, d]: what enters attention and MLP
  AttentionTensors attention;
  Tensor middle;                     // [outside, d]: the residual stream between attention and MLP
  std::vector<Tensor> feed_forward;  // FeedForward::allocate_kept
};

// What one micro-batch keeps for backward, its input and output, and its loss. Made by
// Transformer::make_activations, and reused from step to step.
struct Activations {
  std::vector<LayerActivations> layers;  // [layers of the range]
  Tensor output;                         // [outside, d]: the residual stream after the range
  Tensor gradient;                       // [outside, d]: of `output` before backward, of `input()` after it
  // Where the range has the head:
  Statistics final_rstd;       // [outside, 1]
  Tensor final_normed;         // [outside, d]
  Tensor logits;               // [rows, vocabulary of this rank]; after backward their gradient
  Statistics loss_statistics;  // [3, rows]: of the cross-entropy
  Statistics loss;             // [1, 1]: this micro-batch's part of the loss; assigned, never added to

  Tensor input() const { return layers.empty() ? output : layers.front().input; }

  DeviceArena memory{Purpose::activations};
};

// Layers [first, last), with what comes before and after them.
struct LayerRange {
  int first, last;
  bool embedding, head;
};
inline LayerRange whole_model(const ModelConfig& model) { return {0, model.layers, true, true}; }

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

class Transformer {
 public:
  // For micro-batches of `batch` sequences of `sequence` tokens (of this rank), whose positions lie below
  // `positions`.
  Transformer(const ModelConfig& model, const TransformerParameters& ids, Parameters& parameters,
              LayerRange range, int batch, int sequence, int positions, Recompute recompute, Seams seams,
              cudaStream_t stream);

  std::unique_ptr<Activations> make_activations() const;

  // From the tokens or activations.input() to activations.output, or to the loss.
  void forward(const Batch& batch, Activations& activations);

  // From the loss or activations.gradient to the weight gradients (added to) and, without embedding, to
  // activations.gradient.
  void backward(const Batch& batch, Activations& activations);

 private:
  LayerActivations allocate_layer(DeviceArena& arena, int layer) const;
  void embedding_forward(const Batch& batch, Tensor x);
  void embedding_backward(const Batch& batch, Tensor d);
  // x_out = layer(a.input). When recomputing, stops as soon as everything backward needs is there.
  void layer_forward(int layer, const Batch& batch, const LayerActivations& a, bool recomputing,
                     Tensor x_out);
  void layer_backward(int layer, const Batch& batch, const LayerActivations& a, Tensor d);
  void head_forward(const Batch& batch, Activations& a);
  void head_backward(const Batch& batch, Activations& a);
  // d (+)= the gradient of a norm's input; its weight gradient, already summed over rows, joins the queue.
  void norm_backward(int unit, int norm, Tensor d_normed, Tensor x, Statistics rstd, bool accumulate,
                     Tensor d, Statistics weight_gradient);

  int64_t rows() const { return static_cast<int64_t>(shape_.batch) * shape_.sequence; }
  int64_t outside() const { return seams_.region->rows_outside(rows()); }
  int first_token(int id) const { return static_cast<int>(parameters_[id].first_row); }

  ModelConfig model_;
  TransformerParameters ids_;
  Parameters& parameters_;
  LayerRange range_;
  AttentionShape shape_;
  Recompute recompute_;
  Seams seams_;
  cudaStream_t stream_;
  Blas blas_;
  WgradQueue queue_;

  // Work space that all micro-batches share.
  DeviceArena memory_{Purpose::activations};
  Statistics rotary_table_;  // [positions, head_size]
  Tensor qkv_;               // [rows, q | k | v], and its gradient
  Tensor branch_;            // [rows, d]: output of a region, gradient of its input
  Scores shared_scores_;     // unless they are kept
  AttentionGradients attention_gradients_;
  std::vector<Tensor> feed_forward_gradients_;
  Statistics norm_partials_;                      // [rmsnorm_bands, d]
  Statistics norm_gradients_;                     // [2 a layer, and the final one; d]
  std::unique_ptr<LayerActivations> recomputed_;  // full recomputation: what a layer does not keep
};

}  // namespace pentatron
