// Predicts a rank's device memory at its peak, from the sizes of the model and of the batch alone
// (01_single_gpu/README.md derives the formulas). A technique passes what it changes as a RankShare.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "device/purpose.h"
#include "model/config.h"

namespace pentatron {

// Bytes of an element. real: of weights and activations; accum: of sums (gradients, moments, statistics).
// master_weights: whether the optimizer keeps a copy of the weights in `accum`.
struct ElementSizes {
  size_t real, accum;
  bool master_weights;
  size_t workspace = 0;     // bytes that cuBLAS was given
  bool loss_scale = false;  // whether gradients are scaled
  bool fp8 = false;         // whether operands of products are quantised
};

// Numbers of elements of each type.
struct Elements {
  int64_t real = 0, accum = 0, int32 = 0;
  Elements operator+(Elements b) const { return {real + b.real, accum + b.accum, int32 + b.int32}; }
  Elements operator*(int64_t times) const { return {real * times, accum * times, int32 * times}; }
  Elements& operator+=(Elements b) { return *this = *this + b; }
  size_t bytes(ElementSizes element) const {
    return real * element.real + accum * element.accum + int32 * sizeof(int32_t);
  }
};

// One layer's MLP, as far as it is on this rank.
struct FeedForwardMemory {
  std::vector<int64_t> parameters;  // [parameter groups]: elements
  Elements kept, gradients;  // for one micro-batch: FeedForwardTensors and FeedForwardGradients (seams.h)
  int64_t operand = 0;       // elements of the largest one of its products (kernels/config.h)
};

// A range of layers on this rank. in_flight: the most micro-batches whose activations it keeps at a time.
struct ModelPart {
  LayerRange range;
  int in_flight = 1;
  int inputs = 0;  // buffers [outside, d] that receive activations from another rank
};

// One rank's share of the model, its training state and a micro-batch. By default, one device has everything.
struct RankShare {
  std::vector<int> replicas = {1};   // [parameter groups]: ranks with the same parameters (parameters.h)
  int sharded_states = 0;            // replicas shard: 1: optimizer states, 2: and gradients, 3: and weights
  bool gathers_once_a_step = false;  // sharded weights are all-gathered once a step, not for every use
  int tensor_ranks = 1;              // ranks that split heads, MLP columns and vocabulary
  int token_ranks = 1, outside_ranks = 1;  // ranks that split the tokens; the rows outside the tensor regions
  int head_ranks = 1;  // of the ranks that split the tokens: in attention they split the heads instead
  std::vector<ModelPart> parts = {};                   // empty: one part, the whole model
  bool gradients_on_request = false;                   // weight gradients are computed on request (seams.h)
  std::optional<FeedForwardMemory> feed_forward = {};  // a layer's; empty: of a dense MLP
  Elements work = {}, buffers = {};  // what a technique adds to activations, and its communication buffers
};

// Tokens of one micro-batch on this rank: inside the tensor regions, and outside of them.
struct Rows {
  int64_t inside, outside;
};
Rows rows_of(const TrainingConfig& config, const RankShare& share);

// On one rank: the model's width d; columns of queries, keys (or values), MLP, vocabulary; query heads.
struct Columns {
  int64_t d, q, kv, f, vocabulary, heads;
};
Columns columns_of(const ModelConfig& model, int tensor_ranks);

// Bytes by purpose. resident: of the whole run. unit_buffers: of whole units, where the resident are shards.
struct MemoryPrediction {
  MemoryBytes resident = {}, unit_buffers = {};
  MemoryBytes total() const;
};

// micro_batches: of a step on this rank, whose tokens are all on the device.
MemoryPrediction predict_memory(const TrainingConfig& config, ElementSizes element, int micro_batches,
                                RankShare share = {});

}  // namespace pentatron
