// The ranks and how they communicate. A `Communicator` is a thin layer over an ncclComm_t and a stream of its
// own. Collectives are issued to that stream; only events order it against other streams. The `World` is this
// process among all that mpirun started, or among more of which only those are there (a dry run of 07). It
// uses MPI where the hosts have to agree, and owns the watchdog, which hears of each operation.
#pragma once

#include <mpi.h>
#include <nccl.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "device/precision.h"
#include "device/tensor.h"
#include "ranks/communication_config.h"
#include "ranks/mpi_wait.h"
#include "ranks/peers.h"
#include "ranks/watch.h"

// Failed calls print the call, the error's text, file:line and rank, and end every rank.
#define NCCL_CHECK(call) pentatron::check_nccl((call), #call, __FILE__, __LINE__)

namespace pentatron {

void check_nccl(ncclResult_t status, const char* call, const char* file, int line);

class World;

// The most thread blocks (NCCL: CTAs) of one operation. A block of NCCL's keeps a multiprocessor from the
// products that run beside it, also while it waits for another rank, and NCCL takes 24 to 32 if it may. These
// numbers follow from what hides an operation; they were not measured. NCCL_MAX_CTAS replaces all of them.
constexpr int edge_blocks = 4;     // messages of two ranks: short, and posted early, so they wait long
constexpr int data_blocks = 8;     // beside backward, which is longer than they are
constexpr int tensor_blocks = 16;  // forward waits for them

class Communicator {
 public:
  // `members`: ranks of the world; member i becomes rank i. All members call this, and no other rank. Its
  // stream is urgent: a collective need not wait until a kernel that fills the GPU has drained.
  Communicator(World& world, const std::vector<int>& members, const std::string& name,
               int most_blocks = data_blocks);
  ~Communicator();

  World& world() const { return world_; }
  const std::vector<int>& members() const { return members_; }  // ranks of the world
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  cudaStream_t stream() const { return stream_; }  // runs all its operations
  int channels() const { return channels_; }       // of NCCL; 0 with one rank

  // Operations on device buffers of `count` elements a rank. They return at once and run on stream().
  // In place: `in` may be `out` (all_reduce), the rank's own part of `out` (all_gather), or contain
  // `out` as the rank's own part (reduce_scatter). T: a type of nccl_type.
  template <class T>
  void all_reduce(const T* in, T* out, size_t count, ncclRedOp_t op = ncclSum) {
    issue("all_reduce", count, 2 * bytes_of_ring<T>(count), no_peer,
          [&] { NCCL_CHECK(ncclAllReduce(in, out, count, nccl_type(in), op, comm_, stream_)); });
  }
  template <class T>
  void reduce_scatter(const T* in /*[ranks, count]*/, T* out /*[count]*/, size_t count) {
    issue("reduce_scatter", ranks_ * count, bytes_of_ring<T>(ranks_ * count), no_peer,
          [&] { NCCL_CHECK(ncclReduceScatter(in, out, count, nccl_type(in), ncclSum, comm_, stream_)); });
  }
  template <class T>
  void all_gather(const T* in /*[count]*/, T* out /*[ranks, count]*/, size_t count) {
    issue("all_gather", ranks_ * count, bytes_of_ring<T>(ranks_ * count), no_peer,
          [&] { NCCL_CHECK(ncclAllGather(in, out, count, nccl_type(in), comm_, stream_)); });
  }
  template <class T>
  void broadcast(T* data, size_t count, int root) {
    const bool last_of_ring = rank_ == (root + ranks_ - 1) % ranks_;  // it passes nothing on
    issue("broadcast", count, last_of_ring ? 0 : count * sizeof(T), root,
          [&] { NCCL_CHECK(ncclBroadcast(data, data, count, nccl_type(data), root, comm_, stream_)); });
  }
  template <class T>
  void send(const T* data, size_t count, int peer) {
    issue("send", count, count * sizeof(T), peer,
          [&] { NCCL_CHECK(ncclSend(data, count, nccl_type(data), peer, comm_, stream_)); });
  }
  template <class T>
  void receive(T* data, size_t count, int peer) {
    issue("receive", count, 0, peer,
          [&] { NCCL_CHECK(ncclRecv(data, count, nccl_type(data), peer, comm_, stream_)); });
  }
  // Part i of `in` goes to rank i, and part i of `out` comes from rank i.
  template <class T>
  void all_to_all(const T* in /*[ranks, count]*/, T* out /*[ranks, count]*/, size_t count) {
    issue("all_to_all", ranks_ * count, bytes_of_ring<T>(ranks_ * count), no_peer, [&] {
      for (int peer = 0; peer < ranks_; ++peer) {
        NCCL_CHECK(ncclSend(in + peer * count, count, nccl_type(in), peer, comm_, stream_));
        NCCL_CHECK(ncclRecv(out + peer * count, count, nccl_type(out), peer, comm_, stream_));
      }
    });
  }
  // The same with any number of parts, of any size. Between two ranks the parts match in order.
  template <class T>
  struct Part {
    T* data;
    size_t count;
    int peer;
  };
  template <class T>
  void all_to_all_v(const std::vector<Part<T>>& in, const std::vector<Part<T>>& out) {
    size_t elements = 0, sent = 0;
    for (const auto& [data, count, peer] : in) elements += count, sent += peer == rank_ ? 0 : count;
    issue("all_to_all_v", elements, sent * sizeof(T), no_peer, [&] {
      for (const auto& [data, count, peer] : in) {
        if (count > 0) NCCL_CHECK(ncclSend(data, count, nccl_type(data), peer, comm_, stream_));
      }
      for (const auto& [data, count, peer] : out) {
        if (count > 0) NCCL_CHECK(ncclRecv(data, count, nccl_type(data), peer, comm_, stream_));
      }
    });
  }

  // Sums a few doubles in device memory, values[size], over the ranks. The sum waits for `compute`, and
  // `compute` for the sum. Its traffic is counted as "scalars".
  void sum_scalars(double* values, size_t size, cudaStream_t compute);

  // Sends an element to rank `to`, receives one from rank `from`, and waits. NCCL connects two ranks at
  // their first exchange, which may block the host: so it comes before other operations are under way.
  template <class T>
  void connect(int to, int from, T* scratch /*[2]*/) {
    {
      const Group exchange(*this);
      send(scratch, 1, to);
      receive(scratch + 1, 1, from);
    }
    stream_.synchronize();
  }

  // Collects the operations of this communicator that are issued while it exists. Its destructor starts them
  // together, as one. An operation by itself is a group of one.
  class Group {
   public:
    explicit Group(Communicator& communicator, const char* name = "group",
                   const Cost& cost = shortest_kernel);
    ~Group();
    Group(const Group&) = delete;

   private:
    Communicator& communicator_;
    trace::Operation operation_;
  };

  TrafficByOperation traffic() const { return traffic_; }
  void reset_traffic() { traffic_.clear(); }

 private:
  static constexpr int no_peer = -1;

  static constexpr ncclDataType_t nccl_type(const float*) { return ncclFloat; }
  static constexpr ncclDataType_t nccl_type(const double*) { return ncclDouble; }
  static constexpr ncclDataType_t nccl_type(const __nv_bfloat16*) { return ncclBfloat16; }
  static constexpr ncclDataType_t nccl_type(const __half*) { return ncclHalf; }
  static constexpr ncclDataType_t nccl_type(const int32_t*) { return ncclInt32; }

  uint64_t join(const std::vector<int>& processes, ncclConfig_t config);

  // What each rank passes on when a buffer of so many elements goes round a ring once.
  template <class T>
  double bytes_of_ring(size_t elements) const {
    return elements * ((ranks_ - 1.0) / ranks_) * sizeof(T);
  }
  // Runs `call`, which issues an operation to NCCL. Tells trace and watchdog of it, and counts its traffic.
  void issue(const char* operation, size_t elements, double sent_bytes, int peer,
             const std::function<void()>& call);

  World& world_;
  const std::vector<int> members_;
  Stream stream_;
  Watchdog::Watched* watched_ = nullptr;
  ncclComm_t comm_ = nullptr;
  int rank_ = 0, ranks_ = 1;
  int channels_ = 0;
  TrafficByOperation traffic_;
  bool in_group_ = false;
};

// With CUDA_MODULE_LOADING=EAGER: bytes, measured on an H200 (CUDA 13.0, NCCL 2.28).
constexpr size_t context_with_all_kernels = 1408 << 20;

// What CUDA and NCCL take of a device: bytes. A communicator has NCCL's channels, one a thread block. On each
// comes a ring's data, through a buffer for each of three protocols (NCCL 2.30, init.cc: LL, LL128, Simple).
// An estimate: trees, NVLS and messages to several peers take more, and NCCL may use fewer channels.
constexpr size_t library_bytes(int channels) {
  constexpr size_t buffers_of_channel = (512 << 10) + 120 * 640 * 8 * 8 + (4 << 20);
  return context_with_all_kernels + channels * buffers_of_channel;
}

// `count` ranks, `stride` apart.
std::vector<int> every(int first, int count, int stride = 1);

class World : public Peers {
 public:
  // Starts MPI, unless it is running already (as in tests). Picks this rank's GPU: the rank's number on
  // its host, modulo the number of GPUs there. Starts the watchdog.
  World(int* argc, char*** argv);
  ~World() override;

  // Sets the watchdog's timeout and the modelled links. Called after configure_device, and before the first
  // communicator. Throws UsageError.
  void configure(const CommunicationConfig& config);

  // From now on the world has `ranks` ranks, of which only `present` are there, one for each process. This
  // one stands for so many that do what it does. Of a dry run, before the first communicator. Messages about
  // failures go on to number the processes.
  void fold(int ranks, const std::vector<int>& present, int stands_for);

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  int stands_for() const override { return stands_for_; }
  Watchdog& watchdog() { return *watchdog_; }

  // Host values (peers.h). All ranks call these, in the same order. A rank that waits yields its core.
  std::vector<double> largest(const std::vector<double>& values) const override;
  std::vector<double> sum(const std::vector<double>& values) const override;
  std::vector<uint32_t> exclusive_or(const std::vector<uint32_t>& values) const override;
  std::vector<std::string> gather(const std::string& text) const override;
  std::string first_fault(const std::string& words) const override;
  std::string difference(const std::string& lines) const override;
  std::string hosts() const override;
  bool all_arrive(double seconds) const override;
  void end_all(int status) const override { end_all_ranks(status); }
  std::vector<int> all() const { return every(0, ranks_); }

  size_t context_bytes() const override { return context_with_all_kernels; }
  // With the channels of each existing communicator, and those of later ones.
  size_t library_bytes(int channels_to_come) const override;

  // The sum over all existing communicators.
  void begin_counting() override;
  TrafficByOperation traffic() const override;

 private:
  friend class Communicator;
  bool several_hosts() const { return std::set(hosts_.begin(), hosts_.end()).size() > 1; }
  int process_of(int rank) const;  // -1: it is absent

  int rank_ = 0, ranks_ = 1;
  int process_ = 0, processes_ = 1;  // of MPI_COMM_WORLD: as rank_ and ranks_, unless the world is folded
  std::vector<int> present_;         // ranks that are there, of a folded world
  int stands_for_ = 1;
  std::vector<std::string> hosts_;  // of each process
  MPI_Comm arrivals_;               // of all_arrive alone, as other ranks may be in a collective meanwhile
  bool started_mpi_ = false;
  std::set<Communicator*> communicators_;
  ncclComm_t self_ = nullptr;  // of all groups of one member, if they share one; made with the first of them
  uint64_t communicators_made_ = 0;  // by this rank, so far
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace pentatron
