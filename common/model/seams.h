// The seams: four small interfaces through which parallelism acts on the model. The model is single-device
// code that calls them; their defaults are for one device. (A pipeline runs parts of the model.)
//
//   UnitHooks      around the use of weights and the writing of gradients    data parallelism, ZeRO
//   TensorRegion   the borders of attention, MLP, embedding and head         tensor and sequence parallelism
//   AttentionCore  attention of all queries over all keys                    context parallelism
//   FeedForward    a layer's MLP                                             experts
#pragma once

#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/tensor.h"
#include "kernels/attention.h"
#include "kernels/matmul.h"
#include "model/batch.h"
#include "model/config.h"
#include "model/parameters.h"

namespace pentatron {

enum class Pass { forward, backward };

class UnitHooks {
 public:
  virtual ~UnitHooks() = default;
  // Called before and after a unit's weights are used, in each pass; recomputation is part of backward's use.
  virtual void before_weights([[maybe_unused]] int unit, [[maybe_unused]] Pass pass) {}
  virtual void after_weights([[maybe_unused]] int unit, [[maybe_unused]] Pass pass) {}
  // Called before and after a micro-batch (`last`: the step's last one) writes a unit's weight gradients.
  // The next one adds to them, unless after_gradients takes them (ParameterGroup::take_gradients).
  virtual void before_gradients([[maybe_unused]] int unit) {}
  virtual void after_gradients([[maybe_unused]] int unit, [[maybe_unused]] bool last) {}
  // Called after a step's last micro-batch. Later work of the compute stream reads the global gradient.
  virtual void finish_gradient_sync() {}
  // Called after this rank has initialised, or the optimizer has updated, the weights of its shards.
  virtual void weights_changed() {}
};

// A tensor region is where tensor parallelism splits heads, columns or vocabulary. These calls are its
// borders. "Outside": rows that a rank holds between regions, all or (sequence parallelism) a part.
// The type behind a shape says what each tensor rank has (04's note; with one rank all mean the matrix).
// I: the same on all. R: the same, but of its gradient each has a summand. P: a summand. V: its own part.
// "Outside" is I; under sequence parallelism it is V.
class TensorRegion {
 public:
  virtual ~TensorRegion() = default;
  virtual int64_t rows_outside(int64_t rows) const { return rows; }
  // A region's input: x [outside, d], I or V -> [rows, d], R.
  virtual Tensor enter(Tensor x) { return x; }
  // A region's partial output [rows, d], P -> its sum over the tensor ranks, [outside, d], I or V.
  virtual Tensor leave(Tensor partial) { return partial; }
  // The first product of a region, y [rows, out] = enter(x) W^T, and the last one, leave(x W^T), whose
  // partial output is written to `partial` [rows, d]. They are calls of their own so that a technique can cut
  // them into chunks, and communicate one chunk beside another one's product.
  virtual void enter_linear(const Blas& blas, Tensor x /*[outside, in]*/, Tensor weight, Tensor y) {
    linear_forward(blas, enter(x), weight, y);
  }
  virtual Tensor leave_linear(const Blas& blas, Tensor x /*[rows, in]*/, Tensor weight, Tensor partial) {
    linear_forward(blas, x, weight, partial);
    return leave(partial);
  }
  // The gradient of a region's output: [outside, d], I or V -> [rows, d], R.
  virtual Tensor leave_backward(Tensor d_out) { return d_out; }
  // The partial gradient of a region's input [rows, d], P -> its sum over the tensor ranks, [outside, d], I
  // or V. `meanwhile` issues work that may overlap with that sum.
  virtual Tensor enter_backward(Tensor d_in, const std::function<void()>& meanwhile) {
    meanwhile();
    return d_in;
  }
  // entered(x) returns again what enter(x) did, [rows, d], R, for the weight gradients; prefetch begins that.
  virtual void prefetch_entered([[maybe_unused]] Tensor x /*[outside, d]*/) {}
  virtual Tensor entered(Tensor x /*[outside, d]*/) { return x; }
  // Combines the cross-entropy's statistics (kernels/loss.h) of all vocabulary slices, in place, V -> I.
  virtual void combine([[maybe_unused]] AccumTensor statistics /*[3, rows]*/) {}
};

// Queue of the work on weight gradients. Backward needs only input gradients to go on. So this work can wait
// until it hides a collective on an input gradient. (From 05 on, a derived queue makes it wait still longer.)
class WgradQueue {
 public:
  WgradQueue(std::vector<UnitHooks*> hooks, Parameters& parameters)
      : hooks_(std::move(hooks)), parameters_(parameters) {}
  virtual ~WgradQueue() = default;

  // `work` adds to weight gradients of `unit`.
  virtual void push(int unit, std::function<void()> work) { entries_.push_back({unit, std::move(work)}); }
  // Says that the unit is complete for this micro-batch, and drains. `last`: of the step's micro-batches.
  void close(int unit, bool last) {
    entries_.push_back({unit, nullptr, last});
    drain();
  }
  // The work pushed next reads region.entered(x): gathering begins now.
  virtual void prefetch(TensorRegion& region, Tensor x /*[outside, d]*/) { region.prefetch_entered(x); }
  // The work pushed next reads d_out, which backward overwrites after the next drain. Returns what that work
  // is to read: d_out itself, or a copy.
  virtual Tensor keep(Tensor d_out /*[rows, d]*/) { return d_out; }
  virtual void drain() { issue_all(); }
  void issue_all();  // issues all waiting work

 private:
  struct Entry {
    int unit;
    std::function<void()> work;  // empty: the unit is complete
    bool last = false;
  };
  std::vector<UnitHooks*> hooks_;
  Parameters& parameters_;
  std::vector<Entry> entries_;
  int open_unit_ = -1;  // the unit between before_gradients and after_gradients; -1: none
};

// It may overwrite q, k, v and lse in forward, and d_out in backward: only its own backward reads them again.
class AttentionCore {
 public:
  explicit AttentionCore(Attention kind);  // throws UsageError if this machine cannot run `kind`
  virtual ~AttentionCore() = default;
  // Rows and columns of the memory for one sequence's scores; 0, 0 if none is needed.
  virtual std::pair<int64_t, int64_t> score_shape(AttentionShape shape) const;
  virtual BackwardMemory backward_memory(DeviceArena& arena, AttentionShape shape) const {
    return pentatron::backward_memory(kind_, arena, shape);
  }
  virtual void forward(const Blas& blas, AttentionShape shape, const AttentionTensors& t);
  // Without t.out, the caller has computed g.d_out_dot_out.
  virtual void backward(const Blas& blas, AttentionShape shape, const AttentionTensors& t,
                        const AttentionGradients& g);

 protected:
  const Attention kind_;
};

// What a layer's MLP keeps of a micro-batch for backward.
struct FeedForwardTensors {
  Tensor gate_up, product;      // [rows, gate | up], the widest result; and their SwiGLU [rows, f]
  std::shared_ptr<void> other;  // an overriding FeedForward keeps its own type here
};
using FeedForwardGradients = FeedForwardTensors;  // backward has a gradient for each

// What forward and backward of a layer's MLP are called with.
struct FeedForwardCall {
  const Blas& blas;
  const Parameters& parameters;
  TensorRegion& region;
  int layer;
  Batch batch;
  Tensor normed;  // [outside, d]: the input, which enters the region
  const FeedForwardTensors& kept;
  Tensor partial;  // [rows, d], P: of forward the output, before it leaves the region; of backward d_h
};

class FeedForward {
 public:
  // The names of its parameters have `name` between layer and matrix. It has width * d_ff hidden columns.
  explicit FeedForward(std::string name = "mlp.", int width = 1) : name_(std::move(name)), width_(width) {}
  virtual ~FeedForward() = default;
  virtual void declare(Parameters& parameters, const ModelConfig& model, int layer);
  virtual FeedForwardTensors allocate_kept(DeviceArena& arena, int64_t rows) const;
  virtual FeedForwardGradients allocate_gradients(DeviceArena& arena, int64_t rows) const {
    return FeedForward::allocate_kept(arena, rows);
  }
  // Returns mlp(normed) [outside, d]. When recomputing, only `kept` is written.
  virtual Tensor forward(const FeedForwardCall& call, bool recomputing);
  // Computes call.partial, the gradient of h = region.enter(normed), from d_out [rows, d], R. Pushes the work
  // on weight gradients into the queue, which reads h again: region.entered(normed).
  virtual void backward(const FeedForwardCall& call, Tensor d_out, const FeedForwardGradients& gradients,
                        WgradQueue& queue);

 private:
  const std::string name_;
  const int width_;
  std::vector<int> gate_;  // [layers]: number of the first of gate, up, down
  int64_t f_ = 0;          // columns of this rank
};

struct Seams {
  std::vector<UnitHooks*> hooks;  // called in this order
  TensorRegion* region;
  AttentionCore* attention;
  FeedForward* feed_forward;
};

constexpr int embedding_unit = 0;
constexpr int unit_of_layer(int layer) { return 1 + layer; }
constexpr int head_unit(int layers) { return 1 + layers; }

// Standard deviation of initial values: sqrt(1 / (3 fan_in)), as PyTorch's nn.Linear, of the global shape.
inline double initial_deviation(int64_t fan_in) { return std::sqrt(1.0 / (3.0 * fan_in)); }

}  // namespace pentatron
