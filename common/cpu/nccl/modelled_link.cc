#include "modelled_link.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <map>

namespace nccl_mpi {
namespace {

// NCCL's numbers (src/graph/tuning.cc of 2.30): seconds before the first hop and of a hop, shares of a ring's
// bandwidth. Simple's hops are those of the profile.
constexpr double us = 1e-6;
struct Protocol {
  double start, within_node, between_nodes, share;
};
constexpr Protocol ring_ll = {6.6 * us, 0.6 * us, 2.7 * us, 0.5};  // half of each message are flags
constexpr Protocol ring_ll128 = {14.0 * us, 1.9 * us, 4.0 * us, 0.92};
constexpr double ring_simple_start = 8.4 * us;
constexpr Protocol tree_ll = {6.8 * us, 0.6 * us, 5.0 * us, 0.92 / 3.8};
constexpr Protocol tree_ll128 = {14.0 * us, 1.25 * us, 8.5 * us, 0.92 * 120 / 128};
constexpr Protocol tree_simple = {8.4 * us, 4.0 * us, 14.0 * us, 0.92};
constexpr double most_ll_between_nodes = 20.4e9;  // bytes/s; NCCL lets two nodes have 39
constexpr double most_ll_message = 16384;         // bytes (src/enqueue.cc)
constexpr double unlimited = std::numeric_limits<double>::infinity();

using Units = std::map<std::string, double>;

// "5us" with {"us", 1e-6}: 5e-6. Empty unless the text is a number >= 0 and a unit.
std::optional<double> parse_quantity(const std::string& text, const Units& units) {
  char* unit = nullptr;
  const double number = std::strtod(text.c_str(), &unit);
  const auto found = units.find(unit);
  if (unit == text.c_str() || found == units.end() || !(number >= 0) || std::isinf(number)) return {};
  return number * found->second;
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

}  // namespace

std::optional<Link> parse_link(const std::string& text, std::string* error) {
  const Units times = {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}};
  const Units bandwidths = {{"B/s", 1}, {"KB/s", 1e3}, {"MB/s", 1e6}, {"GB/s", 1e9}};
  const size_t comma = std::min(text.find(','), text.size());
  const auto latency = parse_quantity(text.substr(0, comma), times);
  const auto bandwidth = parse_quantity(text.substr(std::min(comma + 1, text.size())), bandwidths);
  if (latency && bandwidth && *bandwidth > 0) return Link{*latency, *bandwidth};
  *error = "a latency (ns, us, ms, s) and a bandwidth (KB/s, MB/s, GB/s), such as 5us,50GB/s";
  return {};
}

std::optional<Network> network_from_environment(Network network, std::string* error) {
  if (const char* text = environment("NCCL_CPU_LINK")) {
    const auto link = parse_link(text, error);
    if (!link) {
      *error = std::string("NCCL_CPU_LINK=") + text + ": expected " + *error;
      return {};
    }
    network.modelled = true;
    network.within_node = network.between_nodes = *link;
    network.ll_bandwidth = 0;
  }
  if (const char* text = environment("NCCL_CPU_RANKS_PER_NODE")) {
    const auto ranks = parse_quantity(text, {{"", 1}});
    if (!ranks || *ranks < 1 || *ranks > 1e6 || *ranks != std::floor(*ranks)) {
      *error = std::string("NCCL_CPU_RANKS_PER_NODE=") + text + ": expected a number of ranks, at least 1";
      return {};
    }
    network.ranks_per_node = static_cast<int>(*ranks);
  }
  return network;
}

Link Network::for_message(int world_rank, int other, double bytes) const {
  Link link = between(world_rank, other);
  if (ll_bandwidth == 0) return link;
  if (bytes > most_ll_message) return {ring_simple_start + link.latency, link.bandwidth};
  const bool within = share_node(world_rank, other);
  return {ring_ll.start + (within ? ring_ll.within_node : ring_ll.between_nodes),
          std::min(ring_ll.share * link.bandwidth, within ? ll_bandwidth : most_ll_between_nodes)};
}

Collectives::Collectives(const Network& network, const std::vector<int>& world_ranks)
    : steps_(static_cast<int>(world_ranks.size()) - 1) {
  const auto node_of = [&](int world_rank) { return world_rank / network.ranks_per_node; };
  std::map<int, int> members;  // of each node
  for (const int rank : world_ranks) ++members[node_of(rank)];
  double out = unlimited;  // the slowest bandwidth between nodes
  for (size_t i = 0; i < world_ranks.size(); ++i) {
    const int from = world_ranks[i], to = world_ranks[(i + 1) % world_ranks.size()];
    double bandwidth = network.between(from, to).bandwidth;
    const int rings = std::min(members[node_of(from)], members[node_of(to)]);
    leaves_node_.push_back(node_of(from) != node_of(to));
    if (leaves_node_.back()) {
      bandwidth = std::max(bandwidth, std::min(rings * bandwidth, network.within_node.bandwidth));
      out = std::min(out, bandwidth);
    }
    bandwidth_.push_back(bandwidth);
    hops_between_ += leaves_node_.back();
    slowest_ = std::min(slowest_, bandwidth);
  }
  const Ring simple = {0, network.within_node.latency, network.between_nodes.latency, 1, unlimited};
  rings_ = {simple};
  if (network.ll_bandwidth == 0) return;
  rings_[0].start = ring_simple_start;
  const size_t nodes = members.size();
  const double most_ll = nodes == 1 ? network.ll_bandwidth : most_ll_between_nodes;
  const auto add_ring = [&](const Protocol& p, double most) {
    rings_.push_back({p.start, p.within_node, p.between_nodes, p.share, most});
  };
  add_ring(ring_ll, most_ll);
  add_ring(ring_ll128, unlimited);
  if (nodes == 1) return;
  // The sum goes up the tree of nodes and comes down again; in a node it passes from rank to rank. A node
  // sends twice the bytes, but only once where there are two nodes.
  double chain = 0;  // hops in a node
  for (const auto& [node, count] : members) chain = std::max(chain, count - 1.0);
  const double levels = std::bit_width(nodes) - 1;
  const double bandwidth = std::min((nodes == 2 ? 2 : 1) * out, network.within_node.bandwidth) / 2;
  const auto add_tree = [&](const Protocol& p, double most) {
    trees_.push_back({p.start, 2 * (chain * p.within_node + levels * p.between_nodes),
                      std::min(p.share * bandwidth, most / 2)});
  };
  add_tree(tree_ll, most_ll);
  add_tree(tree_ll128, unlimited);
  add_tree(tree_simple, unlimited);
}

double Collectives::seconds(std::span<const Collective> group, int turns) const {
  if (steps_ == 0 || group.empty()) return 0;
  double best = unlimited, sums = 0;
  for (const Ring& ring : rings_) {
    Time all = {0, 0};
    for (const Collective& collective : group) {
      const Time t = time(ring, collective);
      all = {std::max(all.latency, t.latency), all.transfer + t.transfer};
    }
    best = std::min(best, ring.start + turns * all.latency + all.transfer);
  }
  for (const Collective& collective : group) {
    if (collective.kind != Collective::all_reduce) return best;
    sums += collective.bytes;
  }
  for (const Tree& tree : trees_)
    best = std::min(best, tree.start + turns * tree.latency + sums / tree.bandwidth);
  return best;
}

Collectives::Time Collectives::time(const Ring& ring, const Collective& c) const {
  const bool is_pipeline = c.kind == Collective::broadcast;
  // A pipeline does not use the hop into its root. Blocks go everywhere; the one that misses the shortest hop
  // comes last.
  const int unused = (c.root + steps_) % (steps_ + 1);
  const int between = hops_between_ - (is_pipeline && leaves_node_[unused]);
  const int within = steps_ + (is_pipeline ? 0 : 1) - between;
  const double sum = within * ring.within_node + between * ring.between_nodes;
  double slowest = is_pipeline ? unlimited : slowest_;
  for (int hop = 0; is_pipeline && hop <= steps_; ++hop)
    if (hop != unused) slowest = std::min(slowest, bandwidth_[hop]);
  const double shortest =
      std::min(within > 0 ? ring.within_node : unlimited, between > 0 ? ring.between_nodes : unlimited);
  const double bandwidth = std::min(ring.share * slowest, ring.most);
  if (is_pipeline) return {sum, c.bytes / bandwidth};
  const Time blocks = {sum - shortest, steps_ * c.bytes / bandwidth};
  if (c.kind != Collective::all_reduce) return blocks;
  return {2 * blocks.latency, 2 * blocks.transfer / (steps_ + 1)};
}

}  // namespace nccl_mpi
