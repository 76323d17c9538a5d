// The cross-entropy (loss.h) of ranks that each have a slice of the vocabulary.
#pragma once

#include "device/tensor.h"

namespace pentatron {

// Replaces each row's largest logit by that over all ranks, and rescales: sum *= exp(own largest - largest).
void cross_entropy_rescale(const accum* largest /*[rows]*/, AccumTensor statistics /*[3, rows]*/,
                           cudaStream_t stream);

}  // namespace pentatron
