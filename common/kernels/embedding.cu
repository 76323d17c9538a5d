#include "kernels/embedding.h"
#include "kernels/pack.h"

namespace pentatron {

template <int width>
__global__ void embedding_forward_kernel(In<real> table /*[vocabulary, d]*/, In<int32_t> tokens /*[rows]*/,
                                         int first_token, int vocabulary, int d,
                                         Out<real> out /*[rows, d]*/) {
  const size_t row = blockIdx.x;
  const int token = tokens[row] - first_token;
  const bool here = 0 <= token && token < vocabulary;
  const real* const of_token = table + (here ? static_cast<size_t>(token) * d : 0);
  for (int j : block_range(d, width))
    store(out + row * d + j, here ? load<width>(of_token + j) : Pack<width>{});
}

void embedding_forward(Tensor table, const int32_t* tokens, int first_token, Tensor out,
                       cudaStream_t stream) {
  const int width = width_for(out.columns, table.data, out.data);
  launch(width == 1 ? embedding_forward_kernel<1> : embedding_forward_kernel<pack_width>,
         block_a_row(out.rows, out.columns / width), moves(2 * real_bytes * out.size()), stream, table.data,
         tokens, first_token, table.rows, out.columns, out.data);
}

// One block a place in `by_token`; the first place of each token adds up all the rows of that token.
template <int width>
__global__ void embedding_backward_kernel(In<real> d_out /*[rows, columns]*/, In<int32_t> tokens /*[rows]*/,
                                          In<int32_t> by_token /*[rows]*/, int rows, int first_token,
                                          int vocabulary, int columns,
                                          Out<accum> gradient /*[vocabulary, columns]*/) {
  const int place = blockIdx.x;
  const int global_token = tokens[by_token[place]], token = global_token - first_token;
  if (token < 0 || token >= vocabulary) return;
  if (place > 0 && tokens[by_token[place - 1]] == global_token) return;
  int end = place + 1;
  while (end < rows && tokens[by_token[end]] == global_token) ++end;
  accum* const of_token = gradient + static_cast<size_t>(token) * columns;
  for (int j : block_range(columns, width)) {
    Pack<width> sum = load<width>(of_token + j);
#pragma unroll 4
    for (int i = place; i < end; ++i)
      sum += load<width>(d_out + static_cast<size_t>(by_token[i]) * columns + j);
    store(of_token + j, sum);
  }
}

void embedding_backward(Tensor d_out, const int32_t* tokens, const int32_t* by_token, int first_token,
                        Gradient gradient, cudaStream_t stream) {
  const AccumTensor sum = gradient.sum;
  // Most tokens do not occur, and the kernel writes only those that do.
  if (!gradient.add) CUDA_CHECK(cudaMemsetAsync(sum.data, 0, sum.bytes(), stream));
  const int width = width_for(d_out.columns, d_out.data, sum.data);
  launch(width == 1 ? embedding_backward_kernel<1> : embedding_backward_kernel<pack_width>,
         block_a_row(d_out.rows, d_out.columns / width), moves((real_bytes + 2 * accum_bytes) * d_out.size()),
         stream, d_out.data, tokens, by_token, d_out.rows, first_token, sum.rows, d_out.columns, sum.data);
}

}  // namespace pentatron
