// Every kernel but attention, and the ranges and reductions that kernels are made of (cuda.h), against plain
// loops in double, at sizes that are no multiple of anything and at sizes beyond one block, one band, one
// part.
// precisions: fp64 fp32 bf16 fp16
#include <algorithm>
#include <complex>
#include <numeric>
#include <utility>

#include "device.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/optimizer_step.h"
#include "kernels/pack.h"
#include "kernels/rescale.h"
#include "kernels/rotary.h"
#include "kernels/swiglu.h"

namespace pentatron {

// ---- Ranges and reductions --------------------------------------------------------------------------------

__global__ void count_visits_kernel(size_t n, accum* visits) {
  for (size_t i : grid_range(n)) visits[i] += 1;
}

// out[0..n) = the sum, out[n..2n) = the largest, written by all threads that have a part of the range.
__global__ void reduce_kernel(const accum* x, int n, accum* out) {
  accum sum = 0;
  for (int i : block_range(n)) sum += x[i];
  sum = block_sum(sum);
  const accum largest = block_max_of<1>(x, n), again = block_sum(largest) - block_sum(largest);
  for (int i : block_range(n)) {
    out[i] = sum + again;
    out[n + i] = largest;
  }
}

namespace {

struct Shape {
  int64_t rows, columns;
};
// One row; fewer elements than threads; more than threads of a block (256); more rows than bands (256) and
// not a multiple of them; more elements than one block of an elementwise grid (2048). And rows of whole packs
// (pack.h): few, many, more than one for each thread.
constexpr Shape shapes[] = {{1, 10},   {1, 259},  {37, 1}, {37, 97}, {5, 601},
                            {257, 10}, {601, 13}, {3, 8},  {29, 96}, {3, 2056}};

TEST_CASE("ranges: a grid visits every element once", "[01][kernels]") {
  Device device;
  for (const unsigned blocks : {1u, 3u, 7u}) {
    for (const size_t n : {1, 2, 6, 37, 2048, 10007}) {
      CAPTURE(blocks, n);
      const HostMatrix once(1, n, 1);
      const AccumTensor visits = device.upload<accum>(HostMatrix(1, n));
      launch(count_visits_kernel, dim3(blocks), shortest_kernel, device.stream, n, visits.data);
      REQUIRE(device.download(visits) == once);
    }
  }
  REQUIRE(elementwise_grid(0).x == 1);  // an empty grid would be refused
  REQUIRE(elementwise_grid(2048).x == 1);
  REQUIRE(elementwise_grid(2049).x == 2);
  REQUIRE(elementwise_grid(size_t{1} << 40).x == 16384);
}

TEST_CASE("reductions: every thread gets the sum and the largest", "[01][kernels]") {
  Device device;
  Random random;
  for (const int n : {1, 2, 31, 37, 255, 256, 257, 1000}) {
    CAPTURE(n);
    HostMatrix x(1, n), want(2, n);
    for (double& element : x.values) element = -1 - random.integers(1, 0, 100)[0];  // their sums are exact
    for (int i = 0; i < n; ++i) {
      want(0, i) = std::accumulate(x.values.begin(), x.values.end(), 0.0);
      want(1, i) = *std::max_element(x.values.begin(), x.values.end());
    }
    const AccumTensor out = device.fresh<accum>(2, n);
    launch(reduce_kernel, dim3(1), shortest_kernel, device.stream, device.upload<accum>(x).data, n, out.data);
    REQUIRE(device.download(out) == want);
  }
}

// ---- Embedding --------------------------------------------------------------------------------------------

struct Slice {
  int first, count;
};
constexpr int vocabulary = 259;
constexpr Slice vocabulary_slices[] = {{0, 259}, {0, 100}, {258, 1}};

TEST_CASE("embedding: each row is its token's, or zero beyond the table", "[01][kernels]") {
  Device device;
  Random random;
  for (const auto [rows, d] : shapes) {
    const HostMatrix table = random.normal<real>(vocabulary, d);
    std::vector<int32_t> tokens = random.integers(rows, 0, vocabulary);
    tokens.back() = vocabulary - 1;
    for (const auto [first, count] : vocabulary_slices) {
      CAPTURE(rows, d, first, count);
      HostMatrix want(rows, d);
      for (int64_t i = 0; i < rows; ++i) {
        const bool here = first <= tokens[i] && tokens[i] < first + count;
        for (int64_t j = 0; j < d; ++j) want(i, j) = here ? table(tokens[i], j) : 0;
      }
      const Tensor out = device.fresh<real>(rows, d);
      embedding_forward(device.upload<real>(table.slice(first, count, 0, d)), device.upload(tokens), first,
                        out, device.stream);
      REQUIRE(device.download(out) == want);
    }
  }
}

TEST_CASE("embedding backward: the rows of a token add up to its gradient, or onto it", "[01][kernels]") {
  Device device;
  Random random;
  for (const auto [rows, d] : shapes) {
    const HostMatrix d_out = random.normal<real>(rows, d);
    const HostMatrix before = random.normal<accum>(vocabulary, d);
    for (const int distinct : {3, vocabulary}) {  // so that tokens repeat
      const std::vector<int32_t> tokens = random.integers(rows, vocabulary - distinct, distinct);
      std::vector<int32_t> by_token(rows);
      std::iota(by_token.begin(), by_token.end(), 0);
      std::stable_sort(by_token.begin(), by_token.end(),
                       [&](int32_t a, int32_t b) { return tokens[a] < tokens[b]; });
      for (const bool add : {false, true}) {
        HostMatrix want = add ? before : HostMatrix(vocabulary, d);
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t j = 0; j < d; ++j) want(tokens[i], j) += d_out(i, j);
        }
        for (const auto [first, count] : vocabulary_slices) {
          CAPTURE(rows, d, distinct, first, count, add);
          const AccumTensor gradient = device.upload<accum>(before.slice(first, count, 0, d));
          embedding_backward(device.upload<real>(d_out), device.upload(tokens), device.upload(by_token),
                             first, {gradient, add}, device.stream);
          require_close(device.download(gradient), want.slice(first, count, 0, d), sum_of<accum>(rows));
        }
      }
    }
  }
}

// ---- RMSNorm ----------------------------------------------------------------------------------------------

TEST_CASE("rmsnorm: forward", "[01][kernels]") {
  Device device;
  Random random;
  for (const auto [rows, d] : shapes) {
    for (const double norm_epsilon : {1e-5, 0.5}) {
      CAPTURE(rows, d, norm_epsilon);
      const HostMatrix x = random.normal<real>(rows, d), weight = random.normal<real>(1, d);
      HostMatrix want(rows, d), want_rstd(rows, 1);
      for (int64_t i = 0; i < rows; ++i) {
        double squares = 0;
        for (int64_t j = 0; j < d; ++j) squares += x(i, j) * x(i, j);
        want_rstd(i, 0) = 1 / std::sqrt(squares / d + norm_epsilon);
        for (int64_t j = 0; j < d; ++j) want(i, j) = x(i, j) * want_rstd(i, 0) * weight(0, j);
      }
      const Tensor out = device.fresh<real>(rows, d);
      const AccumTensor rstd = device.fresh<accum>(rows, 1);
      const Tensor device_x = device.upload<real>(x);
      rmsnorm_forward(device_x, {}, device.upload<real>(weight).data, norm_epsilon, device_x, out, rstd.data,
                      device.stream);
      require_close(device.download(out), want, sum_of<real>(d));
      require_close(device.download(rstd), want_rstd, sum_of<accum>(d));
    }
  }
}

TEST_CASE("rmsnorm: forward, of a stream that a branch is added to", "[01][kernels]") {
  Device device;
  Random random;
  for (const auto [rows, d] : shapes) {
    CAPTURE(rows, d);
    const Tensor before = device.upload<real>(random.normal<real>(rows, d)),
                 branch = device.upload<real>(random.normal<real>(rows, d)),
                 weight = device.upload<real>(random.normal<real>(1, d));
    const Tensor want_x = device.fresh<real>(rows, d), want = device.fresh<real>(rows, d);
    const AccumTensor want_rstd = device.fresh<accum>(rows, 1);
    residual_add(before, branch, want_x, device.stream);
    rmsnorm_forward(want_x, {}, weight.data, 0.5, want_x, want, want_rstd.data, device.stream);

    const Tensor x = device.fresh<real>(rows, d), out = device.fresh<real>(rows, d);
    const AccumTensor rstd = device.fresh<accum>(rows, 1);
    rmsnorm_forward(before, branch, weight.data, 0.5, x, out, rstd.data, device.stream);
    REQUIRE(device.download(x) == device.download(want_x));
    require_close(device.download(out), device.download(want), sum_of<real>(d));
    require_close(device.download(rstd), device.download(want_rstd), sum_of<accum>(d));
  }
}

TEST_CASE("rmsnorm: a row of zeros, and rows of any size, stay finite", "[01][kernels]") {
  Device device;
  const int d = 97;
  HostMatrix x(3, d), want(3, d);
  for (int64_t j = 0; j < d; ++j) {
    x(1, j) = rounded<real>(1e4), want(1, j) = 1;
    x(2, j) = rounded<real>(-1e-4), want(2, j) = -1 / std::sqrt(1 + 1e-12 / (x(2, j) * x(2, j)));
  }
  const Tensor device_x = device.upload<real>(x), out = device.fresh<real>(3, d);
  rmsnorm_forward(device_x, {}, device.upload<real>(HostMatrix(1, d, 1)).data, 1e-12, device_x, out,
                  device.fresh<accum>(3, 1).data, device.stream);
  require_close(device.download(out), want, sum_of<real>(d));
}

void check_rmsnorm_backward(Device& device, int64_t rows, int64_t d, bool add) {
  CAPTURE(rows, d, add);
  Random random;
  const double norm_epsilon = 0.5;  // so that the gradient of a row of one element is not all cancellation
  const HostMatrix x = random.normal<real>(rows, d), weight = random.normal<real>(1, d);
  const HostMatrix d_out = random.normal<real>(rows, d), before = random.normal<real>(rows, d);
  HostMatrix want(rows, d), want_weight(1, d), rstd(rows, 1);
  for (int64_t i = 0; i < rows; ++i) {
    double squares = 0, dot = 0;
    for (int64_t j = 0; j < d; ++j) {
      squares += x(i, j) * x(i, j);
      dot += d_out(i, j) * x(i, j) * weight(0, j);
    }
    const double r = rstd(i, 0) = 1 / std::sqrt(squares / d + norm_epsilon);
    for (int64_t k = 0; k < d; ++k) {  // through out_j = x_j r w_j, with dr/dx_k = -x_k r^3 / d
      want(i, k) = (add ? before(i, k) : 0) + d_out(i, k) * r * weight(0, k) - dot * x(i, k) * r * r * r / d;
      want_weight(0, k) += d_out(i, k) * x(i, k) * r;
    }
  }
  const Tensor d_x = add ? device.upload<real>(before) : device.fresh<real>(rows, d);
  const AccumTensor partials = device.fresh<accum>(rmsnorm_bands(rows), d);
  const AccumTensor d_weight = device.fresh<accum>(1, d);
  rmsnorm_backward(device.upload<real>(d_out), device.upload<real>(x), device.upload<real>(weight).data,
                   device.upload<accum>(rounded<accum>(rstd)).data, add, d_x, partials, d_weight.data,
                   device.stream);
  require_close(device.download(d_x), want, sum_of<real>(d));
  require_close(device.download(d_weight), want_weight, sum_of<accum>(rows));
  device.download(partials);  // for its guards
}

TEST_CASE("rmsnorm: backward, assigned and added", "[01][kernels]") {
  Device device;
  for (const auto [rows, d] : shapes)
    for (const bool add : {false, true}) check_rmsnorm_backward(device, rows, d, add);
}

#ifdef CUDA_CPU
TEST_CASE("rmsnorm: backward of wide rows, on GPUs with little shared memory", "[01][standin]") {
  Device device;
  for (const std::string kib : {"64", "99", "227"}) {
    CAPTURE(kib);
    setenv("CUDA_CPU_SHARED_KIB", kib.c_str(), 1);
    for (const int64_t d : {3200, 5120, 6400, 12800})
      if (d * sizeof(accum) <= std::stoul(kib) << 10) check_rmsnorm_backward(device, 9, d, false);
  }
  unsetenv("CUDA_CPU_SHARED_KIB");
}
#endif

// ---- Rotary positions -------------------------------------------------------------------------------------

// cos and sin of each position's angles, as fill_rotary_table documents them.
HostMatrix rotary_table(int positions, int size, double theta) {
  HostMatrix table(positions, size);
  for (int p = 0; p < positions; ++p) {
    for (int i = 0; i < size / 2; ++i) {
      const double angle = p / std::pow(theta, 2.0 * i / size);
      table(p, i) = std::cos(angle);
      table(p, size / 2 + i) = std::sin(angle);
    }
  }
  return table;
}

TEST_CASE("rotary: the table", "[01][kernels]") {
  Device device;
  const int positions = 301;
  for (const int size : {2, 6, 10, 64}) {
    CAPTURE(size);
    const AccumTensor table = device.fresh<accum>(positions, size);
    fill_rotary_table(rotary_frequencies(10000, size), table, device.stream);
    // Computed in double. An angle is off by its own rounding, which grows with the position.
    const double angle_error = positions * epsilon<double>();
    require_close(device.download(table), rotary_table(positions, size, 10000),
                  {epsilon<accum>() / 2 + angle_error, angle_error});
  }
}

// Turns the pairs (i, i + size/2) of columns [first, first + size) of a row, as complex numbers, by the
// angles of table row p, or back by them.
void turn(HostMatrix& matrix, int64_t row, int64_t first, const HostMatrix& table, int p, bool back) {
  const int64_t half = table.columns / 2;
  for (int64_t i = 0; i < half; ++i) {
    const std::complex<double> angle(table(p, i), table(p, half + i));
    const std::complex<double> pair(matrix(row, first + i), matrix(row, first + half + i));
    const std::complex<double> turned = pair * (back ? std::conj(angle) : angle);
    matrix(row, first + i) = turned.real();
    matrix(row, first + half + i) = turned.imag();
  }
}

TEST_CASE("rotary: forward splits and turns, backward turns back and joins", "[01][kernels]") {
  Device device;
  Random random;
  for (const HeadShape shape : {HeadShape{1, 1, 2}, {4, 4, 10}, {6, 2, 6}, {5, 1, 38}, {9, 3, 64}}) {
    for (const int64_t rows : {1, 37, 301}) {
      CAPTURE(shape.heads, shape.kv_heads, shape.head_size, rows);
      const int64_t q_columns = shape.heads * shape.head_size, k_columns = shape.kv_heads * shape.head_size;
      const int positions_known = 53;
      const HostMatrix table = rounded<accum>(rotary_table(positions_known, shape.head_size, 500));
      const std::vector<int32_t> positions = random.integers(rows, 0, positions_known);  // in any order
      const AccumTensor device_table = device.upload<accum>(table);
      const int32_t* device_positions = device.upload(positions);

      const HostMatrix joined = random.normal<real>(rows, shape.qkv_columns());
      HostMatrix turned = joined, turned_back = joined;
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t first = 0; first < q_columns + k_columns; first += shape.head_size) {
          turn(turned, i, first, table, positions[i], false);
          turn(turned_back, i, first, table, positions[i], true);
        }
      }
      const auto part = [&](const HostMatrix& of, int which) {  // q, k or v
        return which == 0 ? of.slice(0, rows, 0, q_columns)
                          : of.slice(0, rows, q_columns + (which - 1) * k_columns, k_columns);
      };

      const Tensor q = device.fresh<real>(rows, q_columns), k = device.fresh<real>(rows, k_columns),
                   v = device.fresh<real>(rows, k_columns);
      rotary_forward(device.upload<real>(joined), device_positions, device_table, shape, q, k, v,
                     device.stream);
      require_close(device.download(q), part(turned, 0), sum_of<real>(2));
      require_close(device.download(k), part(turned, 1), sum_of<real>(2));
      REQUIRE(device.download(v) == part(joined, 2));

      const Tensor d_qkv = device.fresh<real>(rows, shape.qkv_columns());
      rotary_backward(device.upload<real>(part(joined, 0)), device.upload<real>(part(joined, 1)),
                      device.upload<real>(part(joined, 2)), device_positions, device_table, shape, d_qkv,
                      device.stream);
      require_close(device.download(d_qkv), turned_back, sum_of<real>(2));
    }
  }
}

// ---- SwiGLU -----------------------------------------------------------------------------------------------

TEST_CASE("swiglu: forward and backward", "[01][kernels]") {
  Device device;
  Random random;
  for (const auto [rows, f] : shapes) {
    CAPTURE(rows, f);
    const HostMatrix gate_up = random.normal<real>(rows, 2 * f, 3), d_out = random.normal<real>(rows, f);
    HostMatrix want(rows, f), want_d(rows, 2 * f);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < f; ++j) {
        const double gate = gate_up(i, j), up = gate_up(i, f + j), e = std::exp(gate);
        const double silu = gate * e / (e + 1), derivative = e * (e + 1 + gate) / ((e + 1) * (e + 1));
        want(i, j) = silu * up;
        want_d(i, j) = d_out(i, j) * up * derivative;
        want_d(i, f + j) = d_out(i, j) * silu;
      }
    }
    const Tensor out = device.fresh<real>(rows, f), d_gate_up = device.fresh<real>(rows, 2 * f);
    swiglu_forward(device.upload<real>(gate_up), out, device.stream);
    require_close(device.download(out), want, sum_of<real>(2));
    swiglu_backward(device.upload<real>(d_out), device.upload<real>(gate_up), d_gate_up, device.stream);
    require_close(device.download(d_gate_up), want_d, sum_of<real>(2));
  }
}

TEST_CASE("swiglu: gates far from zero switch off and on", "[01][kernels]") {
  Device device;
  const double large = rounded<real>(1e4);
  HostMatrix gate_up(1, 8), d_out(1, 4, 1), want(1, 4), want_d(1, 8);
  for (int j = 0; j < 4; ++j) {
    const double gate = gate_up(0, j) = j < 2 ? large : -large, up = gate_up(0, 4 + j) = j % 2 ? 3 : -3;
    want(0, j) = std::max(gate, 0.0) * up;
    want_d(0, j) = gate > 0 ? up : 0;
    want_d(0, 4 + j) = std::max(gate, 0.0);
  }
  const Tensor out = device.fresh<real>(1, 4), d_gate_up = device.fresh<real>(1, 8);
  swiglu_forward(device.upload<real>(gate_up), out, device.stream);
  require_close(device.download(out), want, sum_of<real>(2));
  swiglu_backward(device.upload<real>(d_out), device.upload<real>(gate_up), d_gate_up, device.stream);
  require_close(device.download(d_gate_up), want_d, sum_of<real>(2));
}

// ---- Cross-entropy ----------------------------------------------------------------------------------------

struct CrossEntropy {
  HostMatrix statistics, loss, d_logits;
};

// Of whole rows of logits.
CrossEntropy cross_entropy(const HostMatrix& logits, const std::vector<int32_t>& targets, double scale) {
  CrossEntropy result{{3, logits.rows}, {1, 1}, {logits.rows, logits.columns}};
  for (int64_t i = 0; i < logits.rows; ++i) {
    const double* row = &logits.values[i * logits.columns];
    const double largest = *std::max_element(row, row + logits.columns);
    double sum = 0;
    for (int64_t j = 0; j < logits.columns; ++j) sum += std::exp(row[j] - largest);
    const bool ignored = targets[i] == ignored_target;
    result.statistics(0, i) = largest;
    result.statistics(1, i) = sum;
    result.statistics(2, i) = ignored ? 0 : row[targets[i]];
    if (ignored) continue;
    result.loss(0, 0) -= scale * (row[targets[i]] - largest - std::log(sum));
    for (int64_t j = 0; j < logits.columns; ++j) {
      result.d_logits(i, j) = scale * (std::exp(row[j] - largest) / sum - (j == targets[i]));
    }
  }
  return result;
}

// What ranks with a slice each would do: statistics of each slice, combined, then each slice's gradient.
// Expects the whole's results.
void check_cross_entropy(Device& device, const HostMatrix& logits, const std::vector<int32_t>& targets,
                         double scale, const std::vector<int>& cuts /*first tokens, and the vocabulary*/) {
  const CrossEntropy want = cross_entropy(logits, targets, scale);
  const int32_t* device_targets = device.upload(targets);
  const int64_t rows = logits.rows, columns = logits.columns;

  std::vector<Tensor> slices;
  std::vector<AccumTensor> of_slices;
  HostMatrix combined(3, rows);  // largest, sum, target's logit
  for (int64_t i = 0; i < rows; ++i) combined(0, i) = -INFINITY;
  for (size_t s = 0; s + 1 < cuts.size(); ++s) {
    slices.push_back(device.upload<real>(logits.slice(0, rows, cuts[s], cuts[s + 1] - cuts[s])));
    of_slices.push_back(device.fresh<accum>(3, rows));
    cross_entropy_statistics(slices[s], device_targets, cuts[s], of_slices[s], device.stream);
    const HostMatrix of_slice = device.download(of_slices[s]);
    for (int64_t i = 0; i < rows; ++i) combined(0, i) = std::max(combined(0, i), of_slice(0, i));
  }
  const AccumTensor largest = device.upload<accum>(rounded<accum>(combined.slice(0, 1, 0, rows)));
  for (const AccumTensor& of_slice : of_slices) {
    cross_entropy_rescale(largest.data, of_slice, device.stream);
    const HostMatrix rescaled = device.download(of_slice);
    REQUIRE(rescaled.slice(0, 1, 0, rows) == combined.slice(0, 1, 0, rows));
    for (const int row : {1, 2}) {
      for (int64_t i = 0; i < rows; ++i) combined(row, i) += rescaled(row, i);
    }
  }
  const AccumTensor statistics = device.upload<accum>(rounded<accum>(combined));
  REQUIRE(combined.slice(0, 1, 0, rows) == want.statistics.slice(0, 1, 0, rows));
  REQUIRE(combined.slice(2, 1, 0, rows) == want.statistics.slice(2, 1, 0, rows));
  require_close(combined.slice(1, 1, 0, rows), want.statistics.slice(1, 1, 0, rows), sum_of<accum>(columns));

  const AccumTensor loss = device.fresh<accum>(1, 1);
  cross_entropy_loss(statistics, device_targets, scale, loss.data, device.stream);
  require_close(device.download(loss), want.loss, sum_of<accum>(rows + columns));

  for (size_t s = 0; s < slices.size(); ++s) {
    cross_entropy_backward(slices[s], device_targets, cuts[s], scale, nullptr, statistics, device.stream);
    require_close(device.download(slices[s]), want.d_logits.slice(0, rows, cuts[s], cuts[s + 1] - cuts[s]),
                  sum_of<real>(columns));
  }
}

TEST_CASE("cross-entropy: the gradient is multiplied by the loss scale", "[01][kernels]") {
  Device device;
  Random random;
  const HostMatrix logits = random.normal<real>(3, 128);
  const auto targets = device.upload(std::vector<int32_t>{5, ignored_target, 127});
  const AccumTensor statistics = device.fresh<accum>(3, 3);
  const auto gradient = [&](const LossScale* loss_scale) {
    const Tensor x = device.upload<real>(logits);
    cross_entropy_statistics(x, targets, 0, statistics, device.stream);
    cross_entropy_backward(x, targets, 0, 0.25, loss_scale, statistics, device.stream);
    return device.download(x);
  };
  HostMatrix want = gradient(nullptr);
  for (double& x : want.values) x *= 1024;
  const auto* scale = device.upload(std::vector<LossScale>{{1024, 0, 0}});
  require_close(gradient(scale), want, sum_of<real>(1));
}

TEST_CASE("cross-entropy: whole, and slices of the vocabulary combined", "[01][kernels]") {
  Device device;
  Random random;
  for (const int64_t rows : {1, 37, 301}) {
    for (const std::vector<int>& cuts :
         {std::vector{0, vocabulary}, {0, 100, vocabulary}, {0, 1, 97, 258, vocabulary}}) {
      CAPTURE(rows, cuts);
      const HostMatrix logits = random.normal<real>(rows, vocabulary, 3);
      std::vector<int32_t> targets = random.integers(rows, 0, vocabulary);
      targets.back() = vocabulary - 1;
      for (int64_t i = 0; i + 1 < rows; i += 3) targets[i] = ignored_target;
      check_cross_entropy(device, logits, targets, 1.0 / 29, cuts);
    }
  }
}

// 8192 logits a chunk. The largest one of a row lies in the first, the last, or the one between.
TEST_CASE("cross-entropy: a vocabulary of several chunks", "[01][kernels]") {
  Device device;
  Random random;
  for (const int many : {20008, 20011}) {
    HostMatrix logits = random.normal<real>(3, many);
    logits(0, 5) = logits(1, 10000) = logits(2, many - 1) = 8;
    for (const std::vector<int>& cuts : {std::vector{0, many}, {0, 9000, many}}) {
      CAPTURE(many, cuts);
      check_cross_entropy(device, logits, {5, 19999, many - 1}, 0.5, cuts);
    }
  }
}

TEST_CASE("cross-entropy: rows without a target have no loss and no gradient", "[01][kernels]") {
  Device device;
  Random random;
  const HostMatrix logits = random.normal<real>(5, vocabulary);
  check_cross_entropy(device, logits, std::vector<int32_t>(5, ignored_target), 1, {0, 100, vocabulary});
}

TEST_CASE("cross-entropy: logits of 10000 stay finite", "[01][kernels]") {
  Device device;
  const double large = rounded<real>(1e4);
  HostMatrix logits(4, vocabulary);
  for (int64_t j = 0; j < vocabulary; ++j) {
    logits(0, j) = -large;                     // equal, far below zero
    logits(1, j) = large;                      // equal, far above
    logits(2, j) = j == 200 ? large : -large;  // certain and right
    logits(3, j) = j == 200 ? -large : large;  // certain and wrong
  }
  for (const std::vector<int>& cuts : {std::vector{0, vocabulary}, {0, 100, vocabulary}}) {
    check_cross_entropy(device, logits, {0, 258, 200, 200}, 0.25, cuts);
  }
}

// ---- Elementwise ------------------------------------------------------------------------------------------

TEST_CASE("elementwise: residual_add and accumulate", "[01][kernels]") {
  Device device;
  Random random;
  for (const auto [rows, columns] : shapes) {
    CAPTURE(rows, columns);
    const HostMatrix x = random.normal<real>(rows, columns), branch = random.normal<real>(rows, columns);
    const HostMatrix term = random.normal<accum>(rows, columns), sum = random.normal<accum>(rows, columns);
    HostMatrix want(rows, columns), want_sum(rows, columns);
    for (size_t i = 0; i < want.values.size(); ++i) {
      want.values[i] = x.values[i] + branch.values[i];
      want_sum.values[i] = sum.values[i] + term.values[i];
    }
    const Tensor out = device.fresh<real>(rows, columns), in_place = device.upload<real>(x);
    residual_add(in_place, device.upload<real>(branch), out, device.stream);
    require_close(device.download(out), want, sum_of<real>(1));
    residual_add(in_place, device.upload<real>(branch), in_place, device.stream);
    REQUIRE(device.download(in_place) == device.download(out));

    const AccumTensor onto = device.upload<accum>(sum);
    accumulate(device.upload<accum>(term).data, onto.data, onto.size(), device.stream);
    REQUIRE(device.download(onto) == rounded<accum>(want_sum));  // one rounding, the same one
  }
}

// ---- Initialisation ---------------------------------------------------------------------------------------

TEST_CASE("fill_constant", "[01][kernels]") {
  Device device;
  for (const auto [rows, columns] : shapes) {
    const Tensor weights = device.fresh<real>(rows, columns);
    fill_constant(weights.data, weights.size(), 0.1, device.stream);
    REQUIRE(device.download(weights) == HostMatrix(rows, columns, rounded<real>(rounded<accum>(0.1))));
  }
}

// Filled in two parts that meet in the middle of a row, as the shards of a span do.
HostMatrix normal(Device& device, int64_t rows, GlobalSlice slice, PhiloxKey key, double standard_deviation) {
  const Tensor weights = device.fresh<real>(rows, slice.columns);
  const size_t part = weights.size() * 3 / 7;
  if (part > 0) fill_normal(weights.data, 0, part, slice, key, standard_deviation, device.stream);
  fill_normal(weights.data + part, part, weights.size() - part, slice, key, standard_deviation,
              device.stream);
  return device.download(weights);
}

TEST_CASE("fill_normal: every slice has the bits of the whole", "[01][kernels]") {
  Device device;
  const PhiloxKey key = philox_key(5, "a weight");
  const int64_t rows = 53, columns = 97;
  const HostMatrix whole = normal(device, rows, {columns, 0, 0, columns}, key, 0.02);
  struct Case {
    int64_t rows;
    GlobalSlice slice;
  };
  for (const auto& [slice_rows, slice] : {Case{11, {29, 7, 13, columns}},
                                          {1, {1, 52, 96, columns}},
                                          {rows, {1, 0, 3, columns}},
                                          {1, {columns, 1, 0, columns}},
                                          {26, {columns, 27, 0, columns}},
                                          {rows, {48, 0, 49, columns}}}) {
    CAPTURE(slice.first_row, slice.first_column, slice_rows, slice.columns);
    REQUIRE(normal(device, slice_rows, slice, key, 0.02) ==
            whole.slice(slice.first_row, slice_rows, slice.first_column, slice.columns));
  }
  REQUIRE(normal(device, rows, {columns, 0, 0, columns}, philox_key(5, "b weight"), 0.02) != whole);
  REQUIRE(normal(device, rows, {columns, 0, 0, columns}, philox_key(6, "a weight"), 0.02) != whole);

  // Numbers 2^32 and on are not numbers 0 and on again.
  const int64_t wide = int64_t{1} << 20;
  REQUIRE(normal(device, 1, {37, 4096, 0, wide}, key, 0.02) !=
          normal(device, 1, {37, 0, 0, wide}, key, 0.02));
}

TEST_CASE("fill_normal: the numbers are normal and independent", "[01][kernels]") {
  Device device;
  const double deviation = 0.02;
  const HostMatrix weights = normal(device, 451, {449, 0, 0, 449}, philox_key(1, "w"), deviation);
  const double n = static_cast<double>(weights.values.size());
  double sums[5] = {}, beyond_two = 0, neighbours[4] = {};
  for (size_t i = 0; i < weights.values.size(); ++i) {
    const double x = weights.values[i] / deviation;
    for (int power = 1; power <= 4; ++power) sums[power] += std::pow(x, power) / n;
    beyond_two += (std::abs(x) > 2) / n;
    for (size_t apart = 1; apart < 4 && apart <= i; ++apart) {
      neighbours[apart] += x * weights.values[i - apart] / deviation / n;
    }
  }
  // Each within five standard deviations of what it estimates; the moments' variances are 1, 2, 15, 96, over
  // n.
  const double sigma = 1 / std::sqrt(n);
  CHECK(std::abs(sums[1]) < 5 * sigma);
  CHECK(std::abs(sums[2] - 1) < 5 * sigma * std::sqrt(2));
  CHECK(std::abs(sums[3]) < 5 * sigma * std::sqrt(15));
  CHECK(std::abs(sums[4] - 3) < 5 * sigma * std::sqrt(96));
  CHECK(std::abs(beyond_two - 0.0455) < 5 * sigma * std::sqrt(0.0455));
  for (size_t apart = 1; apart < 4; ++apart) CHECK(std::abs(neighbours[apart]) < 5 * sigma);
}

// ---- Optimizer --------------------------------------------------------------------------------------------

TEST_CASE("sum_of_squares adds to its result, in double", "[01][kernels]") {
  Device device;
  Random random;
  for (const int64_t size : {1, 2, 37, 127, 128, 129, 2049, 10007}) {
    CAPTURE(size);
    const HostMatrix x = random.normal<accum>(1, size);
    HostMatrix want(1, 1, 2.5);
    for (const double element : x.values) want(0, 0) += element * element;
    const Matrix<double> sum = device.upload<double>(HostMatrix(1, 1, 2.5));
    const Matrix<double> parts = device.fresh<double>(1, norm_parts);
    sum_of_squares(device.upload<accum>(x).data, size, parts.data, sum.data, device.stream);
    require_close(device.download(sum), want, sum_of<double>(static_cast<double>(size)));
    device.download(parts);  // for its guards
  }
}

TEST_CASE("clip_factor", "[01][kernels]") {
  struct Case {
    double norm_squared, max_norm, want;
  };
  Device device;
  for (const auto [norm_squared, max_norm, want] : {
           Case{0, 1, 1},                   // no gradient: nothing to divide by
           {0, 1e-9, 1e-9 / 1e-6},          // the 1e-6 of the definition
           {0.25, 1, 1},                    // below the limit
           {1, 1, 1 / (1 + 1e-6)},          // at it
           {25, 1, 1 / (5 + 1e-6)},         // above it
           {1e300, 1, 1 / (1e150 + 1e-6)},  // whose square fits no float
           {25, 0, 1},                      // 0: no clipping
           {INFINITY, 1, -1},               // a step that is skipped
       }) {
    CAPTURE(norm_squared, max_norm);
    const AccumTensor factors = device.fresh<accum>(1, 3);
    step_factors(device.upload<double>(HostMatrix(1, 1, norm_squared)).data, max_norm, {1, 0.5, 0.75, 0}, 2,
                 nullptr, reinterpret_cast<StepFactors*>(factors.data), device.stream);
    const HostMatrix got = device.download(factors);
    REQUIRE(got(0, 0) == rounded<accum>(want));
    REQUIRE(got(0, 1) == rounded<accum>(1 / (1 - 0.25)));
    REQUIRE(got(0, 2) == rounded<accum>(1 / std::sqrt(1 - 0.5625)));
  }
}

TEST_CASE("loss scale: halves, skips, and doubles after good steps", "[01][kernels]") {
  Device device;
  const Matrix<double> norm = device.fresh<double>(1, 1);
  const AccumTensor factors = device.fresh<accum>(1, 3);
  struct Case {
    std::vector<double> scale;  // its factor, good steps, skipped
    double norm_squared;        // of scaled gradients
    double unscaled, factor, correction1;
    std::vector<double> next;  // as `scale`
  };
  const double good = 9 * 1024.0 * 1024.0, clipped = 1.5 / (3 + 1e-6);
  int64_t step = 0;
  for (const Case& c : {
           Case{{1024, 0, 0}, good, 9, clipped / 1024, 1 / (1 - 0.5), {1024, 1, 0}},
           {{1024, 1, 0}, INFINITY, INFINITY, -1, 1 / (1 - 0.5), {512, 0, 1}},
           {{512, 0, 1}, NAN, INFINITY, -1, 1 / (1 - 0.5), {256, 0, 2}},
           {{256, 0, 2}, 9 * 256.0 * 256.0, 9, clipped / 256, 1 / (1 - 0.25), {256, 1, 2}},
           {{256, 1998, 2}, 9 * 256.0 * 256.0, 9, clipped / 256, 1 / (1 - 0.125), {256, 1999, 2}},
           {{256, 1999, 2}, 9 * 256.0 * 256.0, 9, clipped / 256, 1 / (1 - 0.0625), {512, 0, 2}},
           {{512, 0, 2}, 512.0 * 512.0, 1, 1.0 / 512, 1 / (1 - 0.03125), {512, 1, 2}},
           {{1, 0, 2}, INFINITY, INFINITY, -1, 1 / (1 - 0.03125), {1, 0, 3}},  // no further
       }) {
    CAPTURE(++step);
    HostMatrix now(1, 3);
    for (int i = 0; i < 3; ++i) now(0, i) = c.scale[i];
    const AccumTensor scale = device.upload<accum>(now);
    CUDA_CHECK(cudaMemcpy(norm.data, &c.norm_squared, sizeof(double), cudaMemcpyHostToDevice));
    step_factors(norm.data, 1.5, {1, 0.5, 0.75, 0}, step, reinterpret_cast<LossScale*>(scale.data),
                 reinterpret_cast<StepFactors*>(factors.data), device.stream);
    REQUIRE(device.download(norm)(0, 0) == c.unscaled);
    const HostMatrix got = device.download(factors), next = device.download(scale);
    REQUIRE(got(0, 0) == rounded<accum>(c.factor));
    REQUIRE(got(0, 1) == rounded<accum>(c.correction1));
    for (int i = 0; i < 3; ++i) REQUIRE(next(0, i) == c.next[i]);
  }
}

TEST_CASE("a step that is skipped changes nothing", "[01][kernels]") {
  Device device;
  Random random;
  const HostMatrix w = random.normal<real>(1, 37), m = random.normal<accum>(1, 37);
  const auto* factors = device.upload(std::vector<StepFactors>{{-1, INFINITY, NAN}});
  const accum* gradients = device.upload<accum>(HostMatrix(1, 37, INFINITY)).data;
  const AccumTensor master = device.upload<accum>(w), moment1 = device.upload<accum>(m),
                    moment2 = device.upload<accum>(m);
  const Tensor weights = device.upload<real>(w);
  adamw_step({0.1, 0.9, 0.95, 0.1}, weights.data, master.data, gradients, moment1.data, moment2.data, factors,
             37, device.stream);
  sgd_step(0.1, 0.1, weights.data, master.data, gradients, factors, 37, device.stream);
  REQUIRE(device.download(weights) == w);
  REQUIRE(device.download(master) == w);
  REQUIRE(device.download(moment1) == m);
  REQUIRE(device.download(moment2) == m);
}

// The weights, and where the optimizer computes them: apart, or the weights themselves.
struct Weights {
  Tensor weights;
  AccumTensor master;

  Weights(Device& device, const HostMatrix& start) : weights(device.upload<real>(start)) {
    master = has_master_weights ? device.upload<accum>(start)
                                : AccumTensor{reinterpret_cast<accum*>(weights.data), 1, start.columns};
  }
  void check(Device& device, const HostMatrix& want, double terms) const {
    require_close(device.download(master), want, sum_of<accum>(terms));
    REQUIRE(device.download(weights) == rounded<real>(device.download(master)));
  }
};

constexpr double clip = 0.375;

TEST_CASE("AdamW: several steps", "[01][kernels]") {
  Device device;
  Random random;
  // Gradients as small as epsilon show whether it is added after the bias correction.
  for (const auto& [adamw, size_of_gradients] :
       {std::pair{AdamW{1e-2, 0.9, 0.999, 0.1}, 1.0}, {AdamW{0.1, 0.5, 0.9, 0}, 1e-7}}) {
    for (const int64_t size : {1, 37, 2049, 10007}) {
      HostMatrix w = random.normal<real>(1, size), m(1, size), v(1, size);
      const Weights weights(device, w);
      const AccumTensor moment1 = device.upload<accum>(m), moment2 = device.upload<accum>(v);
      for (int step = 1; step <= 5; ++step) {
        CAPTURE(adamw.lr, size, step);
        HostMatrix gradients = random.normal<accum>(1, size);
        for (int64_t i = 0; i < size; ++i) {
          gradients(0, i) = accum(size_of_gradients * gradients(0, i));
          const double g = clip * gradients(0, i);
          m(0, i) = adamw.beta1 * m(0, i) + (1 - adamw.beta1) * g;
          v(0, i) = adamw.beta2 * v(0, i) + (1 - adamw.beta2) * g * g;
          const double m_hat = m(0, i) / (1 - std::pow(adamw.beta1, step));
          const double v_hat = v(0, i) / (1 - std::pow(adamw.beta2, step));
          w(0, i) -= adamw.lr * adamw.weight_decay * w(0, i);
          w(0, i) -= adamw.lr * m_hat / (std::sqrt(v_hat) + adamw_epsilon);
        }
        const StepFactors factors = {clip, accum(adamw.lr / (1 - std::pow(adamw.beta1, step))),
                                     accum(1 / std::sqrt(1 - std::pow(adamw.beta2, step)))};
        adamw_step(adamw, weights.weights.data, weights.master.data, device.upload<accum>(gradients).data,
                   moment1.data, moment2.data, device.upload(std::vector{factors}), size, device.stream);
        require_close(device.download(moment1), m, sum_of<accum>(step));
        require_close(device.download(moment2), v, sum_of<accum>(step));
        weights.check(device, w, step);
      }
    }
  }
}

TEST_CASE("SGD: several steps", "[01][kernels]") {
  Device device;
  Random random;
  const auto* factors = device.upload(std::vector<StepFactors>{{clip, 1, 1}});
  for (const double weight_decay : {0.0, 0.1}) {
    for (const int64_t size : {1, 37, 2049, 10007}) {
      HostMatrix w = random.normal<real>(1, size);
      const Weights weights(device, w);
      for (int step = 1; step <= 5; ++step) {
        CAPTURE(weight_decay, size, step);
        const HostMatrix gradients = random.normal<accum>(1, size);
        for (int64_t i = 0; i < size; ++i) {
          w(0, i) -= 0.25 * (clip * gradients(0, i) + weight_decay * w(0, i));
        }
        sgd_step(0.25, weight_decay, weights.weights.data, weights.master.data,
                 device.upload<accum>(gradients).data, factors, size, device.stream);
        weights.check(device, w, step);
      }
    }
  }
}

}  // namespace
}  // namespace pentatron
