// Matrix products by cuBLAS. A linear layer y = x W^T has three: forward, the gradient of its input (dgrad),
// and that of its weight (wgrad). cuBLAS is column-major: it takes our matrices for their transposes.
#pragma once

#include <cublas_v2.h>

#include "device/tensor.h"

namespace pentatron {

// If the call fails: prints the call, the error's text, file:line and rank, and ends the process.
#define CUBLAS_CHECK(call) pentatron::check_cublas((call), #call, __FILE__, __LINE__)
void check_cublas(cublasStatus_t status, const char* call, const char* file, int line);

enum class Transpose { no, yes };

// Which elements of an operand share a scale, where a product is in fp8: 128 of a row, or a square of them.
enum class Fp8Tile { row, square };
constexpr int fp8_tile = 128;
struct Fp8Matrix;  // an operand in 8 bits (tensor_cores/fp8.h)

// An operand of a product a b^T: x, or its transpose. Its rows lie along the sum, as tensor cores read 8
// bits. tile: which of its elements share a scale in fp8.
struct Operand {
  Tensor x;
  Transpose transpose;
  Fp8Tile tile;
  bool transposed() const { return transpose == Transpose::yes; }
  int64_t rows() const { return transposed() ? x.columns : x.rows; }
  int64_t columns() const { return transposed() ? x.rows : x.columns; }
};

// Rows of tokens: activations, and their gradients.
inline Operand tokens(Tensor x, Transpose transpose) { return {x, transpose, Fp8Tile::row}; }
inline Operand weights(Tensor w, Transpose transpose) { return {w, transpose, Fp8Tile::square}; }

// Products of fp64 matrices sum in fp64, all others in fp32.
constexpr cublasComputeType_t compute_type = PRECISION == 64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;

// Memory of a handle's own, with which cuBLAS repeats its results. Kernels of Hopper want 32 MiB.
#ifndef CUDA_CPU
constexpr size_t blas_workspace = 32 << 20;  // bytes
#else
constexpr size_t blas_workspace = 0;
#endif

// Bytes for the quantised operands of a product of layers: x [rows, in], W [out, in]; 0 unless it is in fp8.
size_t fp8_operand_bytes(int64_t rows, int64_t in, int64_t out);

// A cuBLAS handle bound to one stream, for the products of layers or for all others. In fp8 builds those of
// layers, and no others, are in fp8.
class Blas {
 public:
  // layer_operand: elements of the largest operand of layers' products (config.h). 0: it is for others.
  explicit Blas(cudaStream_t stream, int64_t layer_operand = 0);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;
  operator cublasHandle_t() const { return handle_; }
  cudaStream_t stream() const { return stream_; }

  bool of_layers() const { return of_layers_; }
  bool in_fp8() const { return has_fp8_products && of_layers_; }
  // Work space for the first (0) or second operand: for codes and scales or, without `codes`, dequantised.
  Fp8Matrix operand(int which, bool codes) const;
  std::byte* workspace() const { return workspace_.data(); }  // [blas_workspace]

 private:
  cublasHandle_t handle_ = nullptr;
  cudaStream_t stream_;
  DeviceArray<std::byte> workspace_{blas_workspace, Purpose::activations};
  const bool of_layers_;
  DeviceArray<real> operands_[2];  // in fp8: values, or codes
  DeviceArray<float> scales_[2];
};

// Row-major c = a b^T + beta c, in fp8 if the handle says so. `name` labels it in traces.
template <class C>
void product(const Blas& blas, const Operand& a, const Operand& b, accum beta, Matrix<C> c, const char* name);
// The same by cuBLAS alone: no trace, and never in fp8.
template <class C>
void gemm(const Blas& blas, const Operand& a, const Operand& b, accum beta, Matrix<C> c);
// The same in fp8 (tensor_cores/fp8.cu): quantises a and, unless it is that of the last product, b (new_b).
template <class C>
void fp8_gemm(const Blas& blas, const Operand& a, const Operand& b, accum beta, Matrix<C> c, const char* name,
              bool new_b = true);

// y = x W^T. In all three there may be no rows. In fp8 the operands are quantised: activations, weights and
// gradients, with scales along the sum (fp8.h).
void linear_forward(const Blas& blas, Tensor x /*[rows, in]*/, Tensor weight /*[out, in]*/,
                    Tensor y /*[rows, out]*/);

// d_x = d_y W.
void linear_dgrad(const Blas& blas, Tensor d_y /*[rows, out]*/, Tensor weight /*[out, in]*/,
                  Tensor d_x /*[rows, in]*/);

// d_weight (+)= d_y^T x, in `accum`.
void linear_wgrad(const Blas& blas, Tensor d_y /*[rows, out]*/, Tensor x /*[rows, in]*/,
                  Gradient d_weight /*[out, in]*/);

// A batch of row-major matrices. Rows are `leading` elements apart, and matrices `stride`.
struct BatchedMatrix {
  void* data;
  cudaDataType_t type;
  int64_t leading, stride;
};

// c_i = alpha op(a_i) op(b_i) + beta c_i for i < count, with op(a_i) [m, k], op(b_i) [k, n], c_i [m, n], all
// row-major; op transposes or not. a and b are `real`, c is `real` or `accum`. `name` labels traces. cost: if
// it is another one than that of as many separate products.
void batched_product(const Blas& blas, Transpose transpose_a, Transpose transpose_b, int m, int n, int k,
                     double alpha, BatchedMatrix a, BatchedMatrix b, double beta, BatchedMatrix c, int count,
                     const char* name, const Cost* cost = nullptr);

}  // namespace pentatron
