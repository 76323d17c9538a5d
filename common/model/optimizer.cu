#include <cmath>
#include <numbers>

#include "kernels/kernels.h"
#include "model/optimizer.h"

namespace pentatron {

double learning_rate(const Options& options, int64_t step) {
  if (step < options.warmup_steps) return options.lr * (step + 1) / options.warmup_steps;
  const double decay_steps = std::max(1, options.steps - options.warmup_steps);
  const double progress = std::min(1.0, (step - options.warmup_steps) / decay_steps);
  return options.min_lr + (options.lr - options.min_lr) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

// weights -> master: exact, because bf16 is a prefix of fp32.
__global__ void copy_to_master_kernel(const real* weights, accum* master, size_t size) {
  for (size_t i : grid_range(size)) master[i] = accum(weights[i]);
}

Optimizer::Optimizer(const Options& options, Parameters& parameters, cudaStream_t stream)
    : options_(options),
      parameters_(parameters),
      stream_(stream),
      parts_(norm_parts, Purpose::optimizer),
      clip_(1, Purpose::optimizer) {
  for (const Piece& piece : parameters_.pieces()) {
    const int64_t size = piece.end - piece.begin;
    State state;
    if (options.optimizer == OptimizerKind::adamw) {
      for (Statistics* moment : {&state.moment1, &state.moment2}) {
        *moment = memory_.matrix<accum>(1, size);
        CUDA_CHECK(cudaMemsetAsync(moment->data, 0, moment->bytes(), stream_));
      }
    }
    if constexpr (has_master_weights) {
      state.master = memory_.matrix<accum>(1, size);
      launch(copy_to_master_kernel, elementwise_grid(size), stream_, piece.weights, state.master.data, size);
    }
    states_.push_back(state);
  }
}

void Optimizer::add_norm_squared(double* norm_squared) {
  for (const Piece& piece : parameters_.pieces()) {
    const std::vector<Crossing> crossings = parameters_.counted_crossings(piece);
    for (auto first = crossings.begin(), next = first; first != crossings.end(); first = next) {
      size_t end = first->begin_in_piece;  // of the parameters that follow each other without a gap
      for (; next != crossings.end() && next->begin_in_piece == end; ++next) end += next->size;
      sum_of_squares(piece.gradients + first->begin_in_piece, end - first->begin_in_piece, parts_.data(),
                     norm_squared, stream_);
    }
  }
}

void Optimizer::step(int64_t step, const double* norm_squared) {
  const double lr = learning_rate(options_, step);
  clip_factor(norm_squared, options_.grad_clip, clip_.data(), stream_);
  for (size_t i = 0; i < states_.size(); ++i) {
    const Piece& piece = parameters_.pieces()[i];
    const State& state = states_[i];
    accum* master = has_master_weights ? state.master.data : reinterpret_cast<accum*>(piece.weights);
    for (const Crossing& c : parameters_.crossings(piece)) {
      const size_t at = c.begin_in_piece;
      const double decay = c.parameter->decays ? options_.weight_decay : 0;
      if (options_.optimizer == OptimizerKind::adamw) {
        adamw_step({lr, options_.beta1, options_.beta2, options_.epsilon, decay, step + 1},
                   piece.weights + at, master + at, piece.gradients + at, state.moment1.data + at,
                   state.moment2.data + at, clip_.data(), c.size, stream_);
      } else {
        sgd_step(lr, decay, piece.weights + at, master + at, piece.gradients + at, clip_.data(), c.size,
                 stream_);
      }
    }
  }
}

}  // namespace pentatron
