#include "bootstrap.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>

#include "communicator.h"
#include "device_access.h"
#include "transport.h"

namespace nccl_mpi {
namespace {

constexpr int kFirstTag = 0x4e43 << 8;  // in MPI_COMM_WORLD; far from what programs use
constexpr int kTags = 1 << 16;

// What a unique id says.
struct Id {
  char text[8];
  int maker;  // world rank
  int tag;
  unsigned process, number;  // by chance, so that no other process of a host has it; of its ids
};
constexpr char kText[8] = "mpi-ids";

void wait(std::vector<MPI_Request>& requests) {
  Patience patience;
  for (int done = 0;; patience.wait()) {
    MPI_Testall(static_cast<int>(requests.size()), requests.data(), &done, MPI_STATUSES_IGNORE);
    if (done) break;
  }
  requests.clear();
}

// A new MPI communicator of some ranks of the world, in the order given. The first one of these ranks is made
// by a call that spins, which takes long where ranks share cores; so it is kept, and all later ones are
// copies of it, for which one can wait in peace.
MPI_Comm communicator_of(const std::vector<int>& world_ranks, int tag) {
  static std::map<std::vector<int>, MPI_Comm> first;
  const auto [entry, is_new] = first.try_emplace(world_ranks, MPI_COMM_NULL);
  if (is_new) {
    MPI_Group all = MPI_GROUP_NULL, group = MPI_GROUP_NULL;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, static_cast<int>(world_ranks.size()), world_ranks.data(), &group);
    MPI_Comm_create_group(MPI_COMM_WORLD, group, tag, &entry->second);
    MPI_Group_free(&group);
    MPI_Group_free(&all);
  }
  MPI_Comm comm = MPI_COMM_NULL;
  std::vector<MPI_Request> copied(1);
  MPI_Comm_idup(entry->second, &comm, copied.data());
  wait(copied);
  MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
  return comm;
}

// The maker of the id learns who is which rank, and tells all. world_ranks: [ranks].
bool collect(const Id& id, int rank, std::vector<int>* world_ranks) {
  const int ranks = static_cast<int>(world_ranks->size());
  int me = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &me);
  std::vector<MPI_Request> requests;
  if (me != id.maker) {
    const int mine[] = {ranks, rank, me};
    requests.resize(2);
    MPI_Irecv(world_ranks->data(), ranks, MPI_INT, id.maker, id.tag, MPI_COMM_WORLD, &requests[0]);
    MPI_Isend(mine, 3, MPI_INT, id.maker, id.tag, MPI_COMM_WORLD, &requests[1]);
    wait(requests);
    return world_ranks->front() >= 0;
  }
  std::vector<int> theirs(3 * ranks);  // [ranks][number of ranks, rank, world rank]
  theirs[0] = ranks, theirs[1] = rank, theirs[2] = me;
  for (int i = 1; i < ranks; ++i) {
    MPI_Irecv(&theirs[3 * i], 3, MPI_INT, MPI_ANY_SOURCE, id.tag, MPI_COMM_WORLD, &requests.emplace_back());
  }
  wait(requests);
  std::fill(world_ranks->begin(), world_ranks->end(), -1);
  bool valid = true;
  for (int i = 0; i < ranks; ++i) {
    const int their_ranks = theirs[3 * i], their_rank = theirs[3 * i + 1];
    valid = valid && their_ranks == ranks && (*world_ranks)[their_rank] < 0;
    if (valid) (*world_ranks)[their_rank] = theirs[3 * i + 2];
  }
  if (!valid) world_ranks->front() = -1;  // two ranks claim to be the same one, or do not agree how many
  for (int i = 1; i < ranks; ++i) {
    MPI_Isend(world_ranks->data(), std::min(ranks, theirs[3 * i]), MPI_INT, theirs[3 * i + 2], id.tag,
              MPI_COMM_WORLD, &requests.emplace_back());
  }
  wait(requests);
  return valid;
}

}  // namespace

bool mpi_is_usable() {
  int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (initialized) MPI_Query_thread(&level);
  return initialized && !finalized && level == MPI_THREAD_MULTIPLE;
}

ncclUniqueId new_id() {
  static std::atomic<int> ids = 0;
  const int number = ids++;
  Id id = {};
  std::memcpy(id.text, kText, sizeof kText);
  MPI_Comm_rank(MPI_COMM_WORLD, &id.maker);
  id.tag = kFirstTag + number % kTags;
  static const unsigned process = std::random_device()();
  id.process = process;
  id.number = number;
  ncclUniqueId unique = {};
  std::memcpy(unique.internal, &id, sizeof id);
  return unique;
}

ncclResult_t join(const ncclUniqueId& unique, int ranks, int rank, const ncclConfig_t& config,
                  Members* members) {
  Unseen unseen;
  Id id;
  std::memcpy(&id, unique.internal, sizeof id);
  if (std::memcmp(id.text, kText, sizeof kText) != 0) {
    return fail(ncclInvalidArgument, "this is not an id that ncclGetUniqueId made");
  }
  members->rank = rank;
  const bool is_folded = config.world_ranks != nullptr && config.processes != nullptr;
  if (is_folded && !is_dry_run()) return fail(ncclInvalidUsage, "only the world of a dry run is folded");
  std::vector<int> processes(is_folded ? 0 : ranks);  // of the members that are there
  for (int member = 0; is_folded && member < ranks; ++member) {
    const int process = config.processes[member];
    members->world_ranks.push_back(config.world_ranks[member]);
    members->places.push_back(process < 0 ? -1 : static_cast<int>(processes.size()));
    if (process >= 0) processes.push_back(process);
  }
  if (is_folded && members->places[rank] < 0) return fail(ncclInvalidArgument, "this rank is absent");
  if (!collect(id, is_folded ? members->places[rank] : rank, &processes)) {
    return fail(ncclInvalidUsage, "the ranks of a new communicator do not agree who they are");
  }
  if (!is_folded) members->world_ranks = processes;
  members->comm = communicator_of(processes, id.tag);
  members->name = "pentatron-" + std::to_string(id.process) + "-" + std::to_string(id.number);
  return ncclSuccess;
}

void meet(MPI_Comm comm) {
  std::vector<MPI_Request> all_came(1);
  MPI_Ibarrier(comm, all_came.data());
  wait(all_came);
}

}  // namespace nccl_mpi
