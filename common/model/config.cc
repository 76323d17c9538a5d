#include "model/config.h"

namespace pentatron {

int64_t parameter_count(const ModelConfig& m) {
  const int64_t d = m.d_model, q = int64_t{m.heads} * m.head_size(), kv = int64_t{m.kv_heads} * m.head_size();
  const int64_t norms = 2 * d, attention = d * (q + 2 * kv) + q * d, mlp = 3 * d * m.d_ff;
  const int64_t routed = m.experts > 0 ? m.layers / m.moe_every : 0;  // layers with experts
  const int64_t bias = m.has_balance_bias() ? 1 : 0;
  const int64_t mlps =
      (m.layers - routed) * mlp + routed * (m.experts * (d + mlp + bias) + m.shared_experts * mlp);
  return m.layers * (norms + attention) + mlps + d + 2 * d * m.vocab_size;
}

int64_t active_parameter_count(const ModelConfig& m) {
  if (m.experts == 0) return parameter_count(m);
  const int64_t idle = int64_t{m.layers / m.moe_every} * (m.experts - m.top_k);  // experts
  return parameter_count(m) - idle * 3 * m.d_model * m.d_ff;
}

}  // namespace pentatron
