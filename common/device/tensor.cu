#include "device/tensor.h"

namespace pentatron {

namespace {
MemoryBytes in_use = {}, peak = {};
}

MemoryBytes memory_in_use() { return in_use; }
MemoryBytes memory_peak() { return peak; }

size_t gradient_bytes() { return sizeof(accum); }

void* DeviceArena::allocate(size_t bytes) {
  void* data = nullptr;
  if (bytes > 0) CUDA_CHECK(cudaMalloc(&data, bytes));
  memory_.push_back({data, Free{bytes, purpose_}});
  in_use[purpose_] += bytes;
  peak[purpose_] = std::max(peak[purpose_], in_use[purpose_]);
  return data;
}

void DeviceArena::Free::operator()(void* data) const {
  CUDA_CHECK(cudaFree(data));
  in_use[purpose] -= bytes;
}

Stream::Stream(const char* name, bool urgent) {
  int least = 0, greatest = 0;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, urgent ? greatest : least));
  trace::name_stream(stream_, name);
  ++streams_in_use;
}

Stream::~Stream() {
  cudaStreamDestroy(stream_);
  --streams_in_use;
}

}  // namespace pentatron
