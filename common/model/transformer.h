// Llama's decoder (Touvron et al., 2023), forward and backward by hand: RMSNorm, rotary positions, grouped-
// query attention, SwiGLU, no biases, an untied head. Activations are [batch x sequence, features].
//
//   a layer:   h = enter(norm(x));  x += leave(attention(h Wqkv) Wo)
//              h = enter(norm(x));  x += leave(swiglu(h Wgate, h Wup) Wdown)
//
// This is single-device code that calls the seams (seams.h). It runs a range of layers; 01's is the model.
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
  Tensor normed1, normed2;   // [outside, d]: the inputs of attention and MLP
  AttentionTensors attention;
  Tensor middle;  // [outside, d]: the residual stream between attention and MLP
  FeedForwardTensors feed_forward;
};

std::vector<double> rotary_frequencies(const ModelConfig& model);  // kernels/rotary.h, and its scaling

// Output gradients from which a layer's weight gradients are computed, together with its LayerActivations.
// All layers share one set of buffers.
struct LayerGradients {
  Tensor qkv;  // [rows, q | k | v]
  FeedForwardGradients feed_forward;
  AccumTensor norms;  // [2, d]: the gradients of both norms' weights
};

// The activations of one micro-batch: what it keeps for backward, its input and output, and its loss.
// Transformer::make_activations allocates them once; every step reuses them.
struct Activations {
  LayerRange range;
  std::unique_ptr<WgradQueue> queue;
  std::vector<LayerActivations> layers;         // [layers of the range]
  std::vector<LayerGradients> layer_gradients;  // likewise
  Tensor output;                                // [outside, d]: the residual stream after the range
  Tensor d_residual;  // [outside, d]: before backward of `output`, after it of `input()`
  // Only if the range has the head:
  AccumTensor final_rstd;           // [outside, 1]
  Tensor final_normed;              // [outside, d]
  Tensor logits;                    // [rows, vocabulary of this rank]; after backward their gradient
  AccumTensor loss_statistics;      // [3, rows]: of the cross-entropy
  AccumTensor loss;                 // [1, 1]: this micro-batch's part of the loss, assigned by each forward
  AccumTensor final_norm_gradient;  // [1, d]

  Tensor& input() { return layers.front().input; }

  DeviceArena memory{Purpose::activations};
};

// The numbers of the model's parameters in Parameters.
struct TransformerParameters {
  struct Layer {
    int norm1, norm2, q /* then k and v */, o;
  };
  int embedding, final_norm, head;
  std::vector<Layer> layers;
};

// Declares the parameters of the whole model, in the order of units.
TransformerParameters declare_transformer(const ModelConfig& model, FeedForward& feed_forward,
                                          Parameters& parameters);

// The residual stream, not yet added up: x = before + branch. The next norm adds them, which saves a pass
// over memory. Without a branch, x = before.
struct Residual {
  Tensor before, branch;  // [outside, d]
};

class Transformer {
 public:
  // tokens: of each sequence on this rank.
  Transformer(const TrainingConfig& config, const TransformerParameters& ids, Parameters& parameters,
              int64_t tokens, Seams seams, cudaStream_t stream);

  // Allocates the activations of one micro-batch for a range of at least one layer. Without embedding, set
  // input() to the caller's memory.
  std::unique_ptr<Activations> make_activations(LayerRange range) const;
  LayerGradients allocate_gradients(DeviceArena& arena) const;

  // Computes activations.output from the tokens or, without embedding, from activations.input(). If the range
  // has the head, also the loss. Returns activations.logits.
  Tensor forward(const Batch& batch, Activations& activations);

  // Starts from the loss or, without head, from activations.d_residual. Adds to the weight gradients,
  // by activations.queue. Leaves the gradient of input() in activations.d_residual.
  void backward(const Batch& batch, Activations& activations);

 private:
  LayerActivations allocate_layer(DeviceArena& arena) const;
  // Writes x to a.input, and returns x after the layer. When it recomputes, it stops once all is
  // there that backward needs; its result is then not used.
  Residual layer_forward(int layer, const Batch& batch, Residual x, const LayerActivations& a,
                         bool recomputing);
  void layer_backward(int layer, const Batch& batch, Activations& a);
  // a.normed1 [outside, d] -> attention's output [outside, d].
  Tensor attention_forward(int layer, const Batch& batch, const LayerActivations& a);
  // d_out [rows, d], R -> branch_ [rows, d], P. d_qkv receives what the weight gradients are made of.
  void attention_backward(int layer, const Batch& batch, const LayerActivations& a, Tensor d_out,
                          Tensor d_qkv, WgradQueue& queue);
  FeedForwardCall feed_forward_call(int layer, const Batch& batch, const LayerActivations& a);
  void embedding_forward(const Batch& batch, Tensor x);
  void embedding_backward(const Batch& batch, Activations& a);
  void head_forward(const Batch& batch, Residual x, Activations& a);
  void head_backward(const Batch& batch, Activations& a);
  // x = from.before + from.branch, and `normed` its norm. Without a branch, x is from.before itself.
  void norm_forward(int norm, Residual from, Tensor x, Tensor normed, AccumTensor rstd);
  // Assigns or adds (`accumulate`) the gradient of a norm's input to d_x. weight_gradient [1, d] receives
  // that of the weight; the queue adds it to the parameter's gradient.
  void norm_backward(int norm, Tensor d_normed, Tensor x, AccumTensor rstd, bool accumulate, Tensor d_x,
                     AccumTensor weight_gradient, WgradQueue& queue);
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
  std::unique_ptr<Blas> layer_blas_;  // for the products of layers; they may be in fp8
  Blas blas_;

  // Work space that all micro-batches share.
  DeviceArena memory_{Purpose::activations};
  AccumTensor rotary_table_;  // [positions, head_size]
  Tensor branch_;             // [rows, d]: output of a region; in backward the gradient of its input
  Scores shared_scores_;      // one sequence's, when scores are recomputed
  AttentionGradients attention_gradients_;
  LayerGradients shared_gradients_;               // forward uses `qkv`, too, for the fused product
  AccumTensor norm_partials_;                     // [rmsnorm_bands, d]
  std::unique_ptr<LayerActivations> recomputed_;  // full recomputation: shared by all layers
};

}  // namespace pentatron
