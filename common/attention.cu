#include <cmath>

#include "attention.h"

namespace pentatron {
namespace {

// One head of each key and value head's group, of one sequence, as a batch of matrices with a row a token.
BatchedMatrix heads_of(Tensor x /*[rows, heads*size]*/, int64_t first_row, int first_head, int heads_apart,
                       int size) {
  return {x.data + first_row * x.columns + first_head * size, x.columns,
          static_cast<int64_t>(heads_apart) * size};
}

BatchedMatrix scores_of(Tensor scores /*[heads*sequence, sequence]*/, int sequence, int first_head,
                        int heads_apart) {
  const int64_t per_head = static_cast<int64_t>(sequence) * sequence;
  return {scores.data + first_head * per_head, sequence, heads_apart * per_head};
}

// The scores memory of sequence b.
Tensor of_sequence(const Scores& scores, AttentionShape shape, int b) {
  return scores.memory.row_range(scores.kept ? b * shape.score_rows() : 0, shape.score_rows());
}

}  // namespace

// One block a row: (head, query). Keys after the query are masked: their probability is 0.
__global__ void causal_softmax_kernel(real* __restrict__ scores, int sequence, int heads,
                                      accum* __restrict__ lse) {
  const int head = blockIdx.x / sequence, query = blockIdx.x % sequence, visible = query + 1;
  real* row = scores + static_cast<size_t>(blockIdx.x) * sequence;
  const accum largest = block_max_of<accum>(row, visible);
  accum sum = 0;
  for (int j : block_range(visible)) sum += exp(accum(row[j]) - largest);
  const accum of_row = largest + log(block_sum(sum));
  for (int j : block_range(visible)) row[j] = real(exp(accum(row[j]) - of_row));
  for (int j : block_range(sequence - visible)) row[visible + j] = real(0.0f);
  for ([[maybe_unused]] int once : block_range(1)) lse[query * heads + head] = of_row;
}

// One block a row: (head, query). d_scores = probabilities * (d_probabilities - d_out_dot_out), in place.
__global__ void softmax_backward_kernel(const real* __restrict__ probabilities,
                                        const accum* __restrict__ d_out_dot_out, int sequence, int heads,
                                        real* __restrict__ d_scores) {
  const int head = blockIdx.x / sequence, query = blockIdx.x % sequence;
  const size_t start = static_cast<size_t>(blockIdx.x) * sequence;
  const accum dot = d_out_dot_out[query * heads + head];
  for (int j : block_range(sequence)) {
    d_scores[start + j] = real(accum(probabilities[start + j]) * (accum(d_scores[start + j]) - dot));
  }
}

// One block a row of tokens: the dot products of its heads.
__global__ void head_dots_kernel(const real* __restrict__ a, const real* __restrict__ b, int heads, int size,
                                 accum* __restrict__ dots) {
  const size_t row = blockIdx.x;
  for (int head = 0; head < heads; ++head) {
    const size_t start = (row * heads + head) * size;
    accum sum = 0;
    for (int j : block_range(size)) sum += accum(a[start + j]) * accum(b[start + j]);
    sum = block_sum(sum);
    for ([[maybe_unused]] int once : block_range(1)) dots[row * heads + head] = sum;
  }
}

namespace {

// probabilities and lse of sequence b. Called by forward and, when they were not kept, again by backward: the
// same operations, so the same bits.
void compute_probabilities(const Blas& blas, AttentionShape shape, Tensor q, Tensor k, int b,
                           Tensor probabilities, accum* lse) {
  const auto [heads, kv_heads, size] = shape.head;
  const int sequence = shape.sequence, group = heads / kv_heads;
  const int64_t first_row = static_cast<int64_t>(b) * sequence;
  for (int i = 0; i < group; ++i) {
    batched_product(blas, Transpose::no, Transpose::yes, sequence, sequence, size, 1 / std::sqrt(size),
                    heads_of(q, first_row, i, group, size), heads_of(k, first_row, 0, 1, size), 0,
                    scores_of(probabilities, sequence, i, group), kv_heads, "gemm_attention_scores");
  }
  launch(causal_softmax_kernel, dim3(heads * sequence), blas.stream(), probabilities.data, sequence, heads,
         lse);
}

}  // namespace

void attention_forward(const Blas& blas, AttentionShape shape, Tensor q, Tensor k, Tensor v, Scores scores,
                       Tensor out, Statistics lse) {
  const auto [heads, kv_heads, size] = shape.head;
  const int sequence = shape.sequence, group = heads / kv_heads;
  for (int b = 0; b < shape.batch; ++b) {
    const int64_t first_row = static_cast<int64_t>(b) * sequence;
    const Tensor probabilities = of_sequence(scores, shape, b);
    compute_probabilities(blas, shape, q, k, b, probabilities, lse.row_range(first_row, sequence).data);
    for (int i = 0; i < group; ++i) {
      batched_product(blas, Transpose::no, Transpose::no, sequence, size, sequence, 1,
                      scores_of(probabilities, sequence, i, group), heads_of(v, first_row, 0, 1, size), 0,
                      heads_of(out, first_row, i, group, size), kv_heads, "gemm_attention_out");
    }
  }
}

void attention_backward(const Blas& blas, AttentionShape shape, Tensor q, Tensor k, Tensor v, Scores scores,
                        Tensor out, Statistics lse, Tensor d_out, Tensor d_scores, Statistics d_out_dot_out,
                        Tensor d_q, Tensor d_k, Tensor d_v) {
  const auto [heads, kv_heads, size] = shape.head;
  const int sequence = shape.sequence, group = heads / kv_heads;
  const double scale = 1 / std::sqrt(size);
  launch(head_dots_kernel, dim3(q.rows), blas.stream(), out.data, d_out.data, heads, size,
         d_out_dot_out.data);
  for (int b = 0; b < shape.batch; ++b) {
    const int64_t first_row = static_cast<int64_t>(b) * sequence;
    const Tensor probabilities = of_sequence(scores, shape, b);
    if (!scores.kept) {
      compute_probabilities(blas, shape, q, k, b, probabilities, lse.row_range(first_row, sequence).data);
    }
    for (int i = 0; i < group; ++i) {  // the heads of a group add up in d_k and d_v
      const auto of_head = [&](Tensor x) { return heads_of(x, first_row, i, group, size); };
      const auto of_kv_head = [&](Tensor x) { return heads_of(x, first_row, 0, 1, size); };
      batched_product(blas, Transpose::yes, Transpose::no, sequence, size, sequence, 1,
                      scores_of(probabilities, sequence, i, group), of_head(d_out), i > 0, of_kv_head(d_v),
                      kv_heads, "gemm_attention_d_v");
      batched_product(blas, Transpose::no, Transpose::yes, sequence, sequence, size, 1, of_head(d_out),
                      of_kv_head(v), 0, scores_of(d_scores, sequence, i, group), kv_heads,
                      "gemm_attention_d_scores");
    }
    launch(softmax_backward_kernel, dim3(heads * sequence), blas.stream(), probabilities.data,
           d_out_dot_out.row_range(first_row, sequence).data, sequence, heads, d_scores.data);
    for (int i = 0; i < group; ++i) {
      const BatchedMatrix d_scores_of_head = scores_of(d_scores, sequence, i, group);
      batched_product(blas, Transpose::no, Transpose::no, sequence, size, sequence, scale, d_scores_of_head,
                      heads_of(k, first_row, 0, 1, size), 0, heads_of(d_q, first_row, i, group, size),
                      kv_heads, "gemm_attention_d_q");
      batched_product(blas, Transpose::yes, Transpose::no, sequence, size, sequence, scale, d_scores_of_head,
                      heads_of(q, first_row, i, group, size), i > 0, heads_of(d_k, first_row, 0, 1, size),
                      kv_heads, "gemm_attention_d_k");
    }
  }
}

}  // namespace pentatron
