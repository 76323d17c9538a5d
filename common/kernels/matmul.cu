#include "kernels/matmul.h"

namespace pentatron {
namespace {

// Products of fp64 matrices sum in fp64, all others in fp32.
constexpr cublasComputeType_t compute_type = PRECISION == 64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;

// Row-major c = op(a) op(b) + beta c, which is column-major c^T = op(b)^T op(a)^T + beta c^T.
template <class C>
void product(const Blas& blas, Tensor a, bool transpose_a, Tensor b, bool transpose_b, accum beta,
             Matrix<C> c, const char* name) {
  if (c.rows == 0) return;
  const int64_t k = transpose_a ? a.rows : a.columns;
  Cost cost = products(c.rows, c.columns, k, 1, sizeof(real), sizeof(C), beta != 0);
  cost.of_layer = trace::here.layer >= 0 ? 1 : 0;
  trace::Range range(blas.stream(), name, cost);
  const accum alpha = 1;
  CUBLAS_CHECK(cublasGemmEx(
      blas, transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
      static_cast<int>(c.columns), static_cast<int>(c.rows), static_cast<int>(k), &alpha, b.data, real_type,
      static_cast<int>(b.columns), a.data, real_type, static_cast<int>(a.columns), &beta, c.data,
      data_type<C>, static_cast<int>(c.columns), compute_type, CUBLAS_GEMM_DEFAULT));
}

void strided_products(const Blas& blas, Transpose transpose_a, Transpose transpose_b, int m, int n, int k,
                      double alpha, BatchedMatrix a, BatchedMatrix b, double beta, BatchedMatrix c, int count,
                      const char* name, const Cost& cost) {
  trace::Range range(blas.stream(), name, cost);
  const accum alpha_accum = static_cast<accum>(alpha), beta_accum = static_cast<accum>(beta);
  CUBLAS_CHECK(cublasGemmStridedBatchedEx(blas, transpose_b == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N,
                                          transpose_a == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k,
                                          &alpha_accum, b.data, b.type, static_cast<int>(b.leading), b.stride,
                                          a.data, a.type, static_cast<int>(a.leading), a.stride, &beta_accum,
                                          c.data, c.type, static_cast<int>(c.leading), c.stride, count,
                                          compute_type, CUBLAS_GEMM_DEFAULT));
}

}  // namespace

void check_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  if (status != CUBLAS_STATUS_SUCCESS) fail(call, cublasGetStatusString(status), file, line);
}

Blas::Blas(cudaStream_t stream) : stream_(stream) {
  CUBLAS_CHECK(cublasCreate(&handle_));
  CUBLAS_CHECK(cublasSetStream(handle_, stream));
  if (blas_workspace > 0) CUBLAS_CHECK(cublasSetWorkspace(handle_, workspace_.data(), blas_workspace));
  // Parts of a long sum are added in `accum`, too.
  CUBLAS_CHECK(cublasSetMathMode(handle_, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
}

Blas::~Blas() { cublasDestroy(handle_); }

void linear_forward(const Blas& blas, Tensor x, Tensor weight, Tensor y) {
  product(blas, x, false, weight, true, 0, y, "gemm_forward");
}

void linear_forward_blocks(const Blas& blas, RowBlocks x, Tensor weight, RowBlocks y, double share) {
  const auto m = static_cast<int>(x.first.rows), n = static_cast<int>(weight.rows),
             k = static_cast<int>(weight.columns);
  Cost cost = products(m * x.count, n, k, 1, sizeof(real), sizeof(real), false);
  cost.of_layer = trace::here.layer >= 0 ? share : 0;
  strided_products(blas, Transpose::no, Transpose::yes, m, n, k, 1,
                   {x.first.data, real_type, k, x.stride * k}, {weight.data, real_type, k, 0}, 0,
                   {y.first.data, real_type, n, y.stride * n}, static_cast<int>(x.count), "gemm_forward",
                   cost);
}

void linear_dgrad(const Blas& blas, Tensor d_y, Tensor weight, Tensor d_x) {
  product(blas, d_y, false, weight, false, 0, d_x, "gemm_dgrad");
}

void linear_wgrad(const Blas& blas, Tensor d_y, Tensor x, Gradient d_weight) {
  if (x.rows == 0) {
    if (!d_weight.add) CUDA_CHECK(cudaMemsetAsync(d_weight.sum.data, 0, d_weight.sum.bytes(), blas.stream()));
    return;
  }
  product(blas, d_y, true, x, false, d_weight.add ? 1 : 0, d_weight.sum, "gemm_wgrad");
}

void batched_product(const Blas& blas, Transpose transpose_a, Transpose transpose_b, int m, int n, int k,
                     double alpha, BatchedMatrix a, BatchedMatrix b, double beta, BatchedMatrix c, int count,
                     const char* name) {
  const int result = c.type == real_type ? sizeof(real) : sizeof(accum);
  strided_products(blas, transpose_a, transpose_b, m, n, k, alpha, a, b, beta, c, count, name,
                   products(m, n, k, count, sizeof(real), result, beta != 0));
}

}  // namespace pentatron
