// What an operation costs a device, declared once, where it is issued. The clock that models a GPU reads
// it (device_profile.h), and so does the bench, which measures a real GPU. No CUDA here.
#pragma once

#include <cstdint>

namespace pentatron {

// An operation takes the longer of moving its bytes and computing (roofline; Williams et al., 2009).
struct Cost {
  double bytes = 0;  // moved from and to memory; what a block reads again comes from a cache
  double flops = 0;  // floating-point operations
  enum class Unit { cores, tensor_cores } unit = Unit::cores;
  bool backward = false;  // of attention, whose backward reaches a smaller share of the peak
  int head_size = 0;      // likewise: it depends on this, too
  double blocks = 1;      // likewise: blocks of threads that its work would fill, if all were its longest
  // A batch of matrix products [m, k] x [k, n], in elements of so many bytes.
  int64_t m = 0, n = 0, k = 0, batch = 0;
  int element_bytes = 0;
  double result_bytes = 0;     // of the result, read and written after its sums
  bool layer_product = false;  // whether it is a product of a layer of the model (`unit`)
};

// An operation that only moves bytes.
constexpr Cost moves(double bytes) { return {.bytes = bytes}; }
// The shortest kernel: so little work that its time is that of a launch.
constexpr Cost shortest_kernel = {};

// `batch` products [m, k] x [k, n]. `element`, `result`: bytes of an element of the inputs and of the
// result. `adds`: the products are added to the result, which is read too.
constexpr Cost products(int64_t m, int64_t n, int64_t k, int64_t batch, int element, int result, bool adds,
                        bool layer_product = false) {
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
          .result_bytes = out,
          .layer_product = layer_product};
}

// The sum of all costs declared in this process so far: a function's cost is a difference of two.
struct DeclaredCosts {
  double bytes = 0, flops = 0;
  void operator+=(const Cost& cost) { bytes += cost.bytes, flops += cost.flops; }
};
inline DeclaredCosts declared_costs;

}  // namespace pentatron
