// The seams: four small interfaces through which parallelism acts on the model. The model is single-device
// code that calls them; their defaults are for one device. (A pipeline needs none, but parts of the model.)
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
  virtual void before_gradients([[maybe_unused]] int unit) {}
  virtual void after_gradients([[maybe_unused]] int unit, [[maybe_unused]] bool last) {}
  // Called after a step's last micro-batch. Later work of the compute stream reads the global gradient.
  virtual void finish_gradient_sync() {}
  // Called after this rank has initialised, or the optimizer has updated, the weights of its shards.
  virtual void weights_changed() {}
};

// A tensor region is where tensor parallelism splits heads, columns or vocabulary. These calls are its
// borders. "Outside": rows that a rank holds between regions, all or (sequence parallelism) a part.
// A type beside a shape says what the tensor ranks have (04's note): I and R the same, where the gradient of
// R is partial; P a summand each; V each its own part. "Outside" is I, under sequence parallelism V.
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

// When a micro-batch's weight gradients are computed: in backward, or when issue_all is called (from 05 on).
enum class WeightGradients { during_backward, on_request };

// Queue of the work on weight gradients. Backward needs only input gradients to go on. So this work can wait
// until it hides a collective on an input gradient, or until issue_all is called.
class WgradQueue {
 public:
  WgradQueue(std::vector<UnitHooks*> hooks, Parameters& parameters, WeightGradients when)
      : hooks_(std::move(hooks)), parameters_(parameters), when_(when) {}

  // `work` adds to weight gradients of `unit`.
  void push(int unit, std::function<void()> work) {
    entries_.push_back({unit, std::move(work), false, trace::here});
  }
  // Says that the unit is complete for this micro-batch, and drains. `last`: of the step's micro-batches.
  void close(int unit, bool last) {
    entries_.push_back({unit, nullptr, last, trace::here});
    drain();
  }
  // The work pushed next reads region.entered(x). Unless it waits for a request, gathering begins now.
  void prefetch(TensorRegion& region, Tensor x /*[outside, d]*/) {
    if (when_ == WeightGradients::during_backward) region.prefetch_entered(x);
  }
  // Issues all waiting work, unless weight gradients are computed on request.
  void drain() {
    if (when_ == WeightGradients::during_backward) issue_all();
  }
  // Issues all waiting work. With WeightGradients::on_request this is the request.
  void issue_all();

 private:
  struct Entry {
    int unit;
    std::function<void()> work;  // empty: the unit is complete
    bool last = false;
    trace::Position position;  // where the work was pushed: its label in a trace
  };
  std::vector<UnitHooks*> hooks_;
  Parameters& parameters_;
  WeightGradients when_;
  std::vector<Entry> entries_;
  int open_unit_ = -1;  // the unit between before_gradients and after_gradients; -1: none
};

struct AttentionTensors {
  Tensor q, k, v;   // [rows, heads*head_size]; k, v [rows, kv_heads*head_size]; q, k after rotary_forward
  Tensor out;       // as q
  AccumTensor lse;  // [rows, heads]: log-sum-exp of each row's scores
  Scores scores;
};

// Buffers for attention's backward.
struct AttentionGradients {
  Tensor d_out;               // [rows, heads*head_size]
  Tensor d_q, d_k, d_v;       // as q, k, v
  BackwardMemory memory;      // see backward_memory
  AccumTensor d_out_dot_out;  // [rows, heads]
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
  Tensor gate_up, product;      // [rows, gate | up], and their SwiGLU [rows, f]
  std::shared_ptr<void> other;  // an overriding FeedForward keeps its own type here
};
using FeedForwardGradients = FeedForwardTensors;  // of the same, in backward

class FeedForward {
 public:
  // `name`: of its parameters, between layer and matrix. `width`: hidden columns, over d_ff.
  explicit FeedForward(std::string name = "mlp.", int width = 1) : name_(std::move(name)), width_(width) {}
  virtual ~FeedForward() = default;
  virtual void declare(Parameters& parameters, const ModelConfig& model, int layer);
  virtual FeedForwardTensors allocate_kept(DeviceArena& arena, int64_t rows) const;
  virtual FeedForwardGradients allocate_gradients(DeviceArena& arena, int64_t rows) const {
    return FeedForward::allocate_kept(arena, rows);
  }
  // Elements of the largest operand of its products (kernels/config.h).
  virtual int64_t largest_operand(int64_t rows, int64_t d) const {
    return pentatron::largest_operand(rows, d, 2 * f_);
  }
  // Enters the region with `normed` [outside, d], leaves it, and returns mlp(normed) [outside, d]. This
  // rank's part of the result is written to `partial` [rows, d], P. When recomputing, only `kept` is written.
  virtual Tensor forward(const Blas& blas, const Parameters& parameters, int layer, const Batch& batch,
                         Tensor normed, const FeedForwardTensors& kept, bool recomputing,
                         TensorRegion& region, Tensor partial);
  // Computes d_h [rows, d], P, from d_partial [rows, d], R, and pushes the work on weight gradients into the
  // queue. That work reads the MLP's input again, region.entered(normed), with `normed` [outside, d].
  virtual void backward(const Blas& blas, const Parameters& parameters, int layer, const Batch& batch,
                        Tensor d_partial, Tensor normed, const FeedForwardTensors& kept,
                        const FeedForwardGradients& gradients, TensorRegion& region, WgradQueue& queue,
                        Tensor d_h);

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
