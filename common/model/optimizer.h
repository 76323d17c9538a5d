// AdamW and SGD over the pieces that this rank owns, with clipping by the global gradient norm.
//
// Nothing here waits for the device: the norm stays there, and the clipping factor is computed from it there.
#pragma once

#include <cstdint>
#include <vector>

#include "model/parameters.h"
#include "program/options.h"

namespace pentatron {

// Learning rate of `step` (from 0): linear warm-up, then a cosine from options.lr down to options.min_lr,
// which a step after the last one would have.
double learning_rate(const Options& options, int64_t step);

class Optimizer {
 public:
  // Allocates the state of all pieces: two moments for AdamW, and master weights where weights are bf16.
  Optimizer(const Options& options, Parameters& parameters, cudaStream_t stream);

  // norm_squared[0] += the squares of this rank's gradients, each element of the model counted on one rank
  // only. Summed over the world, it is the squared gradient norm.
  void add_norm_squared(double* norm_squared);

  // Updates the weights of all pieces, with gradients clipped by the norm whose square is norm_squared[0] on
  // the device.
  void step(int64_t step, const double* norm_squared);

 private:
  struct State {
    Statistics moment1, moment2, master;  // [1, size of the piece]
  };
  const Options& options_;
  Parameters& parameters_;
  cudaStream_t stream_;
  DeviceArena memory_{Purpose::optimizer};
  std::vector<State> states_;  // [pieces]
  DeviceArray<double> parts_;
  DeviceArray<accum> clip_;
};

}  // namespace pentatron
