// When operations start, wait, progress together, deadlock, and are aborted.
// precisions: fp32
#include <chrono>
#include <future>

#include "nccl_fixture.h"

namespace {

using namespace mpi_tests;

constexpr size_t kSmall = 100, kLarge = 200000;  // floats: within a letter, and in several rounds

}  // namespace

TEST_CASE("a collective returns to the host at once and waits for all ranks", "[standin]") {
  if (ranks() < 2) return;
  const Communicator comm;
  const Stream stream("communication");
  const Array<float> in(std::vector<float>(kSmall, 1)), out(kSmall * ranks());
  for (int kind = 0; kind < 4; ++kind) {
    INFO("kind " << kind);
    const auto issue = [&] {
      if (kind == 0) return ncclAllReduce(in.data(), out.data(), kSmall, ncclFloat, ncclSum, comm, stream);
      if (kind == 1) return ncclAllGather(in.data(), out.data(), kSmall, ncclFloat, comm, stream);
      if (kind == 2) return ncclBroadcast(in.data(), out.data(), kSmall, ncclFloat, 0, comm, stream);
      return ncclReduceScatter(in.data(), out.data(), kSmall / ranks(), ncclFloat, ncclSum, comm, stream);
    };
    const bool late = rank() == ranks() - 1;
    if (!late) {
      require_nccl(issue());  // returns, although the last rank issues nothing before the barrier
      CHECK(!is_done_within(stream, kHolds));  // not even the root of a broadcast
    }
    barrier();
    if (late) require_nccl(issue());
    CHECK(is_done_within(stream, kSoon));
  }
}

TEST_CASE("a send waits for its receive", "[standin]") {
  if (ranks() < 2) return;
  const Communicator comm;
  const Stream stream("communication");
  for (size_t count : {size_t{0}, kSmall, kLarge}) {
    INFO("count " << count);
    const Array<float> array(count + 1);
    if (rank() == 0) {
      require_nccl(ncclSend(array.data(), count, ncclFloat, 1, comm, stream));
      CHECK(!is_done_within(stream, kHolds));
    }
    barrier();
    if (rank() == 1) require_nccl(ncclRecv(array.data(), count, ncclFloat, 0, comm, stream));
    CHECK(is_done_within(stream, kSoon));
    barrier();
  }
}

TEST_CASE("operations wait for what their stream did before, and what follows waits for them", "[standin]") {
  const Communicator comm;
  const Stream stream("communication");
  const Array<float> array(std::vector<float>(kSmall, 1));
  const Array<float> twos(std::vector<float>(kSmall, 2)), result(kSmall);
  Gate gate(stream);
  CUDA_CHECK(
      cudaMemcpyAsync(array.data(), twos.data(), kSmall * sizeof(float), cudaMemcpyDeviceToDevice, stream));
  require_nccl(ncclAllReduce(array.data(), array.data(), kSmall, ncclFloat, ncclSum, comm, stream));
  CUDA_CHECK(
      cudaMemcpyAsync(result.data(), array.data(), kSmall * sizeof(float), cudaMemcpyDeviceToDevice, stream));
  for (int next = 0; next < ranks(); ++next) {  // one after the other
    if (next == rank()) gate.open();
    barrier();
  }
  stream.synchronize();
  CHECK(result.get(kSmall) == std::vector<float>(kSmall, 2.0f * static_cast<float>(ranks())));
}

TEST_CASE("a communicator's operations keep their order, on whatever stream", "[standin]") {
  const Communicator comm;
  const Stream first("first"), second("second");
  const Array<float> a(std::vector<float>(kSmall, 1)), b(std::vector<float>(kSmall, 1));
  Gate gate(first);
  require_nccl(ncclAllReduce(a.data(), a.data(), kSmall, ncclFloat, ncclSum, comm, first));
  require_nccl(ncclAllReduce(b.data(), b.data(), kSmall, ncclFloat, ncclSum, comm, second));
  CHECK(!is_done_within(second, kHolds));
  gate.open();
  CHECK(is_done_within(second, kSoon));
  CHECK(is_done_within(first, kSoon));
}

TEST_CASE("operations start in the order of the host, over all communicators", "[standin]") {
  const Communicator a, b;
  const Stream first("first"), second("second");
  const Array<float> x(std::vector<float>(kSmall, 1)), y(std::vector<float>(kSmall, 1));
  // On rank 0 the first operation cannot start; so, there, the second does not, although its stream is free.
  std::unique_ptr<Gate> gate;
  if (rank() == 0) gate = std::make_unique<Gate>(first);
  require_nccl(ncclAllReduce(x.data(), x.data(), kSmall, ncclFloat, ncclSum, a, first));
  require_nccl(ncclAllReduce(y.data(), y.data(), kSmall, ncclFloat, ncclSum, b, second));
  CHECK((!is_done_within(second, kHolds)));
  barrier();
  gate.reset();
  CHECK(is_done_within(second, kSoon));
  CHECK(is_done_within(first, kSoon));
}

TEST_CASE("an operation that has started, and waits, does not hold up other communicators", "[standin]") {
  if (ranks() < 2) return;
  const Communicator a, b;
  const Stream first("first"), second("second");
  const Array<float> x(kSmall), y(std::vector<float>(kSmall, 1));
  if (rank() == 0) require_nccl(ncclRecv(x.data(), kSmall, ncclFloat, 1, a, first));
  require_nccl(ncclAllReduce(y.data(), y.data(), kSmall, ncclFloat, ncclSum, b, second));
  CHECK(is_done_within(second, kSoon));
  if (rank() == 0) CHECK(!is_done(first));
  barrier();
  if (rank() == 1) require_nccl(ncclSend(x.data(), kSmall, ncclFloat, 0, a, first));
  CHECK(is_done_within(first, kSoon));
}

TEST_CASE("communicators used in opposite orders: on one stream a deadlock, which an abort ends",
          "[standin]") {
  if (ranks() < 2) return;
  Communicator a, b;
  const Stream stream("communication");
  const Array<float> x(std::vector<float>(kSmall, 1)), y(std::vector<float>(kSmall, 1));
  const auto first = rank() == 0 ? &a : &b, second = rank() == 0 ? &b : &a;
  require_nccl(ncclAllReduce(x.data(), x.data(), kSmall, ncclFloat, ncclSum, *first, stream));
  require_nccl(ncclAllReduce(y.data(), y.data(), kSmall, ncclFloat, ncclSum, *second, stream));
  CHECK(!is_done_within(stream, kHolds));
  barrier();
  first->abort();
  second->abort();
  CHECK(is_done_within(stream, kSoon));
}

TEST_CASE("two ranks that send to each other: grouped they exchange", "[standin]") {
  if (ranks() < 2) return;
  const Communicator comm;
  const Stream stream("communication");
  for (size_t count : {kSmall, kLarge}) {
    const Array<float> mine(std::vector<float>(count, static_cast<float>(rank()))), theirs(count);
    const int peer = rank() ^ 1;
    if (peer >= ranks()) continue;
    require_nccl(ncclGroupStart());
    require_nccl(ncclSend(mine.data(), count, ncclFloat, peer, comm, stream));
    require_nccl(ncclRecv(theirs.data(), count, ncclFloat, peer, comm, stream));
    require_nccl(ncclGroupEnd());
    REQUIRE(is_done_within(stream, kSoon));
    CHECK(theirs.get(count) == std::vector<float>(count, static_cast<float>(peer)));
  }
}

// Rank 1 comes to its last send only when it has both of rank 0's messages.
TEST_CASE("a message of a group does not wait for the others of the group", "[standin]") {
  if (ranks() < 2) return;
  const Communicator comm;
  const Stream stream("communication");
  for (size_t count : {kSmall, kLarge}) {
    const Array<float> a(std::vector<float>(count, 1)), b(std::vector<float>(count, 2)), in(count),
        other(count);
    if (rank() == 0) {
      require_nccl(ncclGroupStart());
      require_nccl(ncclRecv(in.data(), count, ncclFloat, 1, comm, stream));
      require_nccl(ncclSend(a.data(), count, ncclFloat, 1, comm, stream));
      require_nccl(ncclSend(b.data(), count, ncclFloat, 1, comm, stream));
      require_nccl(ncclGroupEnd());
    } else if (rank() == 1) {
      require_nccl(ncclRecv(other.data(), count, ncclFloat, 0, comm, stream));
      require_nccl(ncclRecv(in.data(), count, ncclFloat, 0, comm, stream));
      require_nccl(ncclSend(in.data(), count, ncclFloat, 0, comm, stream));
    }
    REQUIRE(is_done_within(stream, kSoon));
    if (rank() == 1) CHECK(other.get(count) == std::vector<float>(count, 1));
    if (rank() < 2) CHECK(in.get(count) == std::vector<float>(count, 2));
  }
}

TEST_CASE("two ranks that send to each other: ungrouped they deadlock, and an abort frees their streams",
          "[standin]") {
  if (ranks() < 2) return;
  Communicator comm;
  const Stream stream("communication");
  const Array<float> mine(kSmall), theirs(kSmall);
  if (rank() < 2) {
    require_nccl(ncclSend(mine.data(), kSmall, ncclFloat, 1 - rank(), comm, stream));
    require_nccl(ncclRecv(theirs.data(), kSmall, ncclFloat, 1 - rank(), comm, stream));
    CHECK(!is_done_within(stream, kHolds));
    CHECK(comm.error() == ncclSuccess);  // NCCL cannot know
  }
  barrier();
  comm.abort();
  CHECK(is_done_within(stream, kSoon));
}

TEST_CASE("an abort from another thread frees a host that waits for the stream", "[standin]") {
  if (ranks() < 2) return;
  Communicator comm;
  const Communicator other;
  const Stream stream("communication"), free_stream("free");
  const Array<float> array(std::vector<float>(kLarge, 1));
  // Three operations in a row, of which none can run.
  if (rank() > 0) {
    for (int i = 0; i < 3; ++i) {
      require_nccl(ncclAllReduce(array.data(), array.data(), kLarge, ncclFloat, ncclSum, comm, stream));
    }
  }
  std::thread watchdog([&] {
    is_done_within(stream, kHolds);
    comm.abort();
  });
  CUDA_CHECK(cudaStreamSynchronize(stream));
  watchdog.join();
  // Other communicators still work.
  require_nccl(ncclAllReduce(array.data(), array.data(), kSmall, ncclFloat, ncclMax, other, free_stream));
  CHECK(is_done_within(free_stream, kSoon));
}

// Of two operations the first waits for its stream, and the second for its turn.
TEST_CASE("an abort gives up a turn, or frees an operation whose turn has not come", "[standin]") {
  for (const bool aborts_first : {true, false}) {
    INFO("aborts the first " << aborts_first);
    const Communicator other;
    const Stream first("first"), second("second");
    const Array<float> x(std::vector<float>(kSmall, 1)), y(std::vector<float>(kSmall, 1));
    Gate gate(first);
    Communicator aborted;
    const ncclComm_t of_first = aborts_first ? aborted : other, of_second = aborts_first ? other : aborted;
    require_nccl(ncclAllReduce(x.data(), x.data(), kSmall, ncclFloat, ncclSum, of_first, first));
    require_nccl(ncclAllReduce(y.data(), y.data(), kSmall, ncclFloat, ncclSum, of_second, second));
    CHECK(!is_done_within(second, kHolds));
    aborted.abort();
    CHECK(is_done_within(second, kSoon));
    if (!aborts_first) CHECK(!is_done(first));
    gate.open();
    CHECK(is_done_within(first, kSoon));
  }
}

TEST_CASE("a group is one operation of all its streams", "[standin]") {
  const Communicator comm;
  const Stream first("first"), second("second");
  const Array<float> a(std::vector<float>(kSmall, 1)), b(std::vector<float>(kSmall, 1));
  Gate gate(second);
  require_nccl(ncclGroupStart());
  require_nccl(ncclGroupStart());
  require_nccl(ncclAllReduce(a.data(), a.data(), kSmall, ncclFloat, ncclSum, comm, first));
  require_nccl(ncclGroupEnd());
  CHECK(is_done(first));  // nothing starts before the outer group ends
  require_nccl(ncclAllReduce(b.data(), b.data(), kSmall, ncclFloat, ncclSum, comm, second));
  require_nccl(ncclGroupEnd());
  CHECK(!is_done_within(first, kHolds));
  gate.open();
  CHECK(is_done_within(first, kSoon));
  CHECK(is_done_within(second, kSoon));
  CHECK(a.get(1)[0] == static_cast<float>(ranks()));
  CHECK(b.get(1)[0] == static_cast<float>(ranks()));
}

TEST_CASE("four streams, each with a communicator for an edge, carry a pipeline's exchanges in any order",
          "[standin]") {
  if (ranks() < 2) return;
  // Rank 0 first receives a gradient and then sends an activation; rank 1 the other way round. On one stream
  // that would deadlock.
  const Communicator activations({0, 1}), gradients({0, 1});
  const Stream forth("activations"), back("gradients");
  const Array<float> a(std::vector<float>(kLarge, 3)), g(std::vector<float>(kLarge, 4));
  if (rank() == 0) {
    require_nccl(ncclRecv(g.data(), kLarge, ncclFloat, 1, gradients, back));
    require_nccl(ncclSend(a.data(), kLarge, ncclFloat, 1, activations, forth));
  }
  if (rank() == 1) {
    require_nccl(ncclRecv(a.data(), kLarge, ncclFloat, 0, activations, forth));
    require_nccl(ncclSend(g.data(), kLarge, ncclFloat, 0, gradients, back));
  }
  CHECK(is_done_within(forth, kSoon));
  CHECK(is_done_within(back, kSoon));
}

TEST_CASE("destroying a communicator waits for its operations", "[standin]") {
  const Stream stream("communication");
  const Array<float> array(kLarge);
  array.set(std::vector<float>(kLarge, 1));
  const ncclComm_t comm = Communicator().release();
  for (int i = 0; i < 3; ++i) {
    require_nccl(ncclAllReduce(array.data(), array.data(), kLarge, ncclFloat, ncclSum, comm, stream));
  }
  require_nccl(ncclCommDestroy(comm));
  CHECK(is_done_within(stream, kSoon));
  const auto expected = static_cast<float>(ranks() * ranks() * ranks());
  CHECK(array.get(kLarge) == std::vector<float>(kLarge, expected));
  CHECK(ncclCommDestroy(comm) == ncclInvalidArgument);
}

TEST_CASE("destroying a communicator waits for all of its ranks", "[standin]") {
  const ncclComm_t comm = Communicator().release();
  if (rank() == 0) barrier();
  std::future<ncclResult_t> destroyed = std::async(std::launch::async, ncclCommDestroy, comm);
  if (rank() > 0) {
    CHECK(destroyed.wait_for(std::chrono::duration<double>(kHolds)) == std::future_status::timeout);
    barrier();  // now rank 0 destroys it, too
  }
  CHECK(destroyed.get() == ncclSuccess);
}
