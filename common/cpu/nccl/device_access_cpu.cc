// The device is the CPU: a stream that stops is a thread that waits, and the host reads and writes device
// memory where it lies, which it declares to ThreadSanitizer.
#include "device_access.h"

namespace nccl_mpi {

struct Hold::State {
  cuda_cpu::Latch released;
  Span span;
  std::vector<Message> messages;
};

Hold::Hold() : state_(std::make_shared<State>()) {}

// Asynchronous even with CUDA_LAUNCH_BLOCKING=1: two ranks that each wait for the other's next operation
// would otherwise never reach it.
cudaError_t Hold::stop(cudaStream_t stream) {
  const cuda_cpu::Description described = cuda_cpu::describe({});
  cuda_cpu::describe(described);  // only to read it
  auto wait = [state = state_, label = described.label] {
    state->released.wait();
    cuda_cpu::advance_clock(state->span.end);
    if (label.name == nullptr) return cudaSuccess;
    cuda_cpu::Activity activity{.label = label, .begin = state->span.begin, .end = state->span.end};
    activity.messages = state->messages;
    cuda_cpu::log_activity(std::move(activity));
    return cudaSuccess;
  };
  return cuda_cpu::enqueue(stream, std::move(wait));
}

void Hold::release(Span span, std::vector<Message> messages) {
  state_->span = span;
  state_->messages = std::move(messages);
  state_->released.open();
}

int64_t stream_clock() { return cuda_cpu::clock(); }
void wait_until(int64_t, const std::atomic<bool>&) {}
void pay_for_launch() {
  cuda_cpu::pay_for_launch();
  cuda_cpu::advance_clock(cuda_cpu::clock() + cuda_cpu::nanoseconds(cuda_cpu::profile().collective_seconds));
}
bool is_dry_run() { return cuda_cpu::is_dry_run(); }

Network default_network() {
  const pentatron::DeviceProfile& gpu = cuda_cpu::profile();
  return {true,
          {gpu.link_latency, gpu.link_bandwidth},
          {gpu.network_latency, gpu.network_bandwidth},
          static_cast<int>(gpu.gpus_per_node),
          gpu.ll_bandwidth};
}

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
