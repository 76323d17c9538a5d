// Attention in parts: the results over some blocks of keys, and over one more, make one.
#pragma once

#include "kernels/attention.h"

namespace pentatron {

// Adds a block of keys to (out, lse): then they are the result over the earlier keys and the block's.
void attention_merge(const AttentionBlock& block, AccumTensor block_out /*[rows, heads*head_size]*/,
                     AccumTensor block_lse /*[rows, heads]*/, AccumTensor out, AccumTensor lse,
                     cudaStream_t stream);

// out = x: the sums of all blocks become activations.
void round_to_real(const accum* x, real* out, size_t size, cudaStream_t stream);

}  // namespace pentatron
