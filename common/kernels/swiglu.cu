#include "kernels/pack.h"
#include "kernels/swiglu.h"

namespace pentatron {

__device__ inline accum times_sigmoid(accum x, accum gate) { return divide_fast(x, 1 + exp_fast(-gate)); }

template <int width>
__global__ void swiglu_forward_kernel(In<real> gate_up /*[rows, gate | up]*/, int f,
                                      Out<real> out /*[rows, f]*/) {
  const size_t row = blockIdx.x;
  const real *gates = gate_up + row * 2 * f, *ups = gates + f;
  for (int j : block_range(f, width)) {
    const Pack<width> gate = load<width>(gates + j), up = load<width>(ups + j);
    Pack<width> product;
    for (int e = 0; e < width; ++e) product[e] = times_sigmoid(gate[e], gate[e]) * up[e];
    store(out + row * f + j, product);
  }
}

void swiglu_forward(Tensor gate_up, Tensor out, cudaStream_t stream) {
  const int width = width_for(out.columns, gate_up.data, out.data);
  launch(width == 1 ? swiglu_forward_kernel<1> : swiglu_forward_kernel<pack_width>,
         block_a_row(out.rows, out.columns / width), moves(3 * real_bytes * out.size()), stream, gate_up.data,
         out.columns, out.data);
}

// silu'(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g))).
template <int width>
__global__ void swiglu_backward_kernel(In<real> d_out /*[rows, f]*/, In<real> gate_up /*[rows, gate | up]*/,
                                       int f, Out<real> d_gate_up /*as gate_up*/) {
  const size_t row = blockIdx.x;
  const real *gates = gate_up + row * 2 * f, *ups = gates + f;
  real *d_gates = d_gate_up + row * 2 * f, *d_ups = d_gates + f;
  for (int j : block_range(f, width)) {
    const Pack<width> gate = load<width>(gates + j), up = load<width>(ups + j),
                      d = load<width>(d_out + row * f + j);
    Pack<width> d_gate, d_up;
    for (int e = 0; e < width; ++e) {
      const accum sigmoid = times_sigmoid(1, gate[e]);
      d_gate[e] = d[e] * up[e] * sigmoid * (1 + gate[e] * (1 - sigmoid));
      d_up[e] = d[e] * gate[e] * sigmoid;
    }
    store(d_gates + j, d_gate);
    store(d_ups + j, d_up);
  }
}

void swiglu_backward(Tensor d_out, Tensor gate_up, Tensor d_gate_up, cudaStream_t stream) {
  const int width = width_for(d_out.columns, d_out.data, gate_up.data, d_gate_up.data);
  launch(width == 1 ? swiglu_backward_kernel<1> : swiglu_backward_kernel<pack_width>,
         block_a_row(d_out.rows, d_out.columns / width), moves(5 * real_bytes * d_out.size()), stream,
         d_out.data, gate_up.data, d_out.columns, d_gate_up.data);
}

}  // namespace pentatron
