// The all-reduce that 02_data_parallel builds from sends and receives round a ring, against NCCL's.
// precisions: fp64 bf16
#include "../../02_data_parallel/ring_all_reduce.h"
#include "array.h"
#include "mpi_tests.h"

namespace pentatron {
namespace {

using mpi_tests::Array;

// Whole numbers, whose sums are exact in any order; another on each rank and at each place.
std::vector<accum> numbers(size_t size) {
  std::vector<accum> values(size);
  for (size_t i = 0; i < size; ++i) values[i] = static_cast<accum>((i * i + 7 * mpi_tests::rank()) % 101);
  return values;
}

}  // namespace

TEST_CASE("02: the ring's reduce-scatter leaves the sum of part r on rank r", "[02][primer]") {
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ring");
  const size_t count = 5, size = count * ranks.ranks();
  const Array<accum> nccl(numbers(size)), ring(numbers(size)), received(count + 1), own(count);
  ranks.reduce_scatter(nccl.data(), own.data(), count);
  ring_reduce_scatter(ring.data(), size, received.data(), ranks);
  CUDA_CHECK(cudaStreamSynchronize(ranks.stream()));
  const std::vector<accum> all = ring.get(size);
  const auto part = all.begin() + static_cast<std::ptrdiff_t>(count * ranks.rank());
  CHECK(std::vector<accum>(part, part + count) == own.get(count));
}

TEST_CASE("02: the ring's all-reduce gives what NCCL's gives", "[02][primer]") {
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ring");
  const int n = ranks.ranks();
  // More ranks than elements, and sizes that the ranks do not divide.
  for (const size_t size : {size_t{1}, size_t{2}, size_t{7}, size_t{840}, size_t{10007}}) {
    INFO(size << " elements");
    const Array<accum> in(numbers(size)), nccl(size), ring(numbers(size)), received(size / n + 1);
    ranks.all_reduce(in.data(), nccl.data(), size);
    ranks.reset_traffic();
    ring_all_reduce(ring.data(), size, received.data(), ranks);
    CUDA_CHECK(cudaStreamSynchronize(ranks.stream()));
    CHECK(ring.get(size) == nccl.get(size));
    // What makes the ring worth it: 2 (n-1)/n of the array, not (n-1) times the array.
    if (n > 1 && size % n == 0) {
      CHECK(ranks.traffic().at("send").elements == static_cast<int64_t>(2 * (n - 1) * size / n));
    }
  }
}

}  // namespace pentatron
