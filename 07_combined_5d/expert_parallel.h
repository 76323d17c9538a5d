// Experts: some layers have, in place of one MLP, E of them and a router that sends each token to top_k
// (Shazeer et al., 2017; Lepikhin et al., "GShard", 2020; without dropping: Gale et al., "MegaBlocks", 2022).
// They are split over n ranks, E / n each; tokens travel to their experts and back:
//
//   forward    route, copy rows into the order of experts   all-to-all   MLPs   all-to-all   weigh and add up
//   backward   the same borders with gradients: weigh       all-to-all   MLPs   all-to-all   add up
//
// The ranks that share out the experts have different tokens: they are data and context ranks. So an expert
// sees the tokens of n ranks, and its gradient is summed over the data x context ranks that hold it, 1 / n of
// all. The tensor axis splits each expert as it splits a dense MLP. The router lies inside the tensor region:
// all tensor ranks choose alike, and each has a part of the gradient of the choice.
//
// The balance loss of a micro-batch and layer is coefficient * E * sum over experts of f P, with f the part
// of its copies that an expert gets, and P its mean probability (Switch). The unit is the micro-batch,
// whoever holds its tokens: f is summed over the ranks that split it, and the mean over all micro-batches of
// the step is what is added to the loss. So every layout has the loss of one rank.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/expert_kernels.h"
#include "model/memory.h"
#include "model/seams.h"
#include "ranks/comm.h"

namespace pentatron {

// `copies` are the rows of this rank's tokens, top_k times each, in the order of experts; `arrivals` the rows
// at this rank's experts, by expert, and for one expert by the rank that they come from.
struct KeptByExperts {
  Statistics probabilities;         // [rows, experts]
  Matrix<int32_t> chosen, place;    // [rows, top_k]
  Statistics fractions;             // [1, experts]: of a micro-batch's copies
  Tensor arrivals;                  // [capacity, d]
  Tensor gate_up, product;          // [capacity, gate | up], [capacity, f]
  Tensor returned;                  // [copies, d]
  PinnedArray<int32_t> sent, came;  // [experts]: copies for each; [ranks, own experts]: arrivals from each
};

struct GradientsOfExperts {
  Tensor arrivals;          // [capacity, d]: of what the experts return
  Tensor gate_up, product;  // [capacity, gate | up], [capacity, f]
  Statistics logits;        // [rows, experts]
};

class ExpertParallel : public FeedForward {
 public:
  // For micro-batches of which this rank has `rows` tokens. `experts`: the ranks that share out the experts;
  // `tokens`: those that share out the tokens of a micro-batch.
  ExpertParallel(const Options& options, const ParameterMesh& mesh, int64_t rows, Communicator& experts,
                 Communicator& tokens, cudaStream_t compute)
      : model_(options.model),
        rows_(rows),
        copies_(rows * model_.top_k),
        f_(model_.d_ff / mesh.tensor_ranks),
        own_(model_.experts / experts.ranks()),
        coefficient_(options.aux_loss),
        first_tensor_rank_(mesh.tensor_rank == 0),
        experts_(experts),
        tokens_(tokens),
        compute_(compute) {
    if (model_.experts == 0) return;
    capacity_ = expert_capacity(options, rows);
    loss_ = memory_.matrix<accum>(1, 1);
    counts_ = memory_.matrix<int32_t>(2, model_.experts);
    bands_ = memory_.matrix<int32_t>(copy_bands(rows), model_.experts);
    d_chosen_ = memory_.matrix<accum>(rows, model_.top_k);
    d_copies_ = memory_.matrix<real>(copies_, model_.d_model);
    if (alone()) return;
    outgoing_ = travelling_.matrix<real>(copies_, model_.d_model);
    results_ = travelling_.matrix<real>(capacity_, model_.d_model);
    connect();
  }

  // ---- The balance loss of a step: this rank's part of it

  bool has_experts() const { return model_.experts > 0; }
  void begin_step() {
    if (model_.experts > 0) CUDA_CHECK(cudaMemsetAsync(loss_.data, 0, loss_.bytes(), compute_));
  }
  // To be added to the totals of the step, on every rank, after its last forward.
  Statistics balance_loss() const { return loss_; }

  // ---- FeedForward

  void declare(Parameters& parameters, const ModelConfig& model, int layer) override {
    router_.resize(model.layers);
    if (!model.has_experts(layer)) return FeedForward::declare(parameters, model, layer);
    const std::string prefix = "model.layers." + std::to_string(layer) + ".mlp.";
    const int unit = unit_of_layer(layer), d = model.d_model, f = model.d_ff;
    const double into = initial_deviation(d), out_of = initial_deviation(f) / std::sqrt(2.0 * model.layers);
    router_[layer] = parameters.declare(
        {prefix + "gate.weight", unit, model.experts, d, TensorSplit::held_inside, not_an_expert, into});
    for (int e = 0; e < model.experts; ++e) {
      const std::string name = prefix + "experts." + std::to_string(e) + ".";
      parameters.declare({name + "gate_proj.weight", unit, f, d, TensorSplit::by_output, e, into});
      parameters.declare({name + "up_proj.weight", unit, f, d, TensorSplit::by_output, e, into});
      parameters.declare({name + "down_proj.weight", unit, d, f, TensorSplit::by_input, e, out_of});
    }
  }

  FeedForwardTensors allocate_kept(DeviceArena& arena, int layer, int64_t rows) const override {
    FeedForwardTensors t;
    if (may_be_dense(layer)) t = FeedForward::allocate_kept(arena, layer, rows);
    if (!may_have_experts(layer)) return t;
    const int e = model_.experts, d = model_.d_model;
    t.experts = std::make_shared<KeptByExperts>(
        KeptByExperts{arena.matrix<accum>(rows, e), arena.matrix<int32_t>(rows, model_.top_k),
                      arena.matrix<int32_t>(rows, model_.top_k), arena.matrix<accum>(1, e),
                      arena.matrix<real>(capacity_, d), arena.matrix<real>(capacity_, 2 * f_),
                      arena.matrix<real>(capacity_, f_), arena.matrix<real>(copies_, d),
                      PinnedArray<int32_t>(e), PinnedArray<int32_t>(e)});
    return t;
  }

  FeedForwardGradients allocate_gradients(DeviceArena& arena, int layer, int64_t rows) const override {
    FeedForwardGradients g;
    if (may_be_dense(layer)) g = FeedForward::allocate_gradients(arena, layer, rows);
    if (!may_have_experts(layer)) return g;
    g.experts = std::make_shared<GradientsOfExperts>(GradientsOfExperts{
        arena.matrix<real>(capacity_, model_.d_model), arena.matrix<real>(capacity_, 2 * f_),
        arena.matrix<real>(capacity_, f_), arena.matrix<accum>(rows, model_.experts)});
    return g;
  }

  void forward(const Blas& blas, const Parameters& parameters, int layer, const Batch& batch, Tensor h,
               const FeedForwardTensors& kept, bool recomputing, Tensor partial) override {
    if (!model_.has_experts(layer))
      return FeedForward::forward(blas, parameters, layer, batch, h, kept, recomputing, partial);
    KeptByExperts& a = *kept.experts;
    const Tensor copies = alone() ? a.arrivals : outgoing_, results = alone() ? a.returned : results_;
    router_logits(blas, h, parameters.weights(router_[layer]), a.probabilities);
    choose_experts(a.probabilities, model_.top_k, a.chosen.data, compute_);
    place_copies(a.chosen.data, rows_, model_.top_k, bands_, counts_.data, a.place.data, compute_);
    exchange_counts(a);
    copy_to_places(h, a.place.data, model_.top_k, copies, compute_);
    balance(batch, recomputing, a);
    await_counts(a);

    exchange(Way::to_experts, a, copies, a.arrivals);
    experts_.release(compute_);
    const std::vector<RowsOfExpert> groups = rows_of_experts(a, layer);
    for (const RowsOfExpert& e : groups)
      linear_forward(blas, e.of(a.arrivals), parameters.weights(e.gate, 2), e.of(a.gate_up));
    if (!groups.empty()) swiglu_forward(all(groups, a.gate_up), all(groups, a.product), compute_);
    for (const RowsOfExpert& e : groups)
      linear_forward(blas, e.of(a.product), parameters.weights(e.gate + 2), e.of(results));
    exchange(Way::back, a, a.returned, results);
    experts_.release(compute_);
    if (recomputing) return;
    combine_copies(a.returned, a.probabilities, a.chosen.data, a.place.data, model_.top_k, partial, compute_);
  }

  void backward(const Blas& blas, const Parameters& parameters, int layer, const Batch& batch,
                Tensor d_partial, Tensor normed, const FeedForwardTensors& kept,
                const FeedForwardGradients& gradients, TensorRegion& region, WgradQueue& queue,
                Tensor d_h) override {
    if (!model_.has_experts(layer)) {
      return FeedForward::backward(blas, parameters, layer, batch, d_partial, normed, kept, gradients, region,
                                   queue, d_h);
    }
    const KeptByExperts& a = *kept.experts;
    const GradientsOfExperts& g = *gradients.experts;
    const Tensor d_copies = alone() ? g.arrivals : outgoing_, d_arrivals = alone() ? d_copies_ : results_;
    if (!queue.deferred()) region.announce_regather(normed);
    combine_copies_backward(d_partial, a.returned, a.probabilities, a.chosen.data, a.place.data, model_.top_k,
                            d_copies, d_chosen_.data, compute_);
    exchange(Way::to_experts, a, d_copies, g.arrivals);
    choose_experts_backward(a.probabilities, a.chosen.data, model_.top_k, d_chosen_.data, a.fractions.data,
                            balance_scale(batch), g.logits, compute_);
    experts_.release(compute_);

    const std::vector<RowsOfExpert> groups = rows_of_experts(a, layer);
    for (const RowsOfExpert& e : groups)
      linear_dgrad(blas, e.of(g.arrivals), parameters.weights(e.gate + 2), e.of(g.product));
    if (!groups.empty())
      swiglu_backward(all(groups, g.product), all(groups, a.gate_up), all(groups, g.gate_up), compute_);
    for (const RowsOfExpert& e : groups)
      linear_dgrad(blas, e.of(g.gate_up), parameters.weights(e.gate, 2), e.of(d_arrivals));
    exchange(Way::back, a, d_copies_, d_arrivals);

    queue.push(unit_of_layer(layer), [=, this, &blas, &parameters, &region, &a, &g] {
      for (const RowsOfExpert& e : groups) {
        linear_wgrad(blas, e.of(g.arrivals), e.of(a.product), parameters.gradients(e.gate + 2));
        linear_wgrad(blas, e.of(g.gate_up), e.of(a.arrivals), parameters.gradients(e.gate, 2));
      }
      router_wgrad(g.logits, region.regather(normed), parameters.gradients(router_[layer]), compute_);
    });
    queue.drain_unless_deferred();  // while the gradients travel
    experts_.release(compute_);
    copy_to_places_backward(d_copies_, a.place.data, model_.top_k, g.logits,
                            parameters.weights(router_[layer]), d_h, compute_);
  }

 private:
  // The arrivals of one of this rank's experts.
  struct RowsOfExpert {
    int gate;  // number of its first parameter; up and down follow
    int64_t first, rows;
    Tensor of(Tensor arrivals) const { return arrivals.row_range(first, rows); }
  };
  static Tensor all(const std::vector<RowsOfExpert>& groups, Tensor arrivals) {
    return arrivals.row_range(0, groups.back().first + groups.back().rows);
  }
  enum class Way { to_experts, back };

  // With one rank nothing travels: copies are written where arrivals are expected.
  bool alone() const { return experts_.ranks() == 1; }
  bool may_have_experts(int layer) const {
    return layer == any_layer ? model_.experts > 0 : model_.has_experts(layer);
  }
  bool may_be_dense(int layer) const {
    return layer == any_layer ? model_.experts == 0 || model_.moe_every > 1 : !model_.has_experts(layer);
  }

  // [rows, d] times [experts, d]^T in `accum`: what is rounded to bf16 may tie, or choose another expert.
  static void router_logits(const Blas& blas, Tensor h, Tensor router, Statistics logits) {
    const auto e = static_cast<int>(router.rows), d = static_cast<int>(h.columns);
    batched_product(blas, Transpose::no, Transpose::yes, static_cast<int>(h.rows), e, d, 1,
                    {h.data, real_type, d, 0}, {router.data, real_type, d, 0}, 0,
                    {logits.data, data_type<accum>, e, 0}, 1, "gemm_router");
  }

  // As Communicator::connect, between all pairs of ranks.
  void connect() {
    experts_.all_to_all(counts_.data, counts_.row_range(1, 1).data, own_);
    CUDA_CHECK(cudaStreamSynchronize(experts_.stream()));
  }

  // How many rows come from every rank for each expert here; on their way to the host.
  void exchange_counts(const KeptByExperts& a) {
    const Matrix<int32_t> came = alone() ? counts_ : counts_.row_range(1, 1);
    experts_.wait_for(compute_);
    if (!alone()) experts_.all_to_all(counts_.data, came.data, own_);
    const size_t bytes = model_.experts * sizeof(int32_t);
    CUDA_CHECK(
        cudaMemcpyAsync(a.sent.data(), counts_.data, bytes, cudaMemcpyDeviceToHost, experts_.stream()));
    CUDA_CHECK(cudaMemcpyAsync(a.came.data(), came.data, bytes, cudaMemcpyDeviceToHost, experts_.stream()));
  }

  // The one time in a layer that the host waits: when no token is dropped, the sizes of messages and products
  // are data. It waits for the counts alone, while the compute stream copies rows.
  void await_counts(const KeptByExperts& a) {
    CUDA_CHECK(cudaStreamSynchronize(experts_.stream()));
    int64_t arrivals = 0;
    for (int i = 0; i < model_.experts; ++i) arrivals += a.came[i];
    if (arrivals <= capacity_) return;
    const std::string text =
        std::to_string(arrivals) + " rows for the experts of a rank, room for " + std::to_string(capacity_);
    fail("--expert-capacity", text.c_str(), __FILE__, __LINE__);
  }

  std::vector<RowsOfExpert> rows_of_experts(const KeptByExperts& a, int layer) const {
    std::vector<RowsOfExpert> groups;
    int64_t first = 0;
    for (int i = 0; i < own_; ++i) {
      int64_t rows = 0;
      for (int rank = 0; rank < experts_.ranks(); ++rank) rows += a.came[rank * own_ + i];
      const int expert = experts_.rank() * own_ + i;
      if (rows > 0) groups.push_back({router_[layer] + 1 + 3 * expert, first, rows});
      first += rows;
    }
    return groups;
  }

  // Rows between the two orders, a message for each rank and expert, so that they arrive in their places. The
  // caller releases the compute stream.
  void exchange(Way way, const KeptByExperts& a, Tensor copies, Tensor arrivals) {
    if (alone()) return;
    using Part = Communicator::Part<real>;
    const size_t d = model_.d_model;
    std::vector<Part> of_copies, of_arrivals;
    real* at = copies.data;
    for (int e = 0; e < model_.experts; ++e) {
      of_copies.push_back({at, a.sent[e] * d, e / own_});
      at += a.sent[e] * d;
    }
    at = arrivals.data;
    for (int i = 0; i < own_; ++i) {
      for (int rank = 0; rank < experts_.ranks(); ++rank) {
        const size_t size = a.came[rank * own_ + i] * d;
        of_arrivals.push_back({at, size, rank});
        at += size;
      }
    }
    experts_.wait_for(compute_);
    way == Way::to_experts ? experts_.all_to_all_v(of_copies, of_arrivals)
                           : experts_.all_to_all_v(of_arrivals, of_copies);
  }

  int64_t tokens_of_micro_batch() const { return rows_ * tokens_.ranks(); }

  // The loss and the gradient of the probabilities are this times the fractions; once for all tensor ranks.
  double balance_scale(const Batch& batch) const {
    if (!first_tensor_rank_) return 0;
    return coefficient_ * model_.experts * batch.inverse_micro_batches /
           static_cast<double>(tokens_of_micro_batch());
  }

  // The fractions over the whole micro-batch; then the loss of this rank's rows, which is linear in them.
  void balance(const Batch& batch, bool recomputing, const KeptByExperts& a) {
    const double copies_of_micro_batch = static_cast<double>(tokens_of_micro_batch() * model_.top_k);
    expert_fractions(counts_.data, model_.experts, 1 / copies_of_micro_batch, a.fractions.data, compute_);
    if (tokens_.ranks() > 1) {
      tokens_.wait_for(compute_);
      tokens_.all_reduce(a.fractions.data, a.fractions.data, model_.experts);
      tokens_.release(compute_);
    }
    if (recomputing) return;
    add_balance_loss(a.probabilities, a.fractions.data, balance_scale(batch), loss_.data, compute_);
  }

  const ModelConfig model_;
  const int64_t rows_, copies_;
  const int64_t f_;  // columns of this rank's part of an expert
  const int own_;    // experts of this rank
  const double coefficient_;
  const bool first_tensor_rank_;
  Communicator &experts_, &tokens_;
  cudaStream_t compute_;
  int64_t capacity_ = 0;     // rows
  std::vector<int> router_;  // [layers]: its number; the experts' parameters follow

  // Work space that all layers and micro-batches share.
  DeviceArena memory_{Purpose::activations}, travelling_{Purpose::communication};
  Statistics loss_;         // [1, 1]
  Matrix<int32_t> counts_;  // [2, experts]: copies for each expert; arrivals, [ranks, own experts]
  Matrix<int32_t> bands_;   // [copy_bands, experts]
  Statistics d_chosen_;     // [rows, top_k]
  Tensor d_copies_;         // [copies, d]: gradients of the copies
  Tensor outgoing_;         // [copies, d]: copies in forward, in backward gradients of what came back
  Tensor results_;          // [capacity, d]: what the experts return in forward, gradients of arrivals after
};

// What the experts do beside what all do: data parallelism, or ZeRO, of the two spans, each over its ranks.
class HooksOfBothSpans : public UnitHooks {
 public:
  HooksOfBothSpans(UnitHooks& dense, UnitHooks& experts) : dense_(dense), experts_(experts) {}
  void before_weights(int unit, Pass pass) override {
    dense_.before_weights(unit, pass);
    experts_.before_weights(unit, pass);
  }
  void after_weights(int unit, Pass pass) override {
    dense_.after_weights(unit, pass);
    experts_.after_weights(unit, pass);
  }
  void before_gradients(int unit) override {
    dense_.before_gradients(unit);
    experts_.before_gradients(unit);
  }
  void after_gradients(int unit, bool last) override {
    dense_.after_gradients(unit, last);
    experts_.after_gradients(unit, last);
  }
  void finish() override {
    dense_.finish();
    experts_.finish();
  }
  void weights_changed() override {
    dense_.weights_changed();
    experts_.weights_changed();
  }

 private:
  UnitHooks &dense_, &experts_;
};

}  // namespace pentatron
