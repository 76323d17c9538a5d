// Tensors and the device memory that they view. Everything in the model is a matrix: activations are rows of
// tokens, [batch x sequence, features], and weights are [output features, input features].
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "device/cuda.h"
#include "device/precision.h"
#include "device/purpose.h"

namespace pentatron {

// A view of a row-major matrix in device memory; copying it copies no elements.
template <class T>
struct Matrix {
  T* data = nullptr;
  int64_t rows = 0, columns = 0;

  size_t size() const { return static_cast<size_t>(rows) * columns; }
  size_t bytes() const { return size() * sizeof(T); }
  Matrix row_range(int64_t first, int64_t count) const { return {data + first * columns, count, columns}; }
};

using Tensor = Matrix<real>;        // weights and activations
using AccumTensor = Matrix<accum>;  // sums: gradients of weights, losses, statistics of rows

// The gradient of some weights: a sum over a step's micro-batches. The first assigns it, others add to it.
struct Gradient {
  AccumTensor sum;
  bool add;
};

// Bytes of each purpose: those allocated now, and the most of this process so far. DeviceArena alone counts.
MemoryBytes memory_in_use();
MemoryBytes memory_peak();

// Owns matrices in device memory, of one purpose, that are freed together. Fresh memory holds anything.
class DeviceArena {
 public:
  explicit DeviceArena(Purpose purpose) : purpose_(purpose) {}
  template <class T>
  Matrix<T> matrix(int64_t rows, int64_t columns) {
    return {static_cast<T*>(allocate(static_cast<size_t>(rows) * columns * sizeof(T))), rows, columns};
  }

 private:
  void* allocate(size_t bytes);  // null if there are none

  struct Free {
    size_t bytes;
    Purpose purpose;
    void operator()(void* data) const;
  };
  Purpose purpose_;
  std::vector<std::unique_ptr<void, Free>> memory_;
};

// Pinned host memory, which an asynchronous copy may read or write.
template <class T>
class PinnedArray {
 public:
  PinnedArray() = default;
  explicit PinnedArray(size_t size) : size_(size) {
    void* data = nullptr;
    CUDA_CHECK(cudaMallocHost(&data, std::max<size_t>(size, 1) * sizeof(T)));
    data_.reset(static_cast<T*>(data));
  }
  T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  T& operator[](size_t i) const { return data_.get()[i]; }

 private:
  struct Free {
    void operator()(T* data) const { cudaFreeHost(data); }
  };
  std::unique_ptr<T, Free> data_;
  size_t size_ = 0;
};

// Streams that exist, for check_work_queues (cuda.h), with those that libraries made.
inline int streams_in_use = 0;

// A stream with a name for the trace. Kernels of an urgent one start before those that wait in other streams.
class Stream {
 public:
  explicit Stream(const char* name, bool urgent = false);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void synchronize() const { CUDA_CHECK(cudaStreamSynchronize(stream_)); }

 private:
  cudaStream_t stream_ = nullptr;
};

// A point in a stream, for which another stream can wait.
class Event {
 public:
  Event() { CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }
  void record(cudaStream_t stream) { CUDA_CHECK(cudaEventRecord(event_, stream)); }
  void synchronize() const { CUDA_CHECK(cudaEventSynchronize(event_)); }

 private:
  cudaEvent_t event_ = nullptr;
};

// Work issued to `stream` from now on starts after the point at which `event` was recorded last, if ever.
inline void wait_event(cudaStream_t stream, const Event& event) {
  CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0));
}

// Work issued to `stream` from now on starts after all work issued to `other` so far.
inline void wait_stream(cudaStream_t stream, cudaStream_t other) {
  Event event;
  event.record(other);
  wait_event(stream, event);
}

}  // namespace pentatron
