// The device is the CPU: a stream that stops is a thread that waits, and the host reads and writes device
// memory where it lies, which it declares to ThreadSanitizer.
#include "device.h"

#ifdef __SANITIZE_THREAD__
// A thread that calls MPI for itself may pass on the messages of another: what MPI does to memory is not
// looked at.
extern "C" const char* __tsan_default_options() { return "ignore_noninstrumented_modules=1"; }
#endif

namespace nccl_mpi {

struct Hold::State {
  cuda_cpu::Latch released;
};

Hold::Hold() : state_(std::make_shared<State>()) {}

// Asynchronous even with CUDA_LAUNCH_BLOCKING=1: two ranks that each wait for the other's next operation
// would otherwise never reach it.
cudaError_t Hold::stop(cudaStream_t stream) {
  auto wait = [state = state_] {
    state->released.wait();
    return cudaSuccess;
  };
  return cuda_cpu::enqueue(stream, std::move(wait), true);
}

void Hold::release() { state_->released.open(); }

bool is_device_memory(const void* pointer, size_t bytes) {
  return cuda_cpu::is_device_address(pointer) && cuda_cpu::is_accessible(pointer, bytes);
}

struct DeviceWindow::State {};

DeviceWindow::DeviceWindow(size_t) {}
DeviceWindow::~DeviceWindow() = default;

std::byte* DeviceWindow::read(const void* device, size_t bytes) {
  void* const address = cuda_cpu::host_address(device);
  cuda_cpu::declare_read(address, bytes);
  return static_cast<std::byte*>(address);
}

std::byte* DeviceWindow::write(void* device, size_t bytes) {
  void* const address = cuda_cpu::host_address(device);
  cuda_cpu::declare_write(address, bytes);
  return static_cast<std::byte*>(address);
}

void DeviceWindow::load() {}
void DeviceWindow::store() {}

}  // namespace nccl_mpi
