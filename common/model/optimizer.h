// AdamW and SGD over the shards that this rank updates, with clipping by the global gradient norm.
// The host never waits here: a kernel computes the clipping factor, and in fp16 if the gradients overflowed.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/optimizer_step.h"
#include "model/config.h"
#include "model/parameters.h"

namespace pentatron {

// Learning rate of `step` (from 0): linear warm-up, then a cosine from config.lr down to a tenth of it, which
// the step after the last one would have.
double learning_rate(const TrainingConfig& config, int64_t step);

class Optimizer {
 public:
  // Allocates the state of all shards. In fp16 the gradients of `parameters` are scaled from now on.
  Optimizer(const TrainingConfig& config, Parameters& parameters, cudaStream_t stream);

  // norm_squared[0] (device) += the squares of this rank's gradients. Each element of the model counts on one
  // rank only, so the sum over all ranks is the squared gradient norm.
  void add_norm_squared(double* norm_squared);

  // Updates the weights of all shards. norm_squared[0] (device): the squared norm of the global gradient, by
  // which the gradients are clipped; the loss scale is taken out of it. step: from 0.
  void step(int64_t step, double* norm_squared);

  LossScale* loss_scale() const { return loss_scale_; }  // on the device; null without one
  void set_loss_scale(LossScale scale);                  // waits

  // What a checkpoint has to keep of each shard, [1, size of the shard] each, and under which names.
  std::vector<AccumTensor> states(size_t shard) const;
  std::vector<std::string> state_names() const;

 private:
  struct State {
    AccumTensor moment1, moment2, master;  // [1, size of the shard]
  };
  const TrainingConfig& config_;
  Parameters& parameters_;
  cudaStream_t stream_;
  DeviceArena memory_{Purpose::optimizer};
  std::vector<State> states_;        // [shards]
  double* parts_;                    // [norm_parts]
  StepFactors* factors_;             // [1]
  LossScale* loss_scale_ = nullptr;  // [1], or nothing
};

}  // namespace pentatron
