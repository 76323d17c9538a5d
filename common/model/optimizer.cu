#include <cmath>
#include <numbers>

#include "device/kernel.h"
#include "model/optimizer.h"

namespace pentatron {

// config.warmup_steps steps rise by equal parts; config.steps - config.warmup_steps follow the cosine.
double learning_rate(const TrainingConfig& config, int64_t step) {
  if (step < config.warmup_steps) return config.lr * (step + 1) / config.warmup_steps;
  const double decay_steps = std::max(1, config.steps - config.warmup_steps);
  const double progress = std::min(1.0, (step - config.warmup_steps) / decay_steps);
  const double lowest = config.lr / 10;
  return lowest + (config.lr - lowest) * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

// weights -> master: exact, because fp32 has all numbers of bf16 and fp16.
__global__ void copy_to_master_kernel(const real* weights, accum* master /*both [size]*/, size_t size) {
  for (size_t i : grid_range(size)) master[i] = accum(weights[i]);
}

Optimizer::Optimizer(const TrainingConfig& config, Parameters& parameters, cudaStream_t stream)
    : config_(config),
      parameters_(parameters),
      stream_(stream),
      parts_(memory_.matrix<double>(1, norm_parts).data),
      factors_(memory_.matrix<StepFactors>(1, 1).data) {
  if (!has_loss_scale && config.loss_scale != TrainingConfig{}.loss_scale)
    throw UsageError("--loss-scale", "given", "a program built with PRECISION=fp16");
  if (has_loss_scale) {
    loss_scale_ = memory_.matrix<LossScale>(1, 1).data;
    set_loss_scale({static_cast<accum>(config.loss_scale), 0, 0});
    parameters_.set_loss_scale(loss_scale_);
  }
  for (const Shard& shard : parameters_.shards()) {
    const int64_t size = shard.size();
    State state;
    if (config.optimizer == OptimizerKind::adamw) {
      for (AccumTensor* moment : {&state.moment1, &state.moment2}) {
        *moment = memory_.matrix<accum>(1, size);
        CUDA_CHECK(cudaMemsetAsync(moment->data, 0, moment->bytes(), stream_));
      }
    }
    if constexpr (has_master_weights) {
      state.master = memory_.matrix<accum>(1, size);
      launch(copy_to_master_kernel, elementwise_grid(size), moves((real_bytes + accum_bytes) * size), stream_,
             shard.weights, state.master.data, size);
    }
    states_.push_back(state);
  }
}

void Optimizer::set_loss_scale(LossScale scale) {
  const PinnedArray<LossScale> host(1);
  host[0] = scale;
  CUDA_CHECK(cudaMemcpyAsync(loss_scale_, host.data(), sizeof scale, cudaMemcpyHostToDevice, stream_));
  CUDA_CHECK(cudaStreamSynchronize(stream_));
}

std::vector<std::string> Optimizer::state_names() const {
  std::vector<std::string> names;
  if (config_.optimizer == OptimizerKind::adamw) names = {"moment1", "moment2"};
  if (has_master_weights) names.emplace_back("master");
  return names;
}

std::vector<AccumTensor> Optimizer::states(size_t shard) const {
  const State& state = states_[shard];
  std::vector<AccumTensor> all;
  for (const AccumTensor& tensor : {state.moment1, state.moment2, state.master}) {
    if (tensor.data != nullptr) all.push_back(tensor);
  }
  return all;
}

// Adjacent ranges become one, where their parameters are `alike`: fewer kernels do the same.
template <typename Alike>
static std::vector<ParameterRange> joined(const std::vector<ParameterRange>& ranges, Alike alike) {
  std::vector<ParameterRange> result;
  for (const ParameterRange& range : ranges) {
    ParameterRange* last = result.empty() ? nullptr : &result.back();
    if (last != nullptr && last->begin_in_shard + last->size == range.begin_in_shard &&
        alike(*last->parameter, *range.parameter)) {
      last->size += range.size;
    } else {
      result.push_back(range);
    }
  }
  return result;
}

void Optimizer::add_norm_squared(double* norm_squared) {
  for (const Shard& shard : parameters_.shards()) {
    std::vector<ParameterRange> counted = parameters_.counted_ranges(shard);
    std::erase_if(counted, [](const ParameterRange& range) { return bool(range.parameter->own_step); });
    // Joined, because the bits of a sum are not to depend on how a unit is divided into parameters.
    for (const ParameterRange& range : joined(counted, [](auto&, auto&) { return true; }))
      sum_of_squares(shard.gradients + range.begin_in_shard, range.size, parts_, norm_squared, stream_);
  }
}

void Optimizer::step(int64_t step, double* norm_squared) {
  AdamW adamw = {learning_rate(config_, step), config_.beta1, config_.beta2, 0};
  step_factors(norm_squared, config_.grad_clip, adamw, step + 1, loss_scale_, factors_, stream_);
  const std::vector<Shard> shards = parameters_.shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    const Shard& shard = shards[i];
    const State& state = states_[i];
    // Without master weights `real` is `accum`, and the optimizer updates the weights themselves.
    accum* master = has_master_weights ? state.master.data : reinterpret_cast<accum*>(shard.weights);
    const auto alike = [](const Parameter& p, const Parameter& q) {
      return p.decays == q.decays && !p.own_step && !q.own_step;
    };
    for (const ParameterRange& range : joined(parameters_.ranges(shard), alike)) {
      const Parameter& p = *range.parameter;
      const size_t at = range.begin_in_shard;
      adamw.weight_decay = p.decays ? config_.weight_decay : 0;
      if (p.own_step) {
        p.own_step(shard.weights + at, master + at, shard.gradients + at, factors_, range.size, stream_);
      } else if (config_.optimizer == OptimizerKind::adamw) {
        adamw_step(adamw, shard.weights + at, master + at, shard.gradients + at, state.moment1.data + at,
                   state.moment2.data + at, factors_, range.size, stream_);
      } else {
        sgd_step(adamw.lr, adamw.weight_decay, shard.weights + at, master + at, shard.gradients + at,
                 factors_, range.size, stream_);
      }
    }
  }
}

}  // namespace pentatron
