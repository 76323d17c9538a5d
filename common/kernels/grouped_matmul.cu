#include <algorithm>
#include <tuple>

#include "device/kernel.h"
#include "kernels/grouped_matmul.h"

namespace pentatron {

// cuBLAS reads the addresses of a group's matrices in device memory. They get there as arguments of a kernel,
// of which a launch takes 4 KB: so no host memory has to stay unchanged until a copy has read it.
constexpr int addresses_of_launch = 256;
struct AddressList {
  void* of[addresses_of_launch];
  auto device_pointers() { return std::tie(); }  // that the kernel follows: none
};
__global__ void write_addresses_kernel(AddressList list, int count, void** to /*[count]*/) {
  for (const int i : block_range(count)) to[i] = list.of[i];
}

namespace {

void write_addresses(const std::vector<void*>& from, void** to, cudaStream_t stream) {
  for (size_t first = 0; first < from.size(); first += addresses_of_launch) {
    AddressList list;
    const auto count = static_cast<int>(std::min<size_t>(from.size() - first, addresses_of_launch));
    std::copy_n(from.data() + first, count, list.of);
    launch(write_addresses_kernel, dim3(1), shortest_kernel, stream, list, count, to + first);
  }
}

// One product of a group.
template <class C>
struct Product {
  Operand a, b;
  Matrix<C> c;
  accum beta;
};

// One launch of several products, at least one. In time they count as if all had the mean sizes.
Cost one_launch(const std::vector<Cost>& of) {
  const auto n = static_cast<int64_t>(of.size());
  Cost all = of[0];
  for (int64_t i = 1; i < n; ++i) {
    all.bytes += of[i].bytes;
    all.flops += of[i].flops;
    all.result_bytes += of[i].result_bytes;
    all.m += of[i].m;
    all.n += of[i].n;
    all.k += of[i].k;
  }
  const auto mean = [&](int64_t sum) { return (sum + n - 1) / n; };
  all.m = mean(all.m), all.n = mean(all.n), all.k = mean(all.k), all.batch = n;
  return all;
}

// The operands are transposed alike in all products. Those without a result are left out.
template <class C>
void grouped_product(const Blas& blas, std::vector<Product<C>> group, Addresses addresses, const char* name) {
  std::erase_if(group, [](const Product<C>& product) { return product.c.rows == 0; });
#if CUBLAS_VERSION >= 120500
  const auto n = static_cast<int>(group.size());
  if (blas.has_batches() && sizeof(C) == sizeof(real) && n > 1) {
    std::vector<Cost> costs;
    std::vector<int> rows, columns, sums, leading_a, leading_b;
    std::vector<accum> betas;
    std::vector<void*> list(3 * n);
    for (int i = 0; i < n; ++i) {
      const auto& [a, b, c, beta] = group[i];
      rows.push_back(static_cast<int>(c.rows));
      columns.push_back(static_cast<int>(c.columns));
      sums.push_back(static_cast<int>(a.columns()));
      betas.push_back(beta);
      leading_a.push_back(static_cast<int>(a.x.columns));
      leading_b.push_back(static_cast<int>(b.x.columns));
      list[i] = b.x.data;
      list[n + i] = a.x.data;
      list[2 * n + i] = c.data;
      costs.push_back(
          products(c.rows, c.columns, a.columns(), 1, sizeof(real), sizeof(C), beta != 0, blas.of_layers()));
    }
    const std::vector<accum> alpha(n, 1);
    const std::vector<int> size(n, 1);  // each group of cuBLAS's is one product
    const std::vector op_a(n, group[0].a.transposed() ? CUBLAS_OP_T : CUBLAS_OP_N),
        op_b(n, group[0].b.transposed() ? CUBLAS_OP_N : CUBLAS_OP_T);
    write_addresses(list, addresses.data, blas.stream());
    void* const* const at = addresses.data;
    trace::Operation operation(blas.stream(), name, one_launch(costs));
    CUBLAS_CHECK(cublasGemmGroupedBatchedEx(blas, op_b.data(), op_a.data(), columns.data(), rows.data(),
                                            sums.data(), alpha.data(), at, real_type, leading_b.data(),
                                            at + n, real_type, leading_a.data(), betas.data(), at + 2 * n,
                                            data_type<C>, columns.data(), n, size.data(), compute_type));
    return;
  }
#endif
  for (const auto& [a, b, c, beta] : group) blas.product(a, b, beta, c, name);
}

}  // namespace

void grouped_linear_forward(const Blas& blas, const std::vector<Tensor>& x, const std::vector<Tensor>& weight,
                            const std::vector<Tensor>& y, Addresses addresses) {
  std::vector<Product<real>> group;
  for (size_t i = 0; i < x.size(); ++i)
    group.push_back({{x[i], Transpose::no}, {weight[i], Transpose::no}, y[i], 0});
  grouped_product(blas, group, addresses, "gemm_forward");
}

void grouped_linear_dgrad(const Blas& blas, const std::vector<Tensor>& d_y, const std::vector<Tensor>& weight,
                          const std::vector<Tensor>& d_x, Addresses addresses) {
  std::vector<Product<real>> group;
  for (size_t i = 0; i < d_y.size(); ++i)
    group.push_back({{d_y[i], Transpose::no}, {weight[i], Transpose::yes}, d_x[i], 0});
  grouped_product(blas, group, addresses, "gemm_dgrad");
}

void grouped_linear_wgrad(const Blas& blas, const std::vector<Tensor>& d_y, const std::vector<Tensor>& x,
                          const std::vector<Gradient>& d_weight, Addresses addresses) {
  std::vector<Product<accum>> group;
  for (size_t i = 0; i < x.size(); ++i) {
    if (x[i].rows == 0) {
      linear_wgrad(blas, d_y[i], x[i], d_weight[i]);
    } else {
      group.push_back({{d_y[i], Transpose::yes},
                       {x[i], Transpose::yes},
                       d_weight[i].sum,
                       accum(d_weight[i].add ? 1 : 0)});
    }
  }
  grouped_product(blas, group, addresses, "gemm_wgrad");
}

}  // namespace pentatron
