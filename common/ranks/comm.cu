#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <iomanip>
#include <limits>
#include <numeric>
#include <sstream>
#include <thread>

#include "ranks/comm.h"
#include "ranks/mpi_wait.h"
#include "ranks/nccl_build.h"
#ifdef NCCL_OVER_MPI
#include "modelled_link.h"
#endif

namespace pentatron {
namespace {

constexpr int no_peer = -1;

// On a GPU NCCL makes two streams for each communicator. One of them waits for each operation; the other has
// work with CUDA graphs only (NCCL 2.30, enqueue.cc). With one rank an operation is a copy, and no stream of
// NCCL's waits. NCCL over MPI has one stream, too.
#ifdef CUDA_CPU
constexpr int streams_of_nccl = 0;
#else
constexpr int streams_of_nccl = 1;
#endif

template <class T>
constexpr ncclDataType_t nccl_type = ncclFloat;
template <>
constexpr ncclDataType_t nccl_type<double> = ncclDouble;
template <>
constexpr ncclDataType_t nccl_type<__nv_bfloat16> = ncclBfloat16;
template <>
constexpr ncclDataType_t nccl_type<__half> = ncclHalf;
template <>
constexpr ncclDataType_t nccl_type<int32_t> = ncclInt32;

// Combines each value over all ranks.
template <class T>
std::vector<T> reduce(Watchdog& watchdog, const std::vector<T>& values, MPI_Datatype type, MPI_Op op) {
  const Watchdog::Call call(watchdog, "MPI_Iallreduce");
  std::vector<T> result(values.size());
  MPI_Request request;
  MPI_CHECK(MPI_Iallreduce(values.data(), result.data(), static_cast<int>(values.size()), type, op,
                           MPI_COMM_WORLD, &request));
  wait(request);
  return result;
}

// Throws UsageError if `link` is not valid, or if real NCCL communicates, which models no link.
void check_link(const std::string& link) {
  if (link.empty()) return;
#ifdef NCCL_OVER_MPI
  std::string expected;
  if (!nccl_mpi::parse_link(link, &expected))
    throw UsageError("--link", link, expected.substr(expected.find(' ') + 1));  // it begins with "expected"
#else
  throw UsageError("--link", link, "no modelled link with real NCCL; build with NCCL=mpi");
#endif
}

// What each rank says: fewer than MPI_MAX_PROCESSOR_NAME characters.
std::vector<std::string> all_gather(const std::string& text, int ranks) {
  using Text = std::array<char, MPI_MAX_PROCESSOR_NAME>;
  Text mine = {};
  text.copy(mine.data(), mine.size() - 1);
  std::vector<Text> all(ranks);
  MPI_Request request;
  MPI_CHECK(MPI_Iallgather(mine.data(), sizeof mine, MPI_BYTE, all.data(), sizeof mine, MPI_BYTE,
                           MPI_COMM_WORLD, &request));
  wait(request);
  std::vector<std::string> texts;
  for (const Text& one : all) texts.emplace_back(one.data());
  return texts;
}

// Of the device in use, as digits. No other one of its host has it.
std::string device_uuid() {
  int device = 0;
  cudaDeviceProp gpu;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaGetDeviceProperties(&gpu, device));
  std::ostringstream digits;
  for (const unsigned char byte : gpu.uuid.bytes)
    digits << std::hex << std::setw(2) << std::setfill('0') << int{byte};
  return digits.str();
}

// Several communicators may be in use together only if their operations start in the order in which the
// host issued them (NCCL's and CUDA's documentation of NCCL_LAUNCH_ORDER_IMPLICIT). Otherwise
// sends and receives between two ranks deadlock. That needs CUDA 12.3: here, in the driver, and where NCCL
// was built.
void check_versions() {
#ifndef NCCL_OVER_MPI
  int nccl = 0, driver = 0;
  NCCL_CHECK(ncclGetVersion(&nccl));
  CUDA_CHECK(cudaDriverGetVersion(&driver));
  if (nccl < NCCL_VERSION(2, 26, 0)) fail("NCCL", "version 2.26 or later is needed", __FILE__, __LINE__);
  if (std::min(driver, CUDART_VERSION) < 12030)
    fail("CUDA", "a toolkit and a driver for CUDA 12.3 or later are needed", __FILE__, __LINE__);
  Dl_info library;
  if (dladdr(reinterpret_cast<const void*>(ncclGetVersion), &library) == 0) return;
  const int built_with = cuda_of_nccl(library.dli_fname);
  if (built_with > 0 && built_with < 12030)
    fail("NCCL", "a library that was built with CUDA 12.3 or later is needed", __FILE__, __LINE__);
#endif
}

}  // namespace

void check_nccl(ncclResult_t status, const char* call, const char* file, int line) {
  if (status != ncclSuccess) fail(call, ncclGetErrorString(status), file, line);
}

// ---- World ------------------------------------------------------------------------------------------------

World::World(int* argc, char*** argv) {
  set_work_queues();
  // Those that the user has set stay.
  const std::pair<const char*, const char*> variables[] = {
      {"CUDA_MODULE_LOADING", "EAGER"},     // a kernel loaded late may wait behind a collective
      {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"},  // operations start in the order in which the host issues them
      {"NCCL_RUNTIME_CONNECT", "0"}};       // ranks connect at once, not during collectives
  for (const auto& [name, value] : variables) setenv(name, value, 0);
  int running = 0, provided = 0;
  MPI_CHECK(MPI_Initialized(&running));
  started_mpi_ = !running;
  if (started_mpi_) MPI_CHECK(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided));
  MPI_CHECK(MPI_Query_thread(&provided));
  MPI_CHECK(MPI_Comm_rank(MPI_COMM_WORLD, &rank_));
  MPI_CHECK(MPI_Comm_size(MPI_COMM_WORLD, &ranks_));
  require_all_ranks(ranks_);
  MPI_CHECK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));  // MPI_CHECK reports them
  if (provided < MPI_THREAD_MULTIPLE)
    fail("MPI_Init_thread", "MPI_THREAD_MULTIPLE is missing", __FILE__, __LINE__);
  char host[MPI_MAX_PROCESSOR_NAME];
  int length = 0;
  MPI_CHECK(MPI_Get_processor_name(host, &length));
  hosts_ = all_gather(host, ranks_);
  at_failure(rank_, hosts_, Watchdog::end_after_failure);
  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  const auto lower = std::count(hosts_.begin(), hosts_.begin() + rank_, hosts_[rank_]);  // on this host
  CUDA_CHECK(cudaSetDevice(static_cast<int>(lower) % devices));
  // Slurm shows each rank one GPU, all with the number 0, so GPUs are told apart by their UUIDs.
  const std::vector<std::string> gpus = all_gather(host + device_uuid(), ranks_);
  share_device(static_cast<int>(std::count(gpus.begin(), gpus.end(), gpus[rank_])));
  check_versions();
  count_streams(streams_of_nccl);  // NCCL's for the order of launches, of all communicators
  watchdog_ = std::make_unique<Watchdog>(rank_, ranks_);
  process_ = rank_, processes_ = ranks_;
  peers_before_ = std::exchange(peers_now, this);
}

// Between hosts, older versions of MPICH deadlock in MPI_Finalize if one rank answers another's last message
// before it comes there itself (github.com/pmodels/mpich/pull/6596). So the ranks meet, and then none answers
// for a while: until all have come.
World::~World() {
  count_streams(-streams_of_nccl);
  peers_now = peers_before_;
  constexpr double patience = 10;  // seconds
  const bool between_hosts = started_mpi_ && several_hosts();
  if (between_hosts) all_arrive(patience);
  watchdog_.reset();
  if (between_hosts) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    alarm(60);  // seconds; should they deadlock all the same, it ends the process
  }
  if (started_mpi_) MPI_Finalize();
}

std::string World::places() const {
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  const std::vector<std::string> devices = gather(std::to_string(device));
  std::ostringstream text;
  std::set<std::string> named;
  for (int first = 0; process_ == 0 && several_hosts() && first < processes_; ++first) {
    if (!named.insert(hosts_[first]).second) continue;
    std::ostringstream gpus;
    text << hosts_[first] << ": ranks";
    for (int rank = first; rank < processes_; ++rank) {
      if (hosts_[rank] == hosts_[first]) text << ' ' << rank, gpus << ' ' << devices[rank];
    }
    text << " on GPUs" << gpus.str() << '\n';
  }
  return text.str();
}

void World::configure(const CommunicationConfig& config) {
  if (config.dry_run && several_hosts())
    throw UsageError("--dry-run", "on several hosts", "all ranks on one");
  configure_device(config);
  watchdog_->set_timeout(config.timeout);
  check_link(config.link);
  if (!config.link.empty()) setenv("NCCL_CPU_LINK", config.link.c_str(), true);
  if (config.ranks_per_node > 0) {
    setenv("NCCL_CPU_RANKS_PER_NODE", std::to_string(config.ranks_per_node).c_str(), true);
  }
}

int World::ranks_per_node(int of_gpu) const {
#ifdef NCCL_OVER_MPI
  std::string reason;  // a wrong one is refused with the first communicator
  nccl_mpi::Network network;
  network.ranks_per_node = of_gpu;
  if (const auto found = nccl_mpi::network_from_environment(network, &reason)) return found->ranks_per_node;
#endif
  return of_gpu;
}

void World::fold(int ranks, const PresentRanks& present) {
  const size_t wanted = present.ranks.size();
  if (processes_ != static_cast<int>(wanted)) {
    throw UsageError("mpirun -n", std::to_string(processes_),
                     std::to_string(wanted) + ", the ranks that differ of " + std::to_string(ranks));
  }
  rank_ = present.ranks[process_], ranks_ = ranks;
  stands_for_ = present.stand_for[process_];
  present_ = present.ranks;
}

int World::process_of(int rank) const {
  if (present_.empty()) return rank;
  const auto found = std::lower_bound(present_.begin(), present_.end(), rank);
  return found != present_.end() && *found == rank ? static_cast<int>(found - present_.begin()) : -1;
}

std::vector<double> World::largest(const std::vector<double>& values) const {
  std::vector<double> with_clock = values;
  with_clock.push_back(now());
  std::vector<double> result = reduce(*watchdog_, with_clock, MPI_DOUBLE, MPI_MAX);
  advance_clock(result.back());
  result.pop_back();
  return result;
}
std::vector<double> World::sum(const std::vector<double>& values) const {
  std::vector<double> of_all = values;
  for (double& value : of_all) value *= stands_for_;
  return reduce(*watchdog_, of_all, MPI_DOUBLE, MPI_SUM);
}
std::vector<uint32_t> World::exclusive_or(const std::vector<uint32_t>& values) const {
  return reduce(*watchdog_, values, MPI_UINT32_T, MPI_BXOR);
}

std::vector<std::string> World::gather(const std::string& text) const {
  const Watchdog::Call call(*watchdog_, "MPI_Igather");
  MPI_Request request;
  const int size = static_cast<int>(text.size());
  std::vector<int> sizes(processes_);
  MPI_CHECK(MPI_Igather(&size, 1, MPI_INT, sizes.data(), 1, MPI_INT, 0, MPI_COMM_WORLD, &request));
  wait(request);
  // A message each: MPI_Igatherv would count the bytes of all traces together by an int.
  constexpr int tag = 1;
  if (process_ > 0) {
    MPI_CHECK(MPI_Isend(text.data(), size, MPI_CHAR, 0, tag, MPI_COMM_WORLD, &request));
    wait(request);
    return {};
  }
  std::vector<std::string> result = {text};
  for (int i = 1; i < processes_; ++i) {
    result.emplace_back(sizes[i], ' ');
    MPI_CHECK(MPI_Irecv(result[i].data(), sizes[i], MPI_CHAR, i, tag, MPI_COMM_WORLD, &request));
    wait(request);
  }
  return result;
}

bool World::all_arrive(double seconds) const {
  MPI_Request request;
  MPI_CHECK(MPI_Ibarrier(MPI_COMM_WORLD, &request));
  return wait_at_most(request, seconds);
}

std::vector<int> World::all() const {
  std::vector<int> ranks(ranks_);
  std::iota(ranks.begin(), ranks.end(), 0);
  return ranks;
}

TrafficByOperation World::traffic() const {
  TrafficByOperation sum;
  for (const Communicator* communicator : communicators_) {
    for (const auto& [operation, traffic] : communicator->traffic()) {
      sum[operation].calls += traffic.calls;
      sum[operation].elements += traffic.elements;
      sum[operation].sent_bytes += traffic.sent_bytes;
    }
  }
  return sum;
}

size_t World::library_bytes() const {
  int channels = 0;
  for (const Communicator* c : communicators_) channels += c->channels();
  return pentatron::library_bytes(channels);
}

void World::begin_counting() {
  for (Communicator* communicator : communicators_) communicator->reset_traffic();
}

// ---- Communicator -----------------------------------------------------------------------------------------

Communicator::Communicator(World& world, const std::vector<int>& members, const std::string& name,
                           int most_blocks)
    : world_(world),
      members_(members),
      name_(world.keep(name)),
      stream_(name_, /*urgent=*/true),
      ranks_(static_cast<int>(members.size())),
      channels_(ranks_ > 1 ? most_blocks : 0) {
  const Watchdog::Call call(world_.watchdog(), "ncclCommInitRank");
  rank_ = static_cast<int>(std::find(members.begin(), members.end(), world.rank()) - members.begin());
  std::vector<int> present;  // the process of each member, -1: it is absent
  for (const int member : members) present.push_back(world.process_of(member));
  std::vector<int> processes = present;  // this one for those that are absent: nobody waits for itself
  std::ranges::replace(processes, -1, world.process_);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.maxCTAs = most_blocks;
#ifdef NCCL_OVER_MPI
  if (!world.present_.empty()) config.world_ranks = members.data(), config.processes = present.data();
#endif
  // The first member that is there makes the identifier and sends it to the others.
  constexpr int tag = 0;
  ncclUniqueId id;
  MPI_Request request;
  const int first = *std::min_element(processes.begin(), processes.end());
  if (world.process_ == first) {
    NCCL_CHECK(ncclGetUniqueId(&id));
    for (const int process : processes) {
      if (process == first) continue;
      MPI_CHECK(MPI_Isend(&id, sizeof id, MPI_BYTE, process, tag, MPI_COMM_WORLD, &request));
      wait(request);
    }
  } else {
    MPI_CHECK(MPI_Irecv(&id, sizeof id, MPI_BYTE, first, tag, MPI_COMM_WORLD, &request));
    wait(request);
  }
  NCCL_CHECK(ncclCommInitRankConfig(&comm_, ranks_, id, rank_, &config));
  const uint64_t number = std::hash<std::string_view>()({id.internal, sizeof id.internal});
  watched_ = world_.watchdog().add(name, number, processes, comm_);
  if (ranks_ > 1) count_streams(streams_of_nccl);
  world_.communicators_.insert(this);
}

Communicator::~Communicator() {
  const Watchdog::Call call(world_.watchdog(), "ncclCommDestroy");  // it waits for ranks of the same node
  cudaStreamSynchronize(stream_);
  world_.communicators_.erase(this);
  world_.watchdog().remove(watched_);
  ncclCommDestroy(comm_);
  if (ranks_ > 1) count_streams(-streams_of_nccl);
}

template <class T, class Issue>
void Communicator::issue(const char* operation, size_t elements, double sent_share, int peer,
                         const Issue& call) {
  if (in_group_) {
    call();
    pending_.push_back({operation, elements, peer});
  } else {
    trace::Range range(stream_, operation, moves(elements * sent_share * sizeof(T)));
    world_.watchdog().begin(stream_);
    {
      const Watchdog::Call in(world_.watchdog(), operation);
      call();
    }
    world_.watchdog().note(operation, watched_, elements, peer, stream_);
  }
  Traffic& t = traffic_[operation];
  t.calls += 1;
  t.elements += elements;
  t.sent_bytes += elements * sent_share * sizeof(T);
}

Communicator::Group::Group(Communicator& communicator)
    : communicator_(communicator), range_(communicator.stream_, "group") {
  communicator_.world_.watchdog().begin(communicator_.stream_);
  NCCL_CHECK(ncclGroupStart());
  communicator_.in_group_ = true;
}

Communicator::Group::~Group() {
  Communicator& c = communicator_;
  {
    const Watchdog::Call call(c.world_.watchdog(), "ncclGroupEnd");
    NCCL_CHECK(ncclGroupEnd());
  }
  for (const Pending& p : c.pending_)
    c.world_.watchdog().note(p.operation, c.watched_, p.elements, p.peer, c.stream_);
  c.pending_.clear();
  c.in_group_ = false;
}

template <class T>
void Communicator::all_reduce(const T* in, T* out, size_t size, ncclRedOp_t op) {
  issue<T>("all_reduce", size, 2.0 * (ranks_ - 1) / ranks_, no_peer,
           [&] { NCCL_CHECK(ncclAllReduce(in, out, size, nccl_type<T>, op, comm_, stream_)); });
}

template <class T>
void Communicator::reduce_scatter(const T* in, T* out, size_t size, ncclRedOp_t op) {
  issue<T>("reduce_scatter", size * ranks_, (ranks_ - 1.0) / ranks_, no_peer,
           [&] { NCCL_CHECK(ncclReduceScatter(in, out, size, nccl_type<T>, op, comm_, stream_)); });
}

template <class T>
void Communicator::all_gather(const T* in, T* out, size_t size) {
  issue<T>("all_gather", size * ranks_, (ranks_ - 1.0) / ranks_, no_peer,
           [&] { NCCL_CHECK(ncclAllGather(in, out, size, nccl_type<T>, comm_, stream_)); });
}

template <class T>
void Communicator::broadcast(T* data, size_t size, int root) {
  const bool last_of_ring = rank_ == (root + ranks_ - 1) % ranks_;  // it passes nothing on
  issue<T>("broadcast", size, last_of_ring ? 0 : 1, root,
           [&] { NCCL_CHECK(ncclBroadcast(data, data, size, nccl_type<T>, root, comm_, stream_)); });
}

template <class T>
void Communicator::send(const T* data, size_t size, int peer) {
  issue<T>("send", size, 1, peer,
           [&] { NCCL_CHECK(ncclSend(data, size, nccl_type<T>, peer, comm_, stream_)); });
}

template <class T>
void Communicator::receive(T* data, size_t size, int peer) {
  issue<T>("receive", size, 0, peer,
           [&] { NCCL_CHECK(ncclRecv(data, size, nccl_type<T>, peer, comm_, stream_)); });
}

template <class T>
void Communicator::connect(int to, int from, T* scratch) {
  {
    const Group exchange(*this);
    send(scratch, 1, to);
    receive(scratch + 1, 1, from);
  }
  stream_.synchronize();
}

template <class T>
void Communicator::all_to_all(const T* in, T* out, size_t size) {
  issue<T>("all_to_all", size * ranks_, (ranks_ - 1.0) / ranks_, no_peer, [&] {
    NCCL_CHECK(ncclGroupStart());
    for (int peer = 0; peer < ranks_; ++peer) {
      NCCL_CHECK(ncclSend(in + peer * size, size, nccl_type<T>, peer, comm_, stream_));
      NCCL_CHECK(ncclRecv(out + peer * size, size, nccl_type<T>, peer, comm_, stream_));
    }
    NCCL_CHECK(ncclGroupEnd());
  });
}

template <class T>
void Communicator::all_to_all_v(const std::vector<Part<T>>& in, const std::vector<Part<T>>& out) {
  size_t elements = 0, sent = 0;
  for (const Part<T>& part : in) {
    elements += part.count;
    if (part.peer != rank_) sent += part.count;
  }
  issue<T>("all_to_all_v", elements, elements == 0 ? 0 : static_cast<double>(sent) / elements, no_peer, [&] {
    NCCL_CHECK(ncclGroupStart());
    for (const Part<T>& part : in) {
      if (part.count > 0)
        NCCL_CHECK(ncclSend(part.data, part.count, nccl_type<T>, part.peer, comm_, stream_));
    }
    for (const Part<T>& part : out) {
      if (part.count > 0)
        NCCL_CHECK(ncclRecv(part.data, part.count, nccl_type<T>, part.peer, comm_, stream_));
    }
    NCCL_CHECK(ncclGroupEnd());
  });
}

void Communicator::sum_scalars(double* values, size_t size, cudaStream_t compute) {
  wait_stream(stream_, compute);
  issue<double>("scalars", size, 2.0 * (ranks_ - 1) / ranks_, no_peer, [&] {
    NCCL_CHECK(ncclAllReduce(values, values, size, ncclDouble, ncclSum, comm_, stream_));
  });
  wait_stream(compute, stream_);
}

#define PENTATRON_INSTANTIATE(T)                                                    \
  template void Communicator::all_reduce<T>(const T*, T*, size_t, ncclRedOp_t);     \
  template void Communicator::reduce_scatter<T>(const T*, T*, size_t, ncclRedOp_t); \
  template void Communicator::all_gather<T>(const T*, T*, size_t);                  \
  template void Communicator::broadcast<T>(T*, size_t, int);                        \
  template void Communicator::send<T>(const T*, size_t, int);                       \
  template void Communicator::receive<T>(T*, size_t, int);                          \
  template void Communicator::connect<T>(int, int, T*);                             \
  template void Communicator::all_to_all<T>(const T*, T*, size_t);                  \
  template void Communicator::all_to_all_v<T>(const std::vector<Part<T>>&, const std::vector<Part<T>>&);
PENTATRON_INSTANTIATE(float)
PENTATRON_INSTANTIATE(double)
PENTATRON_INSTANTIATE(__nv_bfloat16)
PENTATRON_INSTANTIATE(__half)
PENTATRON_INSTANTIATE(int32_t)
#undef PENTATRON_INSTANTIATE

}  // namespace pentatron
