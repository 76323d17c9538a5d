// The router: which experts a token is sent to, and what keeps the experts equally busy.
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
#pragma once

#include <string>
#include <vector>

#include "kernels/experts.h"
#include "model/seams.h"
#include "options.h"
#include "ranks/comm.h"
#include "run/totals.h"

namespace pentatron {

constexpr double balance_rate = 1e-3;  // by which a bias moves in a step: DeepSeek-V3's

// What the router says of the rows of a micro-batch.
struct Choice {
  AccumTensor probabilities;      // [rows, experts]
  Matrix<int32_t> chosen, place;  // [rows, top_k]: the experts, and where a copy is among those of its expert
  AccumTensor fractions;          // [1, experts]: f, of a micro-batch's copies
};

inline std::string prefix_of_experts(int layer) { return "model.layers." + std::to_string(layer) + ".mlp."; }

class Router {
 public:
  // For `rows` tokens of a micro-batch, which `token_ranks` share out (null: none do).
  Router(const ModelConfig& model, double aux_loss, int64_t rows, Communicator* token_ranks,
         bool first_tensor_rank, cudaStream_t compute)
      : model_(model),
        aux_loss_(aux_loss),
        rows_(rows),
        token_ranks_(token_ranks),
        first_tensor_rank_(first_tensor_rank),
        compute_(compute),
        gate_(model.layers),
        bias_(model.layers) {
    loss_ = memory_.matrix<accum>(1, 1);
    CUDA_CHECK(cudaMemsetAsync(loss_.data, 0, loss_.bytes(), compute_));
  }

  // Declare the router's parameters in a layer. Between them the caller declares the experts.
  void declare_gate(Parameters& parameters, int layer) {
    const int d = model_.d_model;
    gate_[layer] =
        parameters.declare({prefix_of_experts(layer) + "gate.weight", unit_of_layer(layer), model_.experts, d,
                            TensorSplit::replicated_inside, initial_deviation(d)});
  }
  void declare_bias(const TrainingConfig& training, Parameters& parameters, int layer) {
    const double copies = double(training.global_batch_size) * training.sequence_length * model_.top_k;
    bias_[layer] = parameters.declare(
        {.name = prefix_of_experts(layer) + "gate.e_score_correction_bias",  // its name in DeepSeek-V3
         .unit = unit_of_layer(layer),
         .rows = 1,
         .columns = model_.experts,
         .tensor_split = TensorSplit::replicated_inside,
         .own_step = [mean = copies / model_.experts](const auto&... arguments) {
           step_bias(balance_rate, mean, arguments...);
         }});
  }
  int gate(int layer) const { return gate_[layer]; }  // the number of its parameter

  // This rank's part of the step's balance loss, [1, 1]. add_balance_loss adds it to the totals and clears
  // it. Call it once a step, after the last forward.
  AccumTensor balance_loss() const { return loss_; }
  void add_balance_loss(StepTotals& totals) {
    totals.add_loss(loss_);
    CUDA_CHECK(cudaMemsetAsync(loss_.data, 0, loss_.bytes(), compute_));
  }

  // h [rows, d] -> a.probabilities, a.chosen. The logits, h times router [experts, d]^T, are in `accum`:
  // after rounding to bf16 two logits may tie, or another expert may win.
  void choose(const Blas& blas, Tensor h, const Parameters& parameters, int layer, const Choice& a) const {
    const Tensor router = parameters.weights(gate_[layer]);
    const auto e = static_cast<int>(router.rows), d = static_cast<int>(h.columns);
    batched_product(blas, Transpose::no, Transpose::yes, static_cast<int>(h.rows), e, d, 1,
                    {h.data, real_type, d, 0}, {router.data, real_type, d, 0}, 0,
                    {a.probabilities.data, data_type<accum>, e, 0}, 1, "gemm_router");
    const Tensor bias = model_.has_balance_bias() ? parameters.weights(bias_[layer]) : Tensor();
    route_tokens(a.probabilities, a.chosen, compute_, bias.data);
  }

  // f of the whole micro-batch, summed over the ranks that split it. Then the loss of this rank's rows: with
  // f fixed, the loss is a sum over rows.
  void balance(const Batch& batch, bool recomputing, const Choice& a) {
    const double copies_of_micro_batch = tokens_of_micro_batch() * model_.top_k;
    count_loads(a.chosen, 1 / copies_of_micro_batch, {a.fractions, false}, compute_);
    if (model_.balance != Balance::loss) return;
    if (token_ranks_ && token_ranks_->ranks() > 1) {
      wait_stream(token_ranks_->stream(), compute_);
      token_ranks_->all_reduce(a.fractions.data, a.fractions.data, model_.experts);
      wait_stream(compute_, token_ranks_->stream());
    }
    if (recomputing) return;
    pentatron::add_balance_loss(a.probabilities, a.fractions.data, balance_scale(batch), loss_.data,
                                compute_);
  }

  // d_chosen [rows, top_k], P: the gradients of the chosen probabilities -> d_logits [rows, experts], P.
  void backward(const Batch& batch, const Choice& a, AccumTensor d_chosen, AccumTensor d_logits,
                const LossScale* loss_scale) const {
    route_tokens_backward(a.probabilities, a.chosen, d_chosen.data, a.fractions.data, balance_scale(batch),
                          d_logits, compute_, loss_scale);
  }
  void weight_gradient(AccumTensor d_logits, Tensor h, const Choice& a, const Parameters& parameters,
                       int layer) const {
    router_wgrad(d_logits, h, parameters.gradients(gate_[layer]), compute_);
    // All tensor ranks route the same rows, and their sum is taken.
    if (model_.has_balance_bias())
      count_loads(a.chosen, first_tensor_rank_, parameters.gradients(bias_[layer]), compute_);
  }

 private:
  double tokens_of_micro_batch() const { return rows_ * (token_ranks_ ? token_ranks_->ranks() : 1); }

  // The factor of f in the gradient of each probability, and of f times the probability in the loss. Only the
  // first tensor rank counts; otherwise the balance loss would be added once for each tensor rank.
  double balance_scale(const Batch& batch) const {
    if (!first_tensor_rank_ || model_.balance != Balance::loss) return 0;
    return aux_loss_ * model_.experts * batch.inverse_micro_batches / tokens_of_micro_batch();
  }

  const ModelConfig& model_;
  const double aux_loss_;
  const int64_t rows_;
  Communicator* const token_ranks_;
  const bool first_tensor_rank_;
  cudaStream_t compute_;
  std::vector<int> gate_, bias_;  // [layers]: their numbers; the experts' parameters lie between
  DeviceArena memory_{Purpose::activations};
  AccumTensor loss_;  // [1, 1]
};

}  // namespace pentatron
