#include "device/tensor.h"

namespace pentatron {
namespace {

MemoryBytes in_use = {}, peak = {};
int streams = 0;

void count(Purpose purpose, size_t bytes) {
  const auto i = static_cast<size_t>(purpose);
  in_use[i] += bytes;
  peak[i] = std::max(peak[i], in_use[i]);
}

}  // namespace

const MemoryBytes& memory_in_use() { return in_use; }
const MemoryBytes& memory_peak() { return peak; }

DeviceMemory::DeviceMemory(size_t bytes, Purpose purpose) : bytes_(bytes), purpose_(purpose) {
  if (bytes > 0) CUDA_CHECK(cudaMalloc(&data_, bytes));
  count(purpose_, bytes_);
}

DeviceMemory::~DeviceMemory() {
  if (data_) CUDA_CHECK(cudaFree(data_));
  in_use[static_cast<size_t>(purpose_)] -= bytes_;
}

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(purpose_, other.purpose_);
  return *this;
}

int streams_in_use() { return streams; }
void count_streams(int more) { streams += more; }

Stream::Stream(const char* name, bool urgent) {
  int least = 0, greatest = 0;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, urgent ? greatest : least));
  trace::name_stream(stream_, name);
  count_streams(1);
}

Stream::~Stream() {
  cudaStreamDestroy(stream_);
  count_streams(-1);
}

}  // namespace pentatron
