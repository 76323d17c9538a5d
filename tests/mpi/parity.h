// What a technique must reproduce: a run that one rank does alone, step by step.
#pragma once

#include <vector>

#include "../../07_combined_5d/options.h"
#include "model.h"

namespace pentatron {

constexpr double kTensorTolerance = 1e-11;  // relative Frobenius error
constexpr double kScalarTolerance = 1e-12;  // relative error

using Tensors = std::vector<std::vector<double>>;  // [parameters]

// Weights follow from gradients, as they don't in AdamW, and gradients are clipped: their norm is above 0.2.
inline CombinedOptions training(CombinedOptions o, int steps) {
  o.optimizer = OptimizerKind::sgd;
  o.lr = 0.5;
  o.steps = steps;
  o.warmup_steps = 1;
  o.weight_decay = 0.01;
  o.grad_clip = 0.2;
  return o;
}

// Ranks and micro-batches have different numbers of targets.
inline std::vector<HostBatch> batches_of_step(const CombinedOptions& o, int step) {
  std::vector<HostBatch> batches = random_batches(o, 100 + step);
  for (size_t i = 0; i < batches.size(); ++i) {
    std::vector<int32_t>& targets = batches[i].targets;
    for (size_t row = 0; row < targets.size(); ++row) {
      if (row % (i % 3 + 2) == 0) targets[row] = ignored_target;
    }
  }
  return batches;
}

}  // namespace pentatron
