// All parameters, whole, on the host of every rank. It takes the walk that the optimizer and the gradient
// norm take, over the shards that each rank updates and the parameters that lie in them, and so knows nothing
// of how a technique lays them out. Only tests use it until there are checkpoints.
#pragma once

#include <vector>

#include "model/parameters.h"
#include "ranks/comm.h"

namespace pentatron {

enum class Content { weights, gradients };

// Of each parameter, by its id: [rows, columns] of the global shape. All ranks call this; waits for `stream`,
// whose work made the content.
std::vector<std::vector<double>> gather_parameters(const World& world, const Parameters& parameters,
                                                   Content content, cudaStream_t stream);

}  // namespace pentatron
