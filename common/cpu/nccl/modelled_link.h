// Modelled links between the ranks: how long NCCL's operations take on a given network. Knows neither CUDA
// nor MPI.
//
//   NCCL_CPU_LINK=5us,50GB/s     latency and bandwidth, each way, between all ranks
//   NCCL_CPU_RANKS_PER_NODE=8    consecutive ranks of the world that form a node
//
// What is not given, the GPU's profile says; on a real GPU, which has none, there is no model. On the links
// of a profile NCCL chooses a protocol and an algorithm by size. A link that is given is used as it is, by
// rings.
#pragma once

#include <algorithm>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace nccl_mpi {

struct Link {
  double latency = 0;                                          // s
  double bandwidth = std::numeric_limits<double>::infinity();  // bytes/s

  double seconds(double bytes) const { return latency + bytes / bandwidth; }
};

// "5us,50GB/s" (ns, us, ms, s; B/s, KB/s, MB/s, GB/s, powers of 1000). On failure `error` is what is
// expected.
std::optional<Link> parse_link(const std::string& text, std::string* error);

struct Network {
  bool modelled = false;
  Link within_node, between_nodes;
  int ranks_per_node = std::numeric_limits<int>::max();
  // Of NCCL's protocol LL within a node, bytes/s at most. 0: there is no choice, the links are used as they
  // are.
  double ll_bandwidth = 0;

  bool share_node(int world_rank, int other) const {
    return world_rank / ranks_per_node == other / ranks_per_node;
  }
  const Link& between(int world_rank, int other) const {
    return share_node(world_rank, other) ? within_node : between_nodes;
  }
  // The link as a message of so many bytes uses it: its latency begins when the message does.
  Link for_message(int world_rank, int other, double bytes) const;
};

// What a rank sends at a time, or what it receives. The messages within the node share one wire, those that
// leave the node another one: its network card. Both wires work at the same time.
class Messages {
 public:
  Messages(const Network& network, int world_rank) : network_(network), world_rank_(world_rank) {}

  void add(int peer, double bytes) {
    const Link link = network_.for_message(world_rank_, peer, bytes);
    latency_ = std::max(latency_, link.latency);
    (network_.share_node(world_rank_, peer) ? within_node_ : between_nodes_) += bytes / link.bandwidth;
  }
  double latency() const { return latency_; }  // the longest one
  double transfer() const { return std::max(within_node_, between_nodes_); }
  double seconds() const { return latency() + transfer(); }

 private:
  const Network& network_;
  const int world_rank_;
  double latency_ = 0, within_node_ = 0, between_nodes_ = 0;  // s
};

// `network`, and what the environment says instead. Empty, with `error` set, if a variable makes no sense.
std::optional<Network> network_from_environment(Network network, std::string* error);

// A collective of NCCL. bytes: of a rank's block (all_gather, reduce_scatter), or of the array.
struct Collective {
  enum Kind { all_gather, reduce_scatter, all_reduce, broadcast } kind;
  double bytes;
  int root = 0;
};

// How long collectives take the ranks of a communicator. All times in seconds.
//
// A ring has the ranks in their order: hop i leads from rank i to rank i + 1. Blocks follow one another: the
// slowest hop decides how fast, and the last block arrives after the latencies of all hops that it passes,
// which are all but one. Where a node holds k of the ranks, NCCL makes k rings, each of which leaves the node
// through another network card: together they have k times one card's bandwidth, at most that of the links
// inside.
//
// On the links of a profile a ring uses one of three protocols, and an all-reduce over several nodes can also
// use a tree of them. The fastest is chosen, as in NCCL.
//
// Operations of a group share the channels of their communicator. Those on one channel follow one another:
// each takes a turn, with all its steps. So there are operations / channels turns, and the bytes of all.
class Collectives {
 public:
  Collectives(const Network& network, const std::vector<int>& world_ranks);

  // Of a group, all in the same way. 0 for one rank.
  double seconds(std::span<const Collective> group, int turns = 1) const;

  // n - 1 blocks pass every hop: (n-1) (latency + block_bytes / bandwidth), where hops are alike.
  double all_gather(double block_bytes) const { return one({Collective::all_gather, block_bytes}); }
  double reduce_scatter(double block_bytes) const { return one({Collective::reduce_scatter, block_bytes}); }
  // A reduce-scatter and an all-gather of blocks of bytes / n: 2 (n-1) latency + 2 (n-1)/n bytes / bandwidth.
  double all_reduce(double bytes, int turns = 1) const { return one({Collective::all_reduce, bytes}, turns); }
  // A pipeline from the root all the way round: (n-1) latency + bytes / bandwidth.
  double broadcast(double bytes, int root) const { return one({Collective::broadcast, bytes, root}); }

 private:
  struct Time {
    double latency, transfer;
  };
  // A protocol in a ring: what of the links it uses.
  struct Ring {
    double start;                       // before the first hop
    double within_node, between_nodes;  // latency of a hop
    double share, most;                 // of a link's bandwidth; bytes/s
  };
  // A protocol in a tree, for all-reduce only.
  struct Tree {
    double start, latency, bandwidth;
  };

  double one(const Collective& collective, int turns = 1) const { return seconds({&collective, 1}, turns); }
  Time time(const Ring& ring, const Collective& collective) const;

  int steps_;                      // n - 1
  std::vector<bool> leaves_node_;  // [hops]
  std::vector<double> bandwidth_;  // [hops]
  int hops_between_ = 0;           // that leave a node
  double slowest_ = std::numeric_limits<double>::infinity();
  std::vector<Ring> rings_;
  std::vector<Tree> trees_;
};

}  // namespace nccl_mpi
