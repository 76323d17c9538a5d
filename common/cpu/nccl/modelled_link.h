// Modelled links between the ranks: how long NCCL's ring algorithms take on a given network. Knows neither
// CUDA nor MPI.
//
//   NCCL_CPU_LINK=5us,50GB/s           latency and bandwidth, each way, between ranks of one node
//   NCCL_CPU_LINK_BETWEEN_NODES=...    between nodes; as within one if only that one is given
//   NCCL_CPU_RANKS_PER_NODE=8          consecutive ranks of the world that form a node
//
// What is not given, the GPU's profile says; on a real GPU, which has none, there is no model.
#pragma once

#include <cstddef>
#include <limits>
#include <optional>
#include <string>
#include <vector>

namespace nccl_mpi {

struct Link {
  double latency = 0;                                          // s
  double bandwidth = std::numeric_limits<double>::infinity();  // bytes/s

  double seconds(double bytes) const { return latency + bytes / bandwidth; }
};

// "5us,50GB/s" (ns, us, ms, s; B/s, KB/s, MB/s, GB/s, powers of 1000). On failure `error` says what is
// expected.
std::optional<Link> parse_link(const std::string& text, std::string* error);

struct Network {
  bool modelled = false;
  Link within_node, between_nodes;
  int ranks_per_node = std::numeric_limits<int>::max();

  const Link& between(int world_rank, int other) const {
    return world_rank / ranks_per_node == other / ranks_per_node ? within_node : between_nodes;
  }
};

// `network`, and what the environment says instead. Empty, with `error` set, if a variable makes no sense.
std::optional<Network> network_from_environment(Network network, std::string* error);

// The ranks of a communicator in a ring, in their order: hop i leads from rank i to rank i + 1. All times in
// seconds. Blocks follow one another: the slowest hop decides how fast, and the last block arrives after the
// latencies of all hops that it passes, which are all but one. Where a node holds k of the ranks, NCCL makes
// k rings, each of which leaves the node through another network card: together they have k times one card's
// bandwidth, at most that of the links inside.
class Ring {
 public:
  Ring(const Network& network, const std::vector<int>& world_ranks);

  // n - 1 blocks pass every hop: (n-1) (latency + block_bytes / bandwidth), where hops are alike.
  double all_gather(double block_bytes) const { return latency_ + steps_ * block_bytes / bandwidth_; }
  double reduce_scatter(double block_bytes) const { return all_gather(block_bytes); }
  // A reduce-scatter and an all-gather of blocks of bytes / n: 2 (n-1) latency + 2 (n-1)/n bytes / bandwidth.
  double all_reduce(double bytes) const { return 2 * all_gather(bytes / (steps_ + 1)); }
  // A pipeline from the root all the way round, or the reverse: (n-1) latency + bytes / bandwidth.
  double broadcast(double bytes, int root) const { return pipeline(bytes, (root + steps_) % (steps_ + 1)); }
  double reduce(double bytes, int root) const { return pipeline(bytes, root); }

 private:
  double pipeline(double bytes, int unused_hop) const;

  std::vector<Link> hops_;
  int steps_;                                                   // n - 1
  double latency_ = 0;                                          // of all hops but the shortest
  double bandwidth_ = std::numeric_limits<double>::infinity();  // of the slowest
};

}  // namespace nccl_mpi
