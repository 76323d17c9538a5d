// One small program for each way to forget the order between compute and communication, and one beside it
// that forgets nothing. Run on several ranks as `nccl_tsan_cases NAME...`: ThreadSanitizer must report it if
// the name says what is missing, and be silent otherwise.
#include <mpi.h>
#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <string>

#include "cuda_cpu.h"

namespace {

void check(int status) {
  if (status == 0) return;
  std::fprintf(stderr, "unexpected status %d: %s\n", status, ncclGetLastError(nullptr));
  std::exit(99);
}

}  // namespace

// External linkage, so that the names appear in reports.
__global__ void write_values(float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = 1.0f;
}

__global__ void read_values(const float* in, float* out, int n) {
  for (int i = 0; i < n; ++i) out[i] = in[i];
}

namespace {

int count;  // floats in a block; the large cases take another way through the stand-in

struct Setup {
  int ranks, rank;
  ncclComm_t comm, other_comm;
  cudaStream_t compute, communication, other;
  cudaEvent_t event;
  float *a, *b, *c;  // [ranks, count]

  Setup() {
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    for (ncclComm_t* each : {&comm, &other_comm}) {
      ncclUniqueId id;
      if (rank == 0) check(ncclGetUniqueId(&id));
      MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
      check(ncclCommInitRankConfig(each, ranks, id, rank, nullptr));
    }
    for (cudaStream_t* stream : {&compute, &communication, &other}) {
      check(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    }
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (float** array : {&a, &b, &c}) {
      check(cudaMalloc(reinterpret_cast<void**>(array), sizeof(float) * count * ranks));
      check(cudaMemset(*array, 0, sizeof(float) * count * ranks));
    }
  }
  ~Setup() {
    check(ncclCommDestroy(other_comm));
    check(ncclCommDestroy(comm));
    for (float* array : {a, b, c}) check(cudaFree(array));
    check(cudaEventDestroy(event));
    for (cudaStream_t stream : {compute, communication, other}) check(cudaStreamDestroy(stream));
  }
  Setup(const Setup&) = delete;

  void order(cudaStream_t first, cudaStream_t second) const {
    check(cudaEventRecord(event, first));
    check(cudaStreamWaitEvent(second, event));
  }
  template <class... Parameters, class... Arguments>
  void launch(void (*kernel)(Parameters...), Arguments... arguments) const {
    cudaLaunchConfig_t config{};
    config.gridDim = 1;
    config.blockDim = 1;
    config.stream = compute;
    check(cudaLaunchKernelEx(&config, kernel, arguments...));
  }
  void write(float* x) const { launch(write_values, x, count * ranks); }
  void read(const float* x) const { launch(read_values, x, c, count * ranks); }
  void all_reduce(float* x, ncclComm_t on, cudaStream_t stream) const {
    check(ncclAllReduce(x, x, count, ncclFloat, ncclSum, on, stream));
  }
};

// What has been done long ago, without the host having learnt of it, must not be ordered by accident.
void let_the_streams_idle() {
  const timespec pause{0, 50'000'000};
  nanosleep(&pause, nullptr);
}

using Operation = void (*)(const Setup&);  // reads a, or writes b, on the communication stream

void all_reduce_in_place(const Setup& s) { s.all_reduce(s.a, s.comm, s.communication); }
void all_reduce(const Setup& s) {
  check(ncclAllReduce(s.a, s.b, count, ncclFloat, ncclSum, s.comm, s.communication));
}
void all_gather(const Setup& s) { check(ncclAllGather(s.a, s.b, count, ncclFloat, s.comm, s.communication)); }
void reduce_scatter(const Setup& s) {
  check(ncclReduceScatter(s.a, s.b, count, ncclFloat, ncclSum, s.comm, s.communication));
}
void broadcast(const Setup& s) {
  for (int root = 0; root < s.ranks; ++root) {
    check(ncclBroadcast(s.a, s.b, count, ncclFloat, root, s.comm, s.communication));
  }
}
void exchange(const Setup& s) {
  check(ncclGroupStart());
  for (int peer = 0; peer < s.ranks; ++peer) {
    check(ncclSend(s.a + peer * count, count, ncclFloat, peer, s.comm, s.communication));
    check(ncclRecv(s.b + peer * count, count, ncclFloat, peer, s.comm, s.communication));
  }
  check(ncclGroupEnd());
}

// A kernel writes what the operation reads.
void before(Operation operation, bool with_event) {
  const Setup s;
  s.write(s.a);
  let_the_streams_idle();
  if (with_event) s.order(s.compute, s.communication);
  operation(s);
}

// A kernel reads what the operation wrote.
void after(Operation operation, bool with_event) {
  const Setup s;
  operation(s);
  let_the_streams_idle();
  if (with_event) s.order(s.communication, s.compute);
  s.read(s.b);
}

// A kernel overwrites what the operation still reads.
void reuse(Operation operation, bool with_event) {
  const Setup s;
  operation(s);
  if (with_event) s.order(s.communication, s.compute);
  s.write(s.a);
}

// Of two communicators only the first is told to wait. That it starts first, orders nothing.
void two_communicators(bool with_event) {
  const Setup s;
  s.write(s.a);
  s.write(s.b);
  s.order(s.compute, s.communication);
  s.all_reduce(s.a, s.comm, s.communication);
  let_the_streams_idle();
  if (with_event) s.order(s.compute, s.other);
  s.all_reduce(s.b, s.other_comm, s.other);
}

// The host goes on issuing operations on the communicator, and looks at what is going on, after one whose
// result nobody waits for.
void bookkeeping(bool with_event) {
  const Setup s;
  s.all_reduce(s.a, s.comm, s.communication);
  if (with_event) s.order(s.communication, s.compute);
  for (int i = 0; i < 20; ++i) {
    let_the_streams_idle();
    s.all_reduce(s.b, i % 2 == 0 ? s.other_comm : s.comm, s.other);
    ncclResult_t error = ncclSuccess;
    check(ncclCommGetAsyncError(s.comm, &error));
  }
  s.read(s.a);
}

// Two operations of one communicator follow each other; so do a training step's compute and communication.
void steps() {
  const Setup s;
  for (int i = 0; i < 5; ++i) {
    s.write(s.a);
    s.order(s.compute, s.communication);
    s.all_reduce(s.a, s.comm, s.communication);
    s.all_reduce(s.a, s.comm, s.other);
    s.order(s.other, s.compute);
    s.read(s.a);
  }
}

// Host and communication use MPI at the same time, and so the same locks.
void host_uses_mpi(bool with_event) {
  const Setup s;
  s.write(s.a);
  s.order(s.compute, s.communication);
  s.all_reduce(s.a, s.comm, s.communication);
  for (int i = 0; i < 5; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    let_the_streams_idle();
  }
  if (with_event) s.order(s.communication, s.compute);
  s.read(s.a);
}

template <Operation operation>
void add_cases(std::map<std::string, void (*)()>& cases, const std::string& name) {
  cases[name + "-with-event-before"] = [] { before(operation, true); };
  cases[name + "-missing-event-before"] = [] { before(operation, false); };
  cases[name + "-with-event-after"] = [] { after(operation, true); };
  cases[name + "-missing-event-after"] = [] { after(operation, false); };
  cases[name + "-with-event-at-reuse"] = [] { reuse(operation, true); };
  cases[name + "-missing-event-at-reuse"] = [] { reuse(operation, false); };
}

std::map<std::string, void (*)()> all_cases() {
  std::map<std::string, void (*)()> cases = {
      {"in-place-missing-event-before", [] { before(all_reduce_in_place, false); }},
      {"two-communicators-with-event", [] { two_communicators(true); }},
      {"two-communicators-missing-event", [] { two_communicators(false); }},
      {"bookkeeping-with-event", [] { bookkeeping(true); }},
      {"bookkeeping-missing-event", [] { bookkeeping(false); }},
      {"host-uses-mpi-with-event", [] { host_uses_mpi(true); }},
      {"host-uses-mpi-missing-event", [] { host_uses_mpi(false); }},
      {"steps-with-events", steps},
  };
  add_cases<all_reduce>(cases, "all-reduce");
  add_cases<all_gather>(cases, "all-gather");
  add_cases<reduce_scatter>(cases, "reduce-scatter");
  add_cases<broadcast>(cases, "broadcast");
  add_cases<exchange>(cases, "exchange");
  return cases;
}

}  // namespace

// nccl_tsan_cases NAME[:FLOATS IN A BLOCK]...; without a name, lists them.
int main(int argc, char** argv) {
  const auto cases = all_cases();
  int level = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
  cuda_cpu::describe({});  // kernels take no time
  for (int i = 1; i < argc; ++i) {
    const std::string words = argv[i], name = words.substr(0, words.find(':'));
    count = name == words ? 1000 : std::stoi(words.substr(name.size() + 1));
    cases.at(name)();
  }
  if (argc == 1) {
    for (const auto& [name, run] : cases) std::puts(name.c_str());
  }
  MPI_Finalize();
}
