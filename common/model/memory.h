// Predicts a rank's device memory at its peak, from the sizes of the model and of the batch alone
// (01_single_gpu/README.md derives the formulas). A technique changes the sizes of a RankShare, and adds the
// bytes that it allocates itself: a function in its own header does both.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "device/purpose.h"
#include "model/config.h"

namespace pentatron {

// On one rank: the model's width d; columns of queries, keys (or values), MLP, vocabulary; query heads.
struct Columns {
  int64_t d, q, kv, f, vocabulary, heads;
};
Columns columns_of(const ModelConfig& model, int tensor_ranks = 1);

// Bytes for attention: its scores, which a layer keeps of each micro-batch; its work space, which all share.
struct AttentionMemory {
  size_t kept, shared;
};
// Those of a rank that has whole sequences, and these columns.
AttentionMemory attention_memory(const TrainingConfig& config, const Columns& c);

// What one layer's MLP takes.
struct FeedForwardMemory {
  int64_t parameters;      // elements
  size_t kept, gradients;  // bytes of FeedForwardTensors and FeedForwardGradients (seams.h), of a micro-batch
  size_t fp8_operands;     // bytes, of its largest product (kernels/matmul.h)
};

// A range of layers on this rank. in_flight: the most micro-batches whose activations it keeps at a time.
struct ModelPart {
  LayerRange range;
  int in_flight = 1;
};

// What one rank has of the model, its training state and a step's tokens.
struct RankShare {
  RankShare(const TrainingConfig& training);  // all, on one device

  TrainingConfig config;
  int micro_batches;      // this rank's in a step
  int replicas = 1;       // ranks with the same parameters (parameters.h)
  int64_t rows, outside;  // tokens of a micro-batch: inside the tensor regions, and outside of them
  Columns columns;
  std::vector<ModelPart> parts;
  std::optional<AttentionMemory> attention;       // empty: attention_memory
  std::optional<FeedForwardMemory> feed_forward;  // empty: of a dense MLP
  MemoryBytes added = {};                         // bytes that techniques allocate themselves

  FeedForwardMemory mlp() const;
  size_t gradients_of_layer() const;       // bytes of LayerGradients (transformer.h)
  std::vector<size_t> unit_sizes() const;  // elements of each unit, padded
};

// Elements of a unit with the padding that gives each replica an equal shard (parameters.h).
size_t padded(size_t elements, int replicas);
// Bytes of the weights, gradients and optimizer states of units of these sizes.
MemoryBytes parameter_memory(const TrainingConfig& config, const std::vector<size_t>& units);

// Bytes by purpose. resident: of the whole run. unit_buffers: of whole units, where the resident are shards.
struct MemoryPrediction {
  MemoryBytes resident = {}, unit_buffers = {};
  MemoryBytes total() const { return MemoryBytes(resident) += unit_buffers; }
};
MemoryPrediction predict_memory(RankShare share);

}  // namespace pentatron
