// What a model learns that knows only how frequent each token is.
#pragma once

#include "model/data.h"

namespace pentatron {

// Entropy of the token frequencies, in nats per token; of a large file, of a million tokens from all over it.
// Such a model reaches this loss, so training must get below it.
double unigram_entropy(const TokenData& data);

}  // namespace pentatron
