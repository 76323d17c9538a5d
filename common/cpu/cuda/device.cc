// The device of device/cuda.h, where it is modelled: its clock, and its profile.
#include "clock/device_profile.h"
#include "cuda_cpu.h"
#include "device/cuda.h"

namespace pentatron {

void configure_device(const DeviceConfig& config) {
  if (!config.gpu.empty()) cuda_cpu::set_profile(load_profile(config.gpu));
  if (config.dry_run) cuda_cpu::set_dry_run();
}
bool is_dry_run() { return cuda_cpu::is_dry_run(); }
std::string modelled_gpu() { return cuda_cpu::profile().name; }
double now() { return static_cast<double>(cuda_cpu::clock()) * 1e-9; }
void advance_clock(double seconds) { cuda_cpu::advance_clock(cuda_cpu::nanoseconds(seconds)); }
double peak_flops(int element_bytes) { return cuda_cpu::profile().flops(element_bytes); }

}  // namespace pentatron
