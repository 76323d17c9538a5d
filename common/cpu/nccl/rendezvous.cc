#include "rendezvous.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <functional>
#include <map>

#include "device_access.h"

namespace nccl_mpi {
namespace {

// Between processes, so not FUTEX_PRIVATE_FLAG.
void wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

Kind other_side(Kind kind) { return kind == Kind::send ? Kind::receive : Kind::send; }

}  // namespace

// For collectives. Two by turns: a slow rank may still read the one while the next is under way.
struct Rendezvous::Everybody {
  std::atomic<uint32_t> generation, arrived;
  std::atomic<int64_t> latest[2];
  std::atomic<uint64_t> call[2];  // what the first one called, as a hash
};

// What a rank tells a partner about all that it sends to it, or receives from it, in one group.
struct Rendezvous::Notice {
  int64_t time;
  uint64_t bytes, first_message;
};

// Two by turns, likewise: who posts the third has read the partner's second, which came after the first was
// read.
struct Rendezvous::Board {
  std::atomic<uint32_t> posted;
  Notice notices[2];
};

Rendezvous::Rendezvous(const Members& members, const std::atomic<bool>& aborted)
    : places_(members.places),
      ranks_(static_cast<int>(members.world_ranks.size() - std::count(places_.begin(), places_.end(), -1))),
      rank_(place_of(members.rank)),
      aborted_(aborted),
      name_("/" + members.name),
      bytes_(sizeof(Everybody) + sizeof(Board) * 2 * ranks_ * ranks_),
      posted_(2 * ranks_),
      read_(2 * ranks_) {
  const int file = shm_open(name_.c_str(), O_RDWR | O_CREAT, 0600);  // fresh memory is zero
  void* memory = MAP_FAILED;
  if (file >= 0 && ftruncate(file, static_cast<off_t>(bytes_)) == 0)
    memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (file >= 0) close(file);
  if (memory == MAP_FAILED)
    throw Failure{ncclSystemError, "no memory to share between the ranks of a dry run"};
  everybody_ = static_cast<Everybody*>(memory);
  meet_all({Kind::all_reduce, nullptr, nullptr, 0, ncclInt32}, 0);
  shm_unlink(name_.c_str());  // all have it
}

Rendezvous::~Rendezvous() { munmap(everybody_, bytes_); }

int Rendezvous::place_of(int rank) const { return places_.empty() ? rank : places_[rank]; }

void Rendezvous::sleep_while(std::atomic<uint32_t>& word, uint32_t value) const {
  constexpr timespec look_around = {0, 100'000'000};  // for an abort
  while (word.load(std::memory_order_acquire) == value) {
    if (aborted_.load(std::memory_order_relaxed)) throw Failure{ncclInProgress, "aborted"};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &look_around, nullptr, 0);
  }
}

int64_t Rendezvous::meet_all(const Call& call, int64_t time) {
  Unseen unseen;
  Everybody& all = *everybody_;
  const uint32_t generation = all.generation.load(std::memory_order_acquire);
  const int turn = generation % 2;
  uint64_t expected = 0;
  const uint64_t mine = std::hash<std::string>()(description(call)) | 1;
  if (!all.call[turn].compare_exchange_strong(expected, mine) && expected != mine)
    throw Failure{ncclInvalidUsage, "the ranks of a collective differ: rank " + std::to_string(rank_) +
                                        " calls " + description(call)};
  for (int64_t latest = all.latest[turn].load(); latest < time;) {
    if (all.latest[turn].compare_exchange_weak(latest, time)) break;
  }
  if (all.arrived.fetch_add(1) + 1 == static_cast<uint32_t>(ranks_)) {
    all.arrived = 0;
    all.latest[1 - turn] = 0;
    all.call[1 - turn] = 0;
    all.generation.store(generation + 1, std::memory_order_release);
    wake_all(all.generation);
  } else {
    sleep_while(all.generation, generation);
  }
  return all.latest[turn].load();
}

Rendezvous::Board& Rendezvous::board(int from, int to, Kind kind) const {
  auto* const boards = reinterpret_cast<Board*>(everybody_ + 1);
  return boards[(from * ranks_ + to) * 2 + (kind == Kind::send ? 0 : 1)];
}

void Rendezvous::post(int peer, Kind kind, const Notice& notice) {
  Board& to = board(rank_, peer, kind);
  uint32_t& posted = posted_[2 * peer + (kind == Kind::send ? 0 : 1)];
  to.notices[posted % 2] = notice;
  to.posted.store(++posted, std::memory_order_release);
  wake_all(to.posted);
}

Rendezvous::Notice Rendezvous::read(int peer, Kind kind) {
  Board& from = board(peer, rank_, kind);
  uint32_t& read = read_[2 * peer + (kind == Kind::send ? 0 : 1)];
  sleep_while(from.posted, read);
  return from.notices[read++ % 2];
}

int64_t Rendezvous::meet(std::span<Meeting> meetings, int64_t time) {
  Unseen unseen;
  std::map<std::pair<int, Kind>, std::vector<Meeting*>> by_partner;
  for (Meeting& meeting : meetings) {
    const int place = place_of(meeting.peer);
    if (place >= 0) by_partner[{place, meeting.call->kind}].push_back(&meeting);
  }
  const auto bytes = [](const std::vector<Meeting*>& all) {
    uint64_t sum = 0;
    for (const Meeting* meeting : all) sum += bytes_of(*meeting->call);
    return sum;
  };
  for (const auto& [partner, mine] : by_partner)
    post(partner.first, partner.second, {time, bytes(mine), mine.front()->message});
  int64_t came = time;
  for (const auto& [partner, mine] : by_partner) {
    const auto& [peer, kind] = partner;
    const Notice theirs = read(peer, other_side(kind));
    if (theirs.bytes != bytes(mine)) {
      throw Failure{ncclInvalidUsage, "sends and receives between rank " + std::to_string(rank_) +
                                          " and rank " + std::to_string(peer) + " differ"};
    }
    for (size_t i = 0; kind == Kind::receive && i < mine.size(); ++i)
      mine[i]->message = theirs.first_message + i;
    came = std::max(came, theirs.time);
  }
  return came;
}

}  // namespace nccl_mpi
