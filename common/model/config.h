// The numbers that define a training run on one device.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/attention_kind.h"

namespace pentatron {

// How Llama 3.1 turns slowly rotating pairs still more slowly, for sequences longer than the model was
// trained on: by `factor` where a turn takes more than original_positions / low_freq_factor positions, not at
// all below original_positions / high_freq_factor, and something between in between. factor 1: no pair.
struct RopeScaling {
  double factor = 1, low_freq_factor = 1, high_freq_factor = 4;
  int original_positions = 8192;
  bool operator==(const RopeScaling&) const = default;
};

// What keeps experts equally busy: a loss, a bias of the router's choice, or nothing.
enum class Balance { loss, bias, none };

// The sizes of a Llama decoder.
struct ModelConfig {
  std::string name;  // the preset's, such as tiny, or the folder that the model was read from
  int layers;
  int d_model;     // width of the residual stream
  int heads;       // query heads
  int kv_heads;    // key and value heads, each shared by heads / kv_heads query heads
  int d_ff;        // width of the SwiGLU MLP
  int vocab_size;  // tokens
  double rope_theta;
  double norm_epsilon;
  RopeScaling rope_scaling = {};

  // A mixture of experts (Shazeer et al., 2017; 07): the MLP is several, of which each token takes some.
  int experts = 0;         // a layer has so many; 0: it has one MLP
  int top_k = 2;           // experts that each token is sent to
  int shared_experts = 0;  // further experts of a layer, which every token is sent to
  Balance balance = Balance::loss;

  bool tied_head = false;    // weights that are loaded have no head: it is their embedding
  std::string remarks = {};  // lines: what the config.json of another program says that is not here

  int head_size() const { return d_model / heads; }
  bool has_balance_bias() const { return experts > 0 && balance == Balance::bias; }
};

// Elements of all parameters (embedding and head are two matrices), and of those that one token uses.
inline int64_t parameter_count(const ModelConfig& m) {
  const int64_t d = m.d_model, q = int64_t{m.heads} * m.head_size(), kv = int64_t{m.kv_heads} * m.head_size();
  const int64_t norms = 2 * d, attention = d * (q + 2 * kv) + q * d, mlp = 3 * d * m.d_ff;
  const int64_t bias = m.has_balance_bias() ? 1 : 0;
  const int64_t mlps = m.experts > 0 ? m.experts * (d + mlp + bias) + m.shared_experts * mlp : mlp;
  return m.layers * (norms + attention + mlps) + d + 2 * d * m.vocab_size;
}

inline int64_t active_parameter_count(const ModelConfig& m) {
  if (m.experts == 0) return parameter_count(m);
  const int64_t idle = int64_t{m.layers} * (m.experts - m.top_k);  // experts
  return parameter_count(m) - idle * 3 * m.d_model * m.d_ff;
}

// What forward keeps for backward. none: everything; selective: everything but the attention scores;
// full: only each layer's input. Backward recomputes the rest.
enum class Recompute { none, selective, full };

enum class OptimizerKind { adamw, sgd };

struct TrainingConfig {
  ModelConfig model;

  int sequence_length = 0;     // tokens
  int micro_batch_size = 4;    // sequences in one forward and backward
  int global_batch_size = 32;  // sequences in one optimizer step, over all ranks
  int steps = 200;
  uint64_t seed = 1;

  OptimizerKind optimizer = OptimizerKind::adamw;
  double lr = 0;  // highest learning rate, at the end of the warm-up
  int warmup_steps = 10;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double weight_decay = 0.1;
  double grad_clip = 1.0;     // highest norm of the gradient; 0: not clipped
  double loss_scale = 65536;  // in fp16 the gradients are multiplied by it at first

  Recompute recompute = Recompute::none;
  Attention attention = Attention::naive;

  int64_t rows() const { return int64_t{micro_batch_size} * sequence_length; }  // tokens of a micro-batch
};

// Layers [first, last), and perhaps embedding and head. Until 05 the only range is the whole model.
struct LayerRange {
  int first, last;
  bool embedding, head;
};
inline LayerRange whole_model(const ModelConfig& model) { return {0, model.layers, true, true}; }

}  // namespace pentatron
