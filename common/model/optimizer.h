// AdamW and SGD over the shards that this rank updates, with clipping by the global gradient norm.
//
// Nothing here waits for the device: the norm stays there, and the clipping factor is computed from it there.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"
#include "model/parameters.h"

namespace pentatron {

// Learning rate of `step` (from 0): linear warm-up, then a cosine from config.lr down to config.min_lr,
// which a step after the last one would have.
double learning_rate(const TrainingConfig& config, int64_t step);

class Optimizer {
 public:
  // Allocates the state of all shards: two moments for AdamW, and master weights where weights are bf16.
  Optimizer(const TrainingConfig& config, Parameters& parameters, cudaStream_t stream);

  // norm_squared[0] += the squares of this rank's gradients, each element of the model counted on one rank
  // only. Summed over the world, it is the squared gradient norm.
  void add_norm_squared(double* norm_squared);

  // Updates the weights of all shards, with gradients clipped by the norm whose square is norm_squared[0] on
  // the device.
  void step(int64_t step, const double* norm_squared);

 private:
  struct State {
    AccumTensor moment1, moment2, master;  // [1, size of the shard]
  };
  const TrainingConfig& config_;
  Parameters& parameters_;
  cudaStream_t stream_;
  DeviceArena memory_{Purpose::optimizer};
  std::vector<State> states_;  // [shards]
  DeviceArray<double> parts_;
  DeviceArray<accum> clip_;
};

}  // namespace pentatron
