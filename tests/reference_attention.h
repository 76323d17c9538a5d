// Attention by plain loops in double, which that of every kind, block and rank is compared with.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/attention.h"
#include "reference.h"

namespace pentatron {

// The inputs of a block of attention, and its results, which begin as something else: rows that lie between
// two sequences of the block are to stay as they are.
struct BlockData {
  HostMatrix q, k, v, d_out, out, lse, d_q, d_k, d_v;

  BlockData(const AttentionBlock& block, Random& random)
      : q(random.normal<real>(block.batch * block.stride, block.head.heads * block.head.head_size)),
        k(random.normal<real>(block.batch * block.stride, block.head.kv_heads * block.head.head_size)),
        v(random.normal<real>(k.rows, k.columns)),
        d_out(random.normal<real>(q.rows, q.columns)),
        out(random.normal<real>(q.rows, q.columns)),
        lse(random.normal<accum>(q.rows, block.head.heads)),
        d_q(random.normal<real>(q.rows, q.columns)),
        d_k(random.normal<real>(k.rows, k.columns)),
        d_v(random.normal<real>(k.rows, k.columns)) {}
};

// A row of attention at a time: query i of one head, which sees the keys 0..i of its sequence, or all.
// Gradients are added to what is there, or assigned.
inline void reference_attention(const AttentionBlock& block, BlockData& a, bool add = false) {
  const auto [heads, kv_heads, size] = block.head;
  const auto clear = [](HostMatrix& x, int batch, int rows, int stride) {
    for (int b = 0; b < batch; ++b) {
      for (int64_t i = b * stride * x.columns; i < (b * stride + rows) * x.columns; ++i) x.values[i] = 0;
    }
  };
  clear(a.out, block.batch, block.queries, block.stride);
  if (!add) {
    clear(a.d_q, block.batch, block.queries, block.stride);
    clear(a.d_k, block.batch, block.keys, block.stride);
    clear(a.d_v, block.batch, block.keys, block.stride);
  }
  for (int b = 0; b < block.batch; ++b) {
    for (int head = 0; head < heads; ++head) {
      const int64_t first_key = int64_t{b} * block.stride;
      const int column = head * size, kv_column = head / (heads / kv_heads) * size;
      for (int query = 0; query < block.queries; ++query) {
        const int64_t i = int64_t{b} * block.stride + query;
        const int visible = block.diagonal ? std::min(query + 1, block.keys) : block.keys;
        std::vector<double> scores, p, d_p;
        for (int64_t j = first_key; j < first_key + visible; ++j) {
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

        for (int j = 0; j < visible; ++j) {
          double d_score = 0;  // the softmax' Jacobian: dp_m / dscore_j = p_m ((m == j) - p_j)
          for (int m = 0; m < visible; ++m) d_score += d_p[m] * p[m] * ((m == j) - p[j]);
          for (int e = 0; e < size; ++e) {
            a.out(i, column + e) += p[j] * a.v(first_key + j, kv_column + e);
            a.d_v(first_key + j, kv_column + e) += p[j] * a.d_out(i, column + e);
            a.d_q(i, column + e) += d_score * a.k(first_key + j, kv_column + e) / std::sqrt(size);
            a.d_k(first_key + j, kv_column + e) += d_score * a.q(i, column + e) / std::sqrt(size);
          }
        }
      }
    }
  }
}

}  // namespace pentatron
