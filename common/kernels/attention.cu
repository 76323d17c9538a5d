#include <cmath>

#include "kernels/attention.h"
#include "kernels/pack.h"

namespace pentatron {

// One block a row: (head, query). Scores become probabilities, 0 for keys that the query does not see. The
// lse is that of the others, and is written, unless it is known: that of all keys.
__global__ void probabilities_kernel(Out<real> scores /*[heads*queries, keys]*/, int queries, int keys,
                                     bool diagonal, int heads, bool lse_known,
                                     Out<accum> lse /*[queries, heads]*/) {
  const int head = blockIdx.x / queries, query = blockIdx.x % queries;
  const int visible = diagonal ? std::min(query + 1, keys) : keys;
  real* const row = scores + static_cast<size_t>(blockIdx.x) * keys;
  accum of_row = lse_known ? lse[query * heads + head] : 0;
  if (!lse_known) {
    const accum largest = block_max_of<1>(row, visible);
    accum sum = 0;
    for (int j : block_range(visible)) sum += exp_fast(accum(row[j]) - largest);
    of_row = largest + log(block_sum(sum));
  }
  for (int j : block_range(visible)) row[j] = real(exp_fast(accum(row[j]) - of_row));
  for (int j : block_range(keys - visible)) row[visible + j] = real(0.0f);
  if (!lse_known && is_first_thread()) lse[query * heads + head] = of_row;
}

// One block a row: (head, query). d_scores = probabilities * (d_probabilities - dots), in place.
__global__ void softmax_backward_kernel(In<real> probabilities /*[heads*queries, keys]*/,
                                        In<accum> dots /*[queries, heads]*/, int queries, int keys, int heads,
                                        Out<real> d_scores /*as probabilities*/) {
  const int head = blockIdx.x / queries, query = blockIdx.x % queries;
  const size_t start = static_cast<size_t>(blockIdx.x) * keys;
  const accum dot = dots[query * heads + head];
  for (int j : block_range(keys)) {
    d_scores[start + j] = real(accum(probabilities[start + j]) * (accum(d_scores[start + j]) - dot));
  }
}

// One block a row of tokens: the dot products of its heads. A head is short, so a warp has several.
template <int width>
__global__ void head_dots_kernel(In<real> a /*[rows, heads*size]*/, In<real> b /*as a*/, int heads, int size,
                                 Out<accum> dots /*[rows, heads]*/) {
  const size_t row = blockIdx.x;
  const int lanes = lanes_for(size / width);
  for (int head : warp_range(heads, lanes)) {
    const size_t start = (row * heads + head) * size;
    accum sum = 0;
    for (int j : lane_range(size, width, lanes)) {
      const Pack<width> x = load<width>(a + start + j), y = load<width>(b + start + j);
      for (int e = 0; e < width; ++e) sum += x[e] * y[e];
    }
    dots[row * heads + head] = lane_sum(sum, lanes);  // each lane writes the same
  }
}

namespace {

// Sequence `b` of a block, as the products see it. Each has kv_heads matrices with a row a token: all key and
// value heads, or query head i of each of their groups.
struct Sequence {
  const Blas& blas;
  const AttentionBlock& block;
  int64_t b;
  const int heads = block.head.heads, kv_heads = block.head.kv_heads, size = block.head.head_size;
  const int group = heads / kv_heads, query_count = block.queries, key_count = block.keys;
  const int64_t scores_of_head = int64_t{query_count} * key_count;
  const double scale = 1 / std::sqrt(size);

  int64_t first_row() const { return b * block.stride; }
  template <class T>
  BatchedMatrix queries(Matrix<T> x /*[rows, heads*size]*/, int i) const {
    return {x.data + first_row() * x.columns + i * size, data_type<T>, x.columns, int64_t{group} * size};
  }
  template <class T>
  BatchedMatrix keys(Matrix<T> x /*[rows, kv_heads*size]*/) const {
    return {x.data + first_row() * x.columns, data_type<T>, x.columns, size};
  }
  BatchedMatrix scores(real* x /*[heads*queries, keys]*/, int i) const {
    return {x + i * scores_of_head, real_type, key_count, group * scores_of_head};
  }
  real* probabilities(const Scores& all) const {
    return all.memory.data + (all.kept ? b * heads * scores_of_head : 0);
  }

  // Computes the probabilities: in forward with the lse, in backward from it.
  void compute(Tensor q, Tensor k, real* to, bool lse_known, AccumTensor lse) const {
    for (int i = 0; i < group; ++i)
      batched_product(blas, Transpose::no, Transpose::yes, query_count, key_count, size, scale, queries(q, i),
                      keys(k), 0, scores(to, i), kv_heads, "gemm_attention_scores");
    launch(probabilities_kernel, dim3(heads * query_count), moves(2 * real_bytes * heads * scores_of_head),
           blas.stream(), to, query_count, key_count, block.diagonal, heads, lse_known,
           lse.data + first_row() * heads);
  }
};

}  // namespace

template <class Result>
void naive_forward(const Blas& blas, const AttentionBlock& block, const AttentionTensorsOf<Result>& t) {
  for (int b = 0; b < block.batch; ++b) {
    const Sequence s{blas, block, b};
    real* const probabilities = s.probabilities(t.scores);
    s.compute(t.q, t.k, probabilities, false, t.lse);
    for (int i = 0; i < s.group; ++i)
      batched_product(blas, Transpose::no, Transpose::no, block.queries, s.size, block.keys, 1,
                      s.scores(probabilities, i), s.keys(t.v), 0, s.queries(t.out, i), s.kv_heads,
                      "gemm_attention_out");
  }
}

template <class Result>
void naive_backward(const Blas& blas, const AttentionBlock& block, const AttentionTensors& t,
                    const AttentionGradientsOf<Result>& g, bool add) {
  const int queries = block.queries, keys = block.keys;
  real* const d_scores = g.memory.d_scores.data;
  for (int b = 0; b < block.batch; ++b) {
    const Sequence s{blas, block, b};
    real* const probabilities = s.probabilities(t.scores);
    if (!t.scores.kept) s.compute(t.q, t.k, probabilities, true, t.lse);
    for (int i = 0; i < s.group; ++i) {  // the heads of a group add up in d_k and d_v
      const BatchedMatrix d_out_of_head = s.queries(g.d_out, i);
      batched_product(blas, Transpose::yes, Transpose::no, keys, s.size, queries, 1,
                      s.scores(probabilities, i), d_out_of_head, add || i > 0, s.keys(g.d_v), s.kv_heads,
                      "gemm_attention_d_v");
      batched_product(blas, Transpose::no, Transpose::yes, queries, keys, s.size, 1, d_out_of_head,
                      s.keys(t.v), 0, s.scores(d_scores, i), s.kv_heads, "gemm_attention_d_scores");
    }
    launch(softmax_backward_kernel, dim3(s.heads * queries),
           moves(3 * real_bytes * s.heads * s.scores_of_head), blas.stream(), probabilities,
           g.d_out_dot_out.data + s.first_row() * s.heads, queries, keys, s.heads, d_scores);
    for (int i = 0; i < s.group; ++i) {
      const BatchedMatrix d_scores_of_head = s.scores(d_scores, i);
      batched_product(blas, Transpose::no, Transpose::no, queries, s.size, keys, s.scale, d_scores_of_head,
                      s.keys(t.k), add, s.queries(g.d_q, i), s.kv_heads, "gemm_attention_d_q");
      batched_product(blas, Transpose::yes, Transpose::no, keys, s.size, queries, s.scale, d_scores_of_head,
                      s.queries(t.q, i), add || i > 0, s.keys(g.d_k), s.kv_heads, "gemm_attention_d_k");
    }
  }
}

void attention_dots(Tensor out, Tensor d_out, AccumTensor dots, cudaStream_t stream) {
  const int heads = static_cast<int>(dots.columns), size = static_cast<int>(out.columns / dots.columns);
  const int width = width_for(size, out.data, d_out.data);
  launch(width == 1 ? head_dots_kernel<1> : head_dots_kernel<pack_width>,
         block_a_row(out.rows, out.columns / width), moves(2 * out.bytes()), stream, out.data, d_out.data,
         heads, size, dots.data);
}

template decltype(naive_forward<real>) naive_forward<real>;
template decltype(naive_backward<real>) naive_backward<real>;
#if PRECISION == 16
template decltype(naive_forward<accum>) naive_forward<accum>;
template decltype(naive_backward<accum>) naive_backward<accum>;
#endif

}  // namespace pentatron
