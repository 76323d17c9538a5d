// Memory that is allocated, against its prediction.
#pragma once

#include "catch.h"
#include "device/tensor.h"

namespace pentatron {

inline MemoryBytes allocated_since(const MemoryBytes& before) {
  MemoryBytes bytes = memory_in_use();
  for (size_t i = 0; i < purposes; ++i) bytes[i] -= before[i];
  return bytes;
}

inline void check_bytes(const MemoryBytes& measured, const MemoryBytes& predicted) {
  for (size_t i = 0; i < purposes; ++i) {
    INFO(purpose_names[i]);
    CHECK(measured[i] == predicted[i]);
  }
}

}  // namespace pentatron
