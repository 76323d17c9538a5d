#include "kernels/matmul.h"

namespace pentatron {

// Row-major c = a b^T + beta c, which is column-major c^T = b a^T + beta c^T.
template <class C>
void gemm(const Blas& blas, const Operand& a, const Operand& b, accum beta, Matrix<C> c) {
  const accum alpha = 1;
  CUBLAS_CHECK(cublasGemmEx(
      blas, b.transposed() ? CUBLAS_OP_N : CUBLAS_OP_T, a.transposed() ? CUBLAS_OP_T : CUBLAS_OP_N,
      static_cast<int>(c.columns), static_cast<int>(c.rows), static_cast<int>(a.columns()), &alpha, b.x.data,
      real_type, static_cast<int>(b.x.columns), a.x.data, real_type, static_cast<int>(a.x.columns), &beta,
      c.data, data_type<C>, static_cast<int>(c.columns), compute_type, CUBLAS_GEMM_DEFAULT));
}

template <class C>
void product(const Blas& blas, const Operand& a, const Operand& b, accum beta, Matrix<C> c,
             const char* name) {
  if (c.rows == 0) return;
  if (blas.in_fp8()) return fp8_gemm(blas, a, b, beta, c, name);
  trace::Operation operation(
      blas.stream(), name,
      products(c.rows, c.columns, a.columns(), 1, sizeof(real), sizeof(C), beta != 0, blas.of_layers()));
  gemm(blas, a, b, beta, c);
}

template void gemm(const Blas&, const Operand&, const Operand&, accum, AccumTensor);
template void product(const Blas&, const Operand&, const Operand&, accum, AccumTensor, const char*);
#if PRECISION == 16
template void gemm(const Blas&, const Operand&, const Operand&, accum, Tensor);
template void product(const Blas&, const Operand&, const Operand&, accum, Tensor, const char*);
#endif

void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status != CUBLAS_STATUS_SUCCESS) fail(call, cublasGetStatusString(status), file, line);
}

Blas::Blas(cudaStream_t stream, int64_t layer_operand) : stream_(stream), of_layers_(layer_operand > 0) {
  if (in_fp8()) {
    const auto elements = static_cast<size_t>(layer_operand);
    for (DeviceArray<real>& operand : operands_) operand = {elements, Purpose::activations};
    for (DeviceArray<float>& scales : scales_) scales = {elements / fp8_tile, Purpose::activations};
  }
  CUBLAS_CHECK(cublasCreate(&handle_));
  CUBLAS_CHECK(cublasSetStream(handle_, stream));
  if (blas_workspace > 0) CUBLAS_CHECK(cublasSetWorkspace(handle_, workspace_.data(), blas_workspace));
  // Parts of a long sum are added in `accum`, too.
  CUBLAS_CHECK(cublasSetMathMode(handle_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
}

Blas::~Blas() { cublasDestroy(handle_); }

void linear_forward(const Blas& blas, Tensor x, Tensor weight, Tensor y) {
  product(blas, tokens(x, Transpose::no), weights(weight, Transpose::no), 0, y, "gemm_forward");
}

void linear_dgrad(const Blas& blas, Tensor d_y, Tensor weight, Tensor d_x) {
  product(blas, tokens(d_y, Transpose::no), weights(weight, Transpose::yes), 0, d_x, "gemm_dgrad");
}

void linear_wgrad(const Blas& blas, Tensor d_y, Tensor x, Gradient d_weight) {
  if (x.rows == 0) {
    if (!d_weight.add) CUDA_CHECK(cudaMemsetAsync(d_weight.sum.data, 0, d_weight.sum.bytes(), blas.stream()));
    return;
  }
  product(blas, tokens(d_y, Transpose::yes), tokens(x, Transpose::yes), d_weight.add ? 1 : 0, d_weight.sum,
          "gemm_wgrad");
}

void batched_product(const Blas& blas, Transpose transpose_a, Transpose transpose_b, int m, int n, int k,
                     double alpha, BatchedMatrix a, BatchedMatrix b, double beta, BatchedMatrix c, int count,
                     const char* name, const Cost* cost) {
  const int result = c.type == real_type ? sizeof(real) : sizeof(accum);
  const Cost of_these = products(m, n, k, count, sizeof(real), result, beta != 0);
  trace::Operation operation(blas.stream(), name, cost ? *cost : of_these);
  const accum alpha_accum = static_cast<accum>(alpha), beta_accum = static_cast<accum>(beta);
  CUBLAS_CHECK(cublasGemmStridedBatchedEx(blas, transpose_b == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N,
                                          transpose_a == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k,
                                          &alpha_accum, b.data, b.type, static_cast<int>(b.leading), b.stride,
                                          a.data, a.type, static_cast<int>(a.leading), a.stride, &beta_accum,
                                          c.data, c.type, static_cast<int>(c.leading), c.stride, count,
                                          compute_type, CUBLAS_GEMM_DEFAULT));
}

}  // namespace pentatron
