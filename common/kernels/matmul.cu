#include "kernels/matmul.h"

namespace pentatron {

void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status != CUBLAS_STATUS_SUCCESS) fail(call, cublasGetStatusString(status), file, line);
}

Blas::Blas(cudaStream_t stream) : stream_(stream) {
  CUBLAS_CHECK(cublasCreate(&handle_));
  CUBLAS_CHECK(cublasSetStream(handle_, stream));
  if (blas_workspace > 0) CUBLAS_CHECK(cublasSetWorkspace(handle_, workspace_, blas_workspace));
  // Parts of a long sum are added in `accum`, too.
  CUBLAS_CHECK(cublasSetMathMode(handle_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
}

Blas::~Blas() { cublasDestroy(handle_); }

void Blas::product(const Operand& a, const Operand& b, accum beta, ProductResult c, const char* name,
                   bool) const {
  if (c.rows == 0) return;
  trace::Operation operation(
      stream_, name,
      products(c.rows, c.columns, a.columns(), 1, sizeof(real), c.size, beta != 0, of_layers()));
  gemm(a, b, beta, c);
}

// Column-major, it is c^T = b a^T + beta c^T.
void Blas::gemm(const Operand& a, const Operand& b, accum beta, ProductResult c) const {
  const accum alpha = 1;
  CUBLAS_CHECK(cublasGemmEx(
      handle_, b.transposed() ? CUBLAS_OP_N : CUBLAS_OP_T, a.transposed() ? CUBLAS_OP_T : CUBLAS_OP_N,
      static_cast<int>(c.columns), static_cast<int>(c.rows), static_cast<int>(a.columns()), &alpha, b.x.data,
      real_type, static_cast<int>(b.x.columns), a.x.data, real_type, static_cast<int>(a.x.columns), &beta,
      c.data, c.type, static_cast<int>(c.columns), compute_type, CUBLAS_GEMM_DEFAULT));
}

void linear_forward(const Blas& blas, Tensor x, Tensor weight, Tensor y) {
  blas.product({x, Transpose::no}, {weight, Transpose::no}, 0, y, "gemm_forward");
}

// d_x [rows, in] = d_y [rows, out] W [out, in].
void linear_dgrad(const Blas& blas, Tensor d_y, Tensor weight, Tensor d_x) {
  blas.product({d_y, Transpose::no}, {weight, Transpose::yes}, 0, d_x, "gemm_dgrad");
}

// d_weight [out, in] = d_y^T x, or that is added. It has a value, or stays, if there are no rows.
void linear_wgrad(const Blas& blas, Tensor d_y, Tensor x, Gradient d_weight) {
  if (x.rows == 0) {
    if (!d_weight.add) CUDA_CHECK(cudaMemsetAsync(d_weight.sum.data, 0, d_weight.sum.bytes(), blas.stream()));
    return;
  }
  blas.product({d_y, Transpose::yes}, {x, Transpose::yes}, d_weight.add ? 1 : 0, d_weight.sum, "gemm_wgrad");
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
