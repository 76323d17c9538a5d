// Matrix products on a stream, computed by a CPU BLAS (cblas). A product in bf16 or fp16 is computed in fp32:
// its inputs are converted, which is exact, and its result is rounded once, as tensor cores do.
#include <cblas.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cublas_v2.h"
#include "cuda_bf16.h"
#include "cuda_cpu.h"
#include "cuda_fp16.h"

struct cublasContext {
  cudaStream_t stream = nullptr;
};

namespace {

// OpenBLAS is loaded here, not by the linker, because it takes a processor newer than itself for an ancient
// one and is then five times slower: when it is loaded it must find in the environment which of its kernels
// to use.
struct Blas {
  decltype(&cblas_sgemm) sgemm = nullptr;
  decltype(&cblas_dgemm) dgemm = nullptr;
};

void choose_openblas_kernels() {
#ifdef __x86_64__
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  constexpr int kKeepTheUsersChoice = 0;
  if (avx2) setenv("OPENBLAS_CORETYPE", avx512 ? "SkylakeX" : "Haswell", kKeepTheUsersChoice);
#endif
}

// Each product, or tile of one, runs on the core that took it (cuda_cpu::share_out), so the BLAS itself,
// whichever threads it was built for, is told to use one.
void forbid_threads_in_openblas() {
  setenv("OPENBLAS_NUM_THREADS", "1", true);
  setenv("OMP_NUM_THREADS", "1", true);
}

Blas load_blas() {
  choose_openblas_kernels();
  forbid_threads_in_openblas();
  void* const library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    std::fprintf(stderr, "matrix products need OpenBLAS: %s\n", dlerror());
    return {};
  }
  return {reinterpret_cast<decltype(&cblas_sgemm)>(dlsym(library, "cblas_sgemm")),
          reinterpret_cast<decltype(&cblas_dgemm)>(dlsym(library, "cblas_dgemm"))};
}

const Blas& blas() {
  static const Blas blas = load_blas();
  return blas;
}

// A batch of matrices by columns: `columns` columns of `rows` elements each, `ld` elements apart.
struct Matrices {
  void* data;  // device pointer at the call, the memory behind when the product runs
  cudaDataType type;
  long long rows, columns, ld, stride, batch;

  size_t element_bytes() const { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }
  long long extent() const { return rows == 0 || columns == 0 ? 0 : (columns - 1) * ld + rows; }  // elements
  template <class T>
  T* at(long long i) const {
    return static_cast<T*>(data) + i * stride;
  }
};

struct Product {
  CBLAS_TRANSPOSE op_a, op_b;
  int m, n, k;
  double alpha, beta;
  Matrices a, b, c;
};

// One product, by columns: c = alpha op(a) op(b) + beta c.
template <class T>
struct Tile {
  int m, n;
  const T *a, *b;
  T* c;
};

void multiply(const Product& p, const Tile<float>& t) {
  blas().sgemm(CblasColMajor, p.op_a, p.op_b, t.m, t.n, p.k, static_cast<float>(p.alpha), t.a,
               static_cast<int>(p.a.ld), t.b, static_cast<int>(p.b.ld), static_cast<float>(p.beta), t.c,
               static_cast<int>(p.c.ld));
}

void multiply(const Product& p, const Tile<double>& t) {
  blas().dgemm(CblasColMajor, p.op_a, p.op_b, t.m, t.n, p.k, p.alpha, t.a, static_cast<int>(p.a.ld), t.b,
               static_cast<int>(p.b.ld), p.beta, t.c, static_cast<int>(p.c.ld));
}

// Into how many tiles each product of a batch is cut for the cores: not so small that the BLAS, which copies
// its inputs for every tile, would be slow.
int tiles_of_each(const Product& p) {
  constexpr double kSmallest = 2e6;  // operations of a tile
  constexpr long long kTilesPerCore = 2, kNarrowest = 64;
  const double operations = 2.0 * p.m * p.n * p.k;
  const long long wanted = kTilesPerCore * cuda_cpu::cores() / p.a.batch;
  const long long sensible =
      std::min(static_cast<long long>(operations / kSmallest), std::max(p.m, p.n) / kNarrowest);
  return cuda_cpu::cores() < 2 ? 1 : static_cast<int>(std::max(1ll, std::min(wanted, sensible)));
}

// The longer side of c is cut, in multiples of what a BLAS kernel works on at once.
template <class T>
void run_in_place(const Product& p) {
  constexpr long long kMultiple = 16;
  const long long tiles = tiles_of_each(p), side = std::max(p.m, p.n);
  const long long length = ((side + tiles - 1) / tiles + kMultiple - 1) / kMultiple * kMultiple;
  cuda_cpu::share_out(static_cast<size_t>(p.a.batch * tiles), [&](size_t piece) {
    const long long i = static_cast<long long>(piece) / tiles,
                    first = static_cast<long long>(piece) % tiles * length;
    const long long size = std::min(length, side - first);
    if (size <= 0) return;
    Tile<T> tile{p.m, p.n, p.a.at<const T>(i), p.b.at<const T>(i), p.c.at<T>(i)};
    if (p.m > p.n) {
      tile.m = static_cast<int>(size);
      tile.a += p.op_a == CblasNoTrans ? first : first * p.a.ld;
      tile.c += first;
    } else {
      tile.n = static_cast<int>(size);
      tile.b += p.op_b == CblasNoTrans ? first * p.b.ld : first;
      tile.c += first * p.c.ld;
    }
    multiply(p, tile);
  });
}

// Calls `column(i, j, number)` for all columns j of all matrices i of a batch.
template <class Column>
void for_each_column(const Matrices& matrices, const Column& column) {
  constexpr long long kElementsOfPiece = 16384;
  const long long columns = matrices.batch * matrices.columns;
  const long long in_piece = std::max(1ll, kElementsOfPiece / std::max(1ll, matrices.rows));
  cuda_cpu::share_out(static_cast<size_t>((columns + in_piece - 1) / in_piece), [&](size_t piece) {
    const long long first = static_cast<long long>(piece) * in_piece;
    for (long long j = first; j < std::min(columns, first + in_piece); ++j) {
      column(j / matrices.columns, j % matrices.columns, j);
    }
  });
}

// bf16 or fp16 [rows, columns] with a leading dimension -> fp32 [rows, columns] without gaps, one matrix of
// the batch after the other.
template <class T>
void widen(const Matrices& from, float* to) {
  for_each_column(from, [&](long long i, long long j, long long column) {
    const T* source = from.at<const T>(i) + j * from.ld;
    float* target = to + column * from.rows;
    for (long long row = 0; row < from.rows; ++row) target[row] = static_cast<float>(source[row]);
  });
}

template <class T>
void narrow(const float* from, const Matrices& to) {
  for_each_column(to, [&](long long i, long long j, long long column) {
    const float* source = from + column * to.rows;
    T* target = to.at<T>(i) + j * to.ld;
    for (long long row = 0; row < to.rows; ++row) target[row] = static_cast<T>(source[row]);
  });
}

// The fp32 copy of such matrices, in a buffer that the stream's thread keeps.
template <class T>
Matrices widened(const Matrices& matrices, std::vector<float>& buffer, bool with_values) {
  const size_t elements = static_cast<size_t>(matrices.rows * matrices.columns * matrices.batch);
  if (buffer.size() < elements) buffer.resize(elements);
  if (with_values) widen<T>(matrices, buffer.data());
  Matrices copy = matrices;
  copy.data = buffer.data();
  copy.type = CUDA_R_32F;
  copy.ld = std::max(1ll, matrices.rows);
  copy.stride = matrices.rows * matrices.columns;
  return copy;
}

template <class T>
void run_in_float(const Product& p) {
  static thread_local std::vector<float> a, b, c;
  Product product = p;
  product.a = widened<T>(p.a, a, true);
  product.b = widened<T>(p.b, b, true);
  if (p.c.type == p.a.type) product.c = widened<T>(p.c, c, p.beta != 0);
  run_in_place<float>(product);
  if (p.c.type == p.a.type) narrow<T>(c.data(), p.c);
}

// The columns' own elements only: what lies between them may be another thread's.
template <class Declare>
void declare(const Matrices& matrices, const Declare& declare_bytes) {
  for (long long i = 0; i < matrices.batch; ++i) {
    for (long long j = 0; j < matrices.columns; ++j) {
      const size_t first =
          static_cast<size_t>(i * matrices.stride + j * matrices.ld) * matrices.element_bytes();
      declare_bytes(static_cast<char*>(matrices.data) + first,
                    static_cast<size_t>(matrices.rows) * matrices.element_bytes());
    }
  }
}

cudaError_t run_product(const Product& p) {
  if constexpr (cuda_cpu::under_thread_sanitizer) {
    declare(p.a, cuda_cpu::declare_read);
    declare(p.b, cuda_cpu::declare_read);
    declare(p.c, cuda_cpu::declare_write);
  }
  if (p.a.type == CUDA_R_64F) run_in_place<double>(p);
  if (p.a.type == CUDA_R_32F) run_in_place<float>(p);
  if (p.a.type == CUDA_R_16BF) run_in_float<__nv_bfloat16>(p);
  if (p.a.type == CUDA_R_16F) run_in_float<__half>(p);
  return cudaSuccess;
}

bool is_supported(cudaDataType a, cudaDataType b, cudaDataType c, cublasComputeType_t compute) {
  if (a != b) return false;
  if (compute == CUBLAS_COMPUTE_64F) return a == CUDA_R_64F && c == CUDA_R_64F;
  const bool has_16_bits = a == CUDA_R_16BF || a == CUDA_R_16F;
  return (a == CUDA_R_32F && c == CUDA_R_32F) || (has_16_bits && (c == a || c == CUDA_R_32F));
}

bool is_valid(cublasOperation_t op) { return op == CUBLAS_OP_N || op == CUBLAS_OP_T; }

// Element i of an array of scalars.
double read_scalar(const void* scalars, cublasComputeType_t compute, int i) {
  return compute == CUBLAS_COMPUTE_64F ? static_cast<const double*>(scalars)[i]
                                       : static_cast<const float*>(scalars)[i];
}

// Whether all elements, if any, lie in one live allocation.
bool is_live(const Matrices& matrices) {
  if (matrices.extent() == 0) return true;
  const long long last = (matrices.batch - 1) * matrices.stride;
  const long long elements = std::max(0ll, last) + matrices.extent();
  return cuda_cpu::is_accessible(static_cast<char*>(matrices.data) +
                                     std::min(0ll, last) * static_cast<long long>(matrices.element_bytes()),
                                 static_cast<size_t>(elements) * matrices.element_bytes());
}

// Type and leading dimension of a matrix.
struct Layout {
  cudaDataType type;
  long long ld;
};

// A product whose matrices are still to be found.
Product make_product(cublasOperation_t op_a, cublasOperation_t op_b, int m, int n, int k, double alpha,
                     double beta, Layout a, Layout b, Layout c) {
  const bool plain_a = op_a == CUBLAS_OP_N, plain_b = op_b == CUBLAS_OP_N;
  return {plain_a ? CblasNoTrans : CblasTrans,
          plain_b ? CblasNoTrans : CblasTrans,
          m,
          n,
          k,
          alpha,
          beta,
          {nullptr, a.type, plain_a ? m : k, plain_a ? k : m, a.ld, 0, 1},
          {nullptr, b.type, plain_b ? k : n, plain_b ? n : k, b.ld, 0, 1},
          {nullptr, c.type, m, n, c.ld, 0, 1}};
}

cublasStatus_t check_product(const Product& p, cublasOperation_t op_a, cublasOperation_t op_b,
                             cublasComputeType_t compute) {
  if (p.m < 0 || p.n < 0 || p.k < 0 || !is_valid(op_a) || !is_valid(op_b)) return CUBLAS_STATUS_INVALID_VALUE;
  for (const Matrices* matrices : {&p.a, &p.b, &p.c}) {
    if (matrices->ld < std::max(1ll, matrices->rows)) return CUBLAS_STATUS_INVALID_VALUE;
  }
  return is_supported(p.a.type, p.b.type, p.c.type, compute) ? CUBLAS_STATUS_SUCCESS
                                                             : CUBLAS_STATUS_NOT_SUPPORTED;
}

// Sets the memory behind device pointers; false: one is not in live memory.
bool find_matrices(Product& p, const void* a, const void* b, void* c) {
  p.a.data = const_cast<void*>(a), p.b.data = const_cast<void*>(b), p.c.data = c;
  for (Matrices* matrices : {&p.a, &p.b, &p.c}) {
    if (!is_live(*matrices)) return false;
    matrices->data = cuda_cpu::host_address(matrices->data);
  }
  return true;
}

template <class Work>
cublasStatus_t enqueue(cublasHandle_t handle, const Work& work) {
  const cudaError_t error = cuda_cpu::enqueue_described(handle->stream, work);
  if (error == cudaSuccess) return CUBLAS_STATUS_SUCCESS;
  return error == cudaErrorInvalidResourceHandle ? CUBLAS_STATUS_INVALID_VALUE
                                                 : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // namespace

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (!cuda_cpu::is_dry_run() && (blas().sgemm == nullptr || blas().dgemm == nullptr))
    return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void*, size_t) {
  return handle == nullptr ? CUBLAS_STATUS_NOT_INITIALIZED : CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t) {
  return handle == nullptr ? CUBLAS_STATUS_NOT_INITIALIZED : CUBLAS_STATUS_SUCCESS;
}

const char* cublasGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_MAPPING_ERROR:
      return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "unknown cuBLAS status";
}

cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b, int m,
                            int n, int k, const void* alpha, const void* A, cudaDataType a_type, int lda,
                            const void* B, cudaDataType b_type, int ldb, const void* beta, void* C,
                            cudaDataType c_type, int ldc, cublasComputeType_t compute,
                            cublasGemmAlgo_t algorithm) {
  return cublasGemmStridedBatchedEx(handle, op_a, op_b, m, n, k, alpha, A, a_type, lda, 0, B, b_type, ldb, 0,
                                    beta, C, c_type, ldc, 0, 1, compute, algorithm);
}

cublasStatus_t cublasGemmStridedBatchedEx(cublasHandle_t handle, cublasOperation_t op_a,
                                          cublasOperation_t op_b, int m, int n, int k, const void* alpha,
                                          const void* A, cudaDataType a_type, int lda, long long stride_a,
                                          const void* B, cudaDataType b_type, int ldb, long long stride_b,
                                          const void* beta, void* C, cudaDataType c_type, int ldc,
                                          long long stride_c, int batch, cublasComputeType_t compute,
                                          cublasGemmAlgo_t) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (batch < 0 || alpha == nullptr || beta == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  Product product = make_product(op_a, op_b, m, n, k, read_scalar(alpha, compute, 0),
                                 read_scalar(beta, compute, 0), {a_type, lda}, {b_type, ldb}, {c_type, ldc});
  product.a.stride = stride_a;
  product.b.stride = stride_b;
  product.c.stride = stride_c;
  product.a.batch = product.b.batch = product.c.batch = batch;
  const cublasStatus_t status = check_product(product, op_a, op_b, compute);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  if (m == 0 || n == 0 || batch == 0) return CUBLAS_STATUS_SUCCESS;
  if (!find_matrices(product, A, B, C)) return CUBLAS_STATUS_MAPPING_ERROR;
  return enqueue(handle, [product] { return run_product(product); });
}

cublasStatus_t cublasGemmGroupedBatchedEx(cublasHandle_t handle, const cublasOperation_t op_a[],
                                          const cublasOperation_t op_b[], const int m[], const int n[],
                                          const int k[], const void* alpha, const void* const A[],
                                          cudaDataType_t a_type, const int lda[], const void* const B[],
                                          cudaDataType_t b_type, const int ldb[], const void* beta,
                                          void* const C[], cudaDataType_t c_type, const int ldc[], int groups,
                                          const int group_size[], cublasComputeType_t compute) {
  if (handle == nullptr) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (groups < 0 || alpha == nullptr || beta == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (a_type != c_type) return CUBLAS_STATUS_NOT_SUPPORTED;
  std::vector<Product> products;  // without their addresses
  for (int i = 0; i < groups; ++i) {
    const Product product =
        make_product(op_a[i], op_b[i], m[i], n[i], k[i], read_scalar(alpha, compute, i),
                     read_scalar(beta, compute, i), {a_type, lda[i]}, {b_type, ldb[i]}, {c_type, ldc[i]});
    const cublasStatus_t status = check_product(product, op_a[i], op_b[i], compute);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (group_size[i] < 0) return CUBLAS_STATUS_INVALID_VALUE;
    products.insert(products.end(), group_size[i], product);
  }
  const size_t bytes = products.size() * sizeof(void*);
  for (const void* list :
       {static_cast<const void*>(A), static_cast<const void*>(B), static_cast<const void*>(C)}) {
    if (bytes > 0 && !cuda_cpu::is_accessible(list, bytes)) return CUBLAS_STATUS_MAPPING_ERROR;
  }
  if (products.empty()) return CUBLAS_STATUS_SUCCESS;
  return enqueue(handle, [products, A, B, C, bytes]() mutable {
    const auto addresses = [&](const void* list) {
      const void* const host = cuda_cpu::host_address(list);
      cuda_cpu::declare_read(host, bytes);
      return static_cast<void* const*>(host);
    };
    void *const *const a = addresses(A), *const *const b = addresses(B), *const *const c = addresses(C);
    for (size_t i = 0; i < products.size(); ++i) {
      Product& product = products[i];
      if (product.m == 0 || product.n == 0) continue;
      if (!find_matrices(product, a[i], b[i], c[i])) return cudaErrorIllegalAddress;
      if (const cudaError_t error = run_product(product); error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}
