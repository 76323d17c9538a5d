// cuBLAS for machines without a GPU: the matrix products that this project uses, under the real names, on a
// stream of the stand-in runtime, with a CPU BLAS underneath (cublas.cc).
#pragma once

#include "cuda_runtime.h"
#include "library_types.h"

enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_NOT_INITIALIZED = 1,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_MAPPING_ERROR = 11,
  CUBLAS_STATUS_EXECUTION_FAILED = 13,
  CUBLAS_STATUS_NOT_SUPPORTED = 15
};

enum cublasOperation_t { CUBLAS_OP_N = 0, CUBLAS_OP_T = 1 };

enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1 };

enum cublasMath_t { CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16 };

enum cublasComputeType_t {
  CUBLAS_COMPUTE_32F = 68,
  CUBLAS_COMPUTE_64F = 70,
  CUBLAS_COMPUTE_32F_FAST_TF32 = 77
};

#define CUBLAS_VERSION 130000  // a real cuBLAS has the grouped products below since 120500

using cublasHandle_t = struct cublasContext*;

cublasStatus_t cublasCreate(cublasHandle_t* handle);
cublasStatus_t cublasDestroy(cublasHandle_t handle);
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream);
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, size_t bytes);
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode);
const char* cublasGetStatusString(cublasStatus_t status);

// C [m, n] = alpha op(A) [m, k] op(B) [k, n] + beta C, matrices by columns: element (i, j) of C is C[i + j *
// ldc]. alpha and beta are host pointers to the compute type, read at the call. If beta is zero, C is not
// read.
cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                            int n, int k, const void* alpha, const void* A, cudaDataType a_type, int lda,
                            const void* B, cudaDataType b_type, int ldb, const void* beta, void* C,
                            cudaDataType c_type, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t algorithm);

// The same for `batch` products, whose matrices lie stride_a, stride_b and stride_c elements apart.
cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a,
                                          cublasOperation_t op_b, int m, int n, int k, const void* alpha,
                                          const void* A, cudaDataType a_type, int lda, long long stride_a,
                                          const void* B, cudaDataType b_type, int ldb, long long stride_b,
                                          const void* beta, void* C, cudaDataType c_type, int ldc,
                                          long long stride_c, int batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t algorithm);

// `groups` groups of products; all of one group, group_size[i] of them, have the same sizes. The arrays of
// A, B and C are in device memory and have an address for each product; all other arrays are the host's, with
// an element for each group.
cublasStatus_t cublasGemmGroupedBatchedEx(cublasHandle_t handle, const cublasOperation_t op_a[],
                                          const cublasOperation_t op_b[], const int m[], const int n[],
                                          const int k[], const void* alpha, const void* const A[],
                                          cudaDataType_t a_type, const int lda[], const void* const B[],
                                          cudaDataType_t b_type, const int ldb[], const void* beta,
                                          void* const C[], cudaDataType_t c_type, const int ldc[], int groups,
                                          const int group_size[], cublasComputeType_t compute);
