// The CUDA runtime for machines without a GPU: the part of its interface that this project uses, under the
// real names, so that the same sources compile with g++. A stream is a thread with a queue (cuda_stream.cc),
// device memory is an address space that the host cannot touch (cuda_memory.cc), and a kernel is a function
// that is called once a block (cuda_launch.cc). A call that CUDA would refuse is refused here with the same
// error. cuda_cpu.h has what CUDA lacks.
#pragma once

#include <cstddef>
#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>

#include "vector_math.h"

#define CUDART_VERSION 13000

// ---- Qualifiers: on the CPU all code is host code. There is no __shared__ (see cuda_cpu::shared_memory). --

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))

// ---- Types and constants, named and numbered as CUDA does -------------------------------------------------

struct uint3 {
  unsigned x, y, z;
};

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
  constexpr operator uint3() const { return {x, y, z}; }
};

enum cudaError {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidPitchValue = 12,
  cudaErrorInvalidDevicePointer = 17,
  cudaErrorInvalidMemcpyDirection = 21,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorInvalidDevice = 101,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorNotReady = 600,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotPermitted = 800,
  cudaErrorUnknown = 999
};
using cudaError_t = cudaError;

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4
};

enum cudaMemoryType { cudaMemoryTypeUnregistered = 0, cudaMemoryTypeHost = 1, cudaMemoryTypeDevice = 2 };

struct cudaPointerAttributes {
  cudaMemoryType type;
};

enum cudaDeviceAttr { cudaDevAttrMaxThreadsPerBlock = 1, cudaDevAttrMaxSharedMemoryPerBlockOptin = 97 };

struct cudaUUID_t {
  char bytes[16];
};

struct cudaDeviceProp {
  char name[256];
  cudaUUID_t uuid;        // of the process and the device, or CUDA_CPU_UUID
  size_t totalGlobalMem;  // bytes
  int major, minor;       // of the compute capability; 0.0 on the CPU
  int multiProcessorCount;
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
using cudaHostFn_t = void (*)(void* user_data);

inline constexpr unsigned cudaStreamDefault = 0;
inline constexpr unsigned cudaStreamNonBlocking = 1;
inline constexpr unsigned cudaEventDefault = 0;
inline constexpr unsigned cudaEventDisableTiming = 2;
inline constexpr unsigned cudaEventWaitDefault = 0;

struct cudaLaunchConfig_t {
  dim3 gridDim;
  dim3 blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

// ---- Device and errors ------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceSynchronize();

cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);

// ---- Memory -----------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMallocHost(void** pointer, size_t bytes);
cudaError_t cudaFreeHost(void* pointer);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer);

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemset(void* to, int value, size_t bytes);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream = nullptr);
// Copies `rows` rows of `width` bytes that lie `to_pitch` and `from_pitch` bytes apart.
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t rows, cudaMemcpyKind kind, cudaStream_t stream = nullptr);

template <class T>
cudaError_t cudaMalloc(T** pointer, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(pointer), bytes);
}
template <class T>
cudaError_t cudaMallocHost(T** pointer, size_t bytes) {
  return cudaMallocHost(reinterpret_cast<void**>(pointer), bytes);
}

// ---- Streams and events -----------------------------------------------------------------------------------

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                unsigned flags = cudaEventWaitDefault);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* user_data);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

// ---- Kernels ----------------------------------------------------------------------------------------------

cudaError_t cudaFuncGetName(const char** name, const void* kernel);  // the mangled name, as CUDA returns it
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);

template <class... Parameters>
cudaError_t cudaFuncGetName(const char** name, void (*kernel)(Parameters...)) {
  return cudaFuncGetName(name, reinterpret_cast<const void*>(kernel));
}
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), attribute, value);
}

namespace cuda_cpu {

// How many threads a block has: one, so that a kernel's loop has a stride known to be one and is vectorised.
// Tests that look for races define more; a block is then this many real threads, or fewer where the launch
// asks for fewer.
#ifdef CUDA_CPU_THREADS_PER_BLOCK
inline constexpr unsigned threads_per_block = CUDA_CPU_THREADS_PER_BLOCK;
#else
inline constexpr unsigned threads_per_block = 1;
#endif

void synchronize_block();  // __syncthreads where a block has several threads

// A reference to a callable that outlives it: the body of a kernel, with its arguments bound.
struct BlockBody {
  void (*call)(const void* bound);
  const void* bound;
};

// Calls the body once a block (threads_per_block times, at once, in the test mode).
void run_grid(const void* kernel, dim3 grid, dim3 block, size_t shared_bytes, BlockBody body);

// Refuses what CUDA refuses, then puts the work in the stream's queue.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel, bool arguments_valid,
                   std::function<cudaError_t()> work);

// The memory behind a device or pinned pointer, null for null. False if the pointer is neither, or was freed.
bool to_host_address(const void* pointer, void** address);

// Makes a kernel's argument usable by the CPU: numbers stay, device pointers become the address of the memory
// behind. A struct says which pointers it has.
template <class T>
bool translate_argument(T& argument) {
  if constexpr (requires { argument.device_pointers(); }) {
    return std::apply([](auto&... pointer) { return (translate_argument(pointer) && ...); },
                      argument.device_pointers());
  } else {
    static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_pointer_v<T>,
                  "a kernel takes numbers, pointers, and structs with device_pointers() only");
    if constexpr (std::is_pointer_v<T>) {
      void* address = nullptr;
      if (!to_host_address(argument, &address)) return false;
      argument = static_cast<T>(address);
    }
    return true;
  }
}

}  // namespace cuda_cpu

#ifdef CUDA_CPU_THREADS_PER_BLOCK
inline thread_local constinit uint3 threadIdx{0, 0, 0};
inline thread_local constinit uint3 blockDim{1, 1, 1};
#else
inline constexpr uint3 threadIdx{0, 0, 0};
inline constexpr uint3 blockDim{1, 1, 1};
#endif
inline thread_local constinit uint3 blockIdx{0, 0, 0};
inline thread_local constinit uint3 gridDim{1, 1, 1};

inline void __syncthreads() {
  if constexpr (cuda_cpu::threads_per_block > 1) cuda_cpu::synchronize_block();
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  // The arguments are copied at the call, as CUDA does: what the host does to its variables afterwards
  // changes nothing.
  std::tuple<Parameters...> values(std::forward<Arguments>(arguments)...);
  const bool valid =
      std::apply([](auto&... value) { return (cuda_cpu::translate_argument(value) && ...); }, values);
  const auto work = [kernel, values, grid = config->gridDim, block = config->blockDim,
                     shared_bytes = config->dynamicSmemBytes] {
    const auto body = [&] { std::apply(kernel, values); };
    const auto call = [](const void* bound) { (*static_cast<decltype(body)*>(bound))(); };
    cuda_cpu::run_grid(reinterpret_cast<const void*>(kernel), grid, block, shared_bytes, {call, &body});
    return cudaSuccess;
  };
  return cuda_cpu::launch(*config, reinterpret_cast<const void*>(kernel), valid, work);
}
