// What a program asks of the GPU that the CPU build models (device_profile.h). No CUDA here.
#pragma once

#include <string>

namespace pentatron {

struct DeviceConfig {
  std::string gpu;       // name or file of its profile; empty: h100
  bool dry_run = false;  // nothing is computed, only counted
};

}  // namespace pentatron
