// What device memory is used for. Every device allocation carries a purpose, and the memory table, the log
// and the predictions list the bytes of each in this order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "program/options.h"

namespace pentatron {

enum class Purpose { weights, gradients, optimizer, activations, communication };

inline constexpr size_t purposes = 5;
inline constexpr std::array<std::string_view, purposes> purpose_names = {"weights", "gradients", "optimizer",
                                                                         "activations", "communication"};

using MemoryBytes = std::array<size_t, purposes>;  // bytes, indexed by Purpose

// Bytes of an element: weights and activations, and everything that is summed; and whether the optimizer
// keeps master weights.
struct ElementSizes {
  size_t real, accum;
  bool master_weights;
};

// Partial sums of the gradient norm (kernels.h, sum_of_squares).
inline constexpr int norm_parts = 1024;

// What is there all the time, and what comes on top for a while.
struct MemoryPrediction {
  MemoryBytes resident = {}, transient = {};
  MemoryBytes total() const;
};

// Layers that a rank holds, and for how many micro-batches at once it keeps what they need for backward.
struct ModelPart {
  int layers;
  bool embedding = true, head = true;
  int in_flight = 1;
  int inputs = 0;  // buffers for what comes from the stage before
  int first = 0;   // number of its first layer
};

// How the model and its state are shared out over ranks.
struct Sharding {
  int zero_stage = 0;  // 03_zero/zero.h
  int data_ranks = 1;  // that hold the same weights: data x context; experts: 1 / options.ep of these
  bool gathered_weights_kept = false;  // likewise
  int tensor_ranks = 1;                // 04_tensor_parallel/tensor_parallel.h
  bool sequence_parallel = false;
  std::vector<ModelPart> parts = {};  // 05_pipeline_parallel/pipeline.h; none: the whole model is one
  bool deferred_weight_gradients = false;
  int context_ranks = 1;  // 06_context_parallel/ring_attention.h
};

// What a rank will hold at its peak, from the sizes of the model and of the batch alone
// (01_single_gpu/README.md derives it). micro_batches: of a step, on this rank.
MemoryPrediction predict_memory(const Options& options, ElementSizes element, int micro_batches,
                                Sharding sharding = {});

// Rows that the experts of a rank have room for in a micro-batch of which it has `rows` tokens
// (07_combined_5d/expert_parallel.h): those of options.expert_capacity even shares or, by default, of the
// worst case, in which all tokens of all ranks that share out the experts come here.
int64_t expert_capacity(const Options& options, int64_t rows);

// Throws UsageError when that is more than `available` bytes.
void require_memory(const MemoryPrediction& predicted, size_t available);

}  // namespace pentatron
