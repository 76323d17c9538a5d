// Text that a trained model writes: one token at a time, each from a forward pass over the last tokens.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/batch.h"
#include "model/parameters.h"
#include "options/options.h"
#include "run/program.h"

namespace pentatron {

// Draws options.sample tokens after token 10, a line break in bytes; (options.seed, position) decides each.
// Returns their text or, if tokens are not bytes, their numbers (common/tokens.py makes text of them).
//   head       the head's matrix: its rows on this rank are this rank's part of the vocabulary
//   forward    returns this rank's logits, [rows, its part of the vocabulary], or nothing if it has none
//   positions  of the rows of `forward`; empty: the whole sequence
//   peers      all of them call this; the sum of their parts is the whole
std::string write_sample(const Options& options, const Parameter& head,
                         const std::function<Tensor(const Batch&)>& forward, cudaStream_t stream,
                         const Peers& peers = single_process, std::vector<int32_t> positions = {});

}  // namespace pentatron
