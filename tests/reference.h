// What the tests of kernels compare with: matrices of doubles on the host, random ones, and the rule for how
// close is close enough.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "catch.h"
#include "device/precision.h"

namespace pentatron {

struct HostMatrix {
  HostMatrix(int64_t rows, int64_t columns, double value = 0)
      : rows(rows), columns(columns), values(rows * columns, value) {}
  double& operator()(int64_t i, int64_t j) { return values[i * columns + j]; }
  double operator()(int64_t i, int64_t j) const { return values[i * columns + j]; }
  bool operator==(const HostMatrix&) const = default;

  HostMatrix slice(int64_t first_row, int64_t row_count, int64_t first_column, int64_t column_count) const {
    HostMatrix part(row_count, column_count);
    for (int64_t i = 0; i < row_count; ++i) {
      for (int64_t j = 0; j < column_count; ++j) part(i, j) = (*this)(first_row + i, first_column + j);
    }
    return part;
  }

  int64_t rows, columns;
  std::vector<double> values;  // [rows, columns]
};

// (bfloat16 converts from and to float only.)
template <class T>
double to_double(T x) {
  if constexpr (sizeof(T) == sizeof(double)) return x;
  return static_cast<float>(x);
}

template <class T>
T from_double(double x) {
  if constexpr (sizeof(T) == sizeof(double)) return x;
  return T(static_cast<float>(x));
}

// What is left of x in memory of type T.
template <class T>
double rounded(double x) {
  return to_double(from_double<T>(x));
}

template <class T>
HostMatrix rounded(HostMatrix matrix) {
  for (double& x : matrix.values) x = rounded<T>(x);
  return matrix;
}

// Inputs, already rounded to the type in which the device will have them.
class Random {
 public:
  template <class T>
  HostMatrix normal(int64_t rows, int64_t columns, double standard_deviation = 1) {
    std::normal_distribution<double> distribution(0, standard_deviation);
    HostMatrix matrix(rows, columns);
    for (double& x : matrix.values) x = rounded<T>(distribution(engine_));
    return matrix;
  }

  // `count` of first, ..., first + range - 1.
  std::vector<int32_t> integers(int64_t count, int first, int range) {
    std::vector<int32_t> drawn(count);
    for (int32_t& x : drawn) x = first + static_cast<int>(engine_() % range);
    return drawn;
  }

 private:
  std::mt19937_64 engine_{1};
};

// ---- How close is close enough ----------------------------------------------------------------------------

// Test and kernel start from the same bits, so they may differ by the roundings on the way only:
//  - storing a result rounds it to half an epsilon of the type in which it is stored;
//  - a sum of n terms makes n roundings of either sign, each of a partial sum of about the result's size:
//    sqrt(n) epsilon(accum). A factor k = 4 covers the few roundings inside a term, and the vectorised exp,
//    log, sin and cos, which are good to 4 units in the last place;
//  - so does each intermediate matrix that passes through memory as `real` (`stored_between`), with
//    epsilon(real).
// All but the first are relative to the element and to the matrix's root mean square: an element may be small
// because its terms cancel. The depth and k are those of TTrace (2025), whose C^depth is 1 here.
struct Tolerance {
  double of_element, of_root_mean_square;
};

template <class T>
constexpr double epsilon() {
  if (std::is_same_v<T, __half>) return 0x1p-10;
  return sizeof(T) == 8 ? 0x1p-52 : sizeof(T) == 4 ? 0x1p-23 : 0x1p-7;  // double, float, bfloat16
}

inline Tolerance tolerance(double store, double sum_epsilon, double terms, int stored_between) {
#ifdef __SANITIZE_THREAD__
  constexpr double k =
      8;  // loops are not vectorised: one chain of roundings, where else are eight short ones
#else
  constexpr double k = 4;
#endif
  const double arithmetic = k * (std::sqrt(terms) * sum_epsilon + stored_between * epsilon<real>());
  return {store / 2 + arithmetic, arithmetic};
}

// Of a result of type T whose elements are sums of about `terms` products.
template <class T>
Tolerance sum_of(double terms, int stored_between = 0) {
  return tolerance(epsilon<T>(), epsilon<std::conditional_t<sizeof(T) == 8, double, accum>>(), terms,
                   stored_between);
}

inline double root_mean_square(const HostMatrix& matrix) {
  double sum = 0;
  for (const double x : matrix.values) sum += x * x;
  return std::sqrt(sum / static_cast<double>(matrix.values.size()));
}

// Every element, so that a single wrong one fails; NaN fails.
inline void require_close(const HostMatrix& got, const HostMatrix& want, Tolerance tolerance) {
  REQUIRE(got.rows == want.rows);
  REQUIRE(got.columns == want.columns);
  const double typical = root_mean_square(want);
  size_t worst = 0;
  double worst_error = 0;  // in tolerances
  for (size_t i = 0; i < want.values.size(); ++i) {
    const double smallest = has_loss_scale ? 0x1p-24 : 0;  // of the numbers that a half can be
    const double allowed = tolerance.of_element * std::abs(want.values[i]) +
                           tolerance.of_root_mean_square * typical + smallest / 2;
    const double error = std::abs(got.values[i] - want.values[i]);
    if (error == 0 || error / allowed <= worst_error) continue;
    worst = i, worst_error = error / allowed;
    if (std::isnan(error)) break;
  }
  INFO("row " << worst / want.columns << ", column " << worst % want.columns << ": " << got.values[worst]
              << " instead of " << want.values[worst] << ", off by " << worst_error << " tolerances");
  REQUIRE(worst_error <= 1);
}

}  // namespace pentatron
