// Ranks that hang on purpose, for test_faults.cc, which starts them one by one (they are hidden otherwise)
// and reads what the watchdog says.
#include <future>

#include "mpi_tests.h"
#include "ranks/comm.h"

namespace pentatron {
namespace {

constexpr double kTimeout = 1;  // s, of the watchdog

// Until the watchdog ends it.
void wait_for_ever() { std::promise<void>().get_future().wait(); }

struct Hang {
  World world{nullptr, nullptr};
  Communicator data{world, world.all(), "data"};
  Stream compute{"compute"};
  DeviceArray<float> values{2, Purpose::communication};

  Hang() {
    world.watchdog().set_timeout(kTimeout);
    CUDA_CHECK(cudaMemsetAsync(values.data(), 0, 2 * sizeof(float), compute));
    wait_stream(data.stream(), compute);
  }
  void all_reduce() { data.all_reduce(values.data(), values.data(), 2); }
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
  world.watchdog().set_timeout(kTimeout);
  if (mpi_tests::rank() == 1) wait_for_ever();
  Communicator data(world, world.all(), "data");
}

TEST_CASE("hang: two ranks send to each other, ungrouped", "[.hang-send]") {
  Hang hang;
  const int peer = 1 - mpi_tests::rank();
  if (mpi_tests::rank() < 2) {
    hang.data.send(hang.values.data(), 1, peer);
    hang.data.receive(hang.values.data() + 1, 1, peer);
  }
  CUDA_CHECK(cudaStreamSynchronize(hang.data.stream()));
}

TEST_CASE("hang: two ranks send to each other, grouped, and do not hang", "[.hang-not]") {
  Hang hang;
  const int peer = 1 - mpi_tests::rank();
  if (mpi_tests::rank() < 2) {
    const Communicator::Group group(hang.data);
    hang.data.send(hang.values.data(), 1, peer);
    hang.data.receive(hang.values.data() + 1, 1, peer);
  }
  CUDA_CHECK(cudaStreamSynchronize(hang.data.stream()));
}

}  // namespace pentatron
