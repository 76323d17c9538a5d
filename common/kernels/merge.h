// Attention in parts: the results over some blocks of keys, and over one more, make one.
#pragma once

#include "kernels/attention.h"

namespace pentatron {

// Adds one more block of keys to (out, lse): afterwards they are the result over the earlier keys and the
// block's together.
void attention_merge(const AttentionBlock& block, AccumTensor block_out /*[rows, heads*head_size]*/,
                     AccumTensor block_lse /*[rows, heads]*/, AccumTensor out, AccumTensor lse,
                     cudaStream_t stream);

}  // namespace pentatron
