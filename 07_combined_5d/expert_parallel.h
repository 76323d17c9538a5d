// Expert parallelism. Some layers have E MLPs, the experts, in place of one. A router chooses top_k experts
// for each token (Shazeer et al., 2017; Lepikhin et al., "GShard", 2020). No token is dropped (Gale et al.,
// "MegaBlocks", 2022), unless experts have a capacity (Fedus et al., "Switch", 2021). Each of n ranks holds E
// / n experts. Tokens travel to their experts and back:
//
//   forward    route, permute       dispatch (all-to-all)   grouped products   combine (all-to-all, sum)
//   backward   weigh the gradient   dispatch (all-to-all)   grouped products   combine (all-to-all, sum)
//
// The n ranks have different tokens, and an expert computes the tokens of all n. So its gradient is summed
// over the ranks that hold the same expert, 1 / n of all. Experts are therefore a parameter group of their
// own. Tensor ranks split each expert as they split a dense MLP. The router lies inside the tensor region:
// all tensor ranks choose the same experts, and each computes a part of the router's gradient.
//
// The balance loss of a micro-batch and layer is coefficient * E * sum over experts of f P (Fedus et al.,
// "Switch", 2021). f is the part of the copies that an expert gets, P its mean probability. The ranks that
// split a micro-batch sum f. The step's loss gets the mean over all micro-batches. So the balance loss does
// not depend on which ranks hold the tokens.
//
// Or there is no such loss, but a bias for each expert, which is added to its probability for the choice
// alone (Wang et al., "Auxiliary-Loss-Free Load Balancing", 2024; DeepSeek-V3). A step moves it by a fixed
// rate, up where the expert got fewer copies than the mean, else down. The bias is a parameter of the dense
// group: its gradient is the number of copies. So the ranks that sum gradients sum it, too.
//
// Shared experts get every token (Dai et al., "DeepSeekMoE", 2024). Together they are a dense MLP on each
// rank, which is computed while the rows of the others travel.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/expert_kernels.h"
#include "model/memory.h"
#include "model/seams.h"
#include "program/log.h"
#include "program/options.h"
#include "program/totals.h"
#include "ranks/comm.h"

namespace pentatron {

// Parameter groups.
constexpr int dense_group = 0, expert_group = 1;

// Two orders of rows. Permuted: top_k copies of each row of this rank, by expert. Dispatched: the rows at
// this rank's experts, by expert and then by the rank that they come from.
struct ExpertActivations {
  AccumTensor probabilities;        // [rows, experts]
  Matrix<int32_t> chosen, place;    // [rows, top_k]
  AccumTensor fractions;            // [1, experts]: f, of a micro-batch's copies
  AccumTensor lse;                  // [rows, 1] for the z-loss, else nothing
  Tensor dispatched;                // [buffer, d]
  Tensor gate_up, product;          // [buffer, gate | up], [buffer, f]
  Tensor returned;                  // [copies, d]
  PinnedArray<int32_t> sent, came;  // counts: [experts], [ranks, own experts]
  FeedForwardTensors shared;
};

struct ExpertGradients {
  Tensor returned;          // [buffer, d]: gradients of the rows that experts return
  Tensor gate_up, product;  // [buffer, gate | up], [buffer, f]
  AccumTensor logits;       // [rows, experts]
  FeedForwardGradients shared;
};

// Copies that an expert takes of a micro-batch of `rows` tokens: options.drop_tokens even shares.
inline int64_t expert_capacity(const Options& options, int64_t rows) {
  if (options.drop_tokens == 0) return rows;
  const double even = static_cast<double>(rows * options.top_k) / options.experts;
  return std::min(rows, static_cast<int64_t>(std::ceil(options.drop_tokens * even)));
}

// Rows that a rank has room for, when it has `rows` tokens of a micro-batch. By default this is the worst
// case: all tokens of all ranks that share out the experts come here. Otherwise it is options.expert_buffer
// even shares, and an even share is rows * top_k.
inline int64_t expert_buffer_rows(const Options& options, int64_t rows) {
  const int64_t own = options.experts / options.ep;
  const int64_t chosen = rows * std::min<int64_t>(options.top_k, own);  // by the tokens of one rank
  const int64_t all = options.ep * std::min(chosen, own * expert_capacity(options, rows));
  if (options.expert_buffer == 0) return all;
  return std::min(all, static_cast<int64_t>(std::ceil(options.expert_buffer * (rows * options.top_k))));
}

class ExpertParallel : public FeedForward {
 public:
  // `experts`: the ranks that share out the experts. `tokens`: the ranks that share out the tokens of a
  // micro-batch. `tensor`: the ranks that split the columns of each expert. Null: this rank has all.
  ExpertParallel(const Options& options, Communicator& experts, cudaStream_t compute,
                 Communicator* tokens = nullptr, Communicator* tensor = nullptr)
      : options_(options),
        rows_(int64_t{options.micro_batch_size} * options.sequence_length / (tokens ? tokens->ranks() : 1)),
        copies_(rows_ * options.top_k),
        buffer_rows_(options.experts > 0 ? expert_buffer_rows(options, rows_) : 0),
        f_(options.model.d_ff / (tensor ? tensor->ranks() : 1)),
        own_(options.experts / experts.ranks()),
        first_tensor_rank_(!tensor || tensor->rank() == 0),
        shared_("mlp.shared_experts.", options.shared_experts),
        experts_(experts),
        tokens_(tokens),
        compute_(compute) {
    if (options_.experts == 0) return;
    loss_ = memory_.matrix<accum>(1, 1);
    CUDA_CHECK(cudaMemsetAsync(loss_.data, 0, loss_.bytes(), compute_));
    counts_ = memory_.matrix<int32_t>(4, options_.experts);
    bands_ = memory_.matrix<int32_t>(copy_bands(rows_), options_.experts);
    d_chosen_ = memory_.matrix<accum>(rows_, options_.top_k);
    d_permuted_ = memory_.matrix<real>(copies_, options_.model.d_model);
    if (one_rank()) return;
    permuted_ = exchanged_.matrix<real>(copies_, options_.model.d_model);
    results_ = exchanged_.matrix<real>(buffer_rows_, options_.model.d_model);
    connect();
  }

  // This rank's part of the step's balance loss, [1, 1]. add_balance_loss adds it to the totals and clears
  // it. Call it once a step, after the last forward.
  AccumTensor balance_loss() const { return loss_; }
  void add_balance_loss(StepTotals& totals) {
    if (options_.experts == 0) return;
    totals.add_loss(loss_);
    CUDA_CHECK(cudaMemsetAsync(loss_.data, 0, loss_.bytes(), compute_));
  }

  // The copies that this rank has dropped since the last call.
  Dropped take_dropped() { return std::exchange(dropped_, {}); }

  // How many copies this rank has sent to each expert of a layer, [experts], since it was made.
  const std::vector<int64_t>& loads(int layer) const { return loads_[layer]; }

  // ---- FeedForward

  void declare(Parameters& parameters, const ModelConfig& model, int layer) override {
    router_.resize(model.layers);
    loads_.resize(model.layers, std::vector<int64_t>(options_.experts));
    if (!options_.has_experts(layer)) return FeedForward::declare(parameters, model, layer);
    const std::string prefix = "model.layers." + std::to_string(layer) + ".mlp.";
    const int unit = unit_of_layer(layer), d = model.d_model, f = model.d_ff;
    const double into = initial_deviation(d), out_of = initial_deviation(f) / std::sqrt(2.0 * model.layers);
    router_[layer] = parameters.declare(
        {prefix + "gate.weight", unit, options_.experts, d, TensorSplit::held_inside, into});
    for (int e = 0; e < options_.experts; ++e) {
      const std::string name = prefix + "experts." + std::to_string(e) + ".";
      const auto declare = [&](const char* matrix, int rows, int columns, TensorSplit split,
                               double deviation) {
        parameters.declare({name + matrix, unit, rows, columns, split, deviation, true, expert_group,
                            e / own_ == experts_.rank()});
      };
      declare("gate_proj.weight", f, d, TensorSplit::by_output, into);
      declare("up_proj.weight", f, d, TensorSplit::by_output, into);
      declare("down_proj.weight", d, f, TensorSplit::by_input, out_of);
    }
    if (has_shared()) shared_.declare(parameters, model, layer);
    if (!options_.has_balance_bias()) return;
    const double copies = double(options_.global_batch_size) * options_.sequence_length * options_.top_k;
    parameters.declare({.name = prefix + "gate.e_score_correction_bias",  // its name in DeepSeek-V3
                        .unit = unit,
                        .rows = 1,
                        .columns = options_.experts,
                        .tensor_split = TensorSplit::held_inside,
                        .sign_rate = options_.balance_rate,
                        .target = copies / options_.experts});
  }

  FeedForwardTensors allocate_kept(DeviceArena& arena, int layer, int64_t rows) const override {
    FeedForwardTensors t;
    if (may_be_dense(layer)) t = FeedForward::allocate_kept(arena, layer, rows);
    if (!may_have_experts(layer)) return t;
    const int e = options_.experts, d = options_.model.d_model;
    t.other = std::make_shared<ExpertActivations>(ExpertActivations{
        arena.matrix<accum>(rows, e), arena.matrix<int32_t>(rows, options_.top_k),
        arena.matrix<int32_t>(rows, options_.top_k), arena.matrix<accum>(1, e),
        arena.matrix<accum>(options_.z_loss > 0 ? rows : 0, 1), arena.matrix<real>(buffer_rows_, d),
        arena.matrix<real>(buffer_rows_, 2 * f_), arena.matrix<real>(buffer_rows_, f_),
        arena.matrix<real>(copies_, d), PinnedArray<int32_t>(e), PinnedArray<int32_t>(e),
        has_shared() ? shared_.allocate_kept(arena, layer, rows) : FeedForwardTensors()});
    return t;
  }

  FeedForwardGradients allocate_gradients(DeviceArena& arena, int layer, int64_t rows) const override {
    FeedForwardGradients g;
    if (may_be_dense(layer)) g = FeedForward::allocate_gradients(arena, layer, rows);
    if (!may_have_experts(layer)) return g;
    g.other = std::make_shared<ExpertGradients>(ExpertGradients{
        arena.matrix<real>(buffer_rows_, options_.model.d_model), arena.matrix<real>(buffer_rows_, 2 * f_),
        arena.matrix<real>(buffer_rows_, f_), arena.matrix<accum>(rows, options_.experts),
        has_shared() ? shared_.allocate_gradients(arena, layer, rows) : FeedForwardGradients()});
    return g;
  }

  Tensor forward(const Blas& blas, const Parameters& parameters, int layer, const Batch& batch, Tensor normed,
                 const FeedForwardTensors& kept, bool recomputing, TensorRegion& region,
                 Tensor partial) override {
    if (!options_.has_experts(layer)) {
      return FeedForward::forward(blas, parameters, layer, batch, normed, kept, recomputing, region, partial);
    }
    const Tensor h = region.enter(normed);
    ExpertActivations& a = *static_cast<ExpertActivations*>(kept.other.get());
    const Tensor permuted = one_rank() ? a.dispatched : permuted_;
    const Tensor results = one_rank() ? a.returned : results_;
    router_logits(blas, h, parameters.weights(router_[layer]), a.probabilities);
    const Tensor bias = options_.has_balance_bias() ? parameters.weights(bias_of(layer)) : Tensor();
    route_tokens(a.probabilities, options_.top_k, a.chosen.data, compute_, bias.data, a.lse.data);
    make_permutation(a.chosen.data, rows_, options_.top_k,
                     static_cast<int32_t>(expert_capacity(options_, rows_)), bands_, counts_, a.place.data,
                     compute_);
    exchange_counts(a);
    permute_tokens(h, a.place.data, options_.top_k, permuted, compute_);
    balance(batch, recomputing, a);
    await_counts(a);
    for (int i = 0; i < options_.experts && !recomputing; ++i) loads_[layer][i] += a.sent[i];
    if (!recomputing) {
      dropped_.of += copies_;
      dropped_.copies +=
          copies_ - std::accumulate(a.sent.data(), a.sent.data() + options_.experts, int64_t{0});
    }

    exchange(Direction::dispatch, a, permuted, a.dispatched);
    if (has_shared())
      shared_.forward(blas, parameters, layer, batch, h, a.shared, recomputing, inside_, partial);
    wait_stream(compute_, experts_.stream());
    const std::vector<RowsOfExpert> groups = rows_of_experts(a, layer);
    for (const RowsOfExpert& e : groups)
      linear_forward(blas, e.of(a.dispatched), parameters.weights(e.gate, 2), e.of(a.gate_up));
    if (all(groups, a.product).rows > 0)
      swiglu_forward(all(groups, a.gate_up), all(groups, a.product), compute_);
    for (const RowsOfExpert& e : groups)
      linear_forward(blas, e.of(a.product), parameters.weights(e.gate + 2), e.of(results));
    exchange(Direction::combine, a, a.returned, results);
    wait_stream(compute_, experts_.stream());
    if (recomputing) return {};
    combine_tokens(a.returned, a.probabilities, a.chosen.data, a.place.data, options_.top_k, partial,
                   compute_, has_shared());
    return region.leave(partial);
  }

  void backward(const Blas& blas, const Parameters& parameters, int layer, const Batch& batch,
                Tensor d_partial, Tensor normed, const FeedForwardTensors& kept,
                const FeedForwardGradients& gradients, TensorRegion& region, WgradQueue& queue,
                Tensor d_h) override {
    if (!options_.has_experts(layer)) {
      return FeedForward::backward(blas, parameters, layer, batch, d_partial, normed, kept, gradients, region,
                                   queue, d_h);
    }
    const ExpertActivations& a = *static_cast<ExpertActivations*>(kept.other.get());
    const ExpertGradients& g = *static_cast<ExpertGradients*>(gradients.other.get());
    const Tensor d_returned = one_rank() ? g.returned : permuted_;
    const Tensor d_dispatched = one_rank() ? d_permuted_ : results_;
    if (!has_shared()) queue.prefetch(region, normed);
    combine_tokens_backward(d_partial, a.returned, a.probabilities, a.chosen.data, a.place.data,
                            options_.top_k, d_returned, d_chosen_.data, compute_);
    exchange(Direction::dispatch, a, d_returned, g.returned);
    route_tokens_backward(a.probabilities, a.chosen.data, options_.top_k, d_chosen_.data, a.fractions.data,
                          balance_scale(batch), g.logits, compute_, z_scale(batch), a.lse.data);
    if (has_shared()) {
      shared_.backward(blas, parameters, layer, batch, d_partial, normed, a.shared, g.shared, region, queue,
                       d_h);
    }
    wait_stream(compute_, experts_.stream());

    const std::vector<RowsOfExpert> groups = rows_of_experts(a, layer);
    for (const RowsOfExpert& e : groups)
      linear_dgrad(blas, e.of(g.returned), parameters.weights(e.gate + 2), e.of(g.product));
    if (all(groups, g.product).rows > 0)
      swiglu_backward(all(groups, g.product), all(groups, a.gate_up), all(groups, g.gate_up), compute_);
    for (const RowsOfExpert& e : groups)
      linear_dgrad(blas, e.of(g.gate_up), parameters.weights(e.gate, 2), e.of(d_dispatched));
    exchange(Direction::combine, a, d_permuted_, d_dispatched);

    queue.push(unit_of_layer(layer), [=, this, &blas, &parameters, &region, &a, &g] {
      for (const RowsOfExpert& e : groups) {
        linear_wgrad(blas, e.of(g.returned), e.of(a.product), parameters.gradients(e.gate + 2));
        linear_wgrad(blas, e.of(g.gate_up), e.of(a.dispatched), parameters.gradients(e.gate, 2));
      }
      router_wgrad(g.logits, region.entered(normed), parameters.gradients(router_[layer]), compute_);
      // All tensor ranks route the same rows, and their sum is taken.
      if (options_.has_balance_bias())
        count_loads(a.chosen, first_tensor_rank_, parameters.gradients(bias_of(layer)), compute_);
    });
    queue.drain();  // while the gradients travel
    wait_stream(compute_, experts_.stream());
    permute_tokens_backward(d_permuted_, a.place.data, options_.top_k, g.logits,
                            parameters.weights(router_[layer]), d_h, compute_, has_shared());
  }

 private:
  // The dispatched rows of one of this rank's experts: [first, first + rows).
  struct RowsOfExpert {
    int gate;  // number of its first parameter, gate; up and down follow
    int64_t first, rows;
    Tensor of(Tensor arrivals) const { return arrivals.row_range(first, rows); }
  };
  static Tensor all(const std::vector<RowsOfExpert>& groups, Tensor arrivals) {
    return arrivals.row_range(0, groups.back().first + groups.back().rows);
  }
  enum class Direction { dispatch, combine };

  // With one rank nothing travels: the kernels write the permuted rows into the dispatched buffer.
  bool one_rank() const { return experts_.ranks() == 1; }
  bool has_shared() const { return options_.shared_experts > 0; }
  int bias_of(int layer) const { return router_[layer] + 1 + 3 * options_.experts + (has_shared() ? 3 : 0); }
  bool may_have_experts(int layer) const {
    return layer == any_layer ? options_.experts > 0 : options_.has_experts(layer);
  }
  bool may_be_dense(int layer) const {
    return layer == any_layer ? options_.experts == 0 || options_.moe_every > 1
                              : !options_.has_experts(layer);
  }

  // logits [rows, experts] = h [rows, d] times router [experts, d]^T, in `accum`. After rounding to bf16 two
  // logits may tie, or another expert may win.
  static void router_logits(const Blas& blas, Tensor h, Tensor router, AccumTensor logits) {
    const auto e = static_cast<int>(router.rows), d = static_cast<int>(h.columns);
    batched_product(blas, Transpose::no, Transpose::yes, static_cast<int>(h.rows), e, d, 1,
                    {h.data, real_type, d, 0}, {router.data, real_type, d, 0}, 0,
                    {logits.data, data_type<accum>, e, 0}, 1, "gemm_router");
  }

  // What experts take of this rank's copies, [1, experts].
  Matrix<int32_t> taken() const { return counts_.row_range(1, 1); }

  // Connects all pairs of ranks before the first step, as Communicator::connect does for two.
  void connect() {
    experts_.all_to_all(taken().data, counts_.row_range(3, 1).data, own_);
    CUDA_CHECK(cudaStreamSynchronize(experts_.stream()));
  }

  // The ranks tell each other how many rows they send to each expert. The counts start on their way to the
  // host; await_counts waits for them.
  void exchange_counts(const ExpertActivations& a) {
    const Matrix<int32_t> sent = taken(), came = one_rank() ? sent : counts_.row_range(3, 1);
    wait_stream(experts_.stream(), compute_);
    if (!one_rank()) experts_.all_to_all(sent.data, came.data, own_);
    const size_t bytes = options_.experts * sizeof(int32_t);
    CUDA_CHECK(cudaMemcpyAsync(a.sent.data(), sent.data, bytes, cudaMemcpyDeviceToHost, experts_.stream()));
    CUDA_CHECK(cudaMemcpyAsync(a.came.data(), came.data, bytes, cudaMemcpyDeviceToHost, experts_.stream()));
  }

  // The host waits for the counts, once in each forward of a layer: the sizes of messages and products depend
  // on the data. Meanwhile the compute stream copies rows. Ends the run where
  // more rows come than the buffer holds.
  void await_counts(const ExpertActivations& a) {
    CUDA_CHECK(cudaStreamSynchronize(experts_.stream()));
    if (is_dry_run()) share_evenly(a);
    int64_t rows = 0;
    for (int i = 0; i < options_.experts; ++i) rows += a.came[i];
    if (rows <= buffer_rows_) return;
    const std::string text =
        std::to_string(rows) + " rows for the experts of a rank, room for " + std::to_string(buffer_rows_);
    fail("--expert-buffer", text.c_str(), __FILE__, __LINE__);
  }

  // A dry run has no data. It assumes that every rank sends each expert the same number of rows.
  void share_evenly(const ExpertActivations& a) const {
    const int64_t copies = rows_ * options_.top_k;
    const auto rows_for = [&](int64_t expert) {
      const int64_t even = (expert + 1) * copies / options_.experts - expert * copies / options_.experts;
      return static_cast<int32_t>(std::min(even, expert_capacity(options_, rows_)));
    };
    for (int i = 0; i < options_.experts; ++i) {
      a.sent[i] = rows_for(i);
      a.came[i] = rows_for(experts_.rank() * own_ + i % own_);
    }
  }

  // This rank's experts. Their rows lie one after the other; an expert may have none.
  std::vector<RowsOfExpert> rows_of_experts(const ExpertActivations& a, int layer) const {
    std::vector<RowsOfExpert> groups;
    int64_t first = 0;
    for (int i = 0; i < own_; ++i) {
      int64_t rows = 0;
      for (int rank = 0; rank < experts_.ranks(); ++rank) rows += a.came[rank * own_ + i];
      const int expert = experts_.rank() * own_ + i;
      groups.push_back({router_[layer] + 1 + 3 * expert, first, rows});
      first += rows;
    }
    return groups;
  }

  // Moves rows [., d] from the permuted to the dispatched order (dispatch) or back (combine). Each (rank,
  // expert) has its own message, so rows arrive in their places. The caller makes compute wait.
  void exchange(Direction direction, const ExpertActivations& a, Tensor permuted, Tensor dispatched) {
    if (one_rank()) return;
    using Part = Communicator::Part<real>;
    const size_t d = options_.model.d_model;
    std::vector<Part> of_permuted, of_dispatched;
    real* at = permuted.data;
    for (int e = 0; e < options_.experts; ++e) {
      of_permuted.push_back({at, a.sent[e] * d, e / own_});
      at += a.sent[e] * d;
    }
    at = dispatched.data;
    for (int i = 0; i < own_; ++i) {
      for (int rank = 0; rank < experts_.ranks(); ++rank) {
        const size_t size = a.came[rank * own_ + i] * d;
        of_dispatched.push_back({at, size, rank});
        at += size;
      }
    }
    wait_stream(experts_.stream(), compute_);
    direction == Direction::dispatch ? experts_.all_to_all_v(of_permuted, of_dispatched)
                                     : experts_.all_to_all_v(of_dispatched, of_permuted);
  }

  int64_t tokens_of_micro_batch() const { return rows_ * (tokens_ ? tokens_->ranks() : 1); }

  // The factor of f in the gradient of each probability, and of f times the probability in the loss. Only the
  // first tensor rank counts; otherwise the balance loss would be added once for each tensor rank.
  double balance_scale(const Batch& batch) const {
    if (!first_tensor_rank_) return 0;
    if (options_.balance != Balance::loss) return 0;
    return options_.aux_loss * options_.experts * batch.inverse_micro_batches /
           static_cast<double>(tokens_of_micro_batch());
  }

  // The same of the squares of lse, in the mean over all tokens (Zoph et al., "ST-MoE", 2022): it keeps the
  // logits small.
  double z_scale(const Batch& batch) const {
    return first_tensor_rank_
               ? options_.z_loss * batch.inverse_micro_batches / static_cast<double>(tokens_of_micro_batch())
               : 0;
  }

  // f of the whole micro-batch, summed over the ranks that split it. Then the loss of this rank's rows: with
  // f fixed, the loss is a sum over rows.
  void balance(const Batch& batch, bool recomputing, const ExpertActivations& a) {
    if (a.lse.rows > 0 && !recomputing) add_z_loss(a.lse, z_scale(batch), loss_.data, compute_);
    const double copies_of_micro_batch = static_cast<double>(tokens_of_micro_batch() * options_.top_k);
    expert_fractions(counts_.data, options_.experts, 1 / copies_of_micro_batch, a.fractions.data, compute_);
    if (options_.balance != Balance::loss) return;
    if (tokens_ && tokens_->ranks() > 1) {
      wait_stream(tokens_->stream(), compute_);
      tokens_->all_reduce(a.fractions.data, a.fractions.data, options_.experts);
      wait_stream(compute_, tokens_->stream());
    }
    if (recomputing) return;
    pentatron::add_balance_loss(a.probabilities, a.fractions.data, balance_scale(batch), loss_.data,
                                compute_);
  }

  const Options options_;
  const int64_t rows_, copies_;
  const int64_t buffer_rows_;  // for dispatched rows
  const int64_t f_;            // columns of this rank's part of an expert
  const int own_;              // experts of this rank
  const bool first_tensor_rank_;
  FeedForward shared_;
  TensorRegion inside_;  // what the shared experts see: their input is entered already
  Communicator& experts_;
  Communicator* tokens_;
  cudaStream_t compute_;
  std::vector<int> router_;                  // [layers]: its number; the experts' parameters follow
  std::vector<std::vector<int64_t>> loads_;  // [layers, experts]

  // Work space that all layers and micro-batches share.
  DeviceArena memory_{Purpose::activations}, exchanged_{Purpose::communication};
  AccumTensor loss_;  // [1, 1]
  Dropped dropped_;
  Matrix<int32_t> counts_;  // [4, experts]: those of make_permutation, and rows that come
  Matrix<int32_t> bands_;   // [copy_bands, experts]
  AccumTensor d_chosen_;    // [rows, top_k]
  Tensor d_permuted_;       // [copies, d]: gradients of the copies
  Tensor permuted_;         // [copies, d]: rows in forward, gradients of returned rows in backward
  Tensor results_;  // [buffer, d]: what experts return in forward, gradients of dispatched rows in backward
};

// Adds the experts to the memory that `share` describes: replicas[0] / options.ep ranks hold the same
// experts. replicas[1] becomes that number.
inline RankShare expert_parallel_share(const Options& options, RankShare share) {
  if (options.experts == 0) return share;
  const Columns c = columns_of(options.model, share.tensor_ranks);
  const int64_t r = rows_of(options, share).inside, e = options.experts, copies = r * options.top_k;
  const int64_t buffer = expert_buffer_rows(options, r), mlp = 3 * c.d * c.f;
  const FeedForwardMemory dense = {{mlp}, {r * 3 * c.f}, {r * 3 * c.f}};
  const int64_t bias = options.has_balance_bias() ? e : 0, shared = options.shared_experts;
  const FeedForwardMemory experts = {
      {e * c.d + bias + shared * mlp, e / options.ep * mlp},  // router and shared experts; the other experts
      {buffer * (c.d + 3 * c.f) + copies * c.d + shared * r * 3 * c.f,
       (r + 1) * e + (options.z_loss > 0 ? r : 0), 2 * copies},
      {buffer * (c.d + 3 * c.f) + shared * r * 3 * c.f, r * e}};
  share.replicas.push_back(share.replicas[0] / options.ep);
  share.feed_forward = [=](int layer) {
    if (layer != any_layer) return options.has_experts(layer) ? experts : dense;
    if (options.moe_every == 1) return experts;
    return FeedForwardMemory{{}, experts.kept + dense.kept, experts.gradients + dense.gradients};
  };
  // Gradients of copies and of chosen probabilities, the loss, and the counts, made in at most 256 bands.
  share.work += {copies * c.d, copies + 1, (4 + std::min<int64_t>(r, 256)) * e};
  if (options.ep > 1) share.buffers.real += (copies + buffer) * c.d;
  return share;
}

// Sets ep to `ranks`: all ranks share out the experts. Throws UsageError if E is not a multiple of the ranks.
inline void complete_expert_options(Options& options, int ranks) {
  options.ep = ranks;
  if (options.experts > 0 && options.experts % ranks == 0) return;
  throw UsageError("--experts", std::to_string(options.experts),
                   "a multiple of the ranks (" + std::to_string(ranks) + ")");
}

}  // namespace pentatron
