#include "model/seams.h"

namespace pentatron {

void WgradQueue::issue_all() {
  const trace::Position position = trace::here;
  trace::here.pass = 'w';
  for (const Entry& entry : entries_) {
    if (entry.unit != open_unit_) {
      for (UnitHooks* hooks : hooks_) hooks->before_gradients(entry.unit);
      open_unit_ = entry.unit;
    }
    if (entry.work) {
      entry.work();
    } else {
      parameters_.end_gradients(entry.unit, entry.last);
      for (UnitHooks* hooks : hooks_) hooks->after_gradients(entry.unit, entry.last);
      open_unit_ = -1;
    }
  }
  entries_.clear();
  trace::here = position;
}

AttentionCore::AttentionCore(Attention kind) : kind_(kind) {
  if (kind == Attention::tensor_core) require_tensor_cores();
}

std::pair<int64_t, int64_t> AttentionCore::score_shape(AttentionShape shape) const {
  if (kind_ != Attention::naive) return {0, 0};
  return {shape.score_rows(), shape.sequence};
}

void AttentionCore::forward(const Blas& blas, AttentionShape shape, const AttentionTensors& t) {
  attention_forward(kind_, blas, whole_sequences(shape), t);
}

void AttentionCore::backward(const Blas& blas, AttentionShape shape, const AttentionTensors& t,
                             const AttentionGradients& g) {
  if (t.out.data != nullptr) attention_dots(t.out, g.d_out, g.d_out_dot_out, blas.stream());
  attention_backward(kind_, blas, whole_sequences(shape), t, g, false);
}

}  // namespace pentatron
