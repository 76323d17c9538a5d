// One small program for each rule that ThreadSanitizer must enforce, and one beside it that keeps the rule.
// Run as `tsan_cases NAME`: it must be reported if the name says what is missing or racing, and silent
// otherwise. Built twice: with blocks that are one thread, for the order between streams, and with blocks of
// several threads, for kernels.
#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <sched.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <map>
#include <string>

#include "cuda_cpu.h"

namespace {

constexpr int kElements = 1000;
constexpr size_t kBytes = kElements * sizeof(float);

void check(int status) {
  if (status == 0) return;
  std::fprintf(stderr, "unexpected status %d\n", status);
  std::exit(99);
}

}  // namespace

// ---- Kernels: external linkage, so that their names appear in reports -------------------------------------

__global__ void write_values(float* out, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) out[i] = 1.0f;
}

__global__ void read_values(const float* in, float* out, int n) {
  for (int i = static_cast<int>(threadIdx.x); i < n; i += static_cast<int>(blockDim.x)) out[i] = in[i];
}

// Each thread leaves a value for its neighbour in the block's shared memory.
__global__ void exchange_with_barrier(float* out) {
  auto* shared = static_cast<float*>(cuda_cpu::shared_memory());
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
}

__global__ void exchange_without_barrier(float* out) {
  auto* shared = static_cast<float*>(cuda_cpu::shared_memory());
  shared[threadIdx.x] = static_cast<float>(threadIdx.x);
  out[blockIdx.x * blockDim.x + threadIdx.x] = shared[(threadIdx.x + 1) % blockDim.x];
}

// Every block adds to an element that the next block adds to as well.
__global__ void add_to_neighbours(float* out) {
  if (threadIdx.x != 0) return;
  out[blockIdx.x] += 1.0f;
  out[blockIdx.x + 1] += 1.0f;
}

__global__ void add_to_own(float* out) {
  if (threadIdx.x == 0) out[blockIdx.x] += 1.0f;
}

namespace {

// Two streams and three arrays, as every case needs them.
struct Setup {
  cudaStream_t first, second;
  cudaEvent_t event;
  float *a, *b, *c, *pinned;
  cublasHandle_t cublas;

  Setup() {
    cuda_cpu::describe({});  // kernels take no time
    check(cudaStreamCreateWithFlags(&first, cudaStreamNonBlocking));
    check(cudaStreamCreateWithFlags(&second, cudaStreamNonBlocking));
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (float** array : {&a, &b, &c}) check(cudaMalloc(array, kBytes));
    check(cudaMallocHost(&pinned, kBytes));
    check(cublasCreate(&cublas));
  }
  ~Setup() {
    check(cublasDestroy(cublas));
    check(cudaFreeHost(pinned));
    for (float* array : {a, b, c}) check(cudaFree(array));
    check(cudaEventDestroy(event));
    check(cudaStreamDestroy(second));
    check(cudaStreamDestroy(first));
  }
  Setup(const Setup&) = delete;

  void order_second_after_first() const {
    check(cudaEventRecord(event, first));
    check(cudaStreamWaitEvent(second, event));
  }
  // c = a b on the second stream, all 10 x 10.
  void multiply_on_second() const {
    const float one = 1, zero = 0;
    check(cublasSetStream(cublas, second));
    check(cublasGemmEx(cublas, CUBLAS_OP_N, CUBLAS_OP_N, 10, 10, 10, &one, a, CUDA_R_32F, 10, b, CUDA_R_32F,
                       10, &zero, c, CUDA_R_32F, 10, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }
};

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), unsigned blocks, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = 4;
  config.dynamicSmemBytes = 4 * sizeof(float);
  config.stream = stream;
  check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// A stream that has finished long ago, and of which the host never learnt, must not be ordered by accident.
void let_the_streams_idle() {
  timespec pause{0, 20'000'000};
  nanosleep(&pause, nullptr);
}

void two_kernels(bool with_event, bool idle_between) {
  Setup s;
  launch(write_values, 1, s.first, s.a, kElements);
  if (idle_between) let_the_streams_idle();
  if (with_event) s.order_second_after_first();
  launch(read_values, 1, s.second, s.a, s.b, kElements);
}

// The event is recorded too early: before the kernel that it should cover.
void early_event() {
  Setup s;
  launch(write_values, 1, s.first, s.b, kElements);
  check(cudaEventRecord(s.event, s.first));
  launch(write_values, 1, s.first, s.a, kElements);
  let_the_streams_idle();
  check(cudaStreamWaitEvent(s.second, s.event));
  launch(read_values, 1, s.second, s.a, s.c, kElements);
}

// The second stream overwrites what the first still reads: a buffer that is used again too soon.
void reuse(bool with_event) {
  Setup s;
  launch(read_values, 1, s.first, s.a, s.b, kElements);
  if (with_event) s.order_second_after_first();
  launch(write_values, 1, s.second, s.a, kElements);
}

// The host looks at a stream and an event that are not done, does much bookkeeping, and takes the streams'
// log for a trace, between the two kernels.
void host_bookkeeping(bool with_event) {
  Setup s;
  cuda_cpu::describe({.label = {{}, "kernel"}, .nanoseconds = 1});
  cudaEvent_t other;
  check(cudaEventCreate(&other));
  for (int i = 0; i < 20; ++i) {
    check(cudaEventRecord(other, s.first));
    launch(write_values, 1, s.first, s.a, kElements);
    check(cudaEventRecord(other, s.first));
    check(cudaStreamWaitEvent(s.first, other));
  }
  if (cuda_cpu::take_activities().empty()) std::exit(99);
  if (with_event) s.order_second_after_first();
  for (int i = 0; i < 20; ++i) check(cudaEventRecord(other, s.second));
  launch(read_values, 1, s.second, s.a, s.b, kElements);
  check(cudaEventDestroy(other));
}

void copy_to_host(bool with_wait) {
  Setup s;
  launch(write_values, 1, s.first, s.a, kElements);
  check(cudaMemcpyAsync(s.pinned, s.a, kBytes, cudaMemcpyDeviceToHost, s.first));
  let_the_streams_idle();
  if (with_wait) check(cudaStreamSynchronize(s.first));
  std::printf("%g\n", static_cast<double>(s.pinned[0]));
}

void wait_by_polling() {
  Setup s;
  launch(write_values, 1, s.first, s.pinned, kElements);
  check(cudaEventRecord(s.event, s.first));
  while (cudaEventQuery(s.event) == cudaErrorNotReady) continue;
  launch(write_values, 1, s.first, s.pinned, kElements);
  while (cudaStreamQuery(s.first) == cudaErrorNotReady) continue;
  std::printf("%g\n", static_cast<double>(s.pinned[0]));
}

// The host looks at the first stream and its event while they are not done: it learns nothing about the
// kernel. A host function keeps the stream until the host has looked; the two flags order nothing.
void query(bool until_done) {
  Setup s;
  static std::atomic<bool> kernel_has_run = false, host_has_looked = false;
  launch(write_values, 1, s.first, s.a, kElements);
  const auto keep = [](void*) {
    kernel_has_run.store(true, std::memory_order_relaxed);
    while (!host_has_looked.load(std::memory_order_relaxed)) sched_yield();
  };
  check(cudaLaunchHostFunc(s.first, keep, nullptr));
  check(cudaEventRecord(s.event, s.first));
  while (!kernel_has_run.load(std::memory_order_relaxed)) sched_yield();
  bool done = false;
  do {
    const bool event_done = cudaEventQuery(s.event) == cudaSuccess;
    done = cudaStreamQuery(s.first) == cudaSuccess && event_done;
    host_has_looked.store(true, std::memory_order_relaxed);
  } while (until_done && !done);
  launch(read_values, 1, s.second, s.a, s.b, kElements);
}

void product(bool with_event) {
  Setup s;
  launch(write_values, 1, s.first, s.a, kElements);
  if (with_event) s.order_second_after_first();
  s.multiply_on_second();
}

// The first stream writes to columns between those of the product's strided matrix: no race.
void product_between_columns() {
  Setup s;
  launch(write_values, 1, s.first, s.c + 5, 5);
  const float one = 1, zero = 0;
  check(cublasSetStream(s.cublas, s.second));
  check(cublasGemmEx(s.cublas, CUBLAS_OP_N, CUBLAS_OP_N, 5, 10, 10, &one, s.a, CUDA_R_32F, 10, s.b,
                     CUDA_R_32F, 10, &zero, s.c, CUDA_R_32F, 10, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
}

template <class... Parameters>
void one_kernel(void (*kernel)(Parameters...), unsigned blocks) {
  Setup s;
  check(cudaMemset(s.a, 0, kBytes));
  launch(kernel, blocks, s.first, s.a);
}

const std::map<std::string, void (*)()> kCases = {
    {"with-event", [] { two_kernels(true, false); }},
    {"missing-event", [] { two_kernels(false, false); }},
    {"with-event-idle", [] { two_kernels(true, true); }},
    {"missing-event-idle", [] { two_kernels(false, true); }},
    {"early-event", early_event},
    {"reuse-with-event", [] { reuse(true); }},
    {"reuse-missing-event", [] { reuse(false); }},
    {"bookkeeping-with-event", [] { host_bookkeeping(true); }},
    {"bookkeeping-missing-event", [] { host_bookkeeping(false); }},
    {"copy-with-wait", [] { copy_to_host(true); }},
    {"copy-missing-wait", [] { copy_to_host(false); }},
    {"query-done", [] { query(true); }},
    {"query-not-done", [] { query(false); }},
    {"polling", wait_by_polling},
    {"product-with-event", [] { product(true); }},
    {"product-missing-event", [] { product(false); }},
    {"product-between-columns", product_between_columns},
    {"block-with-barrier", [] { one_kernel(exchange_with_barrier, 40); }},
    {"block-missing-barrier", [] { one_kernel(exchange_without_barrier, 40); }},
    {"blocks-apart", [] { one_kernel(add_to_own, 40); }},
    {"blocks-racing", [] { one_kernel(add_to_neighbours, 40); }},
};

}  // namespace

int main(int argc, char** argv) {
  const auto found = argc == 2 ? kCases.find(argv[1]) : kCases.end();
  if (found == kCases.end()) {
    for (const auto& [name, run] : kCases) std::puts(name.c_str());
    return 2;
  }
  found->second();
}
