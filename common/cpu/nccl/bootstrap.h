// How the ranks of a new communicator find each other: each gets an MPI communicator of its own.
#pragma once

#include <mpi.h>

#include <string>
#include <vector>

#include "nccl.h"

namespace nccl_mpi {

// The ranks of a communicator.
struct Members {
  MPI_Comm comm = MPI_COMM_NULL;  // of those that are there; null: this rank is not one of them
  std::vector<int> world_ranks;   // of each
  std::string name;               // that no other communicator of this host has
  int rank = 0;                   // this one
  std::vector<int> places = {};   // of each in `comm`, -1: absent; empty: all are there, in their order
};

// Whether the program has initialised MPI as the stand-in needs it.
bool mpi_is_usable();

ncclUniqueId new_id();

// All `ranks` ranks that were given the id come together; the one that made it is one of them. Of a folded
// world (`config`, nccl.h) those come that are there.
ncclResult_t join(const ncclUniqueId& id, int ranks, int rank, const ncclConfig_t& config, Members* members);

// All ranks of the communicator come together.
void meet(MPI_Comm comm);

}  // namespace nccl_mpi
