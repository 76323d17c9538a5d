// Sums and maxima of the ranks' contributions.
#pragma once

#include <cstddef>
#include <span>

#include "nccl.h"

namespace nccl_mpi {

size_t size_of(ncclDataType_t type);  // bytes of an element; 0 for a type that is not supported

// out[i] = contributions[0][i] op contributions[1][i] op ..., in this order whatever the number of elements,
// so that equal contributions give equal bits. bfloat16 and half are combined in float and rounded once, at
// the end (NCCL's ring rounds after every hop). `out` may be one of the contributions.
void reduce(void* out, std::span<const void* const> contributions, size_t count, ncclDataType_t type,
            ncclRedOp_t op);

}  // namespace nccl_mpi
