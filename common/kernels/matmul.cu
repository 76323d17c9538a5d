#include <algorithm>
#include <tuple>

#include "device/kernel.h"
#include "kernels/matmul.h"

namespace pentatron {

// cuBLAS reads the addresses of a group's matrices in device memory. They get there as arguments of a kernel,
// of which a launch takes 4 KB: so no host memory has to stay unchanged until a copy has read it.
constexpr int addresses_of_launch = 256;
struct AddressList {
  void* of[addresses_of_launch];
  auto device_pointers() { return std::tie(); }  // that the kernel follows: none
};
__global__ void write_addresses_kernel(AddressList list, int count, void** to) {
  for (const int i : block_range(count)) to[i] = list.of[i];
}

// Products of fp64 matrices sum in fp64, all others in fp32.
static constexpr cublasComputeType_t compute_type = PRECISION == 64 ? CUBLAS_COMPUTE_64F : CUBLAS_COMPUTE_32F;

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

#if PRECISION == 16
template void gemm(const Blas&, const Operand&, const Operand&, accum, Tensor);
#endif
template void gemm(const Blas&, const Operand&, const Operand&, accum, AccumTensor);

namespace {

// Rows of tokens: activations, and their gradients.
Operand tokens(Tensor x, Transpose transpose) { return {x, transpose, Fp8Tile::row}; }
Operand weights(Tensor w, Transpose transpose) { return {w, transpose, Fp8Tile::square}; }

// c = a b^T + beta c.
template <class C>
void product(const Blas& blas, const Operand& a, const Operand& b, accum beta, Matrix<C> c,
             const char* name) {
  if (c.rows == 0) return;
  if (blas.in_fp8()) return fp8_gemm(blas, a, b, beta, c, name);
  trace::Range range(
      blas.stream(), name,
      products(c.rows, c.columns, a.columns(), 1, sizeof(real), sizeof(C), beta != 0, blas.of_layers()));
  gemm(blas, a, b, beta, c);
}

void write_addresses(const std::vector<void*>& from, void** to, cudaStream_t stream) {
  for (size_t first = 0; first < from.size(); first += addresses_of_launch) {
    AddressList list;
    const auto count = static_cast<int>(std::min<size_t>(from.size() - first, addresses_of_launch));
    std::copy_n(from.data() + first, count, list.of);
    launch(write_addresses_kernel, dim3(1), little, stream, list, count, to + first);
  }
}

// One product of a group.
template <class C>
struct Product {
  Operand a, b;
  Matrix<C> c;
  accum beta;
};

// The operands are transposed alike in all products. Those without a result are left out.
template <class C>
void grouped_product(const Blas& blas, std::vector<Product<C>> group, Addresses addresses, const char* name) {
  std::erase_if(group, [](const Product<C>& product) { return product.c.rows == 0; });
#if CUBLAS_VERSION >= 120500
  const auto n = static_cast<int>(group.size());
  if (!blas.in_fp8() && sizeof(C) == sizeof(real) && n > 1) {
    std::vector<Cost> costs;
    std::vector<int> rows, columns, sums, leading_a, leading_b;
    std::vector<accum> betas;
    std::vector<void*> list(3 * n);
    for (int i = 0; i < n; ++i) {
      const auto& [a, b, c, beta] = group[i];
      rows.push_back(static_cast<int>(c.rows)), columns.push_back(static_cast<int>(c.columns));
      sums.push_back(static_cast<int>(a.columns())), betas.push_back(beta);
      leading_a.push_back(static_cast<int>(a.x.columns)), leading_b.push_back(static_cast<int>(b.x.columns));
      list[i] = b.x.data, list[n + i] = a.x.data, list[2 * n + i] = c.data;
      costs.push_back(
          products(c.rows, c.columns, a.columns(), 1, sizeof(real), sizeof(C), beta != 0, blas.of_layers()));
    }
    const std::vector<accum> alpha(n, 1);
    const std::vector<int> size(n, 1);  // each group of cuBLAS's is one product
    const std::vector op_a(n, group[0].a.transposed() ? CUBLAS_OP_T : CUBLAS_OP_N),
        op_b(n, group[0].b.transposed() ? CUBLAS_OP_N : CUBLAS_OP_T);
    write_addresses(list, addresses.data, blas.stream());
    void* const* const at = addresses.data;
    trace::Range range(blas.stream(), name, one_launch(costs));
    CUBLAS_CHECK(cublasGemmGroupedBatchedEx(blas, op_b.data(), op_a.data(), columns.data(), rows.data(),
                                            sums.data(), alpha.data(), at, real_type, leading_b.data(),
                                            at + n, real_type, leading_a.data(), betas.data(), at + 2 * n,
                                            data_type<C>, columns.data(), n, size.data(), compute_type));
    return;
  }
#endif
  for (const auto& [a, b, c, beta] : group) product(blas, a, b, beta, c, name);
}

}  // namespace

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

void linear_forward_blocks(const Blas& blas, RowBlocks x, Tensor weight, RowBlocks y) {
  if (blas.in_fp8()) {
    const auto block = [](const RowBlocks& all, int64_t i) {
      return Tensor{all.first.data + i * all.stride * all.first.columns, all.first.rows, all.first.columns};
    };
    for (int64_t i = 0; i < x.count; ++i) {
      fp8_gemm(blas, tokens(block(x, i), Transpose::no), weights(weight, Transpose::no), 0, block(y, i),
               "gemm_forward", /*new_b=*/i == 0);
    }
    return;
  }
  const auto m = static_cast<int>(x.first.rows), n = static_cast<int>(weight.rows),
             k = static_cast<int>(weight.columns);
  const Cost cost = products(m * x.count, n, k, 1, sizeof(real), sizeof(real), false, blas.of_layers());
  batched_product(blas, Transpose::no, Transpose::yes, m, n, k, 1, {x.first.data, real_type, k, x.stride * k},
                  {weight.data, real_type, k, 0}, 0, {y.first.data, real_type, n, y.stride * n},
                  static_cast<int>(x.count), "gemm_forward", &cost);
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

void grouped_linear_forward(const Blas& blas, const std::vector<Tensor>& x, const std::vector<Tensor>& weight,
                            const std::vector<Tensor>& y, Addresses addresses) {
  std::vector<Product<real>> group;
  for (size_t i = 0; i < x.size(); ++i)
    group.push_back({tokens(x[i], Transpose::no), weights(weight[i], Transpose::no), y[i], 0});
  grouped_product(blas, group, addresses, "gemm_forward");
}

void grouped_linear_dgrad(const Blas& blas, const std::vector<Tensor>& d_y, const std::vector<Tensor>& weight,
                          const std::vector<Tensor>& d_x, Addresses addresses) {
  std::vector<Product<real>> group;
  for (size_t i = 0; i < d_y.size(); ++i)
    group.push_back({tokens(d_y[i], Transpose::no), weights(weight[i], Transpose::yes), d_x[i], 0});
  grouped_product(blas, group, addresses, "gemm_dgrad");
}

void grouped_linear_wgrad(const Blas& blas, const std::vector<Tensor>& d_y, const std::vector<Tensor>& x,
                          const std::vector<Gradient>& d_weight, Addresses addresses) {
  std::vector<Product<accum>> group;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i].rows == 0) {
      linear_wgrad(blas, d_y[i], x[i], d_weight[i]);
    } else {
      group.push_back({tokens(d_y[i], Transpose::yes), tokens(x[i], Transpose::yes), d_weight[i].sum,
                       accum(d_weight[i].add ? 1 : 0)});
    }
  }
  grouped_product(blas, group, addresses, "gemm_wgrad");
}

void batched_product(const Blas& blas, Transpose transpose_a, Transpose transpose_b, int m, int n, int k,
                     double alpha, BatchedMatrix a, BatchedMatrix b, double beta, BatchedMatrix c, int count,
                     const char* name, const Cost* cost) {
  const int result = c.type == real_type ? sizeof(real) : sizeof(accum);
  const Cost of_these = products(m, n, k, count, sizeof(real), result, beta != 0);
  trace::Range range(blas.stream(), name, cost ? *cost : of_these);
  const accum alpha_accum = static_cast<accum>(alpha), beta_accum = static_cast<accum>(beta);
  CUBLAS_CHECK(cublasGemmStridedBatchedEx(blas, transpose_b == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N,
                                          transpose_a == Transpose::yes ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k,
                                          &alpha_accum, b.data, b.type, static_cast<int>(b.leading), b.stride,
                                          a.data, a.type, static_cast<int>(a.leading), a.stride, &beta_accum,
                                          c.data, c.type, static_cast<int>(c.leading), c.stride, count,
                                          compute_type, CUBLAS_GEMM_DEFAULT));
}

}  // namespace pentatron
