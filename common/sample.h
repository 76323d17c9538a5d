// Text that a trained model writes: one token at a time, each from a forward pass over the last tokens.
#pragma once

#include <cstdint>
#include <string>

#include "options.h"
#include "transformer.h"

namespace pentatron {

// `count` tokens after a line break, drawn with the given temperature by (options.seed, position). For byte
// models the text itself, otherwise the token numbers.
std::string write_sample(const Options& options, const TransformerParameters& ids, Parameters& parameters,
                         Seams seams, int count, double temperature, cudaStream_t stream);

}  // namespace pentatron
