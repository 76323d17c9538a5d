// The CPU stand-in of the CUDA runtime keeps CUDA's rules: what runs when, who waits for whom, what is
// refused and how. What ends or changes the whole process is tested in child processes: hidden cases of this
// same program ("[.child]").
#include <cuda_runtime.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "../catch.h"
#include "cuda_cpu.h"
#include "device/trace.h"

// ---- Kernels ----------------------------------------------------------------------------------------------

__global__ void add_one(float* x, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) x[i] += 1.0f;
}

__global__ void multiply_by_two(float* x, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) x[i] *= 2.0f;
}

__global__ void store(float* x, float value) {
  if (threadIdx.x == 0) *x = value;
}

// Waits until the host writes one into pinned memory.
__global__ void wait_for_host(int* flag) {
  while (std::atomic_ref<int>(*flag).load(std::memory_order_acquire) == 0) std::this_thread::yield();
}

// visits [z, y, x] of the grid
__global__ void count_visits(int* visits) {
  const size_t block = (size_t{blockIdx.z} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  if (threadIdx.x == 0) ++visits[block];
}

// out [gridDim.x]: whether the block's n floats of shared memory were all NaN when it began
__global__ void examine_shared_memory(float* out, int n) {
  auto* shared = static_cast<float*>(cuda_cpu::shared_memory());
  bool all_nan = true;
  for (int i = 0; i < n; ++i) all_nan = all_nan && std::isnan(shared[i]);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) shared[i] = 1.0f;
  if (threadIdx.x == 0) out[blockIdx.x] = all_nan ? 1.0f : 0.0f;
}

// out [gridDim.x]: the sum of 1 + thread over the block's threads, through shared memory; every second thread
// of an odd block leaves before the second barrier.
__global__ void sum_over_threads(float* out) {
  auto* partial = static_cast<float*>(cuda_cpu::shared_scratch());
  partial[threadIdx.x] = 1.0f + static_cast<float>(threadIdx.x);
  __syncthreads();
  if (blockIdx.x % 2 == 1 && threadIdx.x % 2 == 1) return;
  float sum = 0;
  for (unsigned i = 0; i < blockDim.x; ++i) sum += partial[i];
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}

__global__ void exponentials(const float* __restrict__ x, float* __restrict__ out, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) out[i] = expf(x[i]);
}

enum class Choice { left, right };
__global__ void mixed_arguments(double* out, int a, size_t b, float c, bool d, Choice e) {
  if (threadIdx.x == 0)
    *out = a + static_cast<double>(b) + c + (d ? 1000 : 0) + (e == Choice::right ? 10000 : 0);
}

namespace {

// ---- Helpers ----------------------------------------------------------------------------------------------

struct Stream {
  cudaStream_t handle = nullptr;
  Stream() { REQUIRE(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking) == cudaSuccess); }
  ~Stream() { cudaStreamDestroy(handle); }
  Stream(const Stream&) = delete;
  operator cudaStream_t() const { return handle; }
};

struct Event {
  cudaEvent_t handle = nullptr;
  Event() { REQUIRE(cudaEventCreate(&handle) == cudaSuccess); }
  ~Event() { cudaEventDestroy(handle); }
  Event(const Event&) = delete;
  operator cudaEvent_t() const { return handle; }
};

template <class T>
struct DeviceArray {
  T* pointer = nullptr;
  size_t count;
  explicit DeviceArray(size_t count) : count(count) {
    REQUIRE(cudaMalloc(&pointer, count * sizeof(T)) == cudaSuccess);
  }
  ~DeviceArray() { cudaFree(pointer); }
  DeviceArray(const DeviceArray&) = delete;
  operator T*() const { return pointer; }
  std::vector<T> values() const {
    std::vector<T> host(count);
    REQUIRE(cudaMemcpy(host.data(), pointer, count * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    return host;
  }
  void assign(const std::vector<T>& host) {
    REQUIRE(host.size() == count);
    REQUIRE(cudaMemcpy(pointer, host.data(), count * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
  }
};

template <class T>
struct PinnedArray {
  T* pointer = nullptr;
  explicit PinnedArray(size_t count) { REQUIRE(cudaMallocHost(&pointer, count * sizeof(T)) == cudaSuccess); }
  ~PinnedArray() { cudaFreeHost(pointer); }
  PinnedArray(const PinnedArray&) = delete;
  operator T*() const { return pointer; }
};

// Something that a stream waits for until the host, at the latest in the destructor, lets it go.
struct Gate {
  PinnedArray<int> flag{1};
  explicit Gate(cudaStream_t stream) {
    if (const char* blocking = std::getenv("CUDA_LAUNCH_BLOCKING"); blocking && *blocking == '1') {
      std::fputs(
          "CUDA_LAUNCH_BLOCKING: 1 is not valid for this test; expected launches that return at once\n",
          stderr);
      std::_Exit(2);
    }
    *flag.pointer = 0;
    cuda_cpu::describe({});
    cudaLaunchConfig_t config{};
    config.stream = stream;
    REQUIRE(cudaLaunchKernelEx(&config, wait_for_host, flag.pointer) == cudaSuccess);
  }
  ~Gate() { open(); }
  void open() { std::atomic_ref<int>(*flag.pointer).store(1, std::memory_order_release); }
};

cudaLaunchConfig_t config_of(dim3 grid, dim3 block, cudaStream_t stream, size_t shared_bytes = 0) {
  cuda_cpu::describe({});  // this thread's kernels take no time
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return config;
}

template <class... Parameters, class... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                   Arguments... arguments) {
  const cudaLaunchConfig_t config = config_of(grid, block, stream);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Runs one hidden case of this program with additions to the environment; returns its exit status.
int run_child(const std::string& name, const std::string& environment = "") {
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  const std::string command = environment + " '" + self + "' '" + name + "' > /dev/null 2>&1";
  const int status = std::system(command.c_str());
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

// Whether the work ends a forked process: with SIGSEGV, or by AddressSanitizer, which notices before the
// fault.
template <class Work>
bool faults(const Work& work) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);  // Catch and the sanitizers have handlers of their own
    std::freopen("/dev/null", "w", stderr);
    work();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV : WEXITSTATUS(status) != 0;
}

}  // namespace

// ---- Streams ----------------------------------------------------------------------------------------------

TEST_CASE("a stream runs its operations in order", "[standin]") {
  Stream stream;
  DeviceArray<float> x(100);
  REQUIRE(cudaMemsetAsync(x, 0, 100 * sizeof(float), stream) == cudaSuccess);
  for (int i = 0; i < 10; ++i) {
    REQUIRE(launch(add_one, 1, 128, stream, x.pointer, 100) == cudaSuccess);
    REQUIRE(launch(multiply_by_two, 1, 128, stream, x.pointer, 100) == cudaSuccess);
  }
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  for (float value : x.values()) REQUIRE(value == 2046.0f);
}

TEST_CASE("a launch returns before the kernel has run", "[standin]") {
  Stream stream;
  Event event;
  DeviceArray<float> x(1);
  {
    Gate gate(stream);
    REQUIRE(launch(store, 1, 1, stream, x.pointer, 7.0f) == cudaSuccess);
    REQUIRE(cudaEventRecord(event, stream) == cudaSuccess);
    REQUIRE(cudaStreamQuery(stream) == cudaErrorNotReady);
    REQUIRE(cudaEventQuery(event) == cudaErrorNotReady);
    REQUIRE(cudaGetLastError() == cudaErrorNotReady);
    gate.open();
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  }
  REQUIRE(cudaStreamQuery(stream) == cudaSuccess);
  REQUIRE(cudaEventQuery(event) == cudaSuccess);
  REQUIRE(x.values()[0] == 7.0f);
}

TEST_CASE("arguments are those of the time of the launch", "[standin]") {
  Stream stream;
  DeviceArray<float> x(1);
  float value = 3;
  {
    Gate gate(stream);
    REQUIRE(launch(store, 1, 1, stream, x.pointer, value) == cudaSuccess);
    value = 4;
  }
  REQUIRE(x.values()[0] == 3.0f);
}

TEST_CASE("two streams do not wait for each other", "[standin]") {
  Stream held, free;
  DeviceArray<float> x(1);
  Gate gate(held);
  REQUIRE(launch(store, 1, 1, free, x.pointer, 1.0f) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(free) == cudaSuccess);
  REQUIRE(cudaStreamQuery(held) == cudaErrorNotReady);
}

TEST_CASE("cudaDeviceSynchronize, cudaMalloc, cudaFree and cudaMemcpy wait for all streams", "[standin]") {
  Stream first, second;
  DeviceArray<float> x(1);
  void* spare = nullptr;
  REQUIRE(cudaMalloc(&spare, 1) == cudaSuccess);
  float host = 0;
  const auto call = GENERATE(0, 1, 2, 3, 4);
  Gate gate(second);
  std::atomic<bool> opened = false;
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    opened = true;
    gate.open();
  });
  void* fresh = nullptr;
  cudaError_t error = cudaErrorUnknown;
  if (call == 0) error = cudaDeviceSynchronize();
  if (call == 1) error = cudaMalloc(&fresh, 8);
  if (call == 2) error = cudaFree(spare);
  if (call == 3) error = cudaMemcpy(&host, x, sizeof host, cudaMemcpyDeviceToHost);
  if (call == 4) error = cudaMemset(x, 0, sizeof host);
  const bool waited = opened;
  opener.join();
  CHECK(error == cudaSuccess);
  CHECK(waited);
  if (call != 2) REQUIRE(cudaFree(spare) == cudaSuccess);
  REQUIRE(cudaFree(fresh) == cudaSuccess);
}

TEST_CASE("a host function runs in stream order and may not call CUDA", "[standin]") {
  Stream stream;
  struct Seen {
    PinnedArray<float> value{1};
    float at_call = 0;
    cudaError_t launched = cudaSuccess, synchronized = cudaSuccess;
    cudaStream_t stream = nullptr;
  } seen;
  seen.stream = stream;
  {
    Gate gate(stream);
    REQUIRE(launch(store, 1, 1, stream, seen.value.pointer, 5.0f) == cudaSuccess);
    const auto function = [](void* data) {
      auto* seen = static_cast<Seen*>(data);
      seen->at_call = *seen->value.pointer;
      seen->launched = launch(store, 1, 1, seen->stream, seen->value.pointer, 6.0f);
      seen->synchronized = cudaDeviceSynchronize();
    };
    REQUIRE(cudaLaunchHostFunc(stream, function, &seen) == cudaSuccess);
  }
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  REQUIRE(seen.at_call == 5.0f);
  REQUIRE(seen.launched == cudaErrorNotPermitted);
  REQUIRE(seen.synchronized == cudaErrorNotPermitted);
}

TEST_CASE("the null stream and a destroyed stream are refused", "[standin]") {
  DeviceArray<float> x(1);
  PinnedArray<float> pinned(1);
  Event event;
  cudaStream_t destroyed;
  REQUIRE(cudaStreamCreate(&destroyed) == cudaSuccess);
  REQUIRE(cudaStreamDestroy(destroyed) == cudaSuccess);
  for (cudaStream_t stream : {cudaStream_t{nullptr}, destroyed}) {
    CHECK(launch(store, 1, 1, stream, x.pointer, 1.0f) == cudaErrorInvalidResourceHandle);
    CHECK(cudaMemsetAsync(x, 0, 4, stream) == cudaErrorInvalidResourceHandle);
    CHECK(cudaMemcpyAsync(x, pinned, 4, cudaMemcpyHostToDevice, stream) == cudaErrorInvalidResourceHandle);
    CHECK(cudaEventRecord(event, stream) == cudaErrorInvalidResourceHandle);
    CHECK(cudaStreamWaitEvent(stream, event) == cudaErrorInvalidResourceHandle);
    CHECK(cudaStreamSynchronize(stream) == cudaErrorInvalidResourceHandle);
    CHECK(cudaStreamQuery(stream) == cudaErrorInvalidResourceHandle);
  }
  CHECK(cudaStreamDestroy(destroyed) == cudaErrorInvalidResourceHandle);
  CHECK(cudaGetLastError() == cudaErrorInvalidResourceHandle);
  CHECK(cudaGetLastError() == cudaSuccess);
}

// ---- Events -----------------------------------------------------------------------------------------------

TEST_CASE("an event that was never recorded holds nobody", "[standin]") {
  Stream stream;
  Event event;
  REQUIRE(cudaStreamWaitEvent(stream, event) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  REQUIRE(cudaEventQuery(event) == cudaSuccess);
  REQUIRE(cudaEventSynchronize(event) == cudaSuccess);
  float milliseconds = 0;
  REQUIRE(cudaEventElapsedTime(&milliseconds, event, event) == cudaErrorInvalidResourceHandle);
}

TEST_CASE("a stream waits for an event of another", "[standin]") {
  Stream first, second;
  Event event;
  DeviceArray<float> x(1);
  Gate gate(first);
  REQUIRE(launch(store, 1, 1, first, x.pointer, 1.0f) == cudaSuccess);
  REQUIRE(cudaEventRecord(event, first) == cudaSuccess);
  REQUIRE(cudaStreamWaitEvent(second, event) == cudaSuccess);
  REQUIRE(launch(store, 1, 1, second, x.pointer, 2.0f) == cudaSuccess);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  REQUIRE(cudaStreamQuery(second) == cudaErrorNotReady);
  gate.open();
  REQUIRE(cudaStreamSynchronize(second) == cudaSuccess);
  REQUIRE(x.values()[0] == 2.0f);
}

TEST_CASE("a wait means the latest record at the time of the call", "[standin]") {
  Stream quick, held, waiting;
  Event event;
  REQUIRE(cudaEventRecord(event, quick) == cudaSuccess);
  REQUIRE(cudaStreamWaitEvent(waiting, event) == cudaSuccess);
  Gate gate(held);
  REQUIRE(cudaEventRecord(event, held) == cudaSuccess);  // after the wait was asked for: it does not count
  REQUIRE(cudaStreamSynchronize(waiting) == cudaSuccess);
  REQUIRE(cudaEventQuery(event) == cudaErrorNotReady);
  REQUIRE(cudaStreamWaitEvent(waiting, event) == cudaSuccess);  // now it does
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  REQUIRE(cudaStreamQuery(waiting) == cudaErrorNotReady);
  gate.open();
  REQUIRE(cudaStreamSynchronize(waiting) == cudaSuccess);
}

TEST_CASE("an event may be destroyed while a stream waits for it", "[standin]") {
  Stream first, second;
  cudaEvent_t event;
  REQUIRE(cudaEventCreateWithFlags(&event, cudaEventDisableTiming) == cudaSuccess);
  Gate gate(first);
  REQUIRE(cudaEventRecord(event, first) == cudaSuccess);
  REQUIRE(cudaStreamWaitEvent(second, event) == cudaSuccess);
  REQUIRE(cudaEventDestroy(event) == cudaSuccess);
  REQUIRE(cudaEventDestroy(event) == cudaErrorInvalidResourceHandle);
  REQUIRE(cudaStreamQuery(second) == cudaErrorNotReady);
  gate.open();
  REQUIRE(cudaStreamSynchronize(second) == cudaSuccess);
}

// The picture in common/cpu/cuda/README.md.
TEST_CASE("virtual time is the longest path", "[standin]") {
  const pentatron::DeviceProfile before = cuda_cpu::profile();
  pentatron::DeviceProfile gpu = pentatron::load_profile("unit");
  gpu.launch_seconds = 3e-6;
  cuda_cpu::set_profile(gpu);
  Stream a, b;
  Event event;
  const auto nothing = [] { return cudaSuccess; };
  const int64_t start = cuda_cpu::clock();
  const auto time = [&] { return cuda_cpu::clock() - start; };
  REQUIRE(cuda_cpu::enqueue_timed(a, nothing, 20'000) == cudaSuccess);
  REQUIRE(cudaEventRecord(event, a) == cudaSuccess);
  REQUIRE(cudaStreamWaitEvent(b, event) == cudaSuccess);
  REQUIRE(cuda_cpu::enqueue_timed(b, nothing, 27'000) == cudaSuccess);
  CHECK(time() == 6'000);  // two launches
  REQUIRE(cudaEventSynchronize(event) == cudaSuccess);
  CHECK(time() == 23'000);
  REQUIRE(cudaEventQuery(event) == cudaSuccess);
  CHECK(time() == 23'000);  // a look takes no time
  REQUIRE(cudaStreamSynchronize(b) == cudaSuccess);
  CHECK(time() == 50'000);
  // An idle stream begins when the host issues.
  REQUIRE(cuda_cpu::enqueue_timed(a, nothing, 1'000) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK(time() == 54'000);
  cuda_cpu::set_profile(before);
}

TEST_CASE("the activities are taken while another thread gives its stream more", "[standin]") {
  Stream stream;
  constexpr size_t operations = 20'000;
  std::atomic<bool> given = false;
  cuda_cpu::take_activities();
  std::thread other([&] {
    cuda_cpu::describe({.label = {{}, "operation"}});
    for (size_t i = 0; i < operations; ++i)
      cuda_cpu::enqueue_timed(
          stream, [] { return cudaSuccess; }, 1'000);
    given = true;
  });
  size_t taken = 0;
  for (bool last = false; !last;) {
    last = given;
    taken += cuda_cpu::take_activities().size();
  }
  other.join();
  REQUIRE(taken == operations);
}

TEST_CASE("events measure the time between them", "[standin]") {
  Stream stream;
  Event start, end;
  cudaEvent_t untimed;
  REQUIRE(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming) == cudaSuccess);
  float milliseconds = 0;
  REQUIRE(cudaEventRecord(start, stream) == cudaSuccess);
  REQUIRE(cudaEventRecord(untimed, stream) == cudaSuccess);
  {
    Gate gate(stream);
    const auto nothing = [] { return cudaSuccess; };
    REQUIRE(cuda_cpu::enqueue_timed(stream, nothing, 30'000'000) == cudaSuccess);
    REQUIRE(cudaEventRecord(end, stream) == cudaSuccess);
    REQUIRE(cudaEventElapsedTime(&milliseconds, start, end) == cudaErrorNotReady);
    gate.open();
    REQUIRE(cudaEventSynchronize(end) == cudaSuccess);
  }
  REQUIRE(cudaEventElapsedTime(&milliseconds, start, end) == cudaSuccess);
  REQUIRE(milliseconds == Approx(30 + 2e3 * cuda_cpu::profile().launch_seconds));  // of it and the gate
  REQUIRE(cudaEventElapsedTime(&milliseconds, untimed, end) == cudaErrorInvalidResourceHandle);
  REQUIRE(cudaEventDestroy(untimed) == cudaSuccess);
}

// ---- Memory -----------------------------------------------------------------------------------------------

TEST_CASE("the host cannot read or write device memory", "[standin]") {
  DeviceArray<float> x(16);
  REQUIRE(faults([&] { [[maybe_unused]] volatile float value = *static_cast<volatile float*>(x.pointer); }));
  REQUIRE(faults([&] { *static_cast<volatile float*>(x.pointer + 15) = 1; }));
  PinnedArray<float> pinned(16);
  REQUIRE_FALSE(faults([&] { *static_cast<volatile float*>(pinned.pointer + 15) = 1; }));
}

TEST_CASE("memory that was freed is out of reach for everybody", "[standin]") {
  float* x = nullptr;
  REQUIRE(cudaMalloc(&x, 4) == cudaSuccess);
  auto* behind = static_cast<volatile float*>(cuda_cpu::host_address(x));
  REQUIRE_FALSE(faults([&] { *behind = 1; }));
  REQUIRE(cudaFree(x) == cudaSuccess);
  REQUIRE(faults([&] { *behind = 1; }));
}

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // they keep books of their own
TEST_CASE("memory that was freed goes back to the system", "[standin]") {
  const auto resident_pages = [] {
    long total = 0, resident = 0;
    std::ifstream("/proc/self/statm") >> total >> resident;
    return resident;
  };
  constexpr size_t kBytes = size_t{64} << 20;
  const long pages = static_cast<long>(kBytes / 4096);
  void* pointer = nullptr;
  const long before = resident_pages();
  REQUIRE(cudaMalloc(&pointer, kBytes) == cudaSuccess);
  REQUIRE(resident_pages() - before > pages * 9 / 10);
  REQUIRE(cudaFree(pointer) == cudaSuccess);
  REQUIRE(resident_pages() - before < pages / 10);
}
#endif

TEST_CASE("fresh memory is NaN, also where other memory was before", "[standin]") {
  for (int round = 0; round < 3; ++round) {
    DeviceArray<float> single(1001);
    DeviceArray<double> twice(1001);
    PinnedArray<float> pinned(1001);
    for (float value : single.values()) REQUIRE(std::isnan(value));
    for (double value : twice.values()) REQUIRE(std::isnan(value));
    for (int i = 0; i < 1001; ++i) REQUIRE(std::isnan(pinned.pointer[i]));
    REQUIRE(cudaMemset(single, 0, 1001 * sizeof(float)) == cudaSuccess);
    std::memset(pinned.pointer, 0, 1001 * sizeof(float));
  }
}

TEST_CASE("kernels take live device and pinned pointers, and null", "[standin]") {
  Stream stream;
  DeviceArray<float> x(10);
  PinnedArray<float> pinned(10);
  std::vector<float> pageable(10);
  CHECK(launch(add_one, 1, 1, stream, x.pointer, 10) == cudaSuccess);
  CHECK(launch(add_one, 1, 1, stream, x.pointer + 9, 1) == cudaSuccess);
  CHECK(launch(add_one, 1, 1, stream, x.pointer + 10, 0) == cudaSuccess);  // an empty rest of the tensor
  CHECK(launch(add_one, 1, 1, stream, pinned.pointer + 3, 1) == cudaSuccess);
  CHECK(launch(add_one, 1, 1, stream, nullptr, 0) == cudaSuccess);
  CHECK(launch(add_one, 1, 1, stream, x.pointer + 11, 0) == cudaErrorInvalidDevicePointer);
  CHECK(launch(add_one, 1, 1, stream, x.pointer - 1, 0) == cudaErrorInvalidDevicePointer);
  CHECK(launch(add_one, 1, 1, stream, pageable.data(), 10) == cudaErrorInvalidDevicePointer);
  CHECK(cudaGetLastError() == cudaErrorInvalidDevicePointer);
}

TEST_CASE("a freed pointer is refused", "[standin]") {
  Stream stream;
  float *x = nullptr, *other = nullptr;
  PinnedArray<float> pinned(1);
  REQUIRE(cudaMalloc(&x, 400) == cudaSuccess);
  REQUIRE(cudaFree(x) == cudaSuccess);
  REQUIRE(cudaMalloc(&other, 400) == cudaSuccess);  // does not get the same address
  CHECK(launch(add_one, 1, 1, stream, x, 1) == cudaErrorInvalidDevicePointer);
  CHECK(cudaMemcpyAsync(pinned, x, 4, cudaMemcpyDeviceToHost, stream) == cudaErrorInvalidValue);
  CHECK(cudaMemsetAsync(x, 0, 4, stream) == cudaErrorInvalidValue);
  CHECK(cudaFree(x) == cudaErrorInvalidValue);
  CHECK(cudaFree(other + 1) == cudaErrorInvalidValue);
  CHECK(cudaFree(other) == cudaSuccess);
  CHECK(cudaFree(nullptr) == cudaSuccess);
  cudaGetLastError();
}

TEST_CASE("cudaMalloc fails beyond the limit, and only then", "[standin]") {
  constexpr size_t kMiB = size_t{1} << 20;
  size_t free = 0, total = 0, original = 0;
  REQUIRE(cudaMemGetInfo(&free, &original) == cudaSuccess);
  const size_t in_use = original - free;
  cuda_cpu::set_memory_limit(in_use + 8 * kMiB);
  void *first = nullptr, *second = nullptr;
  CHECK(cudaMalloc(&first, 5 * kMiB) == cudaSuccess);
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(free == 3 * kMiB);
  CHECK(total == in_use + 8 * kMiB);
  CHECK(cudaMalloc(&second, 4 * kMiB) == cudaErrorMemoryAllocation);
  CHECK(second == nullptr);
  CHECK(cudaGetLastError() == cudaErrorMemoryAllocation);
  CHECK(cudaMalloc(&second, std::numeric_limits<size_t>::max()) == cudaErrorMemoryAllocation);
  CHECK(cudaMalloc(&second, 3 * kMiB) == cudaSuccess);
  CHECK(cudaFree(first) == cudaSuccess);
  CHECK(cudaMemGetInfo(&free, &total) == cudaSuccess);
  CHECK(free == 5 * kMiB);
  CHECK(cudaFree(second) == cudaSuccess);
  cuda_cpu::set_memory_limit(original);
  cudaGetLastError();
}

TEST_CASE("CUDA_CPU_MEMORY sets the limit", "[standin]") {
  CHECK(run_child("child: memory limit", "CUDA_CPU_MEMORY=2MiB") == 0);
  CHECK(run_child("child: memory limit", "CUDA_CPU_MEMORY=2097152") == 0);
  CHECK(run_child("child: memory limit", "CUDA_CPU_MEMORY=3MiB") != 0);
  CHECK(run_child("child: memory limit", "CUDA_CPU_MEMORY=2furlongs") == 2);
}

TEST_CASE("child: memory limit", "[.child]") {
  size_t free = 0, total = 0;
  REQUIRE(cudaMemGetInfo(&free, &total) == cudaSuccess);
  REQUIRE(free == 2097152);
  REQUIRE(total == 2097152);
  void* pointer = nullptr;
  REQUIRE(cudaMalloc(&pointer, 2097153) == cudaErrorMemoryAllocation);
}

TEST_CASE("allocations of all sizes are aligned, apart, and reused in the end", "[standin]") {
  std::vector<char*> live;
  std::vector<size_t> sizes;
  for (size_t i = 0; i < 200; ++i) {
    const size_t bytes = 1 + (i * 7919) % 50000;
    void* pointer = nullptr;
    REQUIRE(cudaMalloc(&pointer, bytes) == cudaSuccess);
    REQUIRE(reinterpret_cast<uintptr_t>(pointer) % 256 == 0);
    for (size_t j = 0; j < live.size(); ++j) {
      const bool apart = static_cast<char*>(pointer) >= live[j] + sizes[j] + 256 ||
                         static_cast<char*>(pointer) + bytes + 256 <= live[j];
      REQUIRE(apart);
    }
    live.push_back(static_cast<char*>(pointer));
    sizes.push_back(bytes);
    if (i % 3 == 0) {
      REQUIRE(cudaFree(live[i / 2]) == cudaSuccess);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(i / 2));
      sizes.erase(sizes.begin() + static_cast<std::ptrdiff_t>(i / 2));
    }
    if (live.size() <= i / 2) break;
  }
  for (char* pointer : live) REQUIRE(cudaFree(pointer) == cudaSuccess);
}

TEST_CASE("cudaPointerGetAttributes tells device, pinned and other memory apart", "[standin]") {
  DeviceArray<float> x(4);
  PinnedArray<float> pinned(4);
  float local = 0;
  cudaPointerAttributes attributes;
  REQUIRE(cudaPointerGetAttributes(&attributes, x + 1) == cudaSuccess);
  CHECK(attributes.type == cudaMemoryTypeDevice);
  REQUIRE(cudaPointerGetAttributes(&attributes, pinned + 1) == cudaSuccess);
  CHECK(attributes.type == cudaMemoryTypeHost);
  REQUIRE(cudaPointerGetAttributes(&attributes, &local) == cudaSuccess);
  CHECK(attributes.type == cudaMemoryTypeUnregistered);
}

// ---- Copies -----------------------------------------------------------------------------------------------

TEST_CASE("asynchronous copies", "[standin]") {
  Stream stream;
  DeviceArray<int> x(60), y(60);
  PinnedArray<int> in(60), out(60);
  for (int i = 0; i < 60; ++i) in.pointer[i] = i;
  REQUIRE(cudaMemcpyAsync(x, in, 240, cudaMemcpyHostToDevice, stream) == cudaSuccess);
  REQUIRE(cudaMemcpyAsync(y, x, 240, cudaMemcpyDeviceToDevice, stream) == cudaSuccess);
  REQUIRE(cudaMemcpyAsync(out, y, 240, cudaMemcpyDefault, stream) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
  for (int i = 0; i < 60; ++i) REQUIRE(out.pointer[i] == i);

  // [6, 10] -> columns 3 to 6 of every second row, into the first four columns of rows of seven
  REQUIRE(cudaMemsetAsync(y, 0, 240, stream) == cudaSuccess);
  REQUIRE(cudaMemcpy2DAsync(y, 28, x + 3, 80, 16, 3, cudaMemcpyDeviceToDevice, stream) == cudaSuccess);
  const std::vector<int> values = y.values();
  for (int row = 0; row < 3; ++row) {
    for (int column = 0; column < 7; ++column) {
      REQUIRE(values[static_cast<size_t>(row * 7 + column)] == (column < 4 ? row * 20 + 3 + column : 0));
    }
  }
}

TEST_CASE("copies that CUDA or the project's rules do not allow are refused", "[standin]") {
  Stream stream;
  DeviceArray<float> x(10);
  PinnedArray<float> pinned(10);
  std::vector<float> pageable(10);
  CHECK(cudaMemcpyAsync(x, pageable.data(), 40, cudaMemcpyHostToDevice, stream) == cudaErrorInvalidValue);
  CHECK(cudaMemcpyAsync(pageable.data(), x, 40, cudaMemcpyDeviceToHost, stream) == cudaErrorInvalidValue);
  CHECK(cudaMemcpyAsync(x, pinned, 44, cudaMemcpyHostToDevice, stream) == cudaErrorInvalidValue);
  CHECK(cudaMemcpyAsync(x, pinned, 40, cudaMemcpyDeviceToHost, stream) == cudaErrorInvalidValue);
  CHECK(cudaMemcpyAsync(x, pinned, 40, static_cast<cudaMemcpyKind>(9), stream) ==
        cudaErrorInvalidMemcpyDirection);
  CHECK(cudaMemcpy2DAsync(x, 8, pinned, 16, 12, 2, cudaMemcpyHostToDevice, stream) ==
        cudaErrorInvalidPitchValue);
  CHECK(cudaMemcpy(x, pageable.data(), 44, cudaMemcpyHostToDevice) == cudaErrorInvalidValue);
  CHECK(cudaMemsetAsync(x, 0, 44, stream) == cudaErrorInvalidValue);
  CHECK(cudaMemset(pageable.data(), 0, 40) == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
}

TEST_CASE("what waits for the whole device is counted, and only that", "[standin]") {
  Stream stream;
  PinnedArray<float> pinned(4);
  const cuda_cpu::Counters before = cuda_cpu::counters();
  {
    DeviceArray<float> x(4);
    REQUIRE(launch(add_one, 1, 1, stream, x.pointer, 4) == cudaSuccess);
    REQUIRE(cudaMemcpyAsync(pinned, x, 16, cudaMemcpyDeviceToHost, stream) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
    x.values();
    REQUIRE(cudaMemset(x, 0, 16) == cudaSuccess);
  }
  const cuda_cpu::Counters after = cuda_cpu::counters();
  CHECK(after.allocations - before.allocations == 1);
  CHECK(after.frees - before.frees == 1);
  CHECK(after.synchronous_copies - before.synchronous_copies == 2);
}

// ---- Kernels ----------------------------------------------------------------------------------------------

TEST_CASE("every block of a grid runs once", "[standin]") {
  Stream stream;
  const dim3 grid = GENERATE(dim3(1), dim3(7), dim3(3, 5), dim3(4, 3, 2));
  const size_t blocks = size_t{grid.x} * grid.y * grid.z;
  DeviceArray<int> visits(blocks);
  REQUIRE(cudaMemset(visits, 0, blocks * sizeof(int)) == cudaSuccess);
  for (int i = 0; i < 3; ++i) REQUIRE(launch(count_visits, grid, 32, stream, visits.pointer) == cudaSuccess);
  for (int count : visits.values()) REQUIRE(count == 3);
}

TEST_CASE("numbers of all kinds reach a kernel, converted to its parameters", "[standin]") {
  Stream stream;
  DeviceArray<double> out(1);
  REQUIRE(launch(mixed_arguments, 1, 1, stream, out.pointer, short{1}, 20, 300.5, true, Choice::right) ==
          cudaSuccess);
  REQUIRE(out.values()[0] == 11321.5);
}

TEST_CASE("launches that CUDA refuses are refused", "[standin]") {
  Stream stream;
  DeviceArray<float> x(1);
  const auto status = [&](dim3 grid, dim3 block, size_t shared_bytes = 0) {
    const cudaLaunchConfig_t config = config_of(grid, block, stream, shared_bytes);
    return cudaLaunchKernelEx(&config, store, x.pointer, 1.0f);
  };
  CHECK(status(dim3(0), 1) == cudaErrorInvalidConfiguration);
  CHECK(status(dim3(1, 0), 1) == cudaErrorInvalidConfiguration);
  CHECK(status(dim3(1, 65536), 1) == cudaErrorInvalidConfiguration);
  CHECK(status(dim3(1, 1, 65536), 1) == cudaErrorInvalidConfiguration);
  CHECK(status(dim3(2147483648u), 1) == cudaErrorInvalidConfiguration);
  CHECK(status(1, dim3(0)) == cudaErrorInvalidConfiguration);
  CHECK(status(1, 1025) == cudaErrorInvalidConfiguration);
  CHECK(status(1, dim3(32, 33)) == cudaErrorInvalidConfiguration);
  CHECK(status(1, dim3(1, 1, 65)) == cudaErrorInvalidConfiguration);
  CHECK(status(1, 1024) == cudaSuccess);
  CHECK(status(1, 1, 48 * 1024) == cudaSuccess);
  CHECK(status(1, 1, 48 * 1024 + 1) == cudaErrorInvalidValue);
  CHECK(cudaFuncSetAttribute(store, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024 + 1) ==
        cudaErrorInvalidValue);
  CHECK(cudaFuncSetAttribute(store, cudaFuncAttributeMaxDynamicSharedMemorySize, 227 * 1024) == cudaSuccess);
  CHECK(status(1, 1, 227 * 1024) == cudaSuccess);
  CHECK(status(1, 1, 227 * 1024 + 1) == cudaErrorInvalidValue);
  CHECK(cudaGetLastError() == cudaErrorInvalidValue);
  CHECK(cudaPeekAtLastError() == cudaSuccess);
}

TEST_CASE("a kernel of which nobody has said what it costs is refused", "[standin]") {
  Stream stream;
  DeviceArray<float> x(1);
  const cudaLaunchConfig_t config = config_of(1, 1, stream);
  const auto launch_store = [&] { return cudaLaunchKernelEx(&config, store, x.pointer, 1.0f); };
  const cuda_cpu::Description before = cuda_cpu::describe({.label = {}, .is_said = false});
  CHECK(launch_store() == cudaErrorNotPermitted);
  {
    const pentatron::trace::Operation operation(stream, "store");
    CHECK(launch_store() == cudaSuccess);
  }
  CHECK(launch_store() == cudaErrorNotPermitted);
  CHECK(cudaGetLastError() == cudaErrorNotPermitted);
  cuda_cpu::describe(before);
}

TEST_CASE("a block's shared memory is NaN when it starts", "[standin]") {
  Stream stream;
  DeviceArray<float> out(40);
  for (int n : {100, 1000, 10}) {
    const cudaLaunchConfig_t config = config_of(40, 32, stream, static_cast<size_t>(n) * sizeof(float));
    REQUIRE(cudaLaunchKernelEx(&config, examine_shared_memory, out.pointer, n) == cudaSuccess);
    for (float value : out.values()) REQUIRE(value == 1.0f);
  }
}

TEST_CASE("the threads of a block meet at its barrier; those that have left are not waited for",
          "[standin]") {
  Stream stream;
  DeviceArray<float> out(40);
  REQUIRE(launch(sum_over_threads, 40, 128, stream, out.pointer) == cudaSuccess);
  constexpr unsigned n = cuda_cpu::threads_per_block;
  for (float value : out.values()) REQUIRE(value == static_cast<float>(n * (n + 1) / 2));
}

TEST_CASE("cudaFuncGetName returns the mangled name", "[standin]") {
  const char* name = nullptr;
  REQUIRE(cudaFuncGetName(&name, add_one) == cudaSuccess);
  REQUIRE(std::string(name) == "_Z7add_onePfi");
}

TEST_CASE("errors have CUDA's names and numbers", "[standin]") {
  CHECK(std::string(cudaGetErrorName(cudaErrorInvalidValue)) == "cudaErrorInvalidValue");
  CHECK(std::string(cudaGetErrorString(cudaErrorMemoryAllocation)) == "out of memory");
  CHECK(std::string(cudaGetErrorName(static_cast<cudaError_t>(1000))) == "unrecognized error code");
  CHECK(static_cast<int>(cudaErrorIllegalAddress) == 700);
}

TEST_CASE("there may be several devices to choose from; a thread begins with the first", "[standin]") {
  setenv("CUDA_CPU_DEVICES", "3", 1);
  int count = 0, device = -1;
  CHECK(cudaGetDeviceCount(&count) == cudaSuccess);
  CHECK(count == 3);
  CHECK(cudaSetDevice(3) == cudaErrorInvalidDevice);
  CHECK(cudaSetDevice(2) == cudaSuccess);
  CHECK(cudaGetDevice(&device) == cudaSuccess);
  CHECK(device == 2);
  std::thread([&] { cudaGetDevice(&device); }).join();
  CHECK(device == 0);
  cudaSetDevice(0);
  unsetenv("CUDA_CPU_DEVICES");
  cudaGetLastError();
}

TEST_CASE("there is one device", "[standin]") {
  int count = 0, device = -1, value = 0;
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceCount(&count) == cudaSuccess);
  CHECK(count == 1);
  CHECK(cudaSetDevice(0) == cudaSuccess);
  CHECK(cudaSetDevice(1) == cudaErrorInvalidDevice);
  CHECK(cudaGetDevice(&device) == cudaSuccess);
  CHECK(device == 0);
  CHECK(cudaGetDeviceProperties(&properties, 0) == cudaSuccess);
  CHECK(std::string(properties.name).substr(0, 3) == "CPU");
  CHECK(cudaDeviceGetAttribute(&value, cudaDevAttrMaxThreadsPerBlock, 0) == cudaSuccess);
  CHECK(value == 1024);
  cudaGetLastError();
}

TEST_CASE("exponentials are right at infinity and NaN", "[standin]") {
  Stream stream;
  constexpr float inf = std::numeric_limits<float>::infinity();
  std::vector<float> x(67);
  for (size_t i = 0; i < x.size(); ++i) x[i] = -30.0f + static_cast<float>(i);
  x[3] = x[66] = -inf;
  x[5] = inf;
  x[11] = std::numeric_limits<float>::quiet_NaN();
  x[12] = -1000;
  x[13] = 1000;
  DeviceArray<float> in(x.size()), out(x.size());
  in.assign(x);
  REQUIRE(launch(exponentials, 1, 1, stream, in.pointer, out.pointer, 67) == cudaSuccess);
  const std::vector<float> y = out.values();
  for (size_t i = 0; i < x.size(); ++i) {
    const double expected = std::exp(static_cast<double>(x[i]));
    if (std::isnan(x[i])) CHECK(std::isnan(y[i]));
    if (x[i] == -inf || x[i] == -1000) CHECK(y[i] == 0.0f);
    if (x[i] == inf || x[i] == 1000) CHECK(y[i] == inf);
    if (std::abs(x[i]) < 80) CHECK(std::abs(y[i] - expected) <= 1e-6 * expected);
  }
}

// ---- Errors and modes of the whole process ----------------------------------------------------------------

TEST_CASE("an error inside a stream stays", "[standin]") {
  CHECK(run_child("child: error inside a stream") == 0);
}

TEST_CASE("child: error inside a stream", "[.child]") {
  Stream stream, other;
  DeviceArray<float> x(1);
  REQUIRE(cuda_cpu::enqueue(stream, [] { return cudaErrorLaunchFailure; }) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaErrorLaunchFailure);
  REQUIRE(cudaStreamSynchronize(other) == cudaErrorLaunchFailure);
  REQUIRE(cudaDeviceSynchronize() == cudaErrorLaunchFailure);
  REQUIRE(launch(store, 1, 1, other, x.pointer, 1.0f) == cudaErrorLaunchFailure);
  REQUIRE(cudaGetLastError() == cudaErrorLaunchFailure);
  REQUIRE(cudaGetLastError() == cudaErrorLaunchFailure);
}

namespace {
thread_local bool on_main_thread = false;
}
__global__ void note_thread(float* out) {
  if (threadIdx.x == 0) *out = on_main_thread ? 1.0f : 2.0f;
}

TEST_CASE("CUDA_LAUNCH_BLOCKING runs kernels and copies on the calling thread, in stream order",
          "[standin]") {
  CHECK(run_child("child: launch blocking", "CUDA_LAUNCH_BLOCKING=1") == 0);
  // Which reads too early, and is to; ThreadSanitizer is not asked.
  CHECK(run_child("child: launch blocking", "CUDA_LAUNCH_BLOCKING=0 TSAN_OPTIONS=report_bugs=0") != 0);
}

TEST_CASE("child: launch blocking", "[.child]") {
  on_main_thread = true;
  Stream stream;
  PinnedArray<float> value(2);
  REQUIRE(launch(note_thread, 1, 1, stream, value.pointer) == cudaSuccess);
  REQUIRE(cudaMemcpyAsync(value + 1, value, 4, cudaMemcpyHostToHost, stream) == cudaSuccess);
  CHECK(value.pointer[0] == (cuda_cpu::threads_per_block == 1 ? 1.0f : 2.0f));
  CHECK(value.pointer[1] == value.pointer[0]);

  // Host functions stay asynchronous, and a kernel behind one waits for it.
  static std::atomic<int> stage = 0;
  const auto function = [](void*) {
    while (stage == 0) std::this_thread::yield();
    stage = 2;
  };
  REQUIRE(cudaLaunchHostFunc(stream, function, nullptr) == cudaSuccess);
  CHECK(stage == 0);
  std::thread opener([] { stage = 1; });
  REQUIRE(launch(store, 1, 1, stream, value.pointer, 9.0f) == cudaSuccess);
  CHECK(stage == 2);
  CHECK(value.pointer[0] == 9.0f);
  opener.join();
}

// At -O3, as programs are built; tests for the sanitizers are not.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(CUDA_CPU_THREADS_PER_BLOCK)
TEST_CASE("loops with exponentials are vectorised", "[standin]") {
  CHECK(std::system("nm -D --undefined-only /proc/$PPID/exe | grep -q '_ZGV.N.*v_expf'") == 0);
}
#endif

#ifdef __SANITIZE_ADDRESS__
TEST_CASE("AddressSanitizer sees a kernel that writes beyond its tensor or its shared memory", "[standin]") {
  CHECK(run_child("child: writes within bounds") == 0);
  CHECK(run_child("child: writes beyond the tensor") != 0);
  CHECK(run_child("child: writes beyond shared memory") != 0);
}

__global__ void write_shared(int i) { static_cast<char*>(cuda_cpu::shared_memory())[i] = 1; }

TEST_CASE("child: writes within bounds", "[.child]") {
  Stream stream;
  DeviceArray<float> x(11);
  REQUIRE(launch(add_one, 1, 1, stream, x.pointer, 11) == cudaSuccess);
  const cudaLaunchConfig_t config = config_of(1, 1, stream, 100);
  REQUIRE(cudaLaunchKernelEx(&config, write_shared, 99) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
}

TEST_CASE("child: writes beyond the tensor", "[.child]") {
  Stream stream;
  DeviceArray<float> x(11);
  REQUIRE(launch(add_one, 1, 1, stream, x.pointer, 12) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
}

TEST_CASE("child: writes beyond shared memory", "[.child]") {
  Stream stream;
  const cudaLaunchConfig_t config = config_of(1, 1, stream, 100);
  REQUIRE(cudaLaunchKernelEx(&config, write_shared, 100) == cudaSuccess);
  REQUIRE(cudaStreamSynchronize(stream) == cudaSuccess);
}
#endif
