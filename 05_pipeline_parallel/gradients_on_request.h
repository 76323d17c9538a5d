// Weight gradients on request, for schedules that split backward: backward computes the input gradients, and
// the work on weight gradients waits until the schedule asks for it. Until then a micro-batch keeps what that
// work reads: its activations, and the gradients of the outputs of its products.
#pragma once

#include "model/transformer.h"

namespace pentatron {

// The queue of one micro-batch, which waits for issue_all().
class WgradsOnRequest : public WgradQueue {
 public:
  // Takes the place of the queue of `a`. Gives each layer of `a` buffers of its own for output gradients.
  // Full recomputation cannot have this queue: all layers share their activations there.
  WgradsOnRequest(Activations& a, const Transformer& model, cudaStream_t compute)
      : WgradQueue(*a.queue), compute_(compute) {
    for (LayerGradients& layer : a.layer_gradients) layer = model.allocate_gradients(a.memory);
    const size_t outputs = 2 * a.layers.size() + (a.range.embedding ? 1 : 0);  // attention and MLP of a layer
    for (size_t i = 0; i < outputs; ++i)
      copies_.push_back(a.memory.matrix<real>(a.layer_gradients[0].qkv.rows, a.output.columns));
  }

  // In a trace, the work belongs to the layer and the micro-batch that have pushed it.
  void push(int unit, std::function<void()> work) override {
    WgradQueue::push(unit, [work = std::move(work), position = trace::here] {
      trace::here = position;
      trace::here.pass = 'w';
      work();
    });
  }
  void prefetch(TensorRegion&, Tensor) override {}
  void drain() override {}

  // d_out is the gradient of the residual stream, or gathered from it. The rest of backward overwrites it.
  Tensor keep(Tensor d_out) override {
    const Tensor copy = copies_[next_];
    next_ = (next_ + 1) % copies_.size();  // each backward keeps as many
    CUDA_CHECK(cudaMemcpyAsync(copy.data, d_out.data, copy.bytes(), cudaMemcpyDeviceToDevice, compute_));
    return copy;
  }

 private:
  cudaStream_t compute_;
  std::vector<Tensor> copies_;  // [outputs], [rows, d] each
  size_t next_ = 0;
};

}  // namespace pentatron
