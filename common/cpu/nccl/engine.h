// The collectives and point-to-point operations of one communicator, carried out by its thread.
//
// A rank sends each other rank what that one needs, directly. An all-reduce of little data is one exchange,
// after which every rank reduces all of it; one of much data is a reduce-scatter and an all-gather. Data
// moves in rounds of limited size, so that the buffers are small and allocated beforehand.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "bootstrap.h"
#include "device_access.h"
#include "modelled_link.h"
#include "rendezvous.h"
#include "transport.h"

namespace nccl_mpi {

class Engine {
 public:
  // Makes the members' MPI communicator its own.
  Engine(const Members& members, const Network& network, int channels, const std::atomic<bool>& aborted);

  // One operation, to which this rank's streams came at `time`: the collectives together, then all sends and
  // receives together. Says when it ran, and which messages passed. Throws Failure.
  Span run(std::span<const Call> calls, int64_t time, std::vector<Message>* messages);

 private:
  // What one rank's exchange with all others consists of: a piece to and from each rank.
  struct Exchange {
    std::vector<Piece> to, from;  // [ranks]; those of the rank itself are not used
  };
  using Range = std::pair<size_t, size_t>;  // first element, elements

  void run_collective(const Call& call);
  void run_point_to_point(std::span<const Call> calls, std::vector<Message>* messages);
  void run_round(const Call& call, Range range);
  void exchange(const Call& call, const Exchange& exchange);

  void all_gather(const Call& call, Range range);
  void broadcast(const Call& call, Range range);
  void reduce_scatter(const Call& call, Range range);
  void all_reduce_at_once(const Call& call, Range range);
  void all_reduce_in_parts(const Call& call, Range range);

  Exchange no_exchange() const;
  const std::byte* input(const Call& call, size_t element) const;
  std::byte* output(const Call& call, size_t element) const;
  std::byte* scratch(int rank) { return scratch_.data() + rank * chunk; }
  void receive_contributions(Exchange* exchange, size_t bytes);
  void combine(std::byte* out, std::byte* own, size_t count, const Call& call);

  double seconds_of_collectives(std::span<const Call> calls) const;
  double seconds_of_messages(std::span<const Call> calls) const;
  void meet(int64_t met);
  void pass(double seconds);

  static constexpr size_t chunk = 512 << 10;  // bytes: the longest piece of a round

  int ranks_, rank_;
  std::vector<int> world_ranks_;
  Network network_;
  int channels_;
  Collectives collectives_;
  Transport transport_;
  std::unique_ptr<Rendezvous> rendezvous_;  // of a dry run, instead of letters
  DeviceWindow window_;
  std::vector<std::byte> scratch_;  // [ranks, chunk]: contributions to a reduction, as they arrive
  bool met_ = false;                // in the collective that is running
  Span span_;                       // of the operation so far
};

}  // namespace nccl_mpi
