// Text that a trained model writes: one token at a time, each from a forward pass over the last tokens.
#pragma once

#include <cstdint>
#include <string>

#include "options.h"
#include "program.h"
#include "transformer.h"

namespace pentatron {

// options.sample tokens after a line break, drawn by (options.seed, position). For byte models the text
// itself, otherwise the token numbers. All ranks that share the weights call it; `tensor_ranks` are those
// that share out the vocabulary.
std::string write_sample(const Options& options, const TransformerParameters& ids, Parameters& parameters,
                         Seams seams, cudaStream_t stream, const Peers& tensor_ranks = single_process);

}  // namespace pentatron
