// Device memory as another address space. Two halves of address space are reserved. Device pointers are
// handed out in the lower one, which nobody can access: host code that follows a device pointer faults, as on
// a GPU. The memory itself lies in the upper one, at a constant distance; kernels, copies and products add
// it.
//
// An allocation is made of whole pages, with inaccessible pages on both sides. It starts as NaN (all bits
// one), so an output that nothing wrote shows. Freed addresses are used again as late as possible, so that a
// stale pointer is noticed.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "cuda_cpu.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

using cuda_cpu::remember;

namespace {

constexpr size_t kHalf = size_t{256} << 30;  // bytes
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

#ifdef __SANITIZE_ADDRESS__
void poison(uintptr_t begin, size_t bytes) {
  __asan_poison_memory_region(reinterpret_cast<void*>(begin), bytes);
}
void unpoison(uintptr_t begin, size_t bytes) {
  __asan_unpoison_memory_region(reinterpret_cast<void*>(begin), bytes);
}
#else
void poison(uintptr_t, size_t) {}
void unpoison(uintptr_t, size_t) {}
#endif

// "2GiB", "512MiB" or a number of bytes.
size_t parse_bytes(const char* text) {
  char* unit = nullptr;
  const double number = std::strtod(text, &unit);
  const std::map<std::string, double> units = {
      {"", 1.0}, {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}};
  const auto found = units.find(unit);
  if (unit == text || found == units.end() || !(number > 0)) {
    std::fprintf(stderr,
                 "CUDA_CPU_MEMORY=%s: expected a number of bytes, or of KiB, MiB or GiB, such as 2GiB\n",
                 text);
    std::exit(2);
  }
  return static_cast<size_t>(number * found->second);
}

size_t initial_limit() {
  if (const char* text = std::getenv("CUDA_CPU_MEMORY")) return std::min(parse_bytes(text), kHalf);
  const size_t physical =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::min(physical, kHalf);
}

using Allocations = std::map<uintptr_t, size_t>;  // first byte, number of bytes as asked for

struct Memory {
  std::shared_mutex mutex;  // exclusive for allocating and freeing; launches only look
  uintptr_t device_begin = 0;
  uintptr_t cursor = 0;  // the search for free addresses starts behind the last allocation
  Allocations device, pinned;
  size_t used = 0;  // bytes of device memory, in whole pages
  size_t limit = initial_limit();
  std::atomic<long> allocations = 0, frees = 0, synchronous_copies = 0;

  Memory() {
    void* reserved = mmap(nullptr, 2 * kHalf, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED) {
      std::perror("reserving the address space of device memory");
      std::exit(2);
    }
    device_begin = cursor = round_up(reinterpret_cast<uintptr_t>(reserved), kHugePage);
  }
  uintptr_t device_end() const { return device_begin + kHalf - kHugePage; }
};

Memory& memory() {
  static Memory* const memory = new Memory;  // never destroyed: streams may outlive main
  return *memory;
}

// The allocation that holds `address`, or ends there (the end of a tensor is a valid pointer, to nothing).
Allocations::const_iterator find(const Allocations& allocations, uintptr_t address) {
  auto next = allocations.upper_bound(address);
  if (next == allocations.begin()) return allocations.end();
  const auto candidate = std::prev(next);
  return address - candidate->first <= candidate->second ? candidate : allocations.end();
}

bool covers(const Allocations& allocations, const void* pointer, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const auto found = find(allocations, address);
  return found != allocations.end() && bytes <= found->second - (address - found->first);
}

// Free device addresses for `bytes` in whole pages and a page on both sides, at or after `start`; 0 if there
// are none.
uintptr_t find_gap(const Memory& memory, uintptr_t start, size_t bytes) {
  const size_t alignment = bytes >= kHugePage ? kHugePage : kPage;
  uintptr_t candidate = round_up(start + kPage, alignment);
  for (auto next = memory.device.lower_bound(start); next != memory.device.end(); ++next) {
    if (candidate + bytes + kPage <= next->first) return candidate;
    candidate = round_up(next->first + round_up(next->second, kPage) + kPage, alignment);
  }
  return candidate + bytes + kPage <= memory.device_end() ? candidate : 0;
}

bool map_pages(uintptr_t begin, size_t bytes, int protection) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return mmap(reinterpret_cast<void*>(begin), bytes, protection, flags, -1, 0) != MAP_FAILED;
}

// Opens the memory behind device address `begin` and fills it with NaN.
bool open_memory(uintptr_t begin, size_t bytes) {
  if (cuda_cpu::is_dry_run()) return true;
  const uintptr_t behind = begin + kHalf;
  const size_t pages = round_up(bytes, kPage);
  if (!map_pages(behind, pages, PROT_READ | PROT_WRITE)) return false;
  if (pages >= kHugePage) madvise(reinterpret_cast<void*>(behind), pages, MADV_HUGEPAGE);
  poison(behind - kPage, kPage + pages + kPage);
  unpoison(behind, bytes);
  std::memset(reinterpret_cast<void*>(behind), cuda_cpu::nan_byte, bytes);
  return true;
}

// Gives the memory back to the system. From now on an access faults.
void close_memory(uintptr_t begin, size_t bytes) {
  if (cuda_cpu::is_dry_run()) return;
  const size_t pages = round_up(bytes, kPage);
  map_pages(begin + kHalf, pages, PROT_NONE);
  poison(begin + kHalf, pages);
}

enum class Side { host, pinned_host, device, invalid };

Side side_of(const void* pointer, size_t bytes) {
  std::shared_lock lock(memory().mutex);
  if (covers(memory().device, pointer, bytes)) return Side::device;
  if (covers(memory().pinned, pointer, bytes)) return Side::pinned_host;
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const bool device_address = address >= memory().device_begin && address < memory().device_begin + 2 * kHalf;
  return device_address || pointer == nullptr ? Side::invalid : Side::host;
}

cudaError_t check_side(Side side, bool must_be_device, bool any, bool asynchronous) {
  if (side == Side::invalid) return cudaErrorInvalidValue;
  if (!any && must_be_device != (side == Side::device)) return cudaErrorInvalidValue;
  if (asynchronous && side == Side::host) return cudaErrorInvalidValue;
  return cudaSuccess;
}

// Whether a copy of `bytes` each way may be made as asked.
cudaError_t check_copy(const void* to, size_t to_bytes, const void* from, size_t from_bytes,
                       cudaMemcpyKind kind, bool asynchronous) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return cudaErrorInvalidMemcpyDirection;
  const bool any = kind == cudaMemcpyDefault;
  const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  const cudaError_t error = check_side(side_of(to, to_bytes), to_device, any, asynchronous);
  return error != cudaSuccess ? error : check_side(side_of(from, from_bytes), from_device, any, asynchronous);
}

}  // namespace

namespace cuda_cpu {

bool to_host_address(const void* pointer, void** address) {
  *address = host_address(pointer);
  return pointer == nullptr || is_accessible(pointer, 0);
}

bool is_device_address(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  return address >= memory().device_begin && address < memory().device_begin + kHalf;
}

bool is_accessible(const void* pointer, size_t bytes) {
  const Side side = side_of(pointer, bytes);
  return side == Side::device || side == Side::pinned_host;
}

void* host_address(const void* pointer) {
  return is_device_address(pointer) ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) + kHalf)
                                    : const_cast<void*>(pointer);
}

void set_memory_limit(size_t bytes) {
  std::lock_guard lock(memory().mutex);
  memory().limit = std::min(bytes, kHalf);
}

Counters counters() { return {memory().allocations, memory().frees, memory().synchronous_copies}; }

}  // namespace cuda_cpu

// ---- Allocation -------------------------------------------------------------------------------------------

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  if (pointer == nullptr) return remember(cudaErrorInvalidValue);
  *pointer = nullptr;
  Memory& memory = ::memory();
  ++memory.allocations;
  if (cudaError_t error = cuda_cpu::wait_for_all_streams(); error != cudaSuccess) return remember(error);
  if (bytes == 0) return cudaSuccess;

  std::lock_guard lock(memory.mutex);
  if (bytes > memory.limit) return remember(cudaErrorMemoryAllocation);
  const size_t pages = round_up(bytes, kPage);
  if (memory.used + pages > memory.limit) return remember(cudaErrorMemoryAllocation);
  uintptr_t begin = find_gap(memory, memory.cursor, pages);
  if (begin == 0) begin = find_gap(memory, memory.device_begin, pages);
  if (begin == 0 || !open_memory(begin, bytes)) return remember(cudaErrorMemoryAllocation);
  memory.device.emplace(begin, bytes);
  memory.used += pages;
  memory.cursor = begin + pages;
  *pointer = reinterpret_cast<void*>(begin);
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  Memory& memory = ::memory();
  ++memory.frees;
  const cudaError_t error = cuda_cpu::wait_for_all_streams();
  if (pointer == nullptr) return remember(error);
  std::lock_guard lock(memory.mutex);
  const auto found = memory.device.find(reinterpret_cast<uintptr_t>(pointer));
  if (found == memory.device.end()) return remember(cudaErrorInvalidValue);
  close_memory(found->first, found->second);
  memory.used -= round_up(found->second, kPage);
  memory.device.erase(found);
  return remember(error);
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) {
  if (pointer == nullptr) return remember(cudaErrorInvalidValue);
  *pointer = nullptr;
  Memory& memory = ::memory();
  ++memory.allocations;
  if (cudaError_t error = cuda_cpu::wait_for_all_streams(); error != cudaSuccess) return remember(error);
  if (bytes == 0) return cudaSuccess;
  void* const allocated = std::aligned_alloc(kPage, round_up(bytes, kPage));
  if (allocated == nullptr) return remember(cudaErrorMemoryAllocation);
  std::memset(allocated, cuda_cpu::nan_byte, bytes);
  std::lock_guard lock(memory.mutex);
  memory.pinned.emplace(reinterpret_cast<uintptr_t>(allocated), bytes);
  *pointer = allocated;
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* pointer) {
  Memory& memory = ::memory();
  ++memory.frees;
  const cudaError_t error = cuda_cpu::wait_for_all_streams();
  if (pointer == nullptr) return remember(error);
  std::lock_guard lock(memory.mutex);
  if (memory.pinned.erase(reinterpret_cast<uintptr_t>(pointer)) == 0) return remember(cudaErrorInvalidValue);
  std::free(pointer);
  return remember(error);
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  if (free == nullptr || total == nullptr) return remember(cudaErrorInvalidValue);
  std::shared_lock lock(memory().mutex);
  *total = memory().limit;
  *free = memory().limit - std::min(memory().used, memory().limit);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  if (attributes == nullptr) return remember(cudaErrorInvalidValue);
  const Side side = side_of(pointer, 1);
  attributes->type = side == Side::device        ? cudaMemoryTypeDevice
                     : side == Side::pinned_host ? cudaMemoryTypeHost
                                                 : cudaMemoryTypeUnregistered;
  return cudaSuccess;
}

// ---- Copies -----------------------------------------------------------------------------------------------

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  ++memory().synchronous_copies;
  if (cudaError_t error = cuda_cpu::wait_for_all_streams(); error != cudaSuccess) return remember(error);
  if (bytes == 0) return cudaSuccess;
  if (cudaError_t error = check_copy(to, bytes, from, bytes, kind, false); error != cudaSuccess) {
    return remember(error);
  }
  if (!cuda_cpu::is_dry_run()) std::memmove(cuda_cpu::host_address(to), cuda_cpu::host_address(from), bytes);
  cuda_cpu::advance_clock(cuda_cpu::clock() + cuda_cpu::nanoseconds(cuda_cpu::profile().copy_seconds(bytes)));
  return cudaSuccess;
}

cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  ++memory().synchronous_copies;
  if (cudaError_t error = cuda_cpu::wait_for_all_streams(); error != cudaSuccess) return remember(error);
  if (bytes > 0 && !cuda_cpu::is_accessible(to, bytes)) return remember(cudaErrorInvalidValue);
  if (!cuda_cpu::is_dry_run()) std::memset(cuda_cpu::host_address(to), value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, bytes == 0 ? 0 : 1, kind, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t rows, cudaMemcpyKind kind, cudaStream_t stream) {
  if (width > to_pitch || width > from_pitch) return remember(cudaErrorInvalidPitchValue);
  if (width > 0 && rows > 0) {
    const size_t to_bytes = (rows - 1) * to_pitch + width, from_bytes = (rows - 1) * from_pitch + width;
    const cudaError_t error = check_copy(to, to_bytes, from, from_bytes, kind, true);
    if (error != cudaSuccess) return remember(error);
  }
  auto* target = static_cast<char*>(cuda_cpu::host_address(to));
  const auto* source = static_cast<const char*>(cuda_cpu::host_address(from));
  const auto work = [=] {
    for (size_t row = 0; row < rows; ++row) {
      // Told apart: beside MPI, ThreadSanitizer does not look into memmove (nccl/device_access_cpu.cc).
      cuda_cpu::declare_read(source + row * from_pitch, width);
      cuda_cpu::declare_write(target + row * to_pitch, width);
      std::memmove(target + row * to_pitch, source + row * from_pitch, width);
    }
    return cudaSuccess;
  };
  const bool on_device = cuda_cpu::is_device_address(to) && cuda_cpu::is_device_address(from);
  const double bytes = static_cast<double>(rows * width);
  const double seconds = on_device ? cuda_cpu::profile().seconds(pentatron::moves(2 * bytes))
                                   : cuda_cpu::profile().copy_seconds(bytes);
  return remember(cuda_cpu::enqueue_timed(stream, work, cuda_cpu::nanoseconds(seconds), "memcpy"));
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  if (bytes > 0 && !cuda_cpu::is_accessible(to, bytes)) return remember(cudaErrorInvalidValue);
  const auto work = [address = cuda_cpu::host_address(to), value, bytes] {
    cuda_cpu::declare_write(address, bytes);
    std::memset(address, value, bytes);
    return cudaSuccess;
  };
  const double seconds = cuda_cpu::profile().seconds(pentatron::moves(static_cast<double>(bytes)));
  return remember(cuda_cpu::enqueue_timed(stream, work, cuda_cpu::nanoseconds(seconds), "memset"));
}
