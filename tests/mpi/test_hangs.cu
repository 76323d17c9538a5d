// Ranks that hang on purpose, for test_faults.cc, which starts them one by one (they are hidden otherwise)
// and reads what the watchdog says. And what a World finds out about its hosts and its NCCL.
// precisions: fp64 fp32
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <future>
#include <optional>
#include <string>

#include "files.h"
#include "mpi_tests.h"
#include "ranks/comm.h"

namespace pentatron {
namespace {

// Of the watchdog, in seconds: HANG_TIMEOUT, or one.
double watchdog_timeout() {
  const char* const seconds = std::getenv("HANG_TIMEOUT");
  return seconds != nullptr ? std::atof(seconds) : 1;
}

// Until the watchdog ends it.
void wait_for_ever() { std::promise<void>().get_future().wait(); }

struct Hang {
  World world{nullptr, nullptr};
  Communicator data{world, world.all(), "data"};
  std::optional<Communicator> ended{std::in_place, world, world.all(), "ended"};
  Stream compute{"compute"};
  DeviceArena memory{Purpose::communication};
  float* values = memory.matrix<float>(1, 2).data;

  Hang() {
    world.watchdog().set_timeout(watchdog_timeout());
    ended.reset();  // of which the watchdog asks nothing any more
    CUDA_CHECK(cudaMemsetAsync(values, 0, 2 * sizeof(float), compute));
    wait_stream(data.stream(), compute);
  }
  void all_reduce() { data.all_reduce(values, values, 2); }
};

}  // namespace

TEST_CASE("hang: rank 1 stops calling", "[.hang-host]") {
  Hang hang;
  hang.all_reduce();
  if (mpi_tests::rank() == 1) wait_for_ever();
  hang.all_reduce();
  CUDA_CHECK(cudaStreamSynchronize(hang.data.stream()));
}

TEST_CASE("hang: rank 1's stream waits for ever", "[.hang-stream]") {
  Hang hang;
  hang.all_reduce();
  if (mpi_tests::rank() == 1) {
    CUDA_CHECK(cudaLaunchHostFunc(
        hang.compute, [](void*) { wait_for_ever(); }, nullptr));
    wait_stream(hang.data.stream(), hang.compute);
  }
  hang.all_reduce();
  CUDA_CHECK(cudaStreamSynchronize(hang.data.stream()));
}

TEST_CASE("hang: rank 1 never makes a communicator", "[.hang-call]") {
  World world(nullptr, nullptr);
  world.watchdog().set_timeout(watchdog_timeout());
  if (mpi_tests::rank() == 1) wait_for_ever();
  Communicator data(world, world.all(), "data");
}

TEST_CASE("hang: two ranks send to each other, ungrouped", "[.hang-send]") {
  Hang hang;
  const int peer = mpi_tests::rank() ^ 1;
  hang.data.send(hang.values, 1, peer);
  hang.data.receive(hang.values + 1, 1, peer);
  CUDA_CHECK(cudaStreamSynchronize(hang.data.stream()));
}

TEST_CASE("hang: two ranks send to each other, grouped, and do not hang", "[.hang-not]") {
  Hang hang;
  const int peer = mpi_tests::rank() ^ 1;
  {
    const Communicator::Group group(hang.data);
    hang.data.send(hang.values, 1, peer);
    hang.data.receive(hang.values + 1, 1, peer);
  }
  CUDA_CHECK(cudaStreamSynchronize(hang.data.stream()));
}

TEST_CASE("hang: rank 1 is stopped, and a call of rank 0 fails", "[.fail-stopped]") {
  Hang hang;
  const double process = mpi_tests::rank() == 1 ? getpid() : 0;
  const auto victim = static_cast<int64_t>(hang.world.largest({process})[0]);
  if (mpi_tests::rank() == 1) raise(SIGSTOP);
  const auto is_stopped = [&] {  // "pid (name) state ..."
    const std::string text = tests::read_file("/proc/" + std::to_string(victim) + "/stat");
    return text.compare(text.rfind(')') + 2, 1, "T") == 0;
  };
  while (mpi_tests::rank() == 0 && !is_stopped()) usleep(1000);
  if (mpi_tests::rank() == 0) fail("a call", "an error", __FILE__, __LINE__);
  wait_for_ever();
}

// A hop of a ring, in three streams: receive, compute when that has come, and send. With one work queue the
// wait of compute holds up the send behind it, on both ranks.
TEST_CASE("hang: streams share a work queue", "[.hang-queue]") {
  Hang hang;
  Communicator in(hang.world, hang.world.all(), "in"), out(hang.world, hang.world.all(), "out");
  const int rank = mpi_tests::rank(), ranks = mpi_tests::ranks();
  for (Communicator* communicator : {&in, &out}) wait_stream(communicator->stream(), hang.compute);
  Communicator &receives = rank % 2 == 0 ? in : out, &sends = rank % 2 == 0 ? out : in;
  receives.receive(hang.values, 1, (rank + ranks - 1) % ranks);
  wait_stream(hang.compute, receives.stream());
  sends.send(hang.values + 1, 1, (rank + 1) % ranks);
  for (Communicator* communicator : {&in, &out}) CUDA_CHECK(cudaStreamSynchronize(communicator->stream()));
}

// Where each rank believes to be. MPI lets a program replace its calls (PMPI).
static std::string host;
extern "C" int MPI_Get_processor_name(char* name, int* length) {
  if (host.empty()) return PMPI_Get_processor_name(name, length);
  *length = static_cast<int>(host.copy(name, MPI_MAX_PROCESSOR_NAME - 1));
  name[*length] = '\0';
  return MPI_SUCCESS;
}

TEST_CASE("of two hosts each has a line with its ranks and their GPUs", "[02][standin]") {
  const int p = mpi_tests::ranks(), last = p - 1;
  host = mpi_tests::rank() == last ? "node-b" : "node-a";
  setenv("CUDA_CPU_DEVICES", "2", 1);
  const std::string hosts = World(nullptr, nullptr).hosts();
  std::string ranks, gpus;  // of node-a
  for (int rank = 0; rank < last; ++rank) ranks += text(' ', rank), gpus += text(' ', rank % 2);
  const std::string expected =
      text("node-a: ranks", ranks, " on GPUs", gpus, "\nnode-b: ranks ", last, " on GPUs 0\n");
  CHECK(hosts == (mpi_tests::rank() == 0 && p > 1 ? expected : ""));  // of one host nothing is said
  host.clear();
  unsetenv("CUDA_CPU_DEVICES");
  CUDA_CHECK(cudaSetDevice(0));
  const World world(nullptr, nullptr);  // failures name the real hosts again
}

TEST_CASE("an NCCL library says which CUDA it was built with", "[02]") {
  const tests::TemporaryFolder folder;
  const auto built_with = [&](const std::string& bytes) {
    std::ofstream(folder.path() + "/libnccl.so.2") << bytes;
    return cuda_of_nccl(folder.path() + "/libnccl.so.2");
  };
  using namespace std::string_literals;
  CHECK(built_with("\x7f"
                   "ELF\0\0NCCL version %d\0NCCL version 2.26.2+cuda12.2\0NCCL version 1.1.1+cuda13.0\0"s) ==
        12020);
  CHECK(built_with("NCCL version 2.28.9+cuda13.0"s) == 13000);
  CHECK(built_with("NCCL version 2.30.1, built otherwise"s) == 0);
  CHECK(cuda_of_nccl(folder.path() + "/none") == 0);
}

}  // namespace pentatron
