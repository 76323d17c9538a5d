// Device memory for tests of collectives.
#pragma once

#include <algorithm>
#include <vector>

#include "device/tensor.h"

namespace mpi_tests {

// Device memory, and its contents seen from the host. Waits for all streams, so it cannot be used while one
// is held.
template <class T>
class Array {
 public:
  explicit Array(size_t size) : data_(memory_.matrix<T>(1, std::max<size_t>(size, 1)).data) {}
  explicit Array(const std::vector<T>& values) : Array(values.size()) { set(values); }

  T* data() const { return data_; }
  void set(const std::vector<T>& values) const {
    CUDA_CHECK(cudaMemcpy(data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    CUDA_CHECK(cudaDeviceSynchronize());  // the copy may return before pageable memory has reached the device
  }
  std::vector<T> get(size_t count) const {
    std::vector<T> values(count);
    CUDA_CHECK(cudaDeviceSynchronize());
    CUDA_CHECK(cudaMemcpy(values.data(), data(), count * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }

 private:
  pentatron::DeviceArena memory_{pentatron::Purpose::communication};
  T* data_;
};

}  // namespace mpi_tests
