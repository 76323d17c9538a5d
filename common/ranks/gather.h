// Gathers all parameters, whole, on the host of every rank. Each rank contributes what it updates: it
// walks over its shards and the parameters in them, as the optimizer does. So this file does not know how
// a technique lays the shards out. Only tests use it; a checkpoint gathers nothing (program/checkpoint.h).
#pragma once

#include <vector>

#include "model/parameters.h"
#include "ranks/comm.h"

namespace pentatron {

enum class Content { weights, gradients };

// Returns each parameter's elements, [rows, columns] of its global shape, by its id. All ranks call this.
// The host waits for `stream`, which made the content.
std::vector<std::vector<double>> gather_parameters(const World& world, const Parameters& parameters,
                                                   Content content, cudaStream_t stream);

}  // namespace pentatron
