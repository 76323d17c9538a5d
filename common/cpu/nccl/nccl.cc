// NCCL's calls: what they accept and refuse, groups, and the communicators that exist.
#include "nccl.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "bootstrap.h"
#include "communicator.h"
#include "device_access.h"
#include "modelled_link.h"
#include "reduce.h"

using nccl_mpi::Call;
using nccl_mpi::fail;
using nccl_mpi::Kind;

namespace {

// ---- The communicators that exist -------------------------------------------------------------------------

constexpr int most_channels = 64;  // NCCL's MAXCHANNELS

struct Communicators {
  std::mutex mutex;
  std::set<ncclComm_t> alive;
  std::set<ncclComm_t> aborted;  // MPI may still write to their buffers: they are never freed
};

Communicators& communicators() {
  static Communicators* const communicators = new Communicators;
  return *communicators;
}

bool exists(ncclComm_t comm) {
  std::lock_guard lock(communicators().mutex);
  return communicators().alive.contains(comm);
}

ncclResult_t no_communicator() {
  return fail(ncclInvalidArgument, "there is no such communicator, or no longer");
}

ncclResult_t create(const nccl_mpi::Members& members, const nccl_mpi::Network& network, int channels,
                    ncclComm_t* comm) try {
  *comm = new ncclComm(members, network, channels);
  std::lock_guard lock(communicators().mutex);
  communicators().alive.insert(*comm);
  return ncclSuccess;
} catch (const nccl_mpi::Failure& failure) {
  return fail(failure.result, failure.text);
}

// Null if all of it is.
const char* unsupported(const ncclConfig_t* config) {
  if (config == nullptr) return nullptr;
  if (config->blocking != NCCL_CONFIG_UNDEF_INT && config->blocking != 1)
    return "only blocking communicators are supported";
  return config->maxCTAs != NCCL_CONFIG_UNDEF_INT && config->maxCTAs < 1 ? "maxCTAs is below 1" : nullptr;
}

// NCCL has as many channels as an operation may take thread blocks.
int channels_of(const ncclConfig_t* config) {
  return config == nullptr || config->maxCTAs == NCCL_CONFIG_UNDEF_INT ? most_channels : config->maxCTAs;
}

// ---- What a call may ask for ------------------------------------------------------------------------------

// Device memory that a call reads or writes.
struct Range {
  const char* begin = nullptr;
  size_t bytes = 0;
};

bool overlap(const Range& a, const Range& b) {
  return a.bytes > 0 && b.bytes > 0 && a.begin < b.begin + b.bytes && b.begin < a.begin + a.bytes;
}

Range range_read(const Call& call, const ncclComm& comm) {
  const bool reads = call.kind != Kind::receive && (call.kind != Kind::broadcast || comm.rank == call.root);
  const size_t blocks = call.kind == Kind::reduce_scatter ? comm.ranks() : 1;
  return {static_cast<const char*>(call.send), reads ? blocks * bytes_of(call) : 0};
}

Range range_written(const Call& call, const ncclComm& comm) {
  const bool writes = call.kind != Kind::send;
  const size_t blocks = call.kind == Kind::all_gather ? comm.ranks() : 1;
  return {static_cast<const char*>(call.receive), writes ? blocks * bytes_of(call) : 0};
}

// What is wrong with a call whose buffers overlap; empty: it is in place, as NCCL allows.
std::string wrong_overlap(const Call& call, const ncclComm& comm) {
  const bool gathers = call.kind == Kind::all_gather;
  const auto* own = static_cast<const char*>(gathers ? call.send : call.receive);
  const auto* all = static_cast<const char*>(gathers ? call.receive : call.send);
  const auto element = static_cast<int64_t>(nccl_mpi::size_of(call.type));
  const auto is = (own - all) / element;
  const auto due =
      gathers || call.kind == Kind::reduce_scatter ? comm.rank * static_cast<int64_t>(call.count) : 0;
  if (own == all + due * element) return "";
  return "the buffers overlap; in place rank " + std::to_string(comm.rank) +
         "'s own part begins at element " + std::to_string(due) + " of all, and here at element " +
         std::to_string(is);
}

ncclResult_t refuse(const Call& call, const std::string& reason) {
  return fail(ncclInvalidArgument, description(call) + ": " + reason);
}

ncclResult_t check(const Call& call, const ncclComm& comm, cudaStream_t stream) {
  if (call.type < 0 || call.type >= ncclNumTypes || nccl_mpi::size_of(call.type) == 0) {
    return fail(ncclInvalidArgument, "data type " + std::to_string(call.type) + " is not supported");
  }
  if (call.op != ncclSum && call.op != ncclMax) {
    return fail(ncclInvalidArgument, "operators are ncclSum and ncclMax");
  }
  if (call.root < 0 || call.root >= comm.ranks()) return refuse(call, "there is no such rank");
  if (stream == nullptr) return refuse(call, "the null stream is not supported");
  const Range read = range_read(call, comm), written = range_written(call, comm);
  for (const Range& range : {read, written}) {
    if (range.bytes > 0 && !nccl_mpi::is_device_memory(range.begin, range.bytes)) {
      return refuse(call, "a buffer is not device memory, or not all of it");
    }
  }
  if (overlap(read, written)) {
    const std::string wrong = wrong_overlap(call, comm);
    if (!wrong.empty()) return refuse(call, wrong);
  }
  return ncclSuccess;
}

// ---- Groups -----------------------------------------------------------------------------------------------

struct Issued {
  ncclComm_t comm;
  cudaStream_t stream;
  Call call;
};

struct Group {
  int depth = 0;
  ncclResult_t error = ncclSuccess;  // the first of a call in the group
  std::vector<Issued> calls;
};

Group& group() {
  static thread_local Group group;
  return group;
}

// Calls of a group happen at the same time: none may write what another one uses.
ncclResult_t check_against_group(const Call& call, const ncclComm& comm) {
  const Range read = range_read(call, comm), written = range_written(call, comm);
  for (const Issued& other : group().calls) {
    const Range other_read = range_read(other.call, *other.comm);
    const Range other_written = range_written(other.call, *other.comm);
    if (overlap(written, other_read) || overlap(written, other_written) || overlap(read, other_written)) {
      return refuse(call, "a buffer overlaps that of " + description(other.call) + " in the same group");
    }
  }
  return ncclSuccess;
}

// NCCL, too, wants the sends of a rank to itself to be in one group with their receives.
ncclResult_t check_sends_to_self(const std::vector<Call>& calls, const ncclComm& comm) {
  const auto count = [&](Kind kind) {
    return std::count_if(calls.begin(), calls.end(),
                         [&](const Call& call) { return call.kind == kind && call.root == comm.rank; });
  };
  if (count(Kind::send) == count(Kind::receive)) return ncclSuccess;
  return fail(ncclInvalidUsage, "a send to oneself must be in one group with its receive");
}

// Gives each communicator its calls as one operation, in the order in which they were first used.
ncclResult_t issue(std::vector<Issued> issued) {
  while (!issued.empty()) {
    const ncclComm_t comm = issued.front().comm;
    std::vector<Call> calls;
    std::vector<cudaStream_t> streams;
    for (const Issued& each : issued) {
      if (each.comm != comm) continue;
      calls.push_back(each.call);
      if (std::find(streams.begin(), streams.end(), each.stream) == streams.end()) {
        streams.push_back(each.stream);
      }
    }
    if (ncclResult_t error = check_sends_to_self(calls, *comm); error != ncclSuccess) return error;
    if (ncclResult_t error = comm->issue(std::move(calls), streams); error != ncclSuccess) return error;
    std::erase_if(issued, [&](const Issued& each) { return each.comm == comm; });
  }
  return ncclSuccess;
}

ncclResult_t accept(ncclComm_t comm, cudaStream_t stream, const Call& call) {
  if (!exists(comm)) return no_communicator();
  if (comm->error() != ncclSuccess) return comm->error();
  ncclResult_t error = check(call, *comm, stream);
  if (error == ncclSuccess) error = check_against_group(call, *comm);
  if (error == ncclSuccess) group().calls.push_back({comm, stream, call});
  return error;
}

// A call outside of a group is a group of one.
ncclResult_t enqueue(ncclComm_t comm, cudaStream_t stream, const Call& call) {
  ncclGroupStart();
  const ncclResult_t error = accept(comm, stream, call);
  if (group().error == ncclSuccess) group().error = error;
  const ncclResult_t group_error = ncclGroupEnd();
  return error != ncclSuccess ? error : group_error;
}

}  // namespace

ncclResult_t ncclGroupStart() {
  ++group().depth;
  return ncclSuccess;
}

ncclResult_t ncclGroupEnd() {
  if (group().depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
  if (--group().depth > 0) return ncclSuccess;
  const Group ended = std::exchange(group(), {});
  return ended.error != ncclSuccess ? ended.error : issue(ended.calls);
}

// ---- Communicators ----------------------------------------------------------------------------------------

ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  if (id == nullptr) return ncclInvalidArgument;
  if (!nccl_mpi::mpi_is_usable()) {
    return fail(ncclInvalidUsage, "MPI must be initialised, with MPI_THREAD_MULTIPLE");
  }
  *id = nccl_mpi::new_id();
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (comm == nullptr || ranks < 1 || rank < 0 || rank >= ranks) {
    return fail(ncclInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  }
  *comm = nullptr;
  if (const char* reason = unsupported(config)) return fail(ncclInvalidArgument, reason);
  if (!nccl_mpi::mpi_is_usable()) {
    return fail(ncclInvalidUsage, "MPI must be initialised, with MPI_THREAD_MULTIPLE");
  }
  std::string reason;
  const auto network = nccl_mpi::network_from_environment(nccl_mpi::default_network(), &reason);
  if (!network) return fail(ncclInvalidArgument, reason);
  nccl_mpi::Members members;
  const ncclResult_t error =
      nccl_mpi::join(id, ranks, rank, config == nullptr ? ncclConfig_t{} : *config, &members);
  return error != ncclSuccess ? error : create(members, *network, channels_of(config), comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  {
    std::lock_guard lock(communicators().mutex);
    if (communicators().alive.erase(comm) == 0) return no_communicator();
  }
  comm->finish();
  if (comm->error() != ncclSuccess) {
    std::lock_guard lock(communicators().mutex);
    communicators().aborted.insert(comm);
    return ncclSuccess;
  }
  if (nccl_mpi::mpi_is_usable()) {
    nccl_mpi::Unseen unseen;
    MPI_Comm mpi = comm->mpi;
    nccl_mpi::meet(mpi);
    MPI_Comm_free(&mpi);
  }
  delete comm;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  {
    std::lock_guard lock(communicators().mutex);
    if (communicators().alive.erase(comm) == 0) return no_communicator();
    communicators().aborted.insert(comm);
  }
  comm->abort();
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!exists(comm)) return no_communicator();
  if (error == nullptr) return ncclInvalidArgument;
  *error = comm->error();
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t result) {
  constexpr const char* texts[] = {
      "no error",         "a CUDA call failed", "a system or MPI call failed", "internal error",
      "invalid argument", "invalid usage",      "a remote process failed",     "in progress"};
  return result >= 0 && result < ncclNumResults ? texts[result] : "unknown result code";
}

const char* ncclGetLastError(ncclComm_t) { return nccl_mpi::last_failure(); }

// ---- Operations -------------------------------------------------------------------------------------------

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, {Kind::all_reduce, send, receive, count, type, op});
}

ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t receive_count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, {Kind::reduce_scatter, send, receive, receive_count, type, op});
}

ncclResult_t ncclAllGather(const void* send, void* receive, size_t send_count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, {Kind::all_gather, send, receive, send_count, type});
}

ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream) {
  return enqueue(comm, stream, {Kind::broadcast, send, receive, count, type, ncclSum, root});
}

ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return enqueue(comm, stream, {Kind::send, send, nullptr, count, type, ncclSum, peer});
}

ncclResult_t ncclRecv(void* receive, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  return enqueue(comm, stream, {Kind::receive, nullptr, receive, count, type, ncclSum, peer});
}
