// The device memory that a rank will need at its peak, from the sizes of the model and of the batch alone
// (01_single_gpu/README.md derives the formulas). What a technique changes is handed in, as a RankShare.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "device/purpose.h"
#include "model/config.h"

namespace pentatron {

// Bytes of an element: weights and activations, and everything that is summed; and whether the optimizer
// keeps master weights.
struct ElementSizes {
  size_t real, accum;
  bool master_weights;
};

// Numbers of elements, of the types that there are.
struct Elements {
  int64_t real = 0, accum = 0, int32 = 0;
  Elements operator+(Elements b) const { return {real + b.real, accum + b.accum, int32 + b.int32}; }
  Elements operator*(int64_t times) const { return {real * times, accum * times, int32 * times}; }
  Elements& operator+=(Elements b) { return *this = *this + b; }
  size_t bytes(ElementSizes element) const {
    return real * element.real + accum * element.accum + int32 * sizeof(int32_t);
  }
};

// What a rank has of one layer's MLP.
struct FeedForwardMemory {
  std::vector<int64_t> parameters;  // [parameter groups]: elements
  Elements kept, gradients;  // of one micro-batch: FeedForwardTensors and FeedForwardGradients (seams.h)
};

// Layers that a rank holds, and for how many micro-batches at once it keeps what they need for backward.
struct ModelPart {
  LayerRange range;
  int in_flight = 1;
  int inputs = 0;  // buffers for what comes from another rank
};

// What one rank has of the model, its state and a micro-batch. The default is one device, which has all; each
// technique sets what it changes.
struct RankShare {
  std::vector<int> replicas = {1};   // [parameter groups]: ranks with the same parameters (parameters.h)
  int sharded_states = 0;            // 1: they share out optimizer states, 2: and gradients, 3: and weights
  bool gathers_once_a_step = false;  // the weights, if they are shared out; otherwise for every use
  int tensor_ranks = 1;              // that share out heads, MLP columns and vocabulary
  int token_ranks = 1, outside_ranks = 1;  // that share out the tokens; and those outside the tensor regions
  std::vector<ModelPart> parts = {};       // none: the whole model is one
  bool gradients_on_request = false;       // weight gradients are made on request (seams.h)
  // Of a layer or any_layer; empty: a dense MLP.
  std::function<FeedForwardMemory(int layer)> feed_forward = {};
  Elements work = {}, buffers = {};  // of a technique: activations, communication
};

// Tokens of one micro-batch on this rank: inside the tensor regions, and outside of them.
struct Rows {
  int64_t inside, outside;
};
Rows rows_of(const TrainingConfig& config, const RankShare& share);

// Columns of a rank's part of queries, keys (and values), MLP and vocabulary, and its heads.
struct Columns {
  int64_t d, q, kv, f, vocabulary, heads;
};
Columns columns_of(const ModelConfig& model, int tensor_ranks);

// What is there all the time; and the unit buffers, which hold a unit's weights or gradients while they are
// not in shards.
struct MemoryPrediction {
  MemoryBytes resident = {}, unit_buffers = {};
  MemoryBytes total() const;
};

// micro_batches: of a step, on this rank.
MemoryPrediction predict_memory(const TrainingConfig& config, ElementSizes element, int micro_batches,
                                RankShare share = {});

}  // namespace pentatron
