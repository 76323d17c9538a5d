// Expert parallelism. A layer has E MLPs, the experts, in place of one. A router chooses top_k experts
// for each token (Shazeer et al., 2017; Lepikhin et al., "GShard", 2020). Each of n ranks holds E / n
// experts. Tokens travel to their experts and back:
//
//   forward    route, permute       dispatch (all-to-all)   grouped products   combine (all-to-all, sum)
//   backward   weigh the gradient   dispatch (all-to-all)   grouped products   combine (all-to-all, sum)
//
// An expert computes the tokens of all n ranks, so its gradient is summed over the ranks that hold the same
// expert, 1 / n of all. Experts are therefore a parameter group of their own. Tensor ranks split each expert
// as a dense MLP. They choose alike; the router's gradient is partial on each (experts.md).
//
// Shared experts get every token (Dai et al., "DeepSeekMoE", 2024). Together they are a dense MLP on each
// rank, which is computed while the rows of the others travel.
#pragma once

#include <cmath>
#include <memory>

#include "expert_exchange.h"
#include "expert_memory.h"
#include "kernels/grouped_matmul.h"
#include "kernels/swiglu.h"
#include "router.h"

namespace pentatron {

// Parameter groups.
constexpr int dense_group = 0, expert_group = 1;

// The matrices of all experts of a layer. Each rank holds `own` of them; this one is number `rank`.
inline void declare_experts(const ModelConfig& model, int own, int rank, Parameters& parameters, int layer) {
  const int unit = unit_of_layer(layer), d = model.d_model, f = model.d_ff;
  const double into = initial_deviation(d), out_of = initial_deviation(f) / std::sqrt(2.0 * model.layers);
  for (int e = 0; e < model.experts; ++e) {
    const std::string name = prefix_of_experts(layer) + "experts." + std::to_string(e) + ".";
    const auto declare = [&](const char* matrix, int rows, int columns, TensorSplit split, double deviation) {
      parameters.declare(
          {name + matrix, unit, rows, columns, split, deviation, true, expert_group, e / own == rank});
    };
    declare("gate_proj.weight", f, d, TensorSplit::by_output, into);
    declare("up_proj.weight", f, d, TensorSplit::by_output, into);
    declare("down_proj.weight", d, f, TensorSplit::by_input, out_of);
  }
}

// R, V, P: types on the tensor axis (04's note).
struct ExpertActivations : Choice {
  Tensor dispatched;        // [buffer, d], R
  Tensor gate_up, product;  // [buffer, gate | up], [buffer, f], V
  Tensor returned;          // [copies, d], P
  RowCounts counts;
  FeedForwardTensors shared;
};

struct ExpertGradients {
  Tensor returned;          // [buffer, d], R: gradients of the rows that experts return
  Tensor gate_up, product;  // [buffer, gate | up], [buffer, f], V
  AccumTensor logits;       // [rows, experts], P
  FeedForwardGradients shared;
};

class ExpertParallel : public FeedForward {
 public:
  // `expert_ranks` share out the experts, `token_ranks` the tokens of a micro-batch, and `tensor_ranks` the
  // columns of each expert. Null: this rank has all.
  ExpertParallel(const TrainingConfig& training, const ExpertOptions& options, Communicator& expert_ranks,
                 cudaStream_t compute, Communicator* token_ranks = nullptr,
                 Communicator* tensor_ranks = nullptr)
      : training_(training),
        rows_(int64_t{training.micro_batch_size} * training.sequence_length /
              (token_ranks ? token_ranks->ranks() : 1)),
        f_(model_.d_ff / (tensor_ranks ? tensor_ranks->ranks() : 1)),
        buffer_rows_(model_.experts > 0 ? expert_buffer_rows(model_, options, rows_) : 0),
        expert_ranks_(expert_ranks),
        router_(model_, options.aux_loss, rows_, token_ranks, !tensor_ranks || tensor_ranks->rank() == 0,
                compute),
        exchange_(model_.experts, expert_ranks, compute),
        compute_(compute) {
    sent_and_came_ = memory_.matrix<int32_t>(2, model_.experts);
    bands_ = memory_.matrix<int32_t>(copy_bands(rows_), model_.experts);
    d_chosen_ = memory_.matrix<accum>(rows_, model_.top_k);
    d_permuted_ = memory_.matrix<real>(copies_, model_.d_model);
    addresses_ = memory_.matrix<void*>(3, own_);
    if (exchange_.one_rank()) return;
    permuted_ = exchanged_.matrix<real>(copies_, model_.d_model);
    results_ = exchanged_.matrix<real>(buffer_rows_, model_.d_model);
    exchange_.connect(sent_and_came_);
  }

  AccumTensor balance_loss() const { return router_.balance_loss(); }
  void add_balance_loss(StepTotals& totals) { router_.add_balance_loss(totals); }

  // ---- FeedForward

  void declare(Parameters& parameters, const ModelConfig& model, int layer) override {
    router_.declare_gate(parameters, layer);
    declare_experts(model, own_, expert_ranks_.rank(), parameters, layer);
    if (has_shared()) shared_.declare(parameters, model, layer);
    if (model_.has_balance_bias()) router_.declare_bias(training_, parameters, layer);
  }

  FeedForwardTensors allocate_kept(DeviceArena& arena, int64_t rows) const override {
    const int e = model_.experts, d = model_.d_model;
    const auto a = std::make_shared<ExpertActivations>(
        ExpertActivations{{arena.matrix<accum>(rows, e), arena.matrix<int32_t>(rows, model_.top_k),
                           arena.matrix<int32_t>(rows, model_.top_k), arena.matrix<accum>(1, e)},
                          arena.matrix<real>(buffer_rows_, d),
                          arena.matrix<real>(buffer_rows_, 2 * f_),
                          arena.matrix<real>(buffer_rows_, f_),
                          arena.matrix<real>(copies_, d),
                          RowCounts(e),
                          has_shared() ? shared_.allocate_kept(arena, rows) : FeedForwardTensors()});
    return {{}, {}, a};
  }

  FeedForwardGradients allocate_gradients(DeviceArena& arena, int64_t rows) const override {
    const auto g = std::make_shared<ExpertGradients>(ExpertGradients{
        arena.matrix<real>(buffer_rows_, model_.d_model), arena.matrix<real>(buffer_rows_, 2 * f_),
        arena.matrix<real>(buffer_rows_, f_), arena.matrix<accum>(rows, model_.experts),
        has_shared() ? shared_.allocate_gradients(arena, rows) : FeedForwardGradients()});
    const auto bytes = [&](Tensor out) {
      return layer_products_bytes(out.rows, model_.d_model, out.columns);
    };
    const bool shared_is_wider = bytes(g->shared.gate_up) > bytes(g->gate_up);
    return {shared_is_wider ? g->shared.gate_up : g->gate_up, {}, g};
  }

  Tensor forward(const FeedForwardCall& call, bool recomputing) override {
    const auto& [blas, parameters, region, layer, batch, normed, kept, partial] = call;
    const Tensor h = region.enter(normed);
    ExpertActivations& a = *static_cast<ExpertActivations*>(kept.other.get());
    const Tensor permuted = exchange_.one_rank() ? a.dispatched : permuted_;
    const Tensor results = exchange_.one_rank() ? a.returned : results_;
    router_.choose(blas, h, parameters, layer, a);
    const Matrix<int32_t> sent = sent_and_came_.row_range(0, 1), came = sent_and_came_.row_range(1, 1);
    make_permutation(a.chosen, bands_, sent, a.place, compute_);
    exchange_.exchange_counts(sent, came, a.counts);
    permute_tokens(h, a.place, permuted, compute_);
    router_.balance(batch, recomputing, a);
    await_counts(a.counts);

    exchange_.dispatch(a.counts, permuted, a.dispatched);
    if (has_shared())
      shared_.forward({blas, parameters, inside_, layer, batch, h, a.shared, partial}, recomputing);
    exchange_.await_rows();
    const RowsOfExperts rows = rows_of_experts(a.counts);
    grouped_linear_forward(blas, rows.of_each(a.dispatched), weights(parameters, layer, 0, 2),
                           rows.of_each(a.gate_up), addresses_);
    if (rows.all > 0) swiglu_forward(rows.of_all(a.gate_up), rows.of_all(a.product), compute_);
    grouped_linear_forward(blas, rows.of_each(a.product), weights(parameters, layer, 2),
                           rows.of_each(results), addresses_);
    exchange_.combine(a.counts, results, a.returned);
    exchange_.await_rows();
    if (recomputing) return {};
    combine_tokens(a.returned, a.probabilities, a.chosen, a.place, partial, compute_, has_shared());
    return region.leave(partial);
  }

  void backward(const FeedForwardCall& call, Tensor d_out, const FeedForwardGradients& gradients,
                WgradQueue& queue) override {
    const auto& [blas, parameters, region, layer, batch, normed, kept, d_h] = call;
    const ExpertActivations& a = *static_cast<ExpertActivations*>(kept.other.get());
    const ExpertGradients& g = *static_cast<ExpertGradients*>(gradients.other.get());
    const Tensor d_returned = exchange_.one_rank() ? g.returned : permuted_;
    const Tensor d_dispatched = exchange_.one_rank() ? d_permuted_ : results_;
    if (!has_shared()) queue.prefetch(region, normed);
    combine_tokens_backward(d_out, a.returned, a.probabilities, a.chosen, a.place, d_returned, d_chosen_.data,
                            compute_);
    exchange_.dispatch(a.counts, d_returned, g.returned);
    router_.backward(batch, a, d_chosen_, g.logits, parameters.loss_scale());
    if (has_shared()) {
      shared_.backward({blas, parameters, region, layer, batch, normed, a.shared, d_h}, d_out, g.shared,
                       queue);
    }
    exchange_.await_rows();
    const RowsOfExperts rows = rows_of_experts(a.counts);
    grouped_linear_dgrad(blas, rows.of_each(g.returned), weights(parameters, layer, 2),
                         rows.of_each(g.product), addresses_);
    if (rows.all > 0)
      swiglu_backward(rows.of_all(g.product), rows.of_all(a.gate_up), rows.of_all(g.gate_up), compute_);
    grouped_linear_dgrad(blas, rows.of_each(g.gate_up), weights(parameters, layer, 0, 2),
                         rows.of_each(d_dispatched), addresses_);
    exchange_.combine(a.counts, d_dispatched, d_permuted_);

    queue.push(unit_of_layer(layer), [=, this, &a, &g] {
      const auto& [blas, parameters, region, layer, batch, normed, kept, d_h] = call;
      const RowsOfExperts rows = rows_of_experts(a.counts);
      grouped_linear_wgrad(blas, rows.of_each(g.returned), rows.of_each(a.product),
                           gradients_of(parameters, layer, 2), addresses_);
      grouped_linear_wgrad(blas, rows.of_each(g.gate_up), rows.of_each(a.dispatched),
                           gradients_of(parameters, layer, 0, 2), addresses_);
      router_.weight_gradient(g.logits, region.entered(normed), a, parameters, layer);
    });
    queue.drain();  // while the gradients travel
    exchange_.await_rows();
    permute_tokens_backward(d_permuted_, a.place, g.logits, parameters.weights(router_.gate(layer)), d_h,
                            compute_, has_shared());
  }

  // The dispatched rows, by this rank's experts: their rows lie one after the other.
  struct RowsOfExperts {
    std::vector<int64_t> first, rows;  // [own experts]
    int64_t all = 0;
    Tensor of_all(Tensor arrivals) const { return arrivals.row_range(0, all); }
    std::vector<Tensor> of_each(Tensor arrivals) const {
      std::vector<Tensor> each;
      for (size_t i = 0; i < rows.size(); ++i) each.push_back(arrivals.row_range(first[i], rows[i]));
      return each;
    }
  };
  // How many rows came to each own expert, from all ranks, and where they begin in the dispatched order.
  RowsOfExperts rows_of_experts(const RowCounts& n) const {
    RowsOfExperts r;
    for (int i = 0; i < own_; ++i) {
      int64_t rows = 0;
      for (int rank = 0; rank < expert_ranks_.ranks(); ++rank) rows += n.came[rank * own_ + i];
      r.first.push_back(r.all);
      r.rows.push_back(rows);
      r.all += rows;
    }
    return r;
  }

 private:
  bool has_shared() const { return model_.shared_experts > 0; }

  // Parameter `of` (0: gate, 1: up, 2: down) of each of this rank's experts, and so many more after it.
  int parameter(int layer, int i, int of) const {
    return router_.gate(layer) + 1 + 3 * (expert_ranks_.rank() * own_ + i) + of;
  }
  std::vector<Tensor> weights(const Parameters& parameters, int layer, int of, int count = 1) const {
    std::vector<Tensor> each;
    for (int i = 0; i < own_; ++i) each.push_back(parameters.weights(parameter(layer, i, of), count));
    return each;
  }
  std::vector<Gradient> gradients_of(const Parameters& parameters, int layer, int of, int count = 1) const {
    std::vector<Gradient> each;
    for (int i = 0; i < own_; ++i) each.push_back(parameters.gradients(parameter(layer, i, of), count));
    return each;
  }

  // The host waits for the counts, once in each forward of a layer: the sizes of messages and products depend
  // on the data. Meanwhile the compute stream copies rows. Ends the run if the buffer can't hold all rows.
  void await_counts(const RowCounts& n) {
    exchange_.await_counts();
    if (is_dry_run()) exchange_.share_evenly(n, copies_);
    if (n.rows_that_came() <= buffer_rows_) return;
    const std::string text = std::to_string(n.rows_that_came()) +
                             " rows for the experts of a rank, room for " + std::to_string(buffer_rows_);
    fail("--expert-buffer", text.c_str(), __FILE__, __LINE__);
  }

  const TrainingConfig training_;
  const ModelConfig& model_ = training_.model;
  const int64_t rows_, f_;  // f: columns of this rank's part of an expert
  const int64_t copies_ = rows_ * model_.top_k;
  const int64_t buffer_rows_;
  Communicator& expert_ranks_;
  const int own_ = model_.experts / expert_ranks_.ranks();  // experts of this rank
  Router router_;
  FeedForward shared_{"mlp.shared_experts.", model_.shared_experts};
  TensorRegion inside_;  // what the shared experts see: their input is entered already
  ExpertExchange exchange_;
  cudaStream_t compute_;

  // Work space that all layers and micro-batches share.
  DeviceArena memory_{Purpose::activations}, exchanged_{Purpose::communication};
  Matrix<int32_t> sent_and_came_;  // [2, experts]: numbers of rows
  Matrix<int32_t> bands_;          // [copy_bands, experts]
  Addresses addresses_;
  AccumTensor d_chosen_;  // [rows, top_k]
  Tensor d_permuted_;     // [copies, d]: gradients of the copies
  Tensor permuted_;       // [copies, d]: rows in forward, gradients of returned rows in backward
  Tensor results_;  // [buffer, d]: what experts return in forward, gradients of dispatched rows in backward
};

}  // namespace pentatron
