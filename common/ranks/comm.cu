#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <thread>

#include "ranks/comm.h"
#ifdef NCCL_OVER_MPI
#include "modelled_link.h"
#endif

namespace pentatron {
namespace {

// On a GPU NCCL makes two streams for each communicator. One of them waits for each operation, the other one
// has work with CUDA graphs only (NCCL 2.30, enqueue.cc); but a stream has a work queue also while it is
// idle. So groups of one member, whose operations are copies, share a communicator. NCCL over MPI has one
// stream.
#ifdef CUDA_CPU
constexpr int streams_of_nccl = 0;
#elif defined(NCCL_OVER_MPI)
constexpr int streams_of_nccl = 1;
#else
constexpr int streams_of_nccl = 2;
#endif
constexpr bool share_self = streams_of_nccl == 2;

// What only NCCL over MPI has: modelled links, of which check_link throws UsageError if it can't read one,
// and a folded world, of which some members are there; the other ones have -1 for their process.
#ifdef NCCL_OVER_MPI
void check_link(const std::string& link) {
  std::string expected;
  if (!nccl_mpi::parse_link(link, &expected)) throw UsageError("--link", link, expected);
}
void set_present(ncclConfig_t& config, const std::vector<int>& members, const std::vector<int>& processes) {
  config.world_ranks = members.data();
  config.processes = processes.data();
}
#else
void check_link(const std::string& link) {
  throw UsageError("--link", link, "no modelled link with real NCCL; build with NCCL=mpi");
}
void set_present(ncclConfig_t&, const std::vector<int>&, const std::vector<int>&) {}
#endif

// Reduces each value over all ranks.
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

}  // namespace

void check_nccl(ncclResult_t status, const char* call, const char* file, int line) {
  if (status != ncclSuccess)
    fail(call, text(ncclGetErrorString(status), ": ", ncclGetLastError(nullptr)).c_str(), file, line);
}

std::vector<int> every(int first, int count, int stride) {
  std::vector<int> ranks(count);
  for (int i = 0; i < count; ++i) ranks[i] = first + i * stride;
  return ranks;
}

// ---- World ------------------------------------------------------------------------------------------------

World::World(int* argc, char*** argv) {
  set_work_queues();
  constexpr int unless_set = 0;                           // what the user has set stays
  setenv("CUDA_MODULE_LOADING", "EAGER", unless_set);     // a kernel loaded late may wait behind a collective
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", unless_set);  // operations start in the host's order
  setenv("NCCL_RUNTIME_CONNECT", "0", unless_set);        // ranks connect at once, not during collectives
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
  MPI_Request duplicated;
  MPI_CHECK(MPI_Comm_idup(MPI_COMM_WORLD, &arrivals_, &duplicated));
  wait(duplicated);
  char host[MPI_MAX_PROCESSOR_NAME];
  int length = 0;
  MPI_CHECK(MPI_Get_processor_name(host, &length));
  hosts_ = all_gather(host, ranks_);
  at_failure(rank_, hosts_, end_after_failure);
  int devices = 0;
  CUDA_CHECK(cudaGetDeviceCount(&devices));
  const auto lower = std::count(hosts_.begin(), hosts_.begin() + rank_, hosts_[rank_]);  // on this host
  CUDA_CHECK(cudaSetDevice(static_cast<int>(lower) % devices));
  // Slurm shows each rank one GPU, all with the number 0, so GPUs are told apart by their UUIDs.
  std::ostringstream gpu;
  gpu << host << std::hex;
  for (const unsigned char byte : this_device().uuid.bytes) gpu << int{byte} << ' ';
  const std::vector<std::string> gpus = all_gather(gpu.str(), ranks_);
  processes_of_device = static_cast<int>(std::count(gpus.begin(), gpus.end(), gpus[rank_]));
  check_versions();
  streams_in_use += streams_of_nccl > 0;  // NCCL's for the order of launches, of all communicators
  watchdog_ = start_watchdog(rank_, ranks_);
  process_ = rank_;
  processes_ = ranks_;
  peers_now = this;
}

// Between hosts, older versions of MPICH deadlock in MPI_Finalize if one rank answers another's last message
// before it comes there itself (github.com/pmodels/mpich/pull/6596). So the ranks meet, and then none answers
// for a while: until all have come.
World::~World() {
  if (self_) {
    ncclCommDestroy(self_);
    streams_in_use -= streams_of_nccl;
  }
  streams_in_use -= streams_of_nccl > 0;
  peers_now = &single_process;
  constexpr double patience = 10;  // seconds
  const bool between_hosts = started_mpi_ && several_hosts();
  if (between_hosts) all_arrive(patience);
  MPI_Comm_free(&arrivals_);
  watchdog_.reset();
  if (between_hosts) {
    std::this_thread::sleep_for(std::chrono::seconds(1));
    alarm(60);  // seconds; should they deadlock all the same, it ends the process
  }
  if (started_mpi_) MPI_Finalize();
}

std::string World::hosts() const {
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
  if (is_dry_run() && several_hosts()) throw UsageError("--dry-run", "on several hosts", "all ranks on one");
  watchdog_->set_timeout(config.timeout);
  if (config.ranks_per_node > 0)
    setenv("NCCL_CPU_RANKS_PER_NODE", std::to_string(config.ranks_per_node).c_str(), true);
  if (config.link.empty()) return;
  setenv("NCCL_CPU_LINK", config.link.c_str(), true);
  check_link(config.link);
}

void World::fold(int ranks, const std::vector<int>& present, int stands_for) {
  rank_ = present[process_];
  ranks_ = ranks;
  stands_for_ = stands_for;
  present_ = present;
}

int World::process_of(int rank) const {
  if (present_.empty()) return rank;
  const auto found = std::ranges::find(present_, rank);
  return found != present_.end() ? static_cast<int>(found - present_.begin()) : -1;
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

std::string World::first_fault(const std::string& words) const {
  if (largest({words.empty() ? 0.0 : 1.0})[0] == 0) return {};
  for (const std::string& of_rank : gather(words)) {
    if (!of_rank.empty()) return of_rank;
  }
  return "rank 0 says why";
}

std::string World::difference(const std::string& lines) const {
  std::map<std::string, std::map<std::string, std::string>>
      parts;  // contents of each, and the ranks that have it
  const std::vector<std::string> all = gather(lines);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    std::istringstream of_rank(all[rank]);
    std::string thing, part, content;
    while (std::getline(of_rank, thing, '\t') && std::getline(of_rank, part, '\t') &&
           std::getline(of_rank, content)) {
      std::string& ranks = parts[thing + '\t' + part][content];
      ranks += (ranks.empty() ? "" : ", ") + rank_name(static_cast<int>(rank));
    }
  }
  std::string words;
  for (const auto& [name, contents] : parts) {
    if (contents.size() == 1) continue;
    words = name.substr(0, name.find('\t')) + " is not the same on all ranks";
    for (const auto& [of_ranks, ranks] : contents) words += "; " + of_ranks + " on " + ranks;
    break;
  }
  return first_fault(words);
}

bool World::all_arrive(double seconds) const {
  MPI_Request request;
  MPI_CHECK(MPI_Ibarrier(arrivals_, &request));
  return wait_at_most(request, seconds);
}

TrafficByOperation World::traffic() const {
  TrafficByOperation sum;
  for (const Communicator* communicator : communicators_) {
    for (const auto& [operation, traffic] : communicator->traffic()) sum[operation] += traffic;
  }
  return sum;
}

size_t World::library_bytes(int channels_to_come) const {
  int channels = channels_to_come;
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
      stream_(name.c_str(), /*urgent=*/true),
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
  if (!world.present_.empty()) set_present(config, members, present);
  const bool is_shared = share_self && ranks_ == 1;
  uint64_t number = ++world.communicators_made_;  // of a group of one member: no other rank asks for it
  if (is_shared) comm_ = world.self_;
  if (comm_ == nullptr) number = join(processes, config);
  if (is_shared) world.self_ = comm_;
  watched_ = world_.watchdog().add(name, number, processes, comm_);
  world_.communicators_.insert(this);
}

// Makes the communicator. Returns a number that the members have in common.
uint64_t Communicator::join(const std::vector<int>& processes, ncclConfig_t config) {
  // The first member that is there makes the identifier and sends it to the others.
  constexpr int tag = 0;
  ncclUniqueId id;
  MPI_Request request;
  const int first = *std::min_element(processes.begin(), processes.end());
  if (world_.process_ == first) {
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
  streams_in_use += streams_of_nccl;
  return std::hash<std::string_view>()({id.internal, sizeof id.internal});
}

Communicator::~Communicator() {
  const Watchdog::Call call(world_.watchdog(), "ncclCommDestroy");  // it waits for ranks of the same node
  const bool throws = std::uncaught_exceptions() > 0;               // maybe alone: then nobody comes
  if (!throws) cudaStreamSynchronize(stream_);
  world_.communicators_.erase(this);
  world_.watchdog().remove(watched_);
  if (comm_ == world_.self_) return;  // the world destroys it
  throws ? ncclCommAbort(comm_) : ncclCommDestroy(comm_);
  streams_in_use -= streams_of_nccl;
}

void Communicator::issue(const char* operation, size_t elements, double sent_bytes, int peer,
                         const std::function<void()>& call) {
  std::optional<Group> alone;
  if (!in_group_) alone.emplace(*this, operation, moves(sent_bytes));
  call();
  world_.watchdog().note(operation, watched_, elements, peer);
  traffic_[operation] += {1, static_cast<int64_t>(elements), sent_bytes};
}

Communicator::Group::Group(Communicator& communicator, const char* name, const Cost& cost)
    : communicator_(communicator), operation_(communicator.stream_, name, cost) {
  communicator_.world_.watchdog().begin(communicator_.stream_);
  NCCL_CHECK(ncclGroupStart());
  communicator_.in_group_ = true;
}

Communicator::Group::~Group() {
  Communicator& c = communicator_;
  Watchdog& watchdog = c.world_.watchdog();
  {
    const Watchdog::Call call(watchdog, operation_.name());
    NCCL_CHECK(ncclGroupEnd());
  }
  watchdog.end(c.stream_);
  c.in_group_ = false;
}

void Communicator::sum_scalars(double* values, size_t size, cudaStream_t compute) {
  wait_stream(stream_, compute);
  issue("scalars", size, 2 * bytes_of_ring<double>(size), no_peer,
        [&] { NCCL_CHECK(ncclAllReduce(values, values, size, ncclDouble, ncclSum, comm_, stream_)); });
  wait_stream(compute, stream_);
}

}  // namespace pentatron
