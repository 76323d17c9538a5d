#include "kernels/elementwise.h"
#include "kernels/pack.h"

namespace pentatron {

template <int width>
__global__ void residual_add_kernel(const real* x, const real* branch, size_t size,
                                    real* out /*all [size]*/) {
  for (size_t i : grid_range(size, width)) {
    Pack<width> sum = load<width>(x + i);
    sum += load<width>(branch + i);
    store(out + i, sum);
  }
}

void residual_add(Tensor x, Tensor branch, Tensor out, cudaStream_t stream) {
  const int width = width_for(out.size(), x.data, branch.data, out.data);
  launch(width == 1 ? residual_add_kernel<1> : residual_add_kernel<pack_width>, elementwise_grid(out.size()),
         moves(3 * real_bytes * out.size()), stream, x.data, branch.data, out.size(), out.data);
}

template <int width>
__global__ void accumulate_kernel(In<accum> term, Out<accum> sum /*both [size]*/, size_t size) {
  for (size_t i : grid_range(size, width)) {
    Pack<width> total = load<width>(sum + i);
    total += load<width>(term + i);
    store(sum + i, total);
  }
}

void accumulate(const accum* term, accum* sum, size_t size, cudaStream_t stream) {
  const int width = width_for(size, term, sum);
  launch(width == 1 ? accumulate_kernel<1> : accumulate_kernel<pack_width>, elementwise_grid(size),
         moves(3 * accum_bytes * size), stream, term, sum, size);
}

void accumulate(AccumTensor term, Gradient gradient, cudaStream_t stream) {
  const AccumTensor sum = gradient.sum;
  if (gradient.add) return accumulate(term.data, sum.data, sum.size(), stream);
  CUDA_CHECK(cudaMemcpyAsync(sum.data, term.data, sum.bytes(), cudaMemcpyDeviceToDevice, stream));
}

// Number `index` of a sequence of normal numbers: each Philox block gives four, by two Box-Muller transforms.
// Not inlined, because a vectorised loop may round its last elements differently, and a slice of a matrix
// must have the bits of the whole.
__device__ __attribute__((noinline)) double normal_number(PhiloxKey key, uint64_t index) {
  constexpr double two_to_minus_32 = 1.0 / 4294967296.0, two_pi = 6.283185307179586;
  const PhiloxBlock bits = philox4x32(0, index / 4, key);
  const int pair = index % 4 / 2;
  const double u1 = (bits.word[2 * pair] + 0.5) * two_to_minus_32,
               u2 = bits.word[2 * pair + 1] * two_to_minus_32;
  return sqrt(-2 * log(u1)) * (index % 2 == 0 ? cos(two_pi * u2) : sin(two_pi * u2));
}

__global__ void fill_normal_kernel(real* weights /*[size]*/, size_t first, size_t size, int64_t columns,
                                   int64_t first_row, int64_t first_column, int64_t global_columns,
                                   uint32_t key0, uint32_t key1, double standard_deviation) {
  for (size_t i : grid_range(size)) {
    const uint64_t row = first_row + (first + i) / columns, column = first_column + (first + i) % columns;
    const double normal = normal_number({{key0, key1}}, row * global_columns + column);
    weights[i] = real(static_cast<accum>(standard_deviation * normal));
  }
}

void fill_normal(real* weights, size_t first, size_t size, GlobalSlice slice, PhiloxKey key,
                 double standard_deviation, cudaStream_t stream) {
  launch(fill_normal_kernel, elementwise_grid(size), moves(real_bytes * size), stream, weights, first, size,
         slice.columns, slice.first_row, slice.first_column, slice.global_columns, key.word[0], key.word[1],
         standard_deviation);
}

__global__ void fill_constant_kernel(real* weights /*[size]*/, size_t size, accum value) {
  for (size_t i : grid_range(size)) weights[i] = real(value);
}

void fill_constant(real* weights, size_t size, double value, cudaStream_t stream) {
  launch(fill_constant_kernel, elementwise_grid(size), moves(real_bytes * size), stream, weights, size,
         value);
}

}  // namespace pentatron
