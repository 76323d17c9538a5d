// Modelled links: the formulas, what the environment may say, and that operations take the time, to the
// nanosecond.
// precisions: fp32
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>

#include "modelled_link.h"
#include "nccl_fixture.h"

namespace {

using namespace mpi_tests;
using nccl_mpi::Collective;
using nccl_mpi::Collectives;
using nccl_mpi::Link;
using nccl_mpi::Messages;
using nccl_mpi::Network;

// The environment variables of a network, for as long as it lives.
class Environment {
 public:
  Environment(std::initializer_list<std::pair<const char*, const char*>> variables) : variables_(variables) {
    for (const auto& [name, value] : variables_) setenv(name, value, 1);
  }
  ~Environment() {
    for (const auto& [name, value] : variables_) unsetenv(name);
  }
  Environment(const Environment&) = delete;

 private:
  std::vector<std::pair<const char*, const char*>> variables_;
};

#if __has_include(<cuda_cpu.h>)

// When this rank's stream was done with an operation that all ranks issue at time zero, and the ranks in
// `late` so much later; in nanoseconds.
int64_t duration(const Stream& stream, const std::function<ncclResult_t()>& issue,
                 std::map<int, int64_t> late = {}) {
  double latest = static_cast<double>(cuda_cpu::clock());
  for (const double clock : all_gather(latest)) latest = std::max(latest, clock);
  const auto begin = static_cast<int64_t>(latest);
  cuda_cpu::advance_clock(begin + (late.contains(rank()) ? late.at(rank()) : 0));
  require_nccl(issue());
  stream.synchronize();
  return cuda_cpu::clock() - begin;
}

// Operations cost the host nothing.
class FreeLaunches {
 public:
  FreeLaunches() : before_(cuda_cpu::profile()) {
    auto gpu = before_;
    gpu.launch_seconds = 0;
    cuda_cpu::set_profile(gpu);
  }
  // And nodes of two GPUs have these links.
  FreeLaunches(Link within_node, Link between_nodes) : FreeLaunches() {
    auto gpu = cuda_cpu::profile();
    gpu.link_latency = within_node.latency, gpu.link_bandwidth = within_node.bandwidth;
    gpu.network_latency = between_nodes.latency, gpu.network_bandwidth = between_nodes.bandwidth;
    gpu.gpus_per_node = 2, gpu.ll_bandwidth = 0;
    cuda_cpu::set_profile(gpu);
  }
  ~FreeLaunches() { cuda_cpu::set_profile(before_); }
  FreeLaunches(const FreeLaunches&) = delete;

 private:
  const pentatron::DeviceProfile before_;
};

#endif

}  // namespace

TEST_CASE("the text of a link", "[standin]") {
  std::string error;
  const auto link = nccl_mpi::parse_link("5us,50GB/s", &error);
  REQUIRE(link);
  CHECK(link->latency == Approx(5e-6));
  CHECK(link->bandwidth == Approx(50e9));
  CHECK(nccl_mpi::parse_link("0s,1B/s", &error));
  CHECK(nccl_mpi::parse_link("1.5ms,2e3KB/s", &error)->bandwidth == Approx(2e6));
  for (const char* bad : {"", "5us", "5us,", ",50GB/s", "5,50GB/s", "5us,50", "50GB/s,5us", "-1us,1GB/s",
                          "5us,0GB/s", "5us,50GB/s,", "5 us,50 Gb/s", "nanus,1GB/s", "infs,1GB/s"}) {
    INFO(bad);
    error.clear();
    CHECK(!nccl_mpi::parse_link(bad, &error));
    CHECK(error.find("such as 5us,50GB/s") != std::string::npos);
  }
}

TEST_CASE("the network that the environment describes", "[standin]") {
  std::string error;
  CHECK(!nccl_mpi::network_from_environment({}, &error)->modelled);
  {
    const Environment environment{{"NCCL_CPU_RANKS_PER_NODE", "4"}};
    const auto network = nccl_mpi::network_from_environment({true, {1, 2}, {3, 4}, 8}, &error);
    CHECK(network->between(0, 3).latency == 1);
    CHECK(network->between(3, 4).bandwidth == 4);
  }
  {
    const Environment environment{{"NCCL_CPU_LINK", "1us,2GB/s"}};
    const auto network = nccl_mpi::network_from_environment({}, &error);
    REQUIRE(network);
    CHECK(network->modelled);
    CHECK(network->between(0, 1000).latency == Approx(1e-6));
  }
  {
    const Environment environment{{"NCCL_CPU_LINK", "1us,2GB/s"}, {"NCCL_CPU_RANKS_PER_NODE", "4"}};
    const auto network = nccl_mpi::network_from_environment({true, {1, 2}, {3, 4}, 8}, &error);
    REQUIRE(network);
    CHECK(network->between(0, 3).bandwidth == Approx(2e9));
    CHECK(network->between(3, 4).bandwidth == Approx(2e9));
    CHECK(!network->share_node(3, 4));
  }
  for (const char* bad : {"0", "2.5", "many", "-1"}) {
    const Environment environment{{"NCCL_CPU_RANKS_PER_NODE", bad}};
    CHECK(!nccl_mpi::network_from_environment({}, &error));
    CHECK(error.find("NCCL_CPU_RANKS_PER_NODE=") == 0);
  }
}

TEST_CASE("the time of a ring", "[standin]") {
  const Network uniform = {true, {1e-3, 1e6}, {1e-3, 1e6}, 8};
  const Collectives four(uniform, {0, 1, 2, 3});
  CHECK(four.all_reduce(4000) == Approx(6e-3 + 1.5 * 4e-3));
  CHECK(four.all_gather(1000) == Approx(3e-3 + 3e-3));
  CHECK(four.reduce_scatter(1000) == Approx(3e-3 + 3e-3));
  CHECK(four.broadcast(1000, 2) == Approx(3e-3 + 1e-3));
  CHECK(Collectives(uniform, {5}).all_reduce(1000) == 0);

  // Two nodes: the hops 1 -> 2 and 3 -> 0 are slow, and decide. Two ranks of a node have two network cards.
  const Network nodes = {true, {1e-3, 1e6}, {10e-3, 1e5}, 2};
  const Collectives across(nodes, {0, 1, 2, 3});
  CHECK(across.all_gather(1000) == Approx(2 * 10e-3 + 1e-3 + 3 * 5e-3));  // all hops but a short one
  CHECK(across.broadcast(1000, 0) == Approx(1e-3 + 10e-3 + 1e-3 + 5e-3));
  // From rank 1 the pipeline crosses both: 1 -> 2 -> 3 -> 0.
  CHECK(across.broadcast(1000, 1) == Approx(10e-3 + 1e-3 + 10e-3 + 5e-3));
  // One rank of each node: one card each.
  CHECK(Collectives(nodes, {0, 2}).all_gather(1000) == Approx(10e-3 + 10e-3));
  // No more than the links inside can bring there.
  CHECK(Collectives({true, {1e-3, 1.5e5}, {10e-3, 1e5}, 2}, {0, 1, 2, 3}).all_gather(1500) ==
        Approx(2 * 10e-3 + 1e-3 + 3 * 10e-3));
  CHECK(Collectives(nodes, {2, 3}).all_gather(1000) == Approx(2e-3));

  // In two turns: the latencies of two operations, and the bytes that are given.
  CHECK(four.all_reduce(4000, 2) == Approx(2 * 6e-3 + 1.5 * 4e-3));
  CHECK(four.seconds({{{Collective::reduce_scatter, 1000}}}, 2) == Approx(2 * 3e-3 + 3e-3));
  CHECK(four.seconds({{{Collective::broadcast, 1000, 2}}}, 2) == Approx(2 * 3e-3 + 1e-3));
}

// Latencies in us. 8 ranks, on links of 368 GB/s, of which LL reaches 141; a card of 47 GB/s each.
TEST_CASE("NCCL chooses the fastest protocol and algorithm", "[standin]") {
  const auto ranks_of_node = [](int ranks) {
    const Network h100 = {true, {3.4e-6, 368e9}, {14e-6, 47e9}, ranks, 141e9};
    return Collectives(h100, {0, 1, 2, 3, 4, 5, 6, 7});
  };
  const auto us = [](double seconds) { return Approx(1e-6 * seconds).epsilon(1e-9); };
  const Collectives node = ranks_of_node(8), two = ranks_of_node(4), four = ranks_of_node(2);
  // Little data: LL, with 14 steps. More: LL128, then Simple. 1.75 times the bytes of a sum pass a link.
  CHECK(node.all_reduce(16) == us(6.6 + 14 * 0.6 + 1.75 * 16 / 141e3));
  CHECK(node.all_gather(1e6) == us(14 + 7 * 1.9 + 7e6 / (0.92 * 368e3)));
  CHECK(node.all_gather(1e8) == us(8.4 + 7 * 3.4 + 7e8 / 368e3));
  CHECK(node.reduce_scatter(1e8) == node.all_gather(1e8));
  CHECK(node.all_reduce(1e9) == us(8.4 + 14 * 3.4 + 1.75e9 / 368e3));
  // A group takes turns, all in the same way.
  CHECK(node.all_reduce(16, 5) == us(6.6 + 5 * 14 * 0.6 + 1.75 * 16 / 141e3));
  CHECK(node.seconds({{{Collective::all_reduce, 1e9}, {Collective::all_gather, 1e8}}}) ==
        us(8.4 + 14 * 3.4 + 2.45e9 / 368e3));

  // Two nodes, with four cards each: a tree of two, whose links carry the array once each way.
  CHECK(two.all_reduce(16) == us(6.8 + 2 * (3 * 0.6 + 5.0) + 2 * 16 / 20.4e3));
  CHECK(two.all_reduce(1e9) == us(8.4 + 2 * (3 * 4.0 + 14) + 2e9 / (0.92 * 368e3)));
  // Four nodes: two levels. Where bytes decide, the tree has 92 % of a ring's bandwidth.
  CHECK(four.all_reduce(16) == us(6.8 + 2 * (0.6 + 2 * 5.0) + 2 * 16 / 20.4e3));
  CHECK(four.all_reduce(1e9) == us(8.4 + 2 * (4 * 14 + 3 * 3.4) + 1.75e9 / 94e3));
  CHECK(four.all_gather(100) == us(6.6 + 4 * 2.7 + 3 * 0.6 + 700 / 20.4e3));
}

TEST_CASE("NCCL sends short messages with LL", "[standin]") {
  const Network h100 = {true, {3.4e-6, 368e9}, {14e-6, 47e9}, 4, 141e9};
  CHECK(h100.for_message(0, 3, 16384).latency == Approx(7.2e-6));
  CHECK(h100.for_message(0, 3, 16384).bandwidth == 141e9);
  CHECK(h100.for_message(0, 3, 16385).latency == Approx(11.8e-6));
  CHECK(h100.for_message(0, 3, 16385).bandwidth == 368e9);
  CHECK(h100.for_message(0, 4, 16384).latency == Approx(9.3e-6));
  CHECK(h100.for_message(0, 4, 16384).bandwidth == 20.4e9);
  CHECK(h100.for_message(0, 4, 16385).latency == Approx(22.4e-6));
  // A link that is given is used as it is.
  std::string error;
  const Environment environment{{"NCCL_CPU_LINK", "1us,2GB/s"}};
  const auto given = nccl_mpi::network_from_environment(h100, &error);
  REQUIRE(given);
  CHECK(given->for_message(0, 4, 1).latency == Approx(1e-6));
  CHECK(given->for_message(0, 3, 1).latency == Approx(1e-6));
  CHECK(Collectives(*given, {0, 1}).all_gather(1000) == Approx(1e-6 + 1000 / 2e9));
}

TEST_CASE("messages within a node and beyond it have a wire each", "[standin]") {
  const Network nodes = {true, {1e-3, 1e6}, {10e-3, 1e5}, 4};
  Messages messages(nodes, 1);
  messages.add(0, 1000);
  messages.add(3, 2000);
  CHECK(messages.seconds() == Approx(1e-3 + 3e-3));
  messages.add(5, 200);  // 2 ms: hidden behind the others, but for its latency
  CHECK(messages.seconds() == Approx(10e-3 + 3e-3));
  messages.add(4, 400);
  CHECK(messages.seconds() == Approx(10e-3 + 6e-3));
}

#if __has_include(<cuda_cpu.h>)

// Block j of send[ranks * count] becomes block `rank` of rank j's receive.
ncclResult_t all_to_all(const float* send, float* receive, size_t count, ncclComm_t comm,
                        cudaStream_t stream) {
  ncclGroupStart();
  for (int peer = 0; peer < ranks(); ++peer) {
    ncclSend(send + peer * count, count, ncclFloat, peer, comm, stream);
    ncclRecv(receive + peer * count, count, ncclFloat, peer, comm, stream);
  }
  return ncclGroupEnd();
}

TEST_CASE("operations take the time of the modelled links", "[standin]") {
  const FreeLaunches free;
  const Environment environment{{"NCCL_CPU_LINK", "1ms,10MB/s"}};
  const Communicator comm;
  const Stream stream("communication");
  const int n = ranks();
  const size_t count = 10000;  // floats: 40 KB, 4 ms a hop
  const Array<float> a(std::vector<float>(count * n, 1)), b(std::vector<float>(count * n, 1));
  constexpr int64_t hop = 5'000'000;
  CHECK(duration(stream, [&] {
          return ncclAllReduce(a.data(), b.data(), count, ncclFloat, ncclMax, comm, stream);
        }) == (n == 1 ? 0 : 2 * (n - 1) * 1'000'000 + std::llround(2.0 * (n - 1) / n * 4e6)));
  CHECK(duration(stream, [&] { return ncclAllGather(a.data(), b.data(), count, ncclFloat, comm, stream); }) ==
        (n - 1) * hop);
  CHECK(duration(stream, [&] {
          return ncclReduceScatter(a.data(), b.data(), count, ncclFloat, ncclMax, comm, stream);
        }) == (n - 1) * hop);
  const int64_t pipeline = n == 1 ? 0 : (n - 1) * 1'000'000 + 4'000'000;
  CHECK(duration(stream, [&] {
          return ncclBroadcast(a.data(), b.data(), count, ncclFloat, 0, comm, stream);
        }) == pipeline);
  // All-to-all: n - 1 messages each way, together. A hop of a ring: one.
  CHECK(duration(stream, [&] { return all_to_all(a.data(), b.data(), count, comm, stream); }) ==
        (n == 1 ? 0 : 1'000'000 + (n - 1) * 4'000'000));
  const int next = (rank() + 1) % n, previous = (rank() + n - 1) % n;
  CHECK(duration(stream, [&] {
          ncclGroupStart();
          ncclSend(a.data(), count, ncclFloat, next, comm, stream);
          ncclRecv(b.data(), count, ncclFloat, previous, comm, stream);
          return ncclGroupEnd();
        }) == (n == 1 ? 0 : hop));
}

TEST_CASE("operations take the time of the modelled GPU's links", "[standin]") {
  const FreeLaunches free;  // an H100, of which eight are a node
  const Communicator comm;
  const Stream stream("communication");
  const int n = ranks();
  const Array<float> a(std::vector<float>(4 * n, 1)), b(std::vector<float>(4 * n, 1));
  if (n > 8) return;
  CHECK(duration(stream, [&] { return ncclAllGather(a.data(), b.data(), 4, ncclFloat, comm, stream); }) ==
        (n == 1 ? 0 : std::llround(6600 + (n - 1) * (600 + 16 / 141.0))));
  CHECK(duration(stream, [&] { return all_to_all(a.data(), b.data(), 4, comm, stream); }) ==
        (n == 1 ? 0 : std::llround(7200 + (n - 1) * 16 / 141.0)));
}

TEST_CASE("collectives of a group share the channels of their communicator", "[standin]") {
  const FreeLaunches free;
  const Environment environment{{"NCCL_CPU_LINK", "1ms,10MB/s"}};
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 2;
  const Communicator many, two_channels(&config);
  const Stream stream("communication");
  const int n = ranks();
  const Array<float> a(std::vector<float>(40000, 1)), b(std::vector<float>(10000 * n, 1));
  const auto sums = [&](const Communicator& comm, int count, bool gathers) {
    ncclGroupStart();
    for (int i = 0; i < count; ++i)
      ncclAllReduce(a.data() + i * 5000, a.data() + i * 5000, 5000, ncclFloat, ncclMax, comm, stream);
    if (gathers) ncclAllGather(a.data() + 30000, b.data(), 10000, ncclFloat, comm, stream);
    return ncclGroupEnd();
  };
  // 20 KB: 2 (n-1)/n of 2 ms, and 2 (n-1) ms for the steps.
  const auto expected = [&](int turns, int count) {
    return n == 1 ? 0 : turns * 2 * (n - 1) * 1'000'000 + std::llround(count * 2.0 * (n - 1) / n * 2e6);
  };
  CHECK(duration(stream, [&] { return sums(many, 5, false); }) == expected(1, 5));
  CHECK(duration(stream, [&] { return sums(two_channels, 2, false); }) == expected(1, 2));
  CHECK(duration(stream, [&] { return sums(two_channels, 5, false); }) == expected(3, 5));
  // The gather's blocks of 40 KB pass n - 1 hops of 4 ms. Its steps are fewer than those of a sum.
  CHECK(duration(stream, [&] { return sums(two_channels, 2, true); }) ==
        expected(2, 2) + (n - 1) * 4'000'000);
}

TEST_CASE("modelled operations follow each other on a communicator and run side by side on two",
          "[standin]") {
  if (ranks() < 2) return;
  const FreeLaunches free;
  const Environment environment{{"NCCL_CPU_LINK", "50ms,10GB/s"}};
  const Communicator a({0, 1}), b({0, 1});
  const Stream first("first"), second("second");
  const Array<float> x(std::vector<float>(100, 1)), y(std::vector<float>(100, 1));
  const auto run = [&](const Communicator& second_comm) {
    return duration(second, [&] {
      if (rank() > 1) return ncclSuccess;
      require_nccl(ncclAllReduce(x.data(), x.data(), 100, ncclFloat, ncclMax, a, first));
      return ncclAllReduce(y.data(), y.data(), 100, ncclFloat, ncclMax, second_comm, second);
    });
  };
  const int64_t one = 2 * (50'000'000 + 20);  // two hops of 200 bytes
  CHECK(run(a) == (rank() > 1 ? 0 : 2 * one));
  CHECK(run(b) == (rank() > 1 ? 0 : one));
}

TEST_CASE("the modelled time begins when the last rank has come", "[standin]") {
  if (ranks() < 2) return;
  const FreeLaunches free;
  const Environment environment{{"NCCL_CPU_LINK", "20ms,10GB/s"}};
  constexpr int64_t late = 100'000'000, bytes = 40;  // 400 bytes: 40 ns
  const Communicator comm;
  const Stream stream("communication");
  const Array<float> a(std::vector<float>(100, 1));
  CHECK(duration(stream, [&] { return ncclBroadcast(a.data(), a.data(), 100, ncclFloat, 0, comm, stream); },
                 {{1, late}}) == late + (ranks() - 1) * 20'000'000 + bytes);
  const int64_t of_two = duration(stream,
                                  [&] {
                                    if (rank() == 0)
                                      return ncclSend(a.data(), 100, ncclFloat, 1, comm, stream);
                                    if (rank() == 1)
                                      return ncclRecv(a.data(), 100, ncclFloat, 0, comm, stream);
                                    return ncclSuccess;
                                  },
                                  {{1, late}});
  CHECK(of_two == (rank() <= 1 ? late + 20'000'000 + bytes : 0));
}

TEST_CASE("an operation starts after the start of the one that was issued before", "[standin]") {
  if (ranks() < 2) return;
  const FreeLaunches free;
  const Environment environment{{"NCCL_CPU_LINK", "10ms,1e9GB/s"}};
  const Communicator a({0, 1}), b({0, 1});
  const Stream busy("busy"), idle("idle");
  const Array<float> x(std::vector<float>(1, 1)), y(std::vector<float>(1, 1));
  constexpr int64_t work = 70'000'000;
  const int64_t of_idle = duration(idle, [&] {
    if (rank() > 1) return ncclSuccess;
    CUDA_CHECK(cuda_cpu::enqueue_timed(
        busy, [] { return cudaSuccess; }, work));
    require_nccl(ncclAllReduce(x.data(), x.data(), 1, ncclFloat, ncclMax, a, busy));
    return ncclAllReduce(y.data(), y.data(), 1, ncclFloat, ncclMax, b, idle);
  });
  CHECK(of_idle == (rank() > 1 ? 0 : work + 20'000'000));
}

TEST_CASE("links between nodes are slower", "[standin]") {
  if (ranks() < 4) return;
  const FreeLaunches free({1e-3, 1e18}, {40e-3, 1e18});
  const Communicator world;
  std::vector<int> of_node;
  for (int r = rank() / 2 * 2; r < std::min(rank() / 2 * 2 + 2, ranks()); ++r) of_node.push_back(r);
  const Communicator node(of_node);
  const Stream stream("communication");
  const Array<float> a(std::vector<float>(ranks(), 1));
  const auto on = [&](const Communicator& comm) {
    return [&] { return ncclAllReduce(a.data(), a.data(), 1, ncclFloat, ncclMax, comm, stream); };
  };
  const bool alone = rank() == ranks() - 1 && ranks() % 2 == 1;  // on its node
  CHECK(duration(stream, on(node)) == (alone ? 0 : 2'000'000));
  const int nodes = (ranks() + 1) / 2, inside = ranks() / 2;  // hops: as many between, and inside, nodes
  CHECK(duration(stream, on(world)) == 2 * (nodes * 40'000'000 + (inside - 1) * 1'000'000));
  const auto send_across = [&] {
    if (rank() == 1) return ncclSend(a.data(), 1, ncclFloat, 2, world, stream);
    if (rank() == 2) return ncclRecv(a.data(), 1, ncclFloat, 1, world, stream);
    return ncclSuccess;
  };
  CHECK(duration(stream, send_across) == (rank() == 1 || rank() == 2 ? 40'000'000 : 0));
}

TEST_CASE("an all-to-all uses the wires of the node and the network at the same time", "[standin]") {
  if (ranks() != 4) return;
  const auto time = [](Link within_node) {
    const FreeLaunches free(within_node, {3e-3, 10e6});
    const Communicator world;
    const Stream stream("communication");
    const Array<float> a(std::vector<float>(40000, 1)), b(std::vector<float>(40000, 1));
    return duration(stream, [&] { return all_to_all(a.data(), b.data(), 10000, world, stream); });
  };
  CHECK(time({1e-3, 20e6}) == 3'000'000 + 2 * 4'000'000);  // two blocks of 40 KB leave the node
  CHECK(time({1e-3, 4e6}) == 3'000'000 + 10'000'000);      // one stays: 10 ms, longer than 8
}

#endif
