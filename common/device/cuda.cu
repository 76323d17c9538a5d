#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "device/cuda.h"

namespace pentatron {
namespace {

int rank_in_messages = 0;
void (*end_other_ranks)() = nullptr;

}  // namespace

void set_rank_for_messages(int rank) { rank_in_messages = rank; }
void at_failure(void (*end)()) { end_other_ranks = end; }

void fail(const char* call, const char* text, const char* file, int line) {
  std::fprintf(stderr, "rank %d: %s failed: %s (%s:%d)\n", rank_in_messages, call, text, file, line);
  std::fflush(nullptr);
  if (end_other_ranks) {
    std::this_thread::sleep_for(
        std::chrono::seconds(1));  // mpirun passes on no more once it has been told to abort
    end_other_ranks();
  }
  std::_Exit(1);  // streams may still hold work, so nothing is torn down
}

void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status != cudaSuccess) fail(call, cudaGetErrorString(status), file, line);
}

cudaDeviceProp this_device() {
  int device = 0;
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties;
}

}  // namespace pentatron
