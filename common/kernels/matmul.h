// Matrix products by cuBLAS. A linear layer y = x W^T has three: forward, the gradient of its input (dgrad),
// and that of its weight (wgrad). cuBLAS is column-major: it takes our matrices for their transposes.
#pragma once

#include <cublas_v2.h>

#include <memory>
#include <vector>

#include "device/tensor.h"

namespace pentatron {

// If the call fails: prints the call, the error's text, file:line and rank, and ends the process.
#define CUBLAS_CHECK(call) pentatron::check_cublas((call), #call, __FILE__, __LINE__)
void check_cublas(cublasStatus_t status, const char* call, const char* file, int line);

enum class Transpose { no, yes };

// An operand of a product c = a b^T: x, or its transpose. c_ij sums over row i of a and row j of b.
struct Operand {
  Tensor x;
  Transpose transpose;
  bool transposed() const { return transpose == Transpose::yes; }
  int64_t rows() const { return transposed() ? x.columns : x.rows; }
  int64_t columns() const { return transposed() ? x.rows : x.columns; }
};

// The result of a product, in `real` or in `accum`.
struct ProductResult {
  template <class C>
  ProductResult(Matrix<C> c)
      : data(c.data), rows(c.rows), columns(c.columns), type(data_type<C>), size(sizeof(C)) {}
  void* data;
  int64_t rows, columns;
  cudaDataType_t type;
  int size;  // bytes of an element
};

// Products of fp64 matrices sum in fp64, all others in fp32.
constexpr cublasComputeType_t compute_type = PRECISION == 64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;

// Memory of a handle's own, with which cuBLAS repeats its results. Kernels of Hopper want 32 MiB.
#ifndef CUDA_CPU
constexpr size_t blas_workspace = 32 << 20;  // bytes
#else
constexpr size_t blas_workspace = 0;
#endif

// A cuBLAS handle bound to one stream.
class Blas {
 public:
  explicit Blas(cudaStream_t stream);
  virtual ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;
  operator cublasHandle_t() const { return handle_; }
  cudaStream_t stream() const { return stream_; }

  std::byte* workspace() const { return workspace_; }  // [blas_workspace]

  // Row-major c = a b^T + beta c. `name` labels it in traces. same_b: b is that of the product before.
  virtual void product(const Operand& a, const Operand& b, accum beta, ProductResult c, const char* name,
                       bool same_b = false) const;
  // Whether it is for the products of layers, which are counted apart and may be in fp8 (layer_products).
  virtual bool of_layers() const { return false; }
  // Whether one launch can make several of its products.
  virtual bool has_batches() const { return true; }

 protected:
  // The same by cuBLAS alone: no trace.
  void gemm(const Operand& a, const Operand& b, accum beta, ProductResult c) const;

 private:
  cublasHandle_t handle_ = nullptr;
  cudaStream_t stream_;
  DeviceArena memory_{Purpose::activations};
  std::byte* workspace_ = memory_.matrix<std::byte>(1, blas_workspace).data;
};

// The handle for the products of layers (tensor_cores/fp8.h). widths: the columns of a rank's matrices, each
// with the option that sets it. outputs: the widest results of products of x [rows, d].
struct Width {
  const char* option;
  int64_t columns;
};
std::unique_ptr<Blas> layer_products(cudaStream_t stream, int64_t d, const std::vector<Width>& widths,
                                     const std::vector<Tensor>& outputs);
// Bytes that its products x [rows, in], W [out, in], y [rows, out] take, which is none but in fp8.
size_t layer_products_bytes(int64_t rows, int64_t in, int64_t out);

// y = x W^T. In all three there may be no rows.
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
