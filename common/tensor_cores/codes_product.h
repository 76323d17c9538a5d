// A product in fp8 as cuBLAS makes it, from codes and scales. fp8.cu emulates it where that can't be.
#pragma once

#ifndef CUDA_CPU
#include <cublasLt.h>
#endif

#include "tensor_cores/fp8.h"

namespace pentatron {

#if defined(PRODUCTS_IN_FP8) && !defined(CUDA_CPU) && CUBLAS_VERSION >= 120900

// Row-major c = a b^T + beta c by cublasLtMatmul, which takes it as column-major c^T = b a^T. Hopper has such
// scales, newer GPUs have others. c has padded_to_16(rows).
class CodesProduct {
 public:
  CodesProduct(const LayerBlas& blas, const Operand& a, const Operand& b, ProductResult c) : blas_(blas) {
    CUBLAS_CHECK(cublasLtMatmulDescInit(&operation_, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    set(CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T);
    set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode_of(tile_of_b(a)));
    set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode_of(Fp8Tile::row));
    set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, blas.operand(1, true).scales);
    set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, blas.operand(0, true).scales);
    layout(b_, CUDA_R_8F_E4M3, padded_to_16(b.columns()), b.rows());
    layout(a_, CUDA_R_8F_E4M3, padded_to_16(a.columns()), padded_to_16(a.rows()));
    layout(c_, c.type, c.columns, padded_to_16(c.rows));
    cublasLtMatmulPreferenceOpaque_t preference;
    CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value));
    };
    prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{blas_workspace});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t{16});
    prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t{16});
    // Parts of a long sum are added in fp32.
    prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
    int found = 0;
    possible_ = b.rows() % 16 == 0 &&
                cublasLtMatmulAlgoGetHeuristic(handle(), &operation_, &b_, &a_, &c_, &c_, &preference, 1,
                                               &algorithm_, &found) == CUBLAS_STATUS_SUCCESS &&
                found > 0;
  }
  bool possible() const { return possible_; }
  void run(float beta, void* c) {
    const float alpha = 1;
    CUBLAS_CHECK(cublasLtMatmul(handle(), &operation_, &alpha, blas_.operand(1, true).codes, &b_,
                                blas_.operand(0, true).codes, &a_, &beta, c, &c_, c, &c_, &algorithm_.algo,
                                blas_.workspace(), blas_workspace, blas_.stream()));
  }

 private:
  static cublasLtMatmulMatrixScale_t mode_of(Fp8Tile tile) {
    return tile == Fp8Tile::row ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F
                                : CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  }
  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, Value value) {
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&operation_, attribute, &value, sizeof value));
  }
  static void layout(cublasLtMatrixLayoutOpaque_t& of, cudaDataType_t type, int64_t rows, int64_t columns) {
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&of, type, rows, columns, /*leading=*/rows));
  }
  cublasLtHandle_t handle() const {
    return reinterpret_cast<cublasLtHandle_t>(static_cast<cublasHandle_t>(blas_));
  }

  const LayerBlas& blas_;
  cublasLtMatmulDescOpaque_t operation_;
  cublasLtMatrixLayoutOpaque_t a_, b_, c_;
  cublasLtMatmulHeuristicResult_t algorithm_ = {};
  bool possible_;
};

#else  // the CPU, or cuBLAS before 12.9

struct CodesProduct {
  CodesProduct(const LayerBlas&, const Operand&, const Operand&, const auto&) {}
  bool possible() const { return false; }
  void run(accum, void*) {}
};

#endif

}  // namespace pentatron
