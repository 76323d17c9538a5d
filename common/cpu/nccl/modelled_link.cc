#include "modelled_link.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <map>

namespace nccl_mpi {
namespace {

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

bool read_link(const char* name, Network* network, Link* link, std::string* error) {
  const char* text = environment(name);
  if (text == nullptr) return true;
  const auto parsed = parse_link(text, error);
  if (!parsed) {
    *error = std::string(name) + "=" + text + ": " + *error;
    return false;
  }
  *link = *parsed;
  network->modelled = true;
  return true;
}

}  // namespace

std::optional<Link> parse_link(const std::string& text, std::string* error) {
  const Units times = {{"ns", 1e-9}, {"us", 1e-6}, {"ms", 1e-3}, {"s", 1}};
  const Units bandwidths = {{"B/s", 1}, {"KB/s", 1e3}, {"MB/s", 1e6}, {"GB/s", 1e9}};
  const size_t comma = std::min(text.find(','), text.size());
  const auto latency = parse_quantity(text.substr(0, comma), times);
  const auto bandwidth = parse_quantity(text.substr(std::min(comma + 1, text.size())), bandwidths);
  if (latency && bandwidth && *bandwidth > 0) return Link{*latency, *bandwidth};
  *error = "expected a latency (ns, us, ms, s) and a bandwidth (KB/s, MB/s, GB/s), such as 5us,50GB/s";
  return {};
}

std::optional<Network> network_from_environment(Network network, std::string* error) {
  if (!read_link("NCCL_CPU_LINK", &network, &network.within_node, error)) return {};
  if (environment("NCCL_CPU_LINK") != nullptr) network.between_nodes = network.within_node;
  if (!read_link("NCCL_CPU_LINK_BETWEEN_NODES", &network, &network.between_nodes, error)) return {};
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

Ring::Ring(const Network& network, const std::vector<int>& world_ranks)
    : steps_(static_cast<int>(world_ranks.size()) - 1) {
  const auto node_of = [&](int world_rank) { return world_rank / network.ranks_per_node; };
  std::map<int, int> members;  // of each node
  for (const int rank : world_ranks) ++members[node_of(rank)];
  for (size_t i = 0; i < world_ranks.size(); ++i) {
    const int from = world_ranks[i], to = world_ranks[(i + 1) % world_ranks.size()];
    Link hop = network.between(from, to);
    const int rings = std::min(members[node_of(from)], members[node_of(to)]);
    if (node_of(from) != node_of(to))
      hop.bandwidth = std::max(hop.bandwidth, std::min(rings * hop.bandwidth, network.within_node.bandwidth));
    hops_.push_back(hop);
    latency_ += hop.latency;
    bandwidth_ = std::min(bandwidth_, hop.bandwidth);
  }
  const auto shorter = [](const Link& a, const Link& b) { return a.latency < b.latency; };
  latency_ -= std::min_element(hops_.begin(), hops_.end(), shorter)->latency;
}

double Ring::pipeline(double bytes, int unused_hop, int turns) const {
  double latency = 0, slowest = 0;
  for (int hop = 0; hop <= steps_; ++hop) {
    if (hop == unused_hop) continue;
    latency += hops_[hop].latency;
    slowest = std::max(slowest, bytes / hops_[hop].bandwidth);
  }
  return turns * latency + slowest;
}

}  // namespace nccl_mpi
