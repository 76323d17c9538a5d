// Matrices to the device and back. What a kernel is to write begins as NaN, between guards of NaN: an element
// that was left out shows, and so does one written beyond the end.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "device/tensor.h"
#include "kernels/matmul.h"
#include "reference.h"

namespace pentatron {

class Device {
 public:
  // A matrix for results.
  template <class T>
  Matrix<T> fresh(int64_t rows, int64_t columns) {
    const Matrix<T> guarded = memory_.matrix<T>(1, rows * columns + 2 * guard<T>);
    CUDA_CHECK(cudaMemsetAsync(guarded.data, 0xff, guarded.bytes(), stream));
    return {guarded.data + guard<T>, rows, columns};
  }

  // T must be able to hold the values: a test and the device start from the same bits.
  template <class T>
  void write(Matrix<T> to, const HostMatrix& from) {
    REQUIRE(to.size() == from.values.size());
    const PinnedArray<T> host(to.size());
    for (size_t i = 0; i < to.size(); ++i) {
      host[i] = from_double<T>(from.values[i]);
      if (to_double(host[i]) != from.values[i] && !std::isnan(from.values[i]))
        FAIL("not rounded: " << from.values[i]);
    }
    CUDA_CHECK(cudaMemcpyAsync(to.data, host.data(), to.bytes(), cudaMemcpyHostToDevice, stream));
    stream.synchronize();
  }

  template <class T>
  Matrix<T> upload(const HostMatrix& from) {
    const Matrix<T> to = fresh<T>(from.rows, from.columns);
    write(to, from);
    return to;
  }

  template <class T>
  const T* upload(const std::vector<T>& from) {
    const PinnedArray<T> host(from.size());
    std::copy(from.begin(), from.end(), host.data());
    const Matrix<T> to = memory_.matrix<T>(1, static_cast<int64_t>(from.size()));
    CUDA_CHECK(cudaMemcpyAsync(to.data, host.data(), to.bytes(), cudaMemcpyHostToDevice, stream));
    stream.synchronize();
    return to.data;
  }

  // A whole matrix that `fresh` or `upload` made.
  template <class T>
  HostMatrix download(Matrix<T> from) {
    const PinnedArray<T> host(from.size() + 2 * guard<T>);
    CUDA_CHECK(cudaMemcpyAsync(host.data(), from.data - guard<T>, host.size() * sizeof(T),
                               cudaMemcpyDeviceToHost, stream));
    stream.synchronize();
    const T *first = host.data() + guard<T>, *last = first + from.size();
    for (int64_t i = 1; i <= guard<T>; ++i) {
      if (!std::isnan(to_double(*(first - i))) || !std::isnan(to_double(*(last + i - 1)))) {
        FAIL("written " << i << " elements outside of a matrix");
      }
    }
    HostMatrix to(from.rows, from.columns);
    std::transform(first, last, to.values.begin(), to_double<T>);
    return to;
  }

  const Stream stream{"test"};
  const Blas blas{stream};

 private:
  template <class T>
  static constexpr int64_t guard = 256 / sizeof(T);  // elements

  DeviceArena memory_{Purpose::activations};
};

}  // namespace pentatron
