#include <cmath>

#include "kernels/loss.h"
#include "kernels/pack.h"

namespace pentatron {

// A block goes through the logits in chunks that its cache holds, so that memory is read once,
// for the largest logit and for the sum: when a chunk has a larger one, the sum so far is scaled down (online
// softmax; Milakov and Gimelshein, 2018).
template <int width>
__global__ void cross_entropy_statistics_kernel(In<real> logits /*[rows, vocabulary]*/,
                                                In<int32_t> targets /*[rows]*/, int first_token,
                                                int vocabulary, Out<accum> statistics /*[3, rows]*/) {
  const size_t row = blockIdx.x, rows = gridDim.x;
  const real* row_logits = logits + row * vocabulary;
  constexpr int logits_a_chunk = 8192;
  accum largest = -INFINITY, sum = 0;  // sum: of exp(logit - largest), a thread's own
  for (int first = 0; first < vocabulary; first += logits_a_chunk) {
    const int count = std::min(logits_a_chunk, vocabulary - first);
    const accum before = largest;
    largest = std::max(before, block_max_of<width>(row_logits + first, count));
    sum *= exp(before - largest);  // 0 at first
    for (int j : block_range(count, width)) {
      const Pack<width> logit = load<width>(row_logits + first + j);
      for (int e = 0; e < width; ++e) sum += exp_fast(logit[e] - largest);
    }
  }
  sum = block_sum(sum);
  if (is_first_thread()) {
    const int target = targets[row] - first_token;
    const bool here = targets[row] != ignored_target && 0 <= target && target < vocabulary;
    statistics[row] = largest;
    statistics[rows + row] = sum;
    statistics[2 * rows + row] = here ? accum(row_logits[target]) : accum(0);
  }
}

void cross_entropy_statistics(Tensor logits, const int32_t* targets, int first_token, AccumTensor statistics,
                              cudaStream_t stream) {
  const int width = width_for(logits.columns, logits.data);
  launch(width == 1 ? cross_entropy_statistics_kernel<1> : cross_entropy_statistics_kernel<pack_width>,
         block_a_row(logits.rows, logits.columns / width), moves(logits.bytes()), stream, logits.data,
         targets, first_token, logits.columns, statistics.data);
}

// One block in all.
__global__ void cross_entropy_loss_kernel(In<accum> statistics /*[3, rows]*/, In<int32_t> targets /*[rows]*/,
                                          int rows, accum scale, Out<accum> loss /*[1]*/) {
  accum sum = 0;
  for (int row : block_range(rows)) {
    const accum largest = statistics[row], of_target = statistics[2 * rows + row];
    const accum term = log(statistics[rows + row]) + largest - of_target;
    sum += targets[row] == ignored_target ? accum(0) : term;
  }
  sum = block_sum(sum);
  if (is_first_thread()) loss[0] = scale * sum;
}

void cross_entropy_loss(AccumTensor statistics, const int32_t* targets, double scale, accum* loss,
                        cudaStream_t stream) {
  launch(cross_entropy_loss_kernel, dim3(1), shortest_kernel, stream, statistics.data, targets,
         statistics.columns, scale, loss);
}

// In place: a logit is read once more, and its gradient takes its place.
template <int width>
__global__ void cross_entropy_backward_kernel(Out<real> logits /*[rows, vocabulary]*/,
                                              In<int32_t> targets /*[rows]*/, int first_token, int vocabulary,
                                              accum scale, const LossScale* loss_scale,
                                              In<accum> statistics /*[3, rows]*/) {
  const size_t row = blockIdx.x, rows = gridDim.x;
  if (loss_scale != nullptr) scale *= loss_scale->factor;
  const accum largest = statistics[row], row_scale = targets[row] == ignored_target ? accum(0) : scale;
  const accum factor = row_scale / statistics[rows + row];
  const int target = targets[row] - first_token;
  real* row_logits = logits + row * vocabulary;
  for (int j : block_range(vocabulary, width)) {
    Pack<width> logit = load<width>(row_logits + j);
    for (int e = 0; e < width; ++e) {
      logit[e] = factor * exp_fast(logit[e] - largest) - (j + e == target ? row_scale : accum(0));
    }
    store(row_logits + j, logit);
  }
}

void cross_entropy_backward(Tensor logits, const int32_t* targets, int first_token, double scale,
                            const LossScale* loss_scale, AccumTensor statistics, cudaStream_t stream) {
  const int width = width_for(logits.columns, logits.data);
  launch(width == 1 ? cross_entropy_backward_kernel<1> : cross_entropy_backward_kernel<pack_width>,
         block_a_row(logits.rows, logits.columns / width), moves(2 * real_bytes * logits.size()), stream,
         logits.data, targets, first_token, logits.columns, scale, loss_scale, statistics.data);
}

}  // namespace pentatron
