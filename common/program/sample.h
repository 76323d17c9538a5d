// Text that a trained model writes: one token at a time, each from a forward pass over the last tokens.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "model/batch.h"
#include "model/parameters.h"
#include "program/options.h"
#include "program/program.h"

namespace pentatron {

// options.sample tokens after a line break, drawn by (options.seed, position). For byte models the text
// itself, otherwise the token numbers. `forward` returns this rank's part of the logits, [rows, its
// vocabulary]: that of `head`, the head's matrix; or nothing where this rank has none. The rows are those of
// `positions`, or of all. The parts of `peers`, who all call this, make the whole.
std::string write_sample(const Options& options, const Parameter& head,
                         const std::function<Tensor(const Batch&)>& forward, cudaStream_t stream,
                         const Peers& peers = single_process, std::vector<int32_t> positions = {});

}  // namespace pentatron
