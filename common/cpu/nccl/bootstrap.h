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
  std::string name;               // that no other communicator of this host has; empty: none
  int rank = 0;                   // this one
  std::vector<int> places = {};   // of each in `comm`, -1: absent; empty: all are there, in their order
};

// From now on this process and the others of MPI_COMM_WORLD are some ranks of a larger world, which is folded:
// process i is rank world_ranks[i], ascending, and the others are absent. Of a communicator only those meet
// that are there, and an operation takes as long as if all were. That is right where each absent member does
// the same as one that is there, or comes earlier (07_combined_5d/fold.h). Messages to absent ones fail. Of
// dry runs only.
void fold(std::vector<int> world_ranks);

// Whether the program has initialised MPI as the stand-in needs it.
bool mpi_is_usable();

ncclUniqueId new_id();

// All `ranks` ranks that were given the id come together, or those that are there; the one that made it is one
// of them. world_ranks [ranks]: where they sit, needed only in a folded world.
ncclResult_t join(const ncclUniqueId& id, int ranks, int rank, const int* world_ranks, Members* members);

// The ranks with the same color, ordered by key, then by their rank in the parent. All ranks of the parent
// come together.
ncclResult_t split(const Members& parent, int color, int key, Members* members);

}  // namespace nccl_mpi
