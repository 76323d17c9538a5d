// Where the ranks of a communicator meet in a dry run, in which only times travel: memory that the processes
// of a host share. A rank that waits sleeps until another one wakes it, so a few cores serve hundreds of
// ranks.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bootstrap.h"
#include "transport.h"

namespace nccl_mpi {

class Rendezvous {
 public:
  // All members that are there make one.
  Rendezvous(const Members& members, const std::atomic<bool>& aborted);
  ~Rendezvous();
  Rendezvous(const Rendezvous&) = delete;

  // All ranks that are there come to the same collective, each at its time. Returns the latest time. Throws
  // Failure.
  int64_t meet_all(const Call& call, int64_t time);
  // This rank comes to its sends and receives of a group, `meetings`, and its partners to theirs, but for
  // those that are absent. Fills in the numbers of received messages.
  int64_t meet(std::span<Meeting> meetings, int64_t time);

 private:
  struct Everybody;
  struct Notice;
  struct Board;

  int place_of(int rank) const;  // among those that are there; -1: it is absent
  Board& board(int from, int to, Kind kind) const;
  void post(int peer, Kind kind, const Notice& notice);
  Notice read(int peer, Kind kind);
  void sleep_while(std::atomic<uint32_t>& word, uint32_t value) const;

  const std::vector<int> places_;  // [ranks]: -1 where one is absent; empty: all are there
  const int ranks_, rank_;         // that are there; this one among them
  const std::atomic<bool>& aborted_;
  std::string name_;
  size_t bytes_;
  Everybody* everybody_;
  std::vector<uint32_t> posted_, read_;  // [ranks, 2]: notices so far
};

}  // namespace nccl_mpi
