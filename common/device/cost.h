// What an operation costs a device, said once, where it is issued. Two readers: the clock that models a GPU
// (device_profile.h), and the bench, which measures a real one. No CUDA here.
#pragma once

#include <cstdint>

namespace pentatron {

// The side that is slower decides (the roofline model; Williams, Waterman and Patterson, 2009).
struct Cost {
  double bytes = 0;  // moved from and to memory; what a block reads again comes from a cache
  double flops = 0;  // floating-point operations
  enum class Unit { cores, tensor_cores } unit = Unit::cores;
  bool backward = false;  // of attention, whose backward reaches a smaller share of the peak
  // A batch of matrix products [m, k] x [k, n], in elements of so many bytes.
  int64_t m = 0, n = 0, k = 0, batch = 0;
  int element_bytes = 0;
  double result_bytes = 0;  // read and written where the sum of each element is complete
  bool of_layer = false;    // one of the four products of a layer
};

// Memory decides.
constexpr Cost moves(double bytes) { return {.bytes = bytes}; }
// So little of both that it takes a kernel's least time.
constexpr Cost little = {};

// Products [m, k] x [k, n], where an element of the inputs and of the result takes so many bytes; `adds`: to
// what the result is.
constexpr Cost products(int64_t m, int64_t n, int64_t k, int64_t batch, int element, int result, bool adds) {
  const double in = batch * (double(m) * k + double(k) * n) * element;
  const double out = batch * double(m) * n * (adds ? 2 : 1) * result;
  return {.bytes = in + out,
          .flops = 2.0 * m * n * k * batch,
          .unit = Cost::Unit::tensor_cores,
          .m = m,
          .n = n,
          .k = k,
          .batch = batch,
          .element_bytes = element,
          .result_bytes = out};
}

// All that was declared in this process so far: what a function costs is the difference.
struct DeclaredCosts {
  double bytes = 0, flops = 0;
  void operator+=(const Cost& cost) { bytes += cost.bytes, flops += cost.flops; }
};
inline DeclaredCosts declared_costs;

}  // namespace pentatron
