// Folded worlds: a dry run of thousands of ranks for which a few are enough (--ranks). Most ranks of a mesh
// do nearly the same as others at the same moment. So one of them stands for all:
//
//   tensor    the first rank
//   context   the first and the last rank, where all meet in each exchange. The last one may see more keys
//   expert    the first rank, where each expert gets equally many rows
//   data      the first rank, or the first group of ranks that share out the experts
//   pipeline  each rank stands for itself
//
// A rank that is there has exactly the memory and the traffic that it has in the whole world. The time of a
// step is near enough, within 0.5 % (make test-fold). It is not exact: with ZeRO each data rank owns other
// parts of matrices, and its optimizer launches a few kernels more or less.
//
// A communicator that has an absent rank also has the one that stands for it. The stand-in of NCCL lets those
// meet that are there, and counts the time that all its members would take where they sit (nccl.h).
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "mesh.h"

namespace pentatron {

// Whether ranks that share out a sequence, or the experts, do nearly the same. In a ring they do not: a delay
// goes from neighbour to neighbour. And all wait for an expert that gets more rows.
inline bool share_alike(const CombinedOptions& o, const MeshShape& shape) {
  if (o.model.experts == 0)
    return o.context.cp_exchange == CpExchange::all_gather || o.context.cp_exchange == CpExchange::ulysses;
  const int64_t rows = int64_t{o.micro_batch_size} * o.sequence_length * o.model.top_k;
  return shape.cp == 1 && rows % o.model.experts == 0;
}

// Whether all ranks of an axis sit alike: neighbours fill nodes, or a node has room for several groups.
inline bool sit_alike(const MeshShape& shape, int neighbours, int ranks_per_node) {
  const auto even = [&](int n) { return n % ranks_per_node == 0 || ranks_per_node % n == 0; };
  return even(shape.tp) && even(shape.tp * neighbours) && (shape.pp == 1 || even(shape.ranks() / shape.pp)) &&
         (shape.shard_ranks == 0 || even(shape.tp * shape.shard_ranks));
}

// Which ranks of a folded world are there, ascending, and how many ranks do what each of them does.
struct PresentRanks {
  std::vector<int> ranks, stand_for;
};

// The ranks that have to be there: all, if they sit otherwise on one node than on another.
inline PresentRanks present_ranks(const CombinedOptions& options, const MeshShape& shape,
                                  int ranks_per_node) {
  const int neighbours = std::lcm(shape.cp, shape.ep);  // they share out a sequence, or the experts
  const int groups = shape.cp * shape.dp / neighbours;
  const bool folds = sit_alike(shape, neighbours, ranks_per_node);
  std::vector<int> stand_for(neighbours, 1);  // for how many of its neighbours each one stands
  if (share_alike(options, shape)) {
    std::ranges::fill(stand_for, 0);
    if (shape.cp > 1) stand_for.back() = neighbours / 2;
    stand_for.front() = neighbours - stand_for.back();
  }
  PresentRanks present;
  for (int rank = 0; rank < shape.ranks(); ++rank) {
    // rank = tensor + TP (neighbour + NEIGHBOURS (group + GROUPS pipeline))
    const int tensor = rank % shape.tp, neighbour = rank / shape.tp % neighbours;
    const int group = rank / shape.tp / neighbours % groups;
    if (folds && (tensor > 0 || group > 0 || stand_for[neighbour] == 0)) continue;
    present.ranks.push_back(rank);
    present.stand_for.push_back(folds ? shape.tp * groups * stand_for[neighbour] : 1);
  }
  return present;
}

}  // namespace pentatron
