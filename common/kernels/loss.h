// Cross-entropy over a slice of the vocabulary, and the loss scale of fp16.
#pragma once

#include <cstdint>

#include "device/tensor.h"

namespace pentatron {

// Loss scaling (Micikevicius et al., "Mixed Precision Training", 2017, section 3.2). In fp16 the gradient of
// the loss is multiplied by `factor`, so that small gradients do not become 0. It is halved after a step
// whose gradients overflowed, and doubled after a number of good ones. It is on the device, so that the host
// need not wait, and the same on all ranks. Without it, kernels take a null pointer.
struct LossScale {
  accum factor;
  accum good_steps;  // since it changed
  accum skipped;     // steps in all that overflowed
};

constexpr int ignored_target = -1;  // such a row has no loss and no gradient

// Writes three statistics of each row of logits: the largest logit; the sum of exp(logit - largest); the
// target's logit, or 0 if another rank holds it.
void cross_entropy_statistics(Tensor logits /*[rows, vocabulary]*/, const int32_t* targets /*[rows]*/,
                              int first_token, AccumTensor statistics /*[3, rows]*/, cudaStream_t stream);

// loss[0] = scale * sum over the rows of log(sum) + largest - target's logit.
void cross_entropy_loss(AccumTensor statistics /*[3, rows]*/, const int32_t* targets, double scale,
                        accum* loss /*[1]*/, cudaStream_t stream);

// Replaces the logits by their gradient, scale * (softmax - one-hot target), times the loss scale.
void cross_entropy_backward(Tensor logits /*[rows, vocabulary]*/, const int32_t* targets, int first_token,
                            double scale, const LossScale* loss_scale, AccumTensor statistics /*[3, rows]*/,
                            cudaStream_t stream);

}  // namespace pentatron
