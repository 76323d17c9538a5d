#include <cstdlib>
#include <utility>

#include "device/cuda.h"

namespace pentatron {
void check_cuda(cudaError_t status, const char* call, const char* file, int line) {
  if (status != cudaSuccess) fail(call, cudaGetErrorString(status), file, line);
}

void set_environment() {
  const std::pair<const char*, const char*> variables[] = {
      {"CUDA_MODULE_LOADING", "EAGER"},        // a kernel loaded late may wait behind a collective
      {"CUBLAS_WORKSPACE_CONFIG", ":4096:8"},  // repeatable products
      {"NCCL_ALGO", "Ring"},                   // repeatable sums
      {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"},     // operations start in the order in which the host issues them
      {"NCCL_RUNTIME_CONNECT", "0"}};          // ranks connect at once, not amid the first collectives
  for (const auto& [name, value] : variables) setenv(name, value, 0);
}

cudaDeviceProp this_device() {
  int device = 0;
  cudaDeviceProp properties;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
  return properties;
}

}  // namespace pentatron
