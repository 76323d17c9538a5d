// Kernels of a mixture of experts (Shazeer et al., 2017). A router sends each token to a few of many MLPs,
// the experts, and adds up what these return, weighted. An expert gets as many rows as choose it (Gale et
// al., "MegaBlocks", 2022).
//
// A token is copied top_k times; copy k of row r has the number r * top_k + k. Copies are laid out by expert
// and, for one expert, by number. No kernel uses atomics, so the layout and the order of all sums are fixed.
#pragma once

#include <cstdint>

#include "device/tensor.h"
#include "kernels/optimizer_step.h"

namespace pentatron {

// chosen = the experts with the top_k largest logits of each row, the largest first; of equal ones the expert
// with the lower number. Then the logits are replaced by their softmax over all experts. These probabilities
// weigh what the chosen experts return. They are not made to add up to one (as in Switch and OLMoE):
// otherwise top-1 would always have weight 1, and no gradient. With a bias, the largest sums of probability
// and bias are chosen, and the weights stay what they are (DeepSeek-V3, 2024, eq. 16).
void route_tokens(AccumTensor logits /*[rows, experts]*/, Matrix<int32_t> chosen /*[rows, top_k]*/,
                  cudaStream_t stream, const real* bias /*[experts], or null*/ = nullptr);

// Number of bands that make_permutation counts `rows` rows in; the same on every device.
inline int64_t copy_bands(int64_t rows) { return std::min<int64_t>(rows, 64); }

// counts = the copies that choose each expert. place[c] = the row of copy c by expert. `bands`: work space.
void make_permutation(Matrix<int32_t> chosen /*[rows, top_k]*/,
                      Matrix<int32_t> bands /*[copy_bands(rows), experts]*/,
                      Matrix<int32_t> counts /*[1, experts]*/, Matrix<int32_t> place /*[rows, top_k]*/,
                      cudaStream_t stream);

// copies[place[c]] = x[c / top_k].
void permute_tokens(Tensor x /*[rows, d]*/, Matrix<int32_t> place /*[rows, top_k]*/,
                    Tensor copies /*[rows * top_k, d]*/, cudaStream_t stream);

// out[r] (+)= sum over the copies of row r: probability of the copy's expert times its returned row.
void combine_tokens(Tensor returned /*[rows * top_k, d]*/, AccumTensor probabilities /*[rows, experts]*/,
                    Matrix<int32_t> chosen /*[rows, top_k]*/, Matrix<int32_t> place /*[rows, top_k]*/,
                    Tensor out /*[rows, d]*/, cudaStream_t stream, bool add = false);

// Backward of combine_tokens: d_returned of the returned rows, d_chosen of the chosen experts' probabilities.
void combine_tokens_backward(Tensor d_out /*[rows, d]*/, Tensor returned /*[rows * top_k, d]*/,
                             AccumTensor probabilities /*[rows, experts]*/,
                             Matrix<int32_t> chosen /*[rows, top_k]*/,
                             Matrix<int32_t> place /*[rows, top_k]*/, Tensor d_returned /*[rows * top_k, d]*/,
                             accum* d_chosen /*[rows, top_k]*/, cudaStream_t stream);

// d_logits = the softmax's backward of the sum of two gradients: d_chosen for the chosen probabilities, and
// the balance loss below, which gives every probability balance_scale * fractions[expert]. The loss scale
// multiplies this loss, too.
void route_tokens_backward(AccumTensor probabilities /*[rows, experts]*/, Matrix<int32_t> chosen,
                           const accum* d_chosen /*[rows, top_k]*/, const accum* fractions /*[experts]*/,
                           double balance_scale, AccumTensor d_logits /*[rows, experts]*/,
                           cudaStream_t stream, const LossScale* loss_scale = nullptr);

// d_x[r] (+)= sum of d_copies over the copies of row r, plus the router's d_logits[r] * router.
void permute_tokens_backward(Tensor d_copies /*[rows * top_k, d]*/, Matrix<int32_t> place,
                             AccumTensor d_logits /*[rows, experts]*/, Tensor router /*[experts, d]*/,
                             Tensor d_x /*[rows, d]*/, cudaStream_t stream, bool add = false);

// d_router (+)= d_logits^T x, without rounding d_logits to `real`.
void router_wgrad(AccumTensor d_logits /*[rows, experts]*/, Tensor x /*[rows, d]*/,
                  Gradient d_router /*[experts, d]*/, cudaStream_t stream);

// ---- Balance (Lepikhin et al., "GShard", 2020; Fedus et al., "Switch", 2021)

// loss[0] += scale * sum over rows and experts of fractions[e] * probabilities[r, e].
void add_balance_loss(AccumTensor probabilities /*[rows, experts]*/, const accum* fractions /*[experts]*/,
                      double scale, accum* loss /*[1]*/, cudaStream_t stream);

// loads[e] (+)= scale * the copies that choose e. A sum of whole numbers, so its order changes no bit.
void count_loads(Matrix<int32_t> chosen /*[rows, top_k]*/, double scale, Gradient loads /*[1, experts]*/,
                 cudaStream_t stream);

// bias += rate * sign(mean - loads), with sign(0) = 0, unless the step is skipped. It updates `master`, and
// rounds the bias from it. Without master weights, `master` points to the bias.
void step_bias(double rate, double mean, real* bias, accum* master, const accum* loads /*all [size]*/,
               const StepFactors* factors, size_t size, cudaStream_t stream);

}  // namespace pentatron
