#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/rotary.h"
#include "kernels/swiglu.h"
#include "model/transformer.h"

namespace pentatron {

Tensor Transformer::forward(const Batch& batch, Activations& a) {
  trace::here = {trace::here.step, batch.number};  // labels operations in traces; before_weights adds a layer
  const LayerRange range = a.range;
  if (range.embedding) embedding_forward(batch, a.input());
  Residual x = {a.input(), {}};
  for (int layer = range.first; layer < range.last; ++layer) {
    const int unit = unit_of_layer(layer);
    before_weights(unit, Pass::forward);
    x = layer_forward(layer, batch, x, a.layers[layer - range.first], false);
    after_weights(unit, Pass::forward);
  }
  if (range.head) {
    head_forward(batch, x, a);
  } else {
    residual_add(x.before, x.branch, a.output, stream_);
  }
  trace::here = {trace::here.step, batch.number};
  return a.logits;
}

void Transformer::backward(const Batch& batch, Activations& a) {
  trace::here = {trace::here.step, batch.number};
  const LayerRange range = a.range;
  if (range.head) head_backward(batch, a);
  for (int layer = range.last - 1; layer >= range.first; --layer) {
    const int unit = unit_of_layer(layer);
    before_weights(unit, Pass::backward);
    const LayerActivations& kept = a.layers[layer - range.first];
    if (recomputed_) layer_forward(layer, batch, {kept.input, {}}, kept, true);
    layer_backward(layer, batch, a);
    after_weights(unit, Pass::backward);
    a.queue->close(unit, batch.last);
  }
  if (range.embedding) embedding_backward(batch, a);
  trace::here = {trace::here.step, batch.number};
}

// ---- A layer: attention, then the MLP, each behind a norm -------------------------------------------------

Residual Transformer::layer_forward(int layer, const Batch& batch, Residual x, const LayerActivations& a,
                                    bool recomputing) {
  const TransformerParameters::Layer& id = ids_.layers[layer];
  norm_forward(id.norm1, x, a.input, a.normed1, a.rstd1);
  const Tensor attended = attention_forward(layer, batch, a);
  norm_forward(id.norm2, {a.input, attended}, a.middle, a.normed2, a.rstd2);
  const Tensor mlp = seams_.feed_forward->forward(feed_forward_call(layer, batch, a), recomputing);
  return {a.middle, mlp};
}

// As x = before + branch(norm(before)), the gradient of x is that of the branch's output, too. The gradient
// that comes out of the branch is added to it. Attention and MLP leave the gradient of their input in
// branch_.
void Transformer::layer_backward(int layer, const Batch& batch, Activations& activations) {
  const TransformerParameters::Layer& id = ids_.layers[layer];
  const LayerActivations& a = activations.layers[layer - activations.range.first];
  const LayerGradients& g = activations.layer_gradients[layer - activations.range.first];
  TensorRegion& region = *seams_.region;
  WgradQueue& queue = *activations.queue;
  const auto drain = [&queue] { queue.drain(); };
  const Tensor d_residual = activations.d_residual;

  const Tensor d_mlp = queue.keep(region.leave_backward(d_residual));
  seams_.feed_forward->backward(feed_forward_call(layer, batch, a), d_mlp, g.feed_forward, queue);
  const Tensor d_normed2 = region.enter_backward(branch_, drain);
  norm_backward(id.norm2, d_normed2, a.middle, a.rstd2, true, d_residual, g.norms.row_range(1, 1), queue);

  const Tensor d_attended = queue.keep(region.leave_backward(d_residual));
  attention_backward(layer, batch, a, d_attended, g.qkv, queue);
  const Tensor d_normed1 = region.enter_backward(branch_, drain);
  norm_backward(id.norm1, d_normed1, a.input, a.rstd1, true, d_residual, g.norms.row_range(0, 1), queue);
}

Tensor Transformer::attention_forward(int layer, const Batch& batch, const LayerActivations& a) {
  const TransformerParameters::Layer& id = ids_.layers[layer];
  const AttentionTensors& t = a.attention;
  const Tensor qkv = shared_gradients_.qkv;  // free until backward
  seams_.region->enter_linear(*layer_blas_, a.normed1, parameters_.weights(id.q, 3), qkv);
  rotary_forward(qkv, batch.positions, rotary_table_, shape_.head, t.q, t.k, t.v, stream_);
  seams_.attention->forward(*layer_blas_, shape_, t);
  return seams_.region->leave_linear(*layer_blas_, t.out, parameters_.weights(id.o), branch_);
}

void Transformer::attention_backward(int layer, const Batch& batch, const LayerActivations& a, Tensor d_out,
                                     Tensor d_qkv, WgradQueue& queue) {
  const TransformerParameters::Layer& id = ids_.layers[layer];
  const int unit = unit_of_layer(layer);
  const AttentionTensors& t = a.attention;
  const AttentionGradients& g = attention_gradients_;
  linear_dgrad(*layer_blas_, d_out, parameters_.weights(id.o), g.d_out);
  queue.push(unit, [=, this] { linear_wgrad(*layer_blas_, d_out, t.out, parameters_.gradients(id.o)); });
  seams_.attention->backward(*layer_blas_, shape_, t, g);
  rotary_backward(g.d_q, g.d_k, g.d_v, batch.positions, rotary_table_, shape_.head, d_qkv, stream_);
  queue.prefetch(*seams_.region, a.normed1);
  linear_dgrad(*layer_blas_, d_qkv, parameters_.weights(id.q, 3), branch_);
  queue.push(unit, [=, this, normed = a.normed1] {
    linear_wgrad(*layer_blas_, d_qkv, seams_.region->entered(normed), parameters_.gradients(id.q, 3));
  });
}

FeedForwardCall Transformer::feed_forward_call(int layer, const Batch& batch, const LayerActivations& a) {
  return {*layer_blas_, parameters_, *seams_.region, layer, batch, a.normed2, a.feed_forward, branch_};
}

Tensor FeedForward::forward(const FeedForwardCall& call, bool recomputing) {
  const auto& [gate_up, product, other] = call.kept;
  const int gate = gate_[call.layer], down = gate + 2;
  call.region.enter_linear(call.blas, call.normed, call.parameters.weights(gate, 2), gate_up);
  swiglu_forward(gate_up, product, call.blas.stream());
  if (recomputing) return {};
  return call.region.leave_linear(call.blas, product, call.parameters.weights(down), call.partial);
}

void FeedForward::backward(const FeedForwardCall& call, Tensor d_out, const FeedForwardGradients& gradients,
                           WgradQueue& queue) {
  const int gate = gate_[call.layer], down = gate + 2, unit = unit_of_layer(call.layer);
  const Tensor d_gate_up = gradients.gate_up, d_product = gradients.product;
  linear_dgrad(call.blas, d_out, call.parameters.weights(down), d_product);
  queue.push(unit,
             [=] { linear_wgrad(call.blas, d_out, call.kept.product, call.parameters.gradients(down)); });
  swiglu_backward(d_product, call.kept.gate_up, d_gate_up, call.blas.stream());
  queue.prefetch(call.region, call.normed);
  linear_dgrad(call.blas, d_gate_up, call.parameters.weights(gate, 2), call.partial);
  queue.push(unit, [=] {
    linear_wgrad(call.blas, d_gate_up, call.region.entered(call.normed), call.parameters.gradients(gate, 2));
  });
}

// ---- Embedding and head -----------------------------------------------------------------------------------

// The region's sum lies in branch_, which the first layer writes again. So x gets a copy.
void Transformer::embedding_forward(const Batch& batch, Tensor x) {
  before_weights(embedding_unit, Pass::forward);
  pentatron::embedding_forward(parameters_.weights(ids_.embedding), batch.tokens, first_token(ids_.embedding),
                               branch_, stream_);
  after_weights(embedding_unit, Pass::forward);
  const Tensor sum = seams_.region->leave(branch_);
  CUDA_CHECK(cudaMemcpyAsync(x.data, sum.data, x.bytes(), cudaMemcpyDeviceToDevice, stream_));
}

// Without before_weights, because backward of a lookup reads no weights.
void Transformer::embedding_backward(const Batch& batch, Activations& a) {
  trace::here.layer = -1;
  const Tensor d_rows = a.queue->keep(seams_.region->leave_backward(a.d_residual));
  a.queue->push(embedding_unit, [this, d_rows, batch] {
    pentatron::embedding_backward(d_rows, batch.tokens, batch.by_token, first_token(ids_.embedding),
                                  parameters_.gradients(ids_.embedding), stream_);
  });
  a.queue->close(embedding_unit, batch.last);
}

void Transformer::head_forward(const Batch& batch, Residual x, Activations& a) {
  const int unit = head_unit(model_.layers);
  before_weights(unit, Pass::forward);
  norm_forward(ids_.final_norm, x, a.output, a.final_normed, a.final_rstd);
  seams_.region->enter_linear(blas_, a.final_normed, parameters_.weights(ids_.head), a.logits);
  after_weights(unit, Pass::forward);
  cross_entropy_statistics(a.logits, batch.targets, first_token(ids_.head), a.loss_statistics, stream_);
  seams_.region->combine(a.loss_statistics);
  cross_entropy_loss(a.loss_statistics, batch.targets, batch.inverse_target_tokens, a.loss.data, stream_);
}

void Transformer::head_backward(const Batch& batch, Activations& a) {
  const int unit = head_unit(model_.layers);
  TensorRegion& region = *seams_.region;
  before_weights(unit, Pass::backward);
  cross_entropy_backward(a.logits, batch.targets, first_token(ids_.head), batch.inverse_target_tokens,
                         parameters_.loss_scale(), a.loss_statistics, stream_);
  a.queue->prefetch(region, a.final_normed);
  linear_dgrad(blas_, a.logits, parameters_.weights(ids_.head), branch_);
  a.queue->push(unit, [this, &region, d_logits = a.logits, normed = a.final_normed] {
    linear_wgrad(blas_, d_logits, region.entered(normed), parameters_.gradients(ids_.head));
  });
  const Tensor d_normed = region.enter_backward(branch_, [&a] { a.queue->drain(); });
  norm_backward(ids_.final_norm, d_normed, a.output, a.final_rstd, false, a.d_residual, a.final_norm_gradient,
                *a.queue);
  after_weights(unit, Pass::backward);
  a.queue->close(unit, batch.last);
}

// ---- What they share --------------------------------------------------------------------------------------

void Transformer::norm_forward(int norm, Residual from, Tensor x, Tensor normed, AccumTensor rstd) {
  rmsnorm_forward(from.before, from.branch, parameters_.weights(norm).data, model_.norm_epsilon, x, normed,
                  rstd.data, stream_);
}

// One kernel makes both gradients. But only the queue's work may write a parameter's gradient, which may have
// no memory before. So the kernel writes that of the weight to a buffer.
void Transformer::norm_backward(int norm, Tensor d_normed, Tensor x, AccumTensor rstd, bool accumulate,
                                Tensor d_x, AccumTensor weight_gradient, WgradQueue& queue) {
  rmsnorm_backward(d_normed, x, parameters_.weights(norm).data, rstd.data, accumulate, d_x, norm_partials_,
                   weight_gradient.data, stream_);
  queue.push(parameters_[norm].unit,
             [=, this] { pentatron::accumulate(weight_gradient, parameters_.gradients(norm), stream_); });
}

void Transformer::before_weights(int unit, Pass pass) {
  trace::here.layer = unit == embedding_unit || unit == head_unit(model_.layers) ? -1 : unit - 1;
  trace::here.pass = pass == Pass::forward ? 'f' : 'b';
  for (UnitHooks* hooks : seams_.hooks) hooks->before_weights(unit, pass);
}
void Transformer::after_weights(int unit, Pass pass) {
  for (UnitHooks* hooks : seams_.hooks) hooks->after_weights(unit, pass);
}

}  // namespace pentatron
