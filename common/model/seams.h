// The places where a parallelism acts on the model: four small interfaces, whose defaults are those of one
// device, so that the model is single-device code. (A pipeline needs none: it runs parts of the model.)
//
//   UnitHooks      around the use of weights and the writing of gradients    data parallelism, ZeRO
//   TensorRegion   the borders of attention, MLP, embedding and head         tensor and sequence parallelism
//   AttentionCore  attention of all queries over all keys                    context parallelism
//   FeedForward    a layer's MLP                                             experts
#pragma once

#include <functional>
#include <memory>
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
  // Around the use of a unit's weights, once each pass. Recomputation lies inside backward's pair.
  virtual void before_weights([[maybe_unused]] int unit, [[maybe_unused]] Pass pass) {}
  virtual void after_weights([[maybe_unused]] int unit, [[maybe_unused]] Pass pass) {}
  // Around the writing of a unit's weight gradients, for every micro-batch; `last` is true for the last of a
  // step.
  virtual void before_gradients([[maybe_unused]] int unit) {}
  virtual void after_gradients([[maybe_unused]] int unit, [[maybe_unused]] bool last) {}
  // After a step's last micro-batch: whatever the compute stream is given next has the global gradient.
  virtual void finish_gradient_sync() {}
  // After the optimizer has written, or initialised, the weights that this rank updates.
  virtual void weights_changed() {}
};

class TensorRegion;

// When the weight gradients of a micro-batch are made: during backward, or only when somebody asks for them.
// (Read past the second until 05.)
enum class WeightGradients { during_backward, on_request };

// Backward goes on with input gradients alone, so the work on weight gradients waits here for a good moment:
// while a collective on an input gradient is under way, or until somebody asks for it.
class WgradQueue {
 public:
  WgradQueue(std::vector<UnitHooks*> hooks, WeightGradients when) : hooks_(std::move(hooks)), when_(when) {}

  // `work` adds to weight gradients of `unit`.
  void push(int unit, std::function<void()> work) {
    entries_.push_back({unit, std::move(work), false, trace::here});
  }
  // Nothing more comes for this unit in this micro-batch: a good moment, too.
  void close(int unit, bool last) {
    entries_.push_back({unit, nullptr, last, trace::here});
    drain();
  }
  // Work that will be pushed next wants a region's input again: if a good moment comes soon, the region can
  // begin to fetch it.
  void prefetch(TensorRegion& region, Tensor x /*[outside, d]*/);
  // A good moment: issues everything that waits, unless it waits for a request.
  void drain() {
    if (when_ == WeightGradients::during_backward) issue_all();
  }
  // The request.
  void issue_all();

 private:
  struct Entry {
    int unit;
    std::function<void()> work;  // empty: the unit is complete
    bool last = false;
    trace::Position position;  // at which it was pushed
  };
  std::vector<UnitHooks*> hooks_;
  WeightGradients when_;
  std::vector<Entry> entries_;
  int open_unit_ = -1;  // whose before_gradients has been called, and after_gradients not yet
};

// Borders of the regions in which tensor parallelism splits heads, columns and vocabulary. "Outside" rows are
// those that a rank holds between regions: all of them, or its part under sequence parallelism.
class TensorRegion {
 public:
  virtual ~TensorRegion() = default;
  virtual int64_t rows_outside(int64_t rows) const { return rows; }
  // A region's input: x [outside, d] -> [rows, d].
  virtual Tensor enter(Tensor x) { return x; }
  // A region's partial output [rows, d] -> its sum over the tensor ranks, [outside, d].
  virtual Tensor leave(Tensor partial) { return partial; }
  // The gradient of a region's output: [outside, d] -> [rows, d].
  virtual Tensor leave_backward(Tensor d_out) { return d_out; }
  // The partial gradient of a region's input [rows, d] -> its sum over the tensor ranks, [outside, d].
  // `meanwhile` issues work that may run while that sum is made.
  virtual Tensor enter_backward(Tensor d_in, const std::function<void()>& meanwhile) {
    meanwhile();
    return d_in;
  }
  // What enter(x) returned, once more, for the weight gradients; prefetch may say ahead that it will be
  // wanted.
  virtual void prefetch_entered([[maybe_unused]] Tensor x /*[outside, d]*/) {}
  virtual Tensor entered(Tensor x /*[outside, d]*/) { return x; }
  // A cross-entropy's statistics over this rank's vocabulary -> over all of it, in place (kernels.h).
  virtual void combine([[maybe_unused]] AccumTensor statistics /*[3, rows]*/) {}
};

struct AttentionTensors {
  Tensor q, k,
      v;       // [rows, heads*head_size], [rows, kv_heads*head_size] twice; q and k turned by their positions
  Tensor out;  // as q
  AccumTensor lse;  // [rows, heads]
  Scores scores;
};

// What attention's backward works in.
struct AttentionGradients {
  Tensor d_out;               // [rows, heads*head_size]
  Tensor d_q, d_k, d_v;       // as q, k, v
  Tensor d_scores;            // [score_shape]
  AccumTensor d_out_dot_out;  // [rows, heads]
};

class AttentionCore {
 public:
  explicit AttentionCore(Attention kind);  // throws UsageError where this machine can't compute it so
  virtual ~AttentionCore() = default;
  // Rows and columns of scores memory for one sequence.
  virtual std::pair<int64_t, int64_t> score_shape(AttentionShape shape) const;
  virtual void forward(const Blas& blas, AttentionShape shape, const AttentionTensors& t);
  virtual void backward(const Blas& blas, AttentionShape shape, const AttentionTensors& t,
                        const AttentionGradients& g);

 protected:
  const Attention kind_;
};

// What a layer's MLP keeps of a micro-batch, and what its backward works in.
struct FeedForwardTensors {
  Tensor gate_up, product;      // [rows, gate | up], and their SwiGLU [rows, f]
  std::shared_ptr<void> other;  // what another FeedForward has instead
};
struct FeedForwardGradients {
  Tensor gate_up, product;      // of the same
  std::shared_ptr<void> other;  // likewise
};

class FeedForward {
 public:
  virtual ~FeedForward() = default;
  virtual void declare(Parameters& parameters, const ModelConfig& model, int layer);
  virtual FeedForwardTensors allocate_kept(DeviceArena& arena, int layer, int64_t rows) const;
  virtual FeedForwardGradients allocate_gradients(DeviceArena& arena, int layer, int64_t rows) const;
  // partial [rows, d] = this rank's part of mlp(h [rows, d]); left out when only what is kept is computed
  // again.
  virtual void forward(const Blas& blas, const Parameters& parameters, int layer, const Batch& batch,
                       Tensor h, const FeedForwardTensors& kept, bool recomputing, Tensor partial);
  // d_h [rows, d] from d_partial [rows, d]. Work on weight gradients goes into the queue, and there asks the
  // region for the MLP's input again: `normed` [outside, d] is what it entered with.
  virtual void backward(const Blas& blas, const Parameters& parameters, int layer, const Batch& batch,
                        Tensor d_partial, Tensor normed, const FeedForwardTensors& kept,
                        const FeedForwardGradients& gradients, TensorRegion& region, WgradQueue& queue,
                        Tensor d_h);

 private:
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

// Standard deviation of a matrix's initial values: the variance 1 / (3 fan-in) of PyTorch's nn.Linear, from
// the global shape.
double initial_deviation(int64_t fan_in);

}  // namespace pentatron
