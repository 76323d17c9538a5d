// A backward kernel against its forward kernel, by central differences. Only in double: in less, a step small
// enough for the curvature is too small for the digits.
#pragma once

#include <functional>
#include <numeric>

#include "reference.h"

namespace pentatron {

// A central difference is off by h^2 times the third derivative and by epsilon / h, which balance at
// h = epsilon^(1/3), about 2^-17. What is left is h^2 = 6e-11 times a third derivative, and rounding times
// the number of terms: 100 of those.
constexpr double difference_step = 0x1p-17, difference_allowed = 100 * difference_step * difference_step;

// The gradient of f by each element of x. Expects `backward`'s.
inline void check_gradient(const HostMatrix& gradient, HostMatrix x,
                           const std::function<double(const HostMatrix&)>& f) {
  HostMatrix differences(x.rows, x.columns);
  for (size_t i = 0; i < x.values.size(); ++i) {
    const double here = x.values[i];
    x.values[i] = here + difference_step;
    const double above = f(x);
    x.values[i] = here - difference_step;
    const double below = f(x);
    x.values[i] = here;
    differences.values[i] = (above - below) / (2 * difference_step);
  }
  require_close(gradient, differences, {difference_allowed, difference_allowed});
}

inline double dot(const HostMatrix& a, const HostMatrix& b) {
  return std::inner_product(a.values.begin(), a.values.end(), b.values.begin(), 0.0);
}

}  // namespace pentatron
