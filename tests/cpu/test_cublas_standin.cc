// The CPU stand-ins of cuBLAS and of bfloat16: products of all types, transpositions and strides against
// plain loops, the errors that cuBLAS returns, and rounding.
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "../catch.h"
#include "cuda_cpu.h"

namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Handle {
  cublasHandle_t cublas = nullptr;
  cudaStream_t stream = nullptr;
  Handle() {
    REQUIRE(cublasCreate(&cublas) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
    REQUIRE(cublasSetStream(cublas, stream) == CUBLAS_STATUS_SUCCESS);
  }
  ~Handle() {
    cublasDestroy(cublas);
    cudaStreamDestroy(stream);
  }
  Handle(const Handle&) = delete;
};

size_t element_bytes(cudaDataType type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }

void store(void* data, cudaDataType type, size_t i, double value) {
  if (type == CUDA_R_64F) static_cast<double*>(data)[i] = value;
  if (type == CUDA_R_32F) static_cast<float*>(data)[i] = static_cast<float>(value);
  if (type == CUDA_R_16BF) static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16(static_cast<float>(value));
  if (type == CUDA_R_16F) static_cast<__half*>(data)[i] = __float2half(static_cast<float>(value));
}

double load(const void* data, cudaDataType type, size_t i) {
  if (type == CUDA_R_64F) return static_cast<const double*>(data)[i];
  if (type == CUDA_R_32F) return static_cast<double>(static_cast<const float*>(data)[i]);
  if (type == CUDA_R_16F) return static_cast<double>(__half2float(static_cast<const __half*>(data)[i]));
  return static_cast<double>(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]));
}

// Matrices by columns in device memory; what lies between the columns and the matrices stays NaN.
struct Matrices {
  cudaDataType type;
  int rows, columns, ld, batch;
  long long stride;
  std::vector<double> values;  // as rounded to `type`, in the same layout
  void* device = nullptr;

  Matrices(cudaDataType type, int rows, int columns, int batch, std::mt19937& random, bool fill = true)
      : type(type), rows(rows), columns(columns), ld(rows + 3), batch(batch), stride(columns * ld + 5) {
    values.assign(static_cast<size_t>(stride * batch), kNaN);
    std::vector<char> host(values.size() * element_bytes(type), static_cast<char>(0xff));
    std::uniform_real_distribution<double> uniform(-1, 1);
    for_each([&](size_t i) {
      if (fill) store(host.data(), type, i, uniform(random));
      values[i] = load(host.data(), type, i);
    });
    REQUIRE(cudaMalloc(&device, host.size()) == cudaSuccess);
    REQUIRE(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice) == cudaSuccess);
  }
  ~Matrices() { cudaFree(device); }
  Matrices(const Matrices&) = delete;

  size_t at(int i, int row, int column) const {
    return static_cast<size_t>(i * stride + static_cast<long long>(column) * ld + row);
  }
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (int i = 0; i < batch; ++i) {
      for (int column = 0; column < columns; ++column) {
        for (int row = 0; row < rows; ++row) visit(at(i, row, column));
      }
    }
  }
  std::vector<double> on_device() const {
    std::vector<char> host(values.size() * element_bytes(type));
    REQUIRE(cudaMemcpy(host.data(), device, host.size(), cudaMemcpyDeviceToHost) == cudaSuccess);
    std::vector<double> result(values.size());
    for (size_t i = 0; i < result.size(); ++i) result[i] = load(host.data(), type, i);
    return result;
  }
};

struct Types {
  cudaDataType in, out;
  cublasComputeType_t compute;
  double epsilon;  // of the result's type
};

const Types kTypes[] = {
    {CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F, 0x1p-24},
    {CUDA_R_32F, CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32, 0x1p-24},
    {CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F, 0x1p-53},
    {CUDA_R_16BF, CUDA_R_16BF, CUBLAS_COMPUTE_32F, 0x1p-8},
    {CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F, 0x1p-24},
    {CUDA_R_16F, CUDA_R_16F, CUBLAS_COMPUTE_32F, 0x1p-11},
    {CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F, 0x1p-24},
};

struct Sizes {
  int m, n, k, batch;
};

// Multiplies, and compares every element, and the NaN between the columns, with a plain loop in double.
void check_product(Types types, Sizes sizes, bool transpose_a, bool transpose_b, double alpha, double beta) {
  const auto [m, n, k, batch] = sizes;
  std::mt19937 random(static_cast<unsigned>(m * 31 + n * 7 + k));
  Matrices a(types.in, transpose_a ? k : m, transpose_a ? m : k, batch, random);
  Matrices b(types.in, transpose_b ? n : k, transpose_b ? k : n, batch, random);
  Matrices c(types.out, m, n, batch, random, beta != 0);  // with beta = 0, C is NaN and must not be read

  Handle handle;
  const float float_alpha = static_cast<float>(alpha), float_beta = static_cast<float>(beta);
  const bool in_double = types.compute == CUBLAS_COMPUTE_64F;
  const auto op = [](bool transpose) { return transpose ? CUBLAS_OP_T : CUBLAS_OP_N; };
  const cublasStatus_t status = cublasGemmStridedBatchedEx(
      handle.cublas, op(transpose_a), op(transpose_b), m, n, k,
      in_double ? static_cast<const void*>(&alpha) : &float_alpha, a.device, a.type, a.ld, a.stride, b.device,
      b.type, b.ld, b.stride, in_double ? static_cast<const void*>(&beta) : &float_beta, c.device, c.type,
      c.ld, c.stride, batch, types.compute, CUBLAS_GEMM_DEFAULT);
  REQUIRE(status == CUBLAS_STATUS_SUCCESS);
  REQUIRE(cudaStreamSynchronize(handle.stream) == cudaSuccess);

  std::vector<double> expected(c.values.size(), kNaN);
  for (int i = 0; i < batch; ++i) {
    for (int column = 0; column < n; ++column) {
      for (int row = 0; row < m; ++row) {
        double sum = 0;
        for (int l = 0; l < k; ++l) {
          sum += a.values[transpose_a ? a.at(i, l, row) : a.at(i, row, l)] *
                 b.values[transpose_b ? b.at(i, column, l) : b.at(i, l, column)];
        }
        const size_t index = c.at(i, row, column);
        expected[index] = alpha * sum + (beta == 0 ? 0 : beta * c.values[index]);
      }
    }
  }
  const std::vector<double> result = c.on_device();
  // Inputs are below one: a sum of k products in the compute type, then one rounding to the result's type.
  const double sum_tolerance = 2 * (in_double ? 0x1p-53 : 0x1p-24) * (k + 2);
  double worst = 0;  // error, as a multiple of what is allowed
  bool outside_untouched = true;
  for (size_t i = 0; i < result.size(); ++i) {
    if (std::isnan(expected[i])) {
      outside_untouched = outside_untouched && std::isnan(result[i]);
    } else {
      const double error = std::abs(result[i] - expected[i]);
      worst = std::max(worst, std::isnan(error)
                                  ? INFINITY
                                  : error / (sum_tolerance + types.epsilon * std::abs(expected[i])));
    }
  }
  INFO("m " << m << ", n " << n << ", k " << k << ", batch " << batch << ", types " << types.in << " "
            << types.out);
  CHECK(worst <= 1);
  CHECK(outside_untouched);
}

}  // namespace

TEST_CASE("products agree with a plain loop", "[standin]") {
  const Types types = GENERATE(from_range(std::begin(kTypes), std::end(kTypes)));
  const bool transpose_a = GENERATE(false, true), transpose_b = GENERATE(false, true);
  for (const Sizes sizes :
       {Sizes{1, 1, 1, 1}, {5, 7, 3, 1}, {33, 17, 65, 1}, {130, 97, 71, 1}, {19, 23, 29, 5}}) {
    check_product(types, sizes, transpose_a, transpose_b, 1, 0);
    check_product(types, sizes, transpose_a, transpose_b, 0.5, 1);
  }
  check_product(types, {4, 5, 0, 1}, transpose_a, transpose_b, 1, 0.5);  // an empty sum: C is only scaled
}

TEST_CASE("large products and batches are shared out and stay right", "[standin]") {
  const Types types = GENERATE(from_range(std::begin(kTypes), std::end(kTypes)));
  check_product(types, {257, 130, 191, 1}, false, true, 1, 0);
  check_product(types, {64, 70, 66, 9}, true, false, 1, 1);
}

TEST_CASE("matrices may be shared by a batch", "[standin]") {
  Handle handle;
  const float one = 1, zero = 0;
  float *a = nullptr, *b = nullptr, *c = nullptr;
  REQUIRE(cudaMalloc(&a, 4 * sizeof(float)) == cudaSuccess);
  REQUIRE(cudaMalloc(&b, 8 * sizeof(float)) == cudaSuccess);
  REQUIRE(cudaMalloc(&c, 8 * sizeof(float)) == cudaSuccess);
  const float identity[] = {1, 0, 0, 1}, values[] = {1, 2, 3, 4, 5, 6, 7, 8};
  REQUIRE(cudaMemcpy(a, identity, sizeof identity, cudaMemcpyHostToDevice) == cudaSuccess);
  REQUIRE(cudaMemcpy(b, values, sizeof values, cudaMemcpyHostToDevice) == cudaSuccess);
  REQUIRE(cublasGemmStridedBatchedEx(handle.cublas, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 2, &one, a, CUDA_R_32F, 2,
                                     0, b, CUDA_R_32F, 2, 4, &zero, c, CUDA_R_32F, 2, 4, 2,
                                     CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
  float result[8];
  REQUIRE(cudaMemcpy(result, c, sizeof result, cudaMemcpyDeviceToHost) == cudaSuccess);
  for (int i = 0; i < 8; ++i) CHECK(result[i] == values[i]);
  for (float* pointer : {a, b, c}) REQUIRE(cudaFree(pointer) == cudaSuccess);
}

TEST_CASE("groups of products are the single ones", "[standin]") {
  Handle handle;
  std::mt19937 random(5);
  // Three groups: of two products, of one without rows, and of one.
  const std::vector<int> m = {5, 0, 40}, n = {7, 3, 9}, k = {3, 4, 17}, size = {2, 1, 1};
  const std::vector<cublasOperation_t> op_a = {CUBLAS_OP_N, CUBLAS_OP_N, CUBLAS_OP_T},
                                       op_b = {CUBLAS_OP_T, CUBLAS_OP_N, CUBLAS_OP_N};
  const std::vector<float> alpha = {1, 1, 0.5f}, beta = {0, 1, 2};
  for (const cudaDataType type : {CUDA_R_32F, CUDA_R_16BF}) {
    std::vector<std::unique_ptr<Matrices>> a, b, c, want;
    std::vector<int> lda, ldb, ldc;
    std::vector<void*> list;  // of a, b and c
    for (int group = 0; group < 3; ++group) {
      const bool plain_a = op_a[group] == CUBLAS_OP_N, plain_b = op_b[group] == CUBLAS_OP_N;
      const int mm = m[group], nn = n[group], kk = k[group];
      for (int i = 0; i < size[group]; ++i) {
        a.push_back(std::make_unique<Matrices>(type, plain_a ? mm : kk, plain_a ? kk : mm, 1, random));
        b.push_back(std::make_unique<Matrices>(type, plain_b ? kk : nn, plain_b ? nn : kk, 1, random));
        const std::mt19937 same = random;
        for (auto* results : {&c, &want}) {
          random = same;
          results->push_back(std::make_unique<Matrices>(type, mm, nn, 1, random));
        }
        CHECK(cublasGemmEx(handle.cublas, op_a[group], op_b[group], mm, nn, kk, &alpha[group],
                           a.back()->device, type, a.back()->ld, b.back()->device, type, b.back()->ld,
                           &beta[group], want.back()->device, type, want.back()->ld, CUBLAS_COMPUTE_32F,
                           CUBLAS_GEMM_DEFAULT) == CUBLAS_STATUS_SUCCESS);
      }
      lda.push_back(a.back()->ld), ldb.push_back(b.back()->ld), ldc.push_back(c.back()->ld);
    }
    for (const auto* matrices : {&a, &b, &c})
      for (const auto& one : *matrices) list.push_back(one->device);
    void** on_device = nullptr;
    REQUIRE(cudaMalloc(&on_device, list.size() * sizeof(void*)) == cudaSuccess);
    REQUIRE(cudaMemcpy(on_device, list.data(), list.size() * sizeof(void*), cudaMemcpyHostToDevice) ==
            cudaSuccess);
    const auto status = [&](cudaDataType c_type, void** addresses, const int* columns) {
      return cublasGemmGroupedBatchedEx(handle.cublas, op_a.data(), op_b.data(), m.data(), columns, k.data(),
                                        alpha.data(), addresses, type, lda.data(), addresses + 4, type,
                                        ldb.data(), beta.data(), addresses + 8, c_type, ldc.data(), 3,
                                        size.data(), CUBLAS_COMPUTE_32F);
    };
    CHECK(status(type, on_device, n.data()) == CUBLAS_STATUS_SUCCESS);
    REQUIRE(cudaStreamSynchronize(handle.stream) == cudaSuccess);
    for (size_t i = 0; i < c.size(); ++i) {
      const std::vector<double> got = c[i]->on_device(), expected = want[i]->on_device();
      for (size_t j = 0; j < got.size(); ++j) {
        if (std::isnan(expected[j]) ? !std::isnan(got[j]) : got[j] != expected[j])
          FAIL_CHECK("product " << i);
      }
    }
    const std::vector<int> negative = {7, -1, 9};
    CHECK(status(type, on_device, negative.data()) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(status(type, list.data(), n.data()) == CUBLAS_STATUS_MAPPING_ERROR);  // a list of the host's
    CHECK(status(CUDA_R_32F, on_device, n.data()) ==
          (type == CUDA_R_32F ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED));
    REQUIRE(cudaStreamSynchronize(handle.stream) == cudaSuccess);
    REQUIRE(cudaFree(on_device) == cudaSuccess);
  }
}

TEST_CASE("products that cuBLAS refuses are refused", "[standin]") {
  Handle handle;
  float* x = nullptr;
  REQUIRE(cudaMalloc(&x, 100 * sizeof(float)) == cudaSuccess);
  struct Call {
    cublasOperation_t op_a = CUBLAS_OP_N, op_b = CUBLAS_OP_N;
    int m = 4, n = 5, k = 6, lda = 4, ldb = 6, ldc = 4;
    cudaDataType a_type = CUDA_R_32F, b_type = CUDA_R_32F, c_type = CUDA_R_32F;
    cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
    bool with_alpha = true;
    float *a = nullptr, *c = nullptr;
  };
  const auto status = [&](const Call& call) {
    const float one = 1, zero = 0;
    const double one_64 = 1, zero_64 = 0;  // scalars are of the type in which cuBLAS computes
    const bool in_64 = call.compute == CUBLAS_COMPUTE_64F;
    const void* const alpha = in_64 ? static_cast<const void*>(&one_64) : &one;
    const void* const beta = in_64 ? static_cast<const void*>(&zero_64) : &zero;
    return cublasGemmEx(handle.cublas, call.op_a, call.op_b, call.m, call.n, call.k,
                        call.with_alpha ? alpha : nullptr, call.a != nullptr ? call.a : x, call.a_type,
                        call.lda, x, call.b_type, call.ldb, beta, call.c != nullptr ? call.c : x + 60,
                        call.c_type, call.ldc, call.compute, CUBLAS_GEMM_DEFAULT);
  };
  CHECK(status({}) == CUBLAS_STATUS_SUCCESS);
  CHECK(status({.m = 0}) == CUBLAS_STATUS_SUCCESS);
  CHECK(status({.m = -1}) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(status({.k = -1}) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(status({.lda = 3}) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(status({.ldb = 5}) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(status({.ldc = 3}) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(status({.op_a = CUBLAS_OP_T}) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(status({.op_a = CUBLAS_OP_T, .lda = 6}) == CUBLAS_STATUS_SUCCESS);
  CHECK(status({.op_b = CUBLAS_OP_T, .ldb = 5}) == CUBLAS_STATUS_SUCCESS);
  CHECK(status({.with_alpha = false}) == CUBLAS_STATUS_INVALID_VALUE);
  CHECK(status({.a_type = CUDA_R_64F}) == CUBLAS_STATUS_NOT_SUPPORTED);
  CHECK(status({.c_type = CUDA_R_16BF}) == CUBLAS_STATUS_NOT_SUPPORTED);
  CHECK(status({.compute = CUBLAS_COMPUTE_64F}) == CUBLAS_STATUS_NOT_SUPPORTED);
  std::vector<float> pageable(100);
  CHECK(status({.a = pageable.data()}) == CUBLAS_STATUS_MAPPING_ERROR);
  CHECK(status({.c = x + 81}) == CUBLAS_STATUS_MAPPING_ERROR);  // one element beyond the end
  CHECK(status({.c = x + 80}) == CUBLAS_STATUS_SUCCESS);
  REQUIRE(cublasSetStream(handle.cublas, nullptr) == CUBLAS_STATUS_SUCCESS);
  CHECK(status({}) == CUBLAS_STATUS_INVALID_VALUE);  // the null stream
  REQUIRE(cudaFree(x) == cudaSuccess);
}

TEST_CASE("half rounds to nearest, ties to even", "[standin]") {
  const auto bits = [](float value) { return static_cast<__half_raw>(__float2half(value)).x; };
  constexpr float inf = std::numeric_limits<float>::infinity();
  CHECK(bits(1.0f) == 0x3c00);
  CHECK(bits(-0.0f) == 0x8000);
  CHECK(bits(inf) == 0x7c00);
  CHECK(bits(-inf) == 0xfc00);
  CHECK(bits(65504.0f) == 0x7bff);
  CHECK(bits(65519.0f) == 0x7bff);
  CHECK(bits(65520.0f) == 0x7c00);  // a tie, to infinity
  CHECK(bits(std::numeric_limits<float>::quiet_NaN()) == 0x7fff);
  CHECK(bits(0x1p-24f) == 1);    // the smallest
  CHECK(bits(0x1p-25f) == 0);    // a tie, to the even one
  CHECK(bits(0x1.8p-24f) == 2);  // likewise
  CHECK(bits(0x1.000002p-25f) == 1);
  CHECK(bits(0x1.ff8p-15f) == 0x03ff);
  CHECK(bits(0x1.ffcp-15f) == 0x0400);  // a tie, to the smallest normal one
  CHECK(bits(1 + 0x1p-11f) == 0x3c00);
  CHECK(bits(1 + 0x1.8p-10f) == 0x3c02);
  // Every half is itself, and lies between the middles to its neighbours.
  for (uint32_t pattern = 0; pattern < 0x7c00; ++pattern) {
    const float value = __half2float(__half_raw{static_cast<unsigned short>(pattern)});
    const float next = __half2float(__half_raw{static_cast<unsigned short>(pattern + 1)});
    const float middle = pattern + 1 < 0x7c00 ? (value + next) / 2 : 65520.0f;
    bool right = bits(value) == pattern && bits(-value) == (pattern | 0x8000);
    right = right && bits(std::nextafter(middle, 0.0f)) == pattern &&
            bits(std::nextafter(middle, inf)) == pattern + 1;
    right = right && bits(middle) == (pattern % 2 == 0 ? pattern : pattern + 1);
    if (!right) FAIL_CHECK("code " << pattern);
  }
}

TEST_CASE("bfloat16 rounds to nearest, ties to even", "[standin]") {
  const auto bits = [](float value) { return static_cast<__nv_bfloat16_raw>(__float2bfloat16(value)).x; };
  const auto from_bits = [](uint32_t pattern) { return std::bit_cast<float>(pattern); };
  constexpr float inf = std::numeric_limits<float>::infinity();
  CHECK(bits(1.0f) == 0x3f80);
  CHECK(bits(-0.0f) == 0x8000);
  CHECK(bits(inf) == 0x7f80);
  CHECK(bits(-inf) == 0xff80);
  CHECK(bits(std::numeric_limits<float>::max()) == 0x7f80);
  CHECK(bits(std::numeric_limits<float>::quiet_NaN()) == 0x7fff);
  CHECK(bits(from_bits(0xffffffffu)) == 0x7fff);
  CHECK(bits(from_bits(0x7f800001u)) == 0x7fff);
  CHECK(bits(from_bits(0x3f808000u)) == 0x3f80);  // a tie, to the even one below
  CHECK(bits(from_bits(0x3f818000u)) == 0x3f82);  // a tie, to the even one above
  CHECK(bits(from_bits(0x3f808001u)) == 0x3f81);
  CHECK(bits(from_bits(0x3f817fffu)) == 0x3f81);
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    const float value = __bfloat162float(__nv_bfloat16_raw{static_cast<unsigned short>(pattern)});
    REQUIRE(std::bit_cast<uint32_t>(value) == pattern << 16);
    if (!std::isnan(value)) REQUIRE(bits(value) == pattern);
  }
}
