// What a program asks of the GPU that a CPU build models.
#pragma once

#include <string>

namespace pentatron {

struct DeviceConfig {
  std::string gpu;       // name or file of its profile (clock/device_profile.h); empty: h100
  bool dry_run = false;  // nothing is computed, only counted
};

}  // namespace pentatron
