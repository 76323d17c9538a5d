// Modelled links: the formulas, what the environment may say, and that operations take the time.
#include <sys/resource.h>

#include <cstdlib>
#include <functional>

#include "link.h"
#include "nccl_fixture.h"

namespace {

using namespace mpi_tests;
using nccl_mpi::Network;
using nccl_mpi::Ring;

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

double cpu_seconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * t.tv_usec; };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// The shortest of a few runs must take at least the modelled time, and at most a fifth more and what the
// messages themselves take.
void check_duration(const Stream& stream, double modelled, const std::function<ncclResult_t()>& issue) {
  constexpr double kOverhead = 5e-3;  // s, on a busy machine
  double shortest = 1e9, longest_allowed = 1.2 * modelled + kOverhead;
  for (int run = 0; run < 5; ++run) {
    barrier();
    const auto start = std::chrono::steady_clock::now();
    require_nccl(issue());
    stream.synchronize();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    CHECK(elapsed.count() >= 0.9 * modelled);  // ranks leave a barrier at different times
    shortest = std::min(shortest, elapsed.count());
  }
  CHECK(shortest <= longest_allowed);
}

}  // namespace

TEST_CASE("the text of a link", "[02][standin]") {
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

TEST_CASE("the network that the environment describes", "[02][standin]") {
  std::string error;
  CHECK(!nccl_mpi::network_from_environment(&error)->modelled);
  {
    const Environment environment{{"NCCL_CPU_LINK", "1us,2GB/s"}};
    const auto network = nccl_mpi::network_from_environment(&error);
    REQUIRE(network);
    CHECK(network->modelled);
    CHECK(network->between(0, 1000).latency == Approx(1e-6));
  }
  {
    const Environment environment{{"NCCL_CPU_LINK", "1us,2GB/s"},
                                  {"NCCL_CPU_LINK_BETWEEN_NODES", "10us,1GB/s"},
                                  {"NCCL_CPU_RANKS_PER_NODE", "4"}};
    const auto network = nccl_mpi::network_from_environment(&error);
    REQUIRE(network);
    CHECK(network->between(0, 3).bandwidth == Approx(2e9));
    CHECK(network->between(3, 4).bandwidth == Approx(1e9));
  }
  for (const char* bad : {"0", "2.5", "many", "-1"}) {
    const Environment environment{{"NCCL_CPU_RANKS_PER_NODE", bad}};
    CHECK(!nccl_mpi::network_from_environment(&error));
    CHECK(error.find("NCCL_CPU_RANKS_PER_NODE=") == 0);
  }
}

TEST_CASE("the time of a ring", "[02][standin]") {
  const Network uniform = {true, {1e-3, 1e6}, {1e-3, 1e6}, 8};
  const Ring four(uniform, {0, 1, 2, 3});
  CHECK(four.all_reduce(4000) == Approx(6e-3 + 1.5 * 4e-3));
  CHECK(four.all_gather(1000) == Approx(3e-3 + 3e-3));
  CHECK(four.reduce_scatter(1000) == Approx(3e-3 + 3e-3));
  CHECK(four.broadcast(1000, 2) == Approx(3e-3 + 1e-3));
  CHECK(four.reduce(1000, 2) == Approx(3e-3 + 1e-3));
  CHECK(Ring(uniform, {5}).all_reduce(1000) == 0);

  // Two nodes: the hops 1 -> 2 and 3 -> 0 are slow, and decide.
  const Network nodes = {true, {1e-3, 1e6}, {10e-3, 1e5}, 2};
  const Ring across(nodes, {0, 1, 2, 3});
  CHECK(across.all_gather(1000) == Approx(3 * (10e-3 + 10e-3)));
  CHECK(across.broadcast(1000, 0) == Approx(1e-3 + 10e-3 + 1e-3 + 10e-3));
  // From rank 1, or to rank 0, the pipeline crosses both: 1 -> 2 -> 3 -> 0.
  CHECK(across.broadcast(1000, 1) == Approx(10e-3 + 1e-3 + 10e-3 + 10e-3));
  CHECK(across.reduce(1000, 0) == Approx(10e-3 + 1e-3 + 10e-3 + 10e-3));
  CHECK(across.reduce(1000, 1) == Approx(1e-3 + 10e-3 + 1e-3 + 10e-3));
  CHECK(Ring(nodes, {2, 3}).all_gather(1000) == Approx(2e-3));
}

TEST_CASE("operations take the time of the modelled links", "[02][standin]") {
  const Environment environment{{"NCCL_CPU_LINK", "1ms,10MB/s"}};
  const Communicator comm;
  const Stream stream("communication");
  const int n = ranks();
  const size_t count = 10000;  // floats: 40 KB, 4 ms a hop
  const Array<float> a(std::vector<float>(count * n, 1)), b(std::vector<float>(count * n, 1));
  const Network network = {true, {1e-3, 10e6}, {1e-3, 10e6}, 1000};
  std::vector<int> members(n);
  std::iota(members.begin(), members.end(), 0);
  const Ring ring(network, members);
  const double bytes = count * sizeof(float);
  check_duration(stream, n == 1 ? 0 : ring.all_reduce(bytes),
                 [&] { return ncclAllReduce(a.data(), b.data(), count, ncclFloat, ncclMax, comm, stream); });
  check_duration(stream, n == 1 ? 0 : ring.all_gather(bytes),
                 [&] { return ncclAllGather(a.data(), b.data(), count, ncclFloat, comm, stream); });
  check_duration(stream, n == 1 ? 0 : ring.reduce_scatter(bytes), [&] {
    return ncclReduceScatter(a.data(), b.data(), count, ncclFloat, ncclMax, comm, stream);
  });
  check_duration(stream, n == 1 ? 0 : ring.broadcast(bytes, 0),
                 [&] { return ncclBroadcast(a.data(), b.data(), count, ncclFloat, 0, comm, stream); });
  check_duration(stream, n == 1 ? 0 : ring.reduce(bytes, 0),
                 [&] { return ncclReduce(a.data(), b.data(), count, ncclFloat, ncclMax, 0, comm, stream); });
  // All-to-all: n - 1 messages each way. A hop of a ring: one.
  check_duration(stream, (n - 1) * (1e-3 + bytes / 10e6),
                 [&] { return ncclAlltoAll(a.data(), b.data(), count, ncclFloat, comm, stream); });
  check_duration(stream, n == 1 ? 0 : 1e-3 + bytes / 10e6, [&] {
    ncclGroupStart();
    ncclSend(a.data(), count, ncclFloat, (rank() + 1) % n, comm, stream);
    ncclRecv(b.data(), count, ncclFloat, (rank() + n - 1) % n, comm, stream);
    return ncclGroupEnd();
  });
}

TEST_CASE("modelled operations follow each other on a communicator and run side by side on two, asleep",
          "[02][standin]") {
  if (ranks() < 2) return;
  const Environment environment{{"NCCL_CPU_LINK", "50ms,10GB/s"}};
  const Communicator a({0, 1}), b({0, 1});
  if (rank() > 1) return;
  const Stream first("first"), second("second");
  const Array<float> x(std::vector<float>(100, 1)), y(std::vector<float>(100, 1));
  const auto run = [&](const Communicator& second_comm) {
    const auto start = std::chrono::steady_clock::now();
    require_nccl(ncclAllReduce(x.data(), x.data(), 100, ncclFloat, ncclMax, a, first));
    require_nccl(ncclAllReduce(y.data(), y.data(), 100, ncclFloat, ncclMax, second_comm, second));
    first.synchronize();
    second.synchronize();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  run(a);
  const double cpu_before = cpu_seconds();
  CHECK(run(a) >= 0.195);
  CHECK(cpu_seconds() - cpu_before < 0.1);
  const double side_by_side = run(b);
  CHECK(side_by_side >= 0.095);
  CHECK(side_by_side < 0.19);
}

TEST_CASE("the modelled time begins when the last rank has come", "[02][standin]") {
  if (ranks() < 2) return;
  const Environment environment{{"NCCL_CPU_LINK", "20ms,10GB/s"}};
  constexpr double kLate = 0.1;  // s
  const Communicator comm;
  const Stream stream("communication");
  const Array<float> a(std::vector<float>(100, 1));
  const auto run = [&](double least, const std::function<ncclResult_t()>& issue) {
    barrier();
    const auto start = std::chrono::steady_clock::now();
    if (rank() == 1) std::this_thread::sleep_for(std::chrono::duration<double>(kLate));
    require_nccl(issue());
    stream.synchronize();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    CHECK(elapsed.count() >= kLate + 0.9 * least);
  };
  run((ranks() - 1) * 20e-3,
      [&] { return ncclBroadcast(a.data(), a.data(), 100, ncclFloat, 0, comm, stream); });
  if (rank() > 1) return barrier();
  run(20e-3, [&] {
    return rank() == 0 ? ncclSend(a.data(), 100, ncclFloat, 1, comm, stream)
                       : ncclRecv(a.data(), 100, ncclFloat, 0, comm, stream);
  });
}

TEST_CASE("links between nodes are slower", "[02][standin]") {
  if (ranks() < 4) return;
  const Environment environment{{"NCCL_CPU_LINK", "1ms,1GB/s"},
                                {"NCCL_CPU_LINK_BETWEEN_NODES", "40ms,1GB/s"},
                                {"NCCL_CPU_RANKS_PER_NODE", "2"}};
  const Communicator world;
  const Communicator node = world.split(rank() / 2, rank());
  const Stream stream("communication");
  const Array<float> a(std::vector<float>(ranks(), 1));
  const auto on = [&](const Communicator& comm) {
    return [&] { return ncclAllReduce(a.data(), a.data(), 1, ncclFloat, ncclMax, comm, stream); };
  };
  check_duration(stream, rank() / 2 == (ranks() - 1) / 2 && ranks() % 2 == 1 ? 0 : 2e-3, on(node));
  check_duration(stream, 2 * (ranks() - 1) * 40e-3, on(world));
  check_duration(stream, rank() == 1 || rank() == 2 ? 40e-3 : 0, [&] {
    if (rank() == 1) return ncclSend(a.data(), 1, ncclFloat, 2, world, stream);
    if (rank() == 2) return ncclRecv(a.data(), 1, ncclFloat, 1, world, stream);
    return ncclSuccess;
  });
}
