#include <cmath>

#include "kernels/attention.h"
#include "kernels/swiglu.h"
#include "model/seams.h"

namespace pentatron {

void WgradQueue::issue_all() {
  const trace::Position position = trace::here;
  for (const Entry& entry : entries_) {
    trace::here = entry.position;
    trace::here.pass = 'w';
    if (entry.unit != open_unit_) {
      for (UnitHooks* hooks : hooks_) hooks->before_gradients(entry.unit);
      open_unit_ = entry.unit;
    }
    if (entry.work) {
      entry.work();
    } else {
      for (UnitHooks* hooks : hooks_) hooks->after_gradients(entry.unit, entry.last);
      parameters_.end_gradients(entry.unit, entry.last);
      open_unit_ = -1;
    }
  }
  entries_.clear();
  trace::here = position;
}

void WgradQueue::prefetch(TensorRegion& region, Tensor x) {
  if (when_ == WeightGradients::during_backward) region.prefetch_entered(x);
}

AttentionCore::AttentionCore(Attention kind) : kind_(kind) {
  if (kind == Attention::tensor_core) require_tensor_cores();
}

std::pair<int64_t, int64_t> AttentionCore::score_shape(AttentionShape shape) const {
  if (kind_ != Attention::naive) return {0, 0};
  return {shape.score_rows(), shape.sequence};
}

Matrix<int32_t> AttentionCore::allocate_turns(DeviceArena& arena, AttentionShape shape) const {
  if (kind_ != Attention::tensor_core) return {};
  return arena.matrix<int32_t>(1, backward_turns(shape.batch, shape.head.heads, shape.sequence));
}

BackwardMemory AttentionCore::backward_memory(DeviceArena& arena, AttentionShape shape) const {
  const auto [rows, columns] = AttentionCore::score_shape(shape);  // `shape` is that of its own kernels
  const int64_t sums = kind_ == Attention::tensor_core ? int64_t{shape.batch} * shape.sequence : 0;
  return {arena.matrix<real>(rows, columns),
          arena.matrix<accum>(sums, shape.head.heads * shape.head.head_size), allocate_turns(arena, shape)};
}

void AttentionCore::forward(const Blas& blas, AttentionShape shape, const AttentionTensors& t) {
  attention_forward(kind_, blas, whole_sequences(shape), t.q, t.k, t.v, t.scores, t.out, t.lse);
}

void AttentionCore::backward(const Blas& blas, AttentionShape shape, const AttentionTensors& t,
                             const AttentionGradients& g) {
  if (t.out.data != nullptr) attention_dots(t.out, g.d_out, g.d_out_dot_out, blas.stream());
  attention_backward(kind_, blas, whole_sequences(shape), t.q, t.k, t.v, t.scores, t.lse, g.d_out,
                     g.d_out_dot_out, g.memory, false, g.d_q, g.d_k, g.d_v);
}

double initial_deviation(int64_t fan_in) { return std::sqrt(1.0 / (3.0 * fan_in)); }

void FeedForward::declare(Parameters& parameters, const ModelConfig& model, int layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + "." + name_;
  const int unit = unit_of_layer(layer), d = model.d_model, f = width_ * model.d_ff;
  const double into = initial_deviation(d), out_of = initial_deviation(f) / std::sqrt(2.0 * model.layers);
  gate_.resize(std::max<size_t>(gate_.size(), layer + 1));
  gate_[layer] = parameters.declare({prefix + "gate_proj.weight", unit, f, d, TensorSplit::by_output, into});
  f_ = parameters[gate_[layer]].local_rows;
  parameters.declare({prefix + "up_proj.weight", unit, f, d, TensorSplit::by_output, into});
  parameters.declare({prefix + "down_proj.weight", unit, d, f, TensorSplit::by_input, out_of});
}

FeedForwardTensors FeedForward::allocate_kept(DeviceArena& arena, int64_t rows) const {
  return {arena.matrix<real>(rows, 2 * f_), arena.matrix<real>(rows, f_), nullptr};
}

FeedForwardGradients FeedForward::allocate_gradients(DeviceArena& arena, int64_t rows) const {
  return FeedForward::allocate_kept(arena, rows);
}

Tensor FeedForward::forward(const Blas& blas, const Parameters& parameters, int layer, const Batch&,
                            Tensor normed, const FeedForwardTensors& kept, bool recomputing,
                            TensorRegion& region, Tensor partial) {
  const Tensor gate_up = kept.gate_up, product = kept.product;
  region.enter_linear(blas, normed, parameters.weights(gate_[layer], 2), gate_up);
  swiglu_forward(gate_up, product, blas.stream());
  if (recomputing) return {};
  return region.leave_linear(blas, product, parameters.weights(gate_[layer] + 2), partial);
}

void FeedForward::backward(const Blas& blas, const Parameters& parameters, int layer, const Batch&,
                           Tensor d_partial, Tensor normed, const FeedForwardTensors& kept,
                           const FeedForwardGradients& gradients, TensorRegion& region, WgradQueue& queue,
                           Tensor d_h) {
  const int unit = unit_of_layer(layer), gate = gate_[layer], down = gate + 2;
  const Tensor gate_up = kept.gate_up, product = kept.product;
  const Tensor d_gate_up = gradients.gate_up, d_product = gradients.product;
  linear_dgrad(blas, d_partial, parameters.weights(down), d_product);
  queue.push(unit,
             [=, &blas, &parameters] { linear_wgrad(blas, d_partial, product, parameters.gradients(down)); });
  swiglu_backward(d_product, gate_up, d_gate_up, blas.stream());
  queue.prefetch(region, normed);
  linear_dgrad(blas, d_gate_up, parameters.weights(gate, 2), d_h);
  queue.push(unit, [=, &blas, &parameters, &region] {
    linear_wgrad(blas, d_gate_up, region.entered(normed), parameters.gradients(gate, 2));
  });
}

}  // namespace pentatron
