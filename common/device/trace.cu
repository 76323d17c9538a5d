#include <cxxabi.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdlib>
#include <map>

#include "device/cuda.h"
#include "device/trace.h"

namespace pentatron::trace {
namespace {

// "void pentatron::rmsnorm_forward_kernel<float>(float*)" -> "rmsnorm_forward_kernel"
// A kernel for tensor cores is a template parameter of what runs its warps (tensor_cores/tensor_core.h).
std::string unqualified(std::string name) {
  const size_t kernel = name.find("_kernel<");
  name = name.substr(0, kernel != name.npos ? kernel + 7 : name.find_first_of("(<"));
  return name.substr(name.find_last_of(": (&") + 1);
}

}  // namespace

const char* kernel_name(const void* kernel) {
  static std::map<const void*, std::string> names;
  auto [entry, is_new] = names.try_emplace(kernel);
  if (is_new) {
    const char* mangled = "kernel";
    if (cudaFuncGetName(&mangled, kernel) != cudaSuccess) cudaGetLastError();
    int status = -1;
    char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    entry->second = unqualified(status == 0 ? demangled : mangled);
    std::free(demangled);
  }
  return entry->second.c_str();
}

// Two events time each operation. Without a GPU, what follows is cpu/cuda/trace.cc: there the stand-in
// counts.
#ifndef CUDA_CPU
namespace {

bool recording = false;
std::map<cudaStream_t, std::string> stream_names;

struct Recorded {
  Interval interval;
  cudaStream_t stream;
  cudaEvent_t begin, end;
};
cudaEvent_t origin = nullptr;  // time zero
std::vector<Recorded> recorded;

cudaEvent_t record_event(cudaStream_t stream) {
  cudaEvent_t event;
  CUDA_CHECK(cudaEventCreate(&event));
  CUDA_CHECK(cudaEventRecord(event, stream));
  return event;
}

double seconds_since_origin(cudaEvent_t event) {
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, origin, event));
  CUDA_CHECK(cudaEventDestroy(event));
  return milliseconds * 1e-3;
}

}  // namespace

void name_stream(cudaStream_t stream, std::string name) { stream_names[stream] = std::move(name); }

void start() {
  recorded.clear();
  cudaStream_t idle;
  CUDA_CHECK(cudaStreamCreateWithFlags(&idle, cudaStreamNonBlocking));
  origin = record_event(idle);
  CUDA_CHECK(cudaStreamDestroy(idle));
  recording = true;
}

void stop() { recording = false; }

Operation::Operation(cudaStream_t stream, const char* name, const Cost& cost) : stream_(stream), name_(name) {
  nvtxRangePushA(name);
  declared_costs += cost;
  if (!recording) return;
  interval_ = static_cast<int>(recorded.size());
  Interval interval{here};
  interval.name = name;
  interval.bytes = cost.bytes;
  recorded.push_back({interval, stream, record_event(stream), nullptr});
}

Operation::~Operation() {
  if (interval_ >= 0) recorded[interval_].end = record_event(stream_);
  nvtxRangePop();
}

std::vector<Interval> take() {
  CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<Interval> result;
  for (Recorded& r : recorded) {
    r.interval.stream = stream_names[r.stream];
    r.interval.begin = seconds_since_origin(r.begin);
    r.interval.end = seconds_since_origin(r.end);
    result.push_back(std::move(r.interval));
  }
  recorded.clear();
  return result;
}

#endif

}  // namespace pentatron::trace
