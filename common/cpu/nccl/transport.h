// Messages between the ranks of a communicator: MPI's point-to-point calls, waited for in a way that leaves
// the cores to others.
//
// Every operation begins with letters: a rank tells each of its partners what it is about to do. Who has all
// its partners' letters knows that they have come, that they agree, and, if there is little to send, has the
// data too, because a letter has room for it. More data follows on its own.
#pragma once

#include <mpi.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "nccl.h"

namespace nccl_mpi {

enum class Kind : int { all_reduce, reduce_scatter, all_gather, broadcast, send, receive };

// One call of the program.
struct Call {
  Kind kind;
  const void* send;  // device memory, as nccl.h describes it; null in a receive
  void* receive;     // null in a send
  size_t count;      // elements: of a block in a reduce-scatter and an all-gather, of the buffer otherwise
  ncclDataType_t type;
  ncclRedOp_t op = ncclSum;
  int root = 0;  // of a reduction or broadcast; the peer of a send or receive
};

bool is_point_to_point(Kind kind);
size_t bytes_of(const Call& call);          // count elements
std::string description(const Call& call);  // "ncclAllReduce(count 8, float, sum)"

// What ends an operation before its time; thrown and caught in a communicator's thread.
struct Failure {
  ncclResult_t result;
  std::string text;
};

// Room for data in a letter; MPI passes on as much without waiting for the receiver.
constexpr size_t letter_bytes = 8192;

// A piece of host memory.
struct Piece {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

// This rank's dealings with one partner in one call.
struct Meeting {
  const Call* call;
  int peer;
  Piece out, in;
  uint64_t message = 0;  // of a send or receive: what the sender calls it
};

// Waits between looks at something that others bring about: yields the core at first, then sleeps ever
// longer, up to an eighth of the time waited so far.
class Patience {
 public:
  void wait();

 private:
  int looks_ = 0;
  std::chrono::steady_clock::time_point start_;
};

class Transport {
 public:
  // world_ranks: of the ranks of `comm`, as messages name them.
  Transport(MPI_Comm comm, const std::vector<int>& world_ranks, const std::atomic<bool>& aborted);

  // The beginning of an operation, to which this rank came at `time`. Returns when the last of the partners
  // came, or this rank.
  int64_t meet(std::span<Meeting> meetings, int64_t time);
  // Only the pieces; both sides know that both are here.
  void move(std::span<const Meeting> meetings);

 private:
  struct Header {
    Kind kind;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root;
    uint64_t count;
    uint64_t message;
    int64_t came;  // when the sender of the letter had come, in nanoseconds of the streams' clock
  };
  struct Letter {
    Header header;
    std::byte data[letter_bytes];
  };

  // `first`: the number of the first of their letters.
  bool letters_are_here(size_t first, size_t count);
  int64_t open_letters(std::span<Meeting> meetings, size_t first);
  void check_agreement(std::span<const Meeting> meetings, size_t first) const;
  void begin_move(const Meeting& meeting);
  void send(const void* data, size_t bytes, int peer, int tag);
  void receive(void* data, size_t bytes, int peer, int tag);
  // Until all messages have passed; `has_begun`: whether they have all begun.
  void wait(const std::function<bool()>& has_begun);
  void cancel();

  MPI_Comm comm_;
  int rank_;
  const std::vector<int>& world_ranks_;
  const std::atomic<bool>& aborted_;
  std::vector<Letter> sent_, received_;  // of the present meeting
  std::vector<MPI_Request> sends_, receives_;
};

}  // namespace nccl_mpi
