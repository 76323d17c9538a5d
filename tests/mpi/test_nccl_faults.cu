// What is refused at the call, what ranks may not disagree on, and which communicators can be made.
// precisions: fp32
#include <cstdlib>

#include "nccl_fixture.h"

namespace {

using namespace mpi_tests;

constexpr size_t kCount = 100;

bool last_error_has(const std::string& text) {
  const std::string last = ncclGetLastError(nullptr);
  UNSCOPED_INFO("last error: " << last);
  return last.find(text) != std::string::npos;
}

ncclResult_t wait_for_error(const Communicator& comm) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(kSoon);
  while (comm.error() == ncclSuccess && std::chrono::steady_clock::now() < end) {
    std::this_thread::yield();
  }
  return comm.error();
}

// Rank 1 makes one call, the others another one. All must learn of it, and which rank it was, and nobody may
// go on.
template <class Call>
void check_disagreement(const Call& call, const std::string& of_rank_1) {
  Communicator comm;
  const Stream stream("communication");
  const Array<float> in(kCount * ranks()), out(kCount * ranks());
  require_nccl(call(rank() == 1, in.data(), out.data(), comm, stream));
  CHECK(wait_for_error(comm) == ncclInvalidUsage);
  CHECK(last_error_has("rank 1 calls " + of_rank_1));
  CHECK(!is_done(stream));
  CHECK(ncclAllReduce(in.data(), out.data(), 1, ncclFloat, ncclSum, comm, stream) == ncclInvalidUsage);
  barrier();
  comm.abort();
  CHECK(is_done_within(stream, kSoon));
}

}  // namespace

TEST_CASE("ranks that do not agree on a collective get an error that says who", "[standin]") {
  if (ranks() < 2) return;
  check_disagreement(
      [](bool odd, const float* in, float* out, ncclComm_t comm, cudaStream_t stream) {
        return ncclAllReduce(in, out, odd ? kCount - 1 : kCount, ncclFloat, ncclSum, comm, stream);
      },
      "ncclAllReduce(count 99, float, sum)");
  check_disagreement(
      [](bool odd, const float* in, float* out, ncclComm_t comm, cudaStream_t stream) {
        return ncclAllReduce(in, out, odd ? 0 : kCount, ncclFloat, ncclSum, comm, stream);
      },
      "ncclAllReduce(count 0, float, sum)");
  check_disagreement(
      [](bool odd, const float* in, float* out, ncclComm_t comm, cudaStream_t stream) {
        return ncclReduceScatter(in, out, kCount, odd ? ncclInt32 : ncclFloat, ncclSum, comm, stream);
      },
      "ncclReduceScatter(count 100, int32, sum)");
  check_disagreement(
      [](bool odd, const float* in, float* out, ncclComm_t comm, cudaStream_t stream) {
        return ncclAllReduce(in, out, kCount, ncclFloat, odd ? ncclMax : ncclSum, comm, stream);
      },
      "ncclAllReduce(count 100, float, max)");
  check_disagreement(
      [](bool odd, const float* in, float* out, ncclComm_t comm, cudaStream_t stream) {
        return ncclBroadcast(in, out, kCount, ncclFloat, odd ? 1 : 0, comm, stream);
      },
      "ncclBroadcast(count 100, float, root 1)");
  check_disagreement(
      [](bool odd, const float* in, float* out, ncclComm_t comm, cudaStream_t stream) {
        return odd ? ncclAllReduce(in, out, kCount, ncclFloat, ncclSum, comm, stream)
                   : ncclAllGather(in, out, kCount, ncclFloat, comm, stream);
      },
      "ncclAllReduce(count 100, float, sum)");
}

// From what fits a letter to what does not, both ways.
TEST_CASE("long and short receives are errors on both ranks", "[standin]") {
  if (ranks() < 2) return;
  const std::vector<std::pair<size_t, size_t>> sent_and_received = {
      {10, 11}, {11, 10}, {10, 100000}, {100000, 10}};
  for (const auto& [sent, received] : sent_and_received) {
    Communicator comm;
    const Stream stream("communication");
    const Array<float> array(100000);
    if (rank() == 0) require_nccl(ncclSend(array.data(), sent, ncclFloat, 1, comm, stream));
    if (rank() == 1) require_nccl(ncclRecv(array.data(), received, ncclFloat, 0, comm, stream));
    if (rank() < 2) {
      CHECK(wait_for_error(comm) == ncclInvalidUsage);
      CHECK(last_error_has("rank 0 calls ncclSend(count " + std::to_string(sent)));
      CHECK(last_error_has("rank 1 calls ncclRecv(count " + std::to_string(received)));
      CHECK(!is_done(stream));
    }
    barrier();
    comm.abort();
    CHECK(is_done_within(stream, kSoon));
  }
}

TEST_CASE("a send and a receive of different types are an error", "[standin]") {
  if (ranks() < 2) return;
  Communicator comm;
  const Stream stream("communication");
  const Array<float> array(kCount);
  if (rank() == 0) require_nccl(ncclSend(array.data(), kCount, ncclFloat, 1, comm, stream));
  if (rank() == 1) require_nccl(ncclRecv(array.data(), kCount, ncclInt32, 0, comm, stream));
  if (rank() < 2) CHECK(wait_for_error(comm) == ncclInvalidUsage);
  barrier();
  comm.abort();
}

TEST_CASE("buffers must be device memory that is there", "[standin]") {
  const Communicator comm;
  const Stream stream("communication");
  const Array<float> in(kCount), out(kCount * ranks());
  const PinnedArray<float> pinned(kCount);
  std::vector<float> pageable(kCount);
  float* freed = nullptr;
  CUDA_CHECK(cudaMalloc(&freed, kCount * sizeof(float)));
  CUDA_CHECK(cudaFree(freed));
  const auto all_reduce = [&](const float* from, float* to) {
    return ncclAllReduce(from, to, kCount, ncclFloat, ncclSum, comm, stream);
  };
  for (float* bad : {static_cast<float*>(nullptr), pageable.data(), pinned.data(), freed}) {
    CHECK(all_reduce(bad, out.data()) == ncclInvalidArgument);
    CHECK(all_reduce(in.data(), bad) == ncclInvalidArgument);
    CHECK(ncclSend(bad, kCount, ncclFloat, 0, comm, stream) == ncclInvalidArgument);
    CHECK(ncclRecv(bad, kCount, ncclFloat, 0, comm, stream) == ncclInvalidArgument);
    CHECK(last_error_has("not device memory"));
  }
  // The allocation is too short.
  CHECK(all_reduce(in.data() + 1, out.data()) == ncclInvalidArgument);
  CHECK(ncclAllGather(in.data(), out.data() + 1, kCount, ncclFloat, comm, stream) == ncclInvalidArgument);
  CHECK(ncclReduceScatter(out.data() + 1, in.data(), kCount, ncclFloat, ncclSum, comm, stream) ==
        ncclInvalidArgument);
  // What a rank does not use may be null.
  const int root = ranks() - 1;
  require_nccl(
      ncclBroadcast(rank() == root ? in.data() : nullptr, out.data(), kCount, ncclFloat, root, comm, stream));
  require_nccl(ncclAllReduce(nullptr, nullptr, 0, ncclFloat, ncclSum, comm, stream));
  stream.synchronize();
}

TEST_CASE("buffers may overlap only as NCCL's in-place forms do", "[standin]") {
  const Communicator comm;
  const Stream stream("communication");
  const size_t n = ranks();
  const Array<float> array(3 * kCount * n);
  float* const x = array.data();
  CHECK(ncclAllReduce(x, x + 1, kCount, ncclFloat, ncclSum, comm, stream) == ncclInvalidArgument);
  CHECK(ncclAllReduce(x + kCount - 1, x, kCount, ncclFloat, ncclSum, comm, stream) == ncclInvalidArgument);
  CHECK(last_error_has("overlap"));
  CHECK(ncclBroadcast(x, x + 1, kCount, ncclFloat, rank(), comm, stream) == ncclInvalidArgument);
  if (n > 1) {
    const size_t other = (rank() + 1) % n;  // in place, but another rank's block
    const std::string places = "element " + std::to_string(rank() * kCount) +
                               " of all, and here at element " + std::to_string(other * kCount);
    CHECK(ncclAllGather(x + other * kCount, x, kCount, ncclFloat, comm, stream) == ncclInvalidArgument);
    CHECK(last_error_has(places));
    CHECK(ncclReduceScatter(x, x + other * kCount, kCount, ncclFloat, ncclSum, comm, stream) ==
          ncclInvalidArgument);
    CHECK(last_error_has(places));
  }
  // Side by side is fine.
  require_nccl(ncclAllReduce(x, x + kCount, kCount, ncclFloat, ncclSum, comm, stream));

  // So is the same buffer sent twice in a group; written twice, or written while sent, it is not. A group in
  // which a call was refused does nothing.
  const int next = (rank() + 1) % ranks(), previous = (rank() + ranks() - 1) % ranks();
  const auto in_group = [&](const float* sent, float* received, float* received_too) {
    require_nccl(ncclGroupStart());
    ncclSend(sent, kCount, ncclFloat, next, comm, stream);
    ncclSend(sent, kCount, ncclFloat, next, comm, stream);
    ncclRecv(received, kCount, ncclFloat, previous, comm, stream);
    ncclRecv(received_too, kCount, ncclFloat, previous, comm, stream);
    return ncclGroupEnd();
  };
  CHECK(in_group(x, x, x + kCount) == ncclInvalidArgument);
  CHECK(in_group(x, x + kCount, x + 2 * kCount - 1) == ncclInvalidArgument);
  CHECK(last_error_has("same group"));
  require_nccl(in_group(x, x + kCount, x + 2 * kCount));
  CHECK(is_done_within(stream, kSoon));
}

TEST_CASE("other arguments that make no sense are refused", "[standin]") {
  const Communicator comm;
  const Stream stream("communication");
  const Array<float> a(kCount), b(kCount);
  const auto all_reduce = [&](ncclDataType_t type, ncclRedOp_t op, ncclComm_t on, cudaStream_t in) {
    return ncclAllReduce(a.data(), b.data(), 1, type, op, on, in);
  };
  CHECK(all_reduce(ncclFloat, ncclSum, comm, nullptr) == ncclInvalidArgument);
  CHECK(all_reduce(ncclFloat, ncclSum, nullptr, stream) == ncclInvalidArgument);
  CHECK(all_reduce(ncclFloat, ncclAvg, comm, stream) == ncclInvalidArgument);
  CHECK(all_reduce(ncclFloat, ncclProd, comm, stream) == ncclInvalidArgument);
  CHECK(all_reduce(ncclNumTypes, ncclSum, comm, stream) == ncclInvalidArgument);
  CHECK(all_reduce(static_cast<ncclDataType_t>(77), ncclSum, comm, stream) == ncclInvalidArgument);
  CHECK(ncclSend(a.data(), 1, ncclFloat, ranks(), comm, stream) == ncclInvalidArgument);
  CHECK(ncclRecv(a.data(), 1, ncclFloat, -1, comm, stream) == ncclInvalidArgument);
  CHECK(ncclBroadcast(a.data(), b.data(), 1, ncclFloat, ranks(), comm, stream) == ncclInvalidArgument);
  CHECK(ncclSend(a.data(), 1, ncclFloat, rank(), comm, stream) == ncclInvalidUsage);  // to oneself, ungrouped
  CHECK(ncclGroupEnd() == ncclInvalidUsage);
  cudaStream_t destroyed;
  CUDA_CHECK(cudaStreamCreateWithFlags(&destroyed, cudaStreamNonBlocking));
  CUDA_CHECK(cudaStreamDestroy(destroyed));
  CHECK(all_reduce(ncclFloat, ncclSum, comm, destroyed) == ncclUnhandledCudaError);
  cudaGetLastError();
  // None of it left anything behind.
  require_nccl(all_reduce(ncclFloat, ncclSum, comm, stream));
  CHECK(is_done_within(stream, kSoon));
}

TEST_CASE("ranks of a communicator in another order", "[standin]") {
  std::vector<int> reversed;
  for (int r = ranks(); r-- > 0;) reversed.push_back(r);
  const Communicator comm(reversed);
  const Stream stream("communication");
  const Array<int32_t> mine_in(std::vector<int32_t>{rank()}), all(ranks());
  require_nccl(ncclAllGather(mine_in.data(), all.data(), 1, ncclInt32, comm, stream));
  stream.synchronize();
  CHECK(all.get(ranks()) == std::vector<int32_t>(reversed.begin(), reversed.end()));
}

TEST_CASE("communicators of some of the ranks", "[standin]") {
  std::vector<int> even;
  for (int r = 0; r < ranks(); r += 2) even.push_back(r);
  const Communicator comm(even);
  if (rank() % 2 == 1) return;
  const Stream stream("communication");
  const Array<int32_t> array(std::vector<int32_t>{1});
  require_nccl(ncclAllReduce(array.data(), array.data(), 1, ncclInt32, ncclSum, comm, stream));
  stream.synchronize();
  CHECK(array.get(1)[0] == static_cast<int>(even.size()));
}

TEST_CASE("bad ways to make a communicator are refused", "[standin]") {
  ncclComm_t comm = nullptr;
  ncclUniqueId id = {};
  CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, nullptr) == ncclInvalidArgument);  // nobody made the id
  require_nccl(ncclGetUniqueId(&id));
  CHECK(ncclCommInitRankConfig(&comm, 2, id, 2, nullptr) == ncclInvalidArgument);
  CHECK(ncclCommInitRankConfig(&comm, 0, id, 0, nullptr) == ncclInvalidArgument);
  CHECK(ncclCommInitRankConfig(nullptr, 1, id, 0, nullptr) == ncclInvalidArgument);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = 0;
  CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
  config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, &config) == ncclInvalidArgument);
  setenv("NCCL_CPU_LINK", "fast", 1);
  CHECK(ncclCommInitRankConfig(&comm, 1, id, 0, nullptr) == ncclInvalidArgument);
  CHECK(last_error_has("NCCL_CPU_LINK=fast: expected a latency"));
  unsetenv("NCCL_CPU_LINK");
  config.blocking = 1;
  const int seats[] = {0, 5}, processes[] = {0, -1};  // the second one is absent
  config.world_ranks = seats, config.processes = processes;
  CHECK(ncclCommInitRankConfig(&comm, 2, id, 0, &config) == ncclInvalidUsage);
  CHECK(last_error_has("only the world of a dry run is folded"));
  config.world_ranks = config.processes = nullptr;
  CHECK(comm == nullptr);
  require_nccl(ncclCommInitRankConfig(&comm, 1, id, 0, &config));
  require_nccl(ncclCommDestroy(comm));
}
