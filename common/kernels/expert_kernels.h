// Kernels of a mixture of experts: a router sends each token to a few of many MLPs, and what these return is
// added up with the router's weights (Shazeer et al., 2017). No token is dropped (Gale et al., "MegaBlocks",
// 2022): an expert gets as many rows as choose it.
//
// A token is copied top_k times, copy k of row r has the number r * top_k + k, and copies are laid out by
// expert and, for one expert, by number. Nothing here is atomic, so the layout and all sums are fixed.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device/tensor.h"

namespace pentatron {

// The experts of each row: those with the top_k largest logits, the largest first; of equal ones the expert
// with the lower number. Then logits = their softmax over all experts, whose values for the chosen ones weigh
// what these return (Switch, OLMoE: they are not made to add up to one, so that top-1 has a gradient, too).
void route_tokens(AccumTensor logits /*[rows, experts]*/, int top_k, int32_t* chosen /*[rows, top_k]*/,
                  cudaStream_t stream);

// Rows of `bands` that make_permutation needs: the rows of tokens are counted in that many bands, whatever
// the device.
int64_t copy_bands(int64_t rows);

// counts[e] = copies for expert e; place[c] = where copy c lies among all.
void make_permutation(const int32_t* chosen /*[rows, top_k]*/, int64_t rows, int top_k,
                      Matrix<int32_t> bands /*[copy_bands(rows), experts]*/, int32_t* counts /*[experts]*/,
                      int32_t* place /*[rows, top_k]*/, cudaStream_t stream);

// copies[place[c]] = the row that c is a copy of.
void permute_tokens(Tensor x /*[rows, d]*/, const int32_t* place /*[rows, top_k]*/, int top_k,
                    Tensor copies /*[rows * top_k, d]*/, cudaStream_t stream);

// out[r] = sum over the copies of r of the probability of its expert times what came back.
void combine_tokens(Tensor returned /*[rows * top_k, d]*/, AccumTensor probabilities /*[rows, experts]*/,
                    const int32_t* chosen /*[rows, top_k]*/, const int32_t* place, int top_k,
                    Tensor out /*[rows, d]*/, cudaStream_t stream);

// The reverse: the gradients of what came back, and of the chosen experts' probabilities.
void combine_tokens_backward(Tensor d_out /*[rows, d]*/, Tensor returned /*[rows * top_k, d]*/,
                             AccumTensor probabilities, const int32_t* chosen, const int32_t* place,
                             int top_k, Tensor d_returned /*[rows * top_k, d]*/,
                             accum* d_chosen /*[rows, top_k]*/, cudaStream_t stream);

// d_logits = the gradient of the logits, from that of the chosen probabilities and from the balance loss
// below, of which each probability's gradient is balance_scale * fractions[expert].
void route_tokens_backward(AccumTensor probabilities /*[rows, experts]*/, const int32_t* chosen, int top_k,
                           const accum* d_chosen /*[rows, top_k]*/, const accum* fractions /*[experts]*/,
                           double balance_scale, AccumTensor d_logits /*[rows, experts]*/,
                           cudaStream_t stream);

// d_x[r] = sum over its copies of d_copies, plus what comes through the router: d_logits[r] router.
void permute_tokens_backward(Tensor d_copies /*[rows * top_k, d]*/, const int32_t* place, int top_k,
                             AccumTensor d_logits /*[rows, experts]*/, Tensor router /*[experts, d]*/,
                             Tensor d_x /*[rows, d]*/, cudaStream_t stream);

// d_router += d_logits^T x, without rounding d_logits to `real`.
void router_wgrad(AccumTensor d_logits /*[rows, experts]*/, Tensor x /*[rows, d]*/,
                  AccumTensor d_router /*[experts, d]*/, cudaStream_t stream);

// ---- Balance (Lepikhin et al., "GShard", 2020; Fedus et al., "Switch", 2021)

// fractions[e] = scale * counts[e].
void expert_fractions(const int32_t* counts, int experts, double scale, accum* fractions,
                      cudaStream_t stream);

// loss[0] += scale * sum over rows and experts of fractions[e] * probabilities[r, e].
void add_balance_loss(AccumTensor probabilities /*[rows, experts]*/, const accum* fractions /*[experts]*/,
                      double scale, accum* loss /*[1]*/, cudaStream_t stream);

}  // namespace pentatron
