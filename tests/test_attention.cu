// The products of matmul.h, and attention, against plain loops in double.
#include <algorithm>
#include <utility>

#include "attention.h"
#include "device.h"

namespace pentatron {
namespace {

// op(a) op(b).
HostMatrix product(const HostMatrix& a, bool transpose_a, const HostMatrix& b, bool transpose_b) {
  const int64_t depth = transpose_a ? a.rows : a.columns;
  HostMatrix c(transpose_a ? a.columns : a.rows, transpose_b ? b.rows : b.columns);
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.columns; ++j) {
      for (int64_t k = 0; k < depth; ++k) {
        c(i, j) += (transpose_a ? a(k, i) : a(i, k)) * (transpose_b ? b(j, k) : b(k, j));
      }
    }
  }
  return c;
}

TEST_CASE("linear layer: the three products", "[01][kernels]") {
  struct Sizes {
    int64_t rows, in, out;
  };
  Device device;
  Random random;
  for (const auto [rows, in, out] :
       {Sizes{1, 1, 1}, {1, 10, 97}, {37, 97, 10}, {301, 10, 37}, {37, 259, 1}, {129, 65, 259}}) {
    CAPTURE(rows, in, out);
    const HostMatrix x = random.normal<real>(rows, in), weight = random.normal<real>(out, in),
                     d_y = random.normal<real>(rows, out), before = random.normal<accum>(out, in);
    const Tensor device_x = device.upload<real>(x), device_weight = device.upload<real>(weight),
                 device_d_y = device.upload<real>(d_y);

    const Tensor y = device.fresh<real>(rows, out), d_x = device.fresh<real>(rows, in);
    linear_forward(device.blas, device_x, device_weight, y);
    require_close(device.download(y), product(x, false, weight, true), sum_of<real>(in));
    linear_dgrad(device.blas, device_d_y, device_weight, d_x);
    require_close(device.download(d_x), product(d_y, false, weight, false), sum_of<real>(out));

    const Statistics d_weight = device.upload<accum>(before);
    linear_wgrad(device.blas, device_d_y, device_x, d_weight);
    HostMatrix want = product(d_y, true, x, false);
    for (size_t i = 0; i < want.values.size(); ++i) want.values[i] += before.values[i];
    require_close(device.download(d_weight), want, sum_of<accum>(rows));
  }
}

// Matrices of a batch side by side in the rows of one wider matrix, as the heads of attention lie:
// transposes, factors, and untouched columns between the results.
TEST_CASE("batched_product: transposes, factors and strides", "[01][kernels]") {
  Device device;
  Random random;
  const int m = 13, n = 7, k = 37, count = 3, gap = 5;
  // A column block of `width` for each matrix of the batch, and a gap after it.
  const auto wide = [&](int width) { return int64_t{count} * (width + gap); };
  for (const bool transpose_a : {false, true}) {
    for (const bool transpose_b : {false, true}) {
      for (const auto& [alpha, beta] : {std::pair{1.0, 0.0}, {0.375, 1.0}, {-2.0, 0.5}}) {
        CAPTURE(transpose_a, transpose_b, alpha, beta);
        const int a_rows = transpose_a ? k : m, a_width = transpose_a ? m : k;
        const int b_rows = transpose_b ? n : k, b_width = transpose_b ? k : n;
        const HostMatrix a = random.normal<real>(a_rows, wide(a_width)),
                         b = random.normal<real>(b_rows, wide(b_width)),
                         before = random.normal<real>(m, wide(n));
        const Tensor c = device.upload<real>(before);
        HostMatrix want = before;
        for (int i = 0; i < count; ++i) {
          const HostMatrix of_batch = product(a.slice(0, a_rows, i * (a_width + gap), a_width), transpose_a,
                                              b.slice(0, b_rows, i * (b_width + gap), b_width), transpose_b);
          for (int row = 0; row < m; ++row) {
            for (int column = 0; column < n; ++column) {
              double& element = want(row, i * (n + gap) + column);
              element = alpha * of_batch(row, column) + beta * element;
            }
          }
        }
        const auto op = [](bool transpose) { return transpose ? Transpose::yes : Transpose::no; };
        const auto batch_of = [&](Tensor matrix, int width) {
          return BatchedMatrix{matrix.data, matrix.columns, width + gap};
        };
        batched_product(device.blas, op(transpose_a), op(transpose_b), m, n, k, alpha,
                        batch_of(device.upload<real>(a), a_width), batch_of(device.upload<real>(b), b_width),
                        beta, batch_of(c, n), count, "test");
        const HostMatrix got = device.download(c);
        require_close(got, want, sum_of<real>(k));
        for (int i = 0; i < count; ++i) {
          const int first = i * (n + gap) + n;
          REQUIRE(got.slice(0, m, first, gap) == before.slice(0, m, first, gap));
        }
      }
    }
  }
}

// Attention's inputs and all its results.
struct Attention {
  HostMatrix q, k, v, d_out, out, lse, d_q, d_k, d_v;

  Attention(AttentionShape shape, Random& random)
      : q(random.normal<real>(rows(shape), shape.head.heads * shape.head.head_size)),
        k(random.normal<real>(rows(shape), shape.head.kv_heads * shape.head.head_size)),
        v(random.normal<real>(rows(shape), k.columns)),
        d_out(random.normal<real>(rows(shape), q.columns)),
        out(q.rows, q.columns),
        lse(q.rows, shape.head.heads),
        d_q(out),
        d_k(k.rows, k.columns),
        d_v(d_k) {}
  static int64_t rows(AttentionShape shape) { return int64_t{shape.batch} * shape.sequence; }
};

// A row of attention at a time: query i of one head, which sees the keys 0..i of its sequence.
void reference_attention(AttentionShape shape, Attention& a) {
  const auto [heads, kv_heads, size] = shape.head;
  for (int sequence = 0; sequence < shape.batch; ++sequence) {
    for (int head = 0; head < heads; ++head) {
      const int64_t first = int64_t{sequence} * shape.sequence;
      const int column = head * size, kv_column = head / (heads / kv_heads) * size;
      for (int query = 0; query < shape.sequence; ++query) {
        const int64_t i = first + query;
        std::vector<double> scores, p, d_p;
        for (int64_t j = first; j <= i; ++j) {
          double score = 0, d = 0;
          for (int e = 0; e < size; ++e) {
            score += a.q(i, column + e) * a.k(j, kv_column + e) / std::sqrt(size);
            d += a.d_out(i, column + e) * a.v(j, kv_column + e);
          }
          scores.push_back(score);
          d_p.push_back(d);
        }
        const double largest = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (const double score : scores) sum += std::exp(score - largest);
        for (const double score : scores) p.push_back(std::exp(score - largest) / sum);
        a.lse(i, head) = largest + std::log(sum);

        for (int64_t j = first; j <= i; ++j) {
          double d_score = 0;  // the softmax' Jacobian: dp_m / dscore_j = p_m ((m == j) - p_j)
          for (int64_t m = first; m <= i; ++m) {
            d_score += d_p[m - first] * p[m - first] * ((m == j) - p[j - first]);
          }
          for (int e = 0; e < size; ++e) {
            a.out(i, column + e) += p[j - first] * a.v(j, kv_column + e);
            a.d_v(j, kv_column + e) += p[j - first] * a.d_out(i, column + e);
            a.d_q(i, column + e) += d_score * a.k(j, kv_column + e) / std::sqrt(size);
            a.d_k(j, kv_column + e) += d_score * a.q(i, column + e) / std::sqrt(size);
          }
        }
      }
    }
  }
}

// The same on the device, with the scores kept for backward or computed again.
void device_attention(Device& device, AttentionShape shape, Attention& a, bool kept) {
  const Tensor q = device.upload<real>(a.q), k = device.upload<real>(a.k), v = device.upload<real>(a.v),
               d_out = device.upload<real>(a.d_out);
  const Tensor out = device.fresh<real>(q.rows, q.columns);
  const Statistics lse = device.fresh<accum>(q.rows, shape.head.heads);
  const auto scores_for = [&](int sequences) {
    return Scores{device.fresh<real>(sequences * shape.score_rows(), shape.sequence), kept};
  };
  const Scores scores = scores_for(kept ? shape.batch : 1);
  attention_forward(device.blas, shape, q, k, v, scores, out, lse);
  a.out = device.download(out), a.lse = device.download(lse);

  const Tensor d_q = device.fresh<real>(q.rows, q.columns), d_k = device.fresh<real>(k.rows, k.columns),
               d_v = device.fresh<real>(k.rows, k.columns);
  const Tensor d_scores = device.fresh<real>(shape.score_rows(), shape.sequence);
  const Statistics dots = device.fresh<accum>(q.rows, shape.head.heads);
  const Scores in_backward = kept ? scores : scores_for(1);  // in between, other layers used the memory
  attention_backward(device.blas, shape, q, k, v, in_backward, out, lse, d_out, d_scores, dots, d_q, d_k,
                     d_v);
  a.d_q = device.download(d_q), a.d_k = device.download(d_k), a.d_v = device.download(d_v);
  for (const Tensor workspace : {scores.memory, in_backward.memory, d_scores}) device.download(workspace);
}

void require_close(const Attention& got, const Attention& want, AttentionShape shape) {
  // Stored on the way: scores and probabilities; out, the gradients of both and, of a group's heads but the
  // first, the sum so far.
  const int group = shape.head.heads / shape.head.kv_heads, size = shape.head.head_size;
  const double terms = shape.sequence + size;
  require_close(got.out, want.out, sum_of<real>(terms, 2));
  require_close(got.lse, want.lse, sum_of<accum>(terms, 1));
  require_close(got.d_v, want.d_v, sum_of<real>(terms, 2 + group - 1));
  require_close(got.d_q, want.d_q, sum_of<real>(terms, 5));
  require_close(got.d_k, want.d_k, sum_of<real>(terms, 5 + group - 1));
}

bool same_bits(const Attention& a, const Attention& b) {
  return a.out == b.out && a.lse == b.lse && a.d_q == b.d_q && a.d_k == b.d_k && a.d_v == b.d_v;
}

TEST_CASE("attention: forward and backward, heads in groups, several sequences", "[01][kernels]") {
  Device device;
  Random random;
  for (const AttentionShape shape : {AttentionShape{1, 37, {1, 1, 10}},
                                     {2, 7, {4, 1, 6}},
                                     {3, 37, {4, 2, 10}},
                                     {2, 65, {3, 3, 16}},
                                     {1, 97, {6, 2, 14}},
                                     {1, 301, {2, 1, 6}}}) {
    CAPTURE(shape.batch, shape.sequence, shape.head.heads, shape.head.kv_heads, shape.head.head_size);
    Attention want(shape, random);
    Attention kept = want, again = want;
    reference_attention(shape, want);
    device_attention(device, shape, kept, true);
    require_close(kept, want, shape);
    device_attention(device, shape, again, false);
    REQUIRE(same_bits(kept, again));
  }
}

double largest_of(const HostMatrix& matrix) {  // NaN if there is one
  double largest = 0;
  for (const double x : matrix.values) largest = std::abs(x) <= largest ? largest : std::abs(x);
  return largest;
}

// Where every probability is 0 or 1, a score has no gradient: d_p - rowsum(d_out * out) is a difference of
// two sums that are equal but for rounding, and that is all that may reach q and k.
void check_certain_attention(Device& device, AttentionShape shape, Attention& want) {
  Attention got = want;
  reference_attention(shape, want);
  device_attention(device, shape, got, true);
  require_close(got.out, want.out, sum_of<real>(1));
  require_close(got.lse, want.lse, sum_of<accum>(shape.head.head_size, 1));
  require_close(got.d_v, want.d_v, sum_of<real>(shape.sequence, shape.head.heads / shape.head.kv_heads - 1));

  const double d_p = shape.head.head_size * largest_of(want.d_out) * largest_of(want.v);
  const double d_score = epsilon<real>() * d_p / std::sqrt(shape.head.head_size);
  REQUIRE(largest_of(got.d_q) <= d_score * largest_of(want.k));
  REQUIRE(largest_of(got.d_k) <= d_score * largest_of(want.q) * shape.sequence * shape.head.heads);
}

TEST_CASE("attention: sequences of one token", "[01][kernels]") {
  Device device;
  Random random;
  for (const AttentionShape shape : {AttentionShape{1, 1, {1, 1, 2}}, {3, 1, {4, 2, 6}}}) {
    CAPTURE(shape.batch, shape.head.heads);
    Attention inputs(shape, random);
    check_certain_attention(device, shape, inputs);
  }
}

TEST_CASE("attention: scores of 10000 stay finite", "[01][kernels]") {
  Device device;
  Random random;
  const AttentionShape shape{1, 37, {1, 1, 4}};
  Attention inputs(shape, random);
  // Scores 640 m with |m| <= 18, exact even in bfloat16: each row's softmax is 1 at one key, 0 at the others.
  inputs.q = inputs.k = HostMatrix(shape.sequence, 4);
  for (int i = 0; i < shape.sequence; ++i) {
    inputs.q(i, 0) = i % 2 ? 160 : -160;
    inputs.k(i, 0) = 8 * (16 * i % 37 - 18);
  }
  check_certain_attention(device, shape, inputs);
}

}  // namespace
}  // namespace pentatron
