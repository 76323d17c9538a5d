// bench [kernels] [attention] [training] [profile]: how fast this device trains, and how near each kernel
// comes to what the device can do. What a kernel moves or computes is what its launch declares
// (clock/cost.h), which the modelled time uses too. The ceilings are measured in the same run: the bandwidth
// of a copy for what is bound by memory, a large square cuBLAS product for the products. `profile` prints
// what was measured as a file for --gpu. With a GPU the sizes are those of real models; without one they are
// small, and times are modelled.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <vector>

#ifndef CUDA_CPU
#include <cublasLt.h>
#endif

#include "../model.h"
#include "clock/device_profile.h"
#include "kernels/elementwise.h"
#include "kernels/embedding.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/optimizer_step.h"
#include "kernels/rotary.h"
#include "kernels/swiglu.h"
#include "run/program.h"
#include "tensor_cores/attention_tiles.h"

using namespace pentatron;

namespace {

// ---- Measuring --------------------------------------------------------------------------------------------

float milliseconds_of(const Stream& stream, int calls, const std::function<void()>& work) {
  cudaEvent_t begin, end;
  CUDA_CHECK(cudaEventCreate(&begin));
  CUDA_CHECK(cudaEventCreate(&end));
  CUDA_CHECK(cudaEventRecord(begin, stream));
  for (int i = 0; i < calls; ++i) work();
  CUDA_CHECK(cudaEventRecord(end, stream));
  CUDA_CHECK(cudaEventSynchronize(end));
  float milliseconds = 0;
  CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin, end));
  CUDA_CHECK(cudaEventDestroy(begin));
  CUDA_CHECK(cudaEventDestroy(end));
  return milliseconds;
}

// Seconds of one call, on average over as many as take a while, after one that is not counted.
double seconds_of(const Stream& stream, const std::function<void()>& work) {
  work();
  const double once = std::max(milliseconds_of(stream, 1, work), 1e-3f), a_while = 50;
  const int calls = static_cast<int>(std::clamp(a_while / once, 1.0, 1000.0));
  return milliseconds_of(stream, calls, work) * 1e-3 / calls;
}

DeclaredCosts declared_by(const std::function<void()>& work) {
  const DeclaredCosts before = declared_costs;
  work();
  return {declared_costs.bytes - before.bytes, declared_costs.flops - before.flops};
}

// Matrices of random numbers, with which a GPU takes more power, and so perhaps more time, than with equal
// ones; and of zeros.
class Workspace {
 public:
  explicit Workspace(cudaStream_t stream) : stream_(stream) {}
  Tensor tensor(int64_t rows, int64_t columns) {
    const Tensor x = memory_.matrix<real>(rows, columns);
    fill_normal(x.data, 0, x.size(), {columns, 0, 0, columns}, philox_key(1, "bench"), 1, stream_);
    return x;
  }
  AccumTensor statistics(int64_t rows, int64_t columns) {
    const AccumTensor x = memory_.matrix<accum>(rows, columns);
    CUDA_CHECK(cudaMemsetAsync(x.data, 0, x.bytes(), stream_));
    return x;
  }
  // first, first + 1, ... but below `limit`, from where it begins with 0 again.
  const int32_t* ascending(int64_t size, int64_t limit) {
    const PinnedArray<int32_t> host(size);
    for (int64_t i = 0; i < size; ++i) host[i] = static_cast<int32_t>(i % limit);
    const Matrix<int32_t> x = memory_.matrix<int32_t>(1, size);
    CUDA_CHECK(cudaMemcpyAsync(x.data, host.data(), x.bytes(), cudaMemcpyHostToDevice, stream_));
    CUDA_CHECK(cudaStreamSynchronize(stream_));
    return x.data;
  }

 private:
  cudaStream_t stream_;
  DeviceArena memory_{Purpose::activations};
};

// The options of a program that trains this model.
Options options_of(const std::vector<std::string>& arguments) {
  std::vector<const char*> argv = {"bench"};
  for (const std::string& argument : arguments) argv.push_back(argument.c_str());
  return parse_options<Options>(static_cast<int>(argv.size()), argv.data(), "");
}

// ---- Kernels ----------------------------------------------------------------------------------------------

struct Ceilings {
  double bytes_a_second, flops;
};

Ceilings measure_ceilings(const Stream& stream, const Blas& blas, bool print = true) {
  Workspace work(stream);
  const int64_t n = 8192;
  const Tensor a = work.tensor(n, n), b = work.tensor(n, n), c = work.tensor(n, n);
  const Tensor from = work.tensor(8 * n, n), to = work.tensor(8 * n, n);
  const double copy = seconds_of(stream, [&] {
    CUDA_CHECK(cudaMemcpyAsync(to.data, from.data, to.bytes(), cudaMemcpyDeviceToDevice, stream));
  });
  const double product = seconds_of(stream, [&] { linear_forward(blas, a, b, c); });
  const Ceilings ceilings = {2.0 * to.bytes() / copy, 2.0 * n * n * n / product};
  if (print)
    std::printf("\nCeilings: copy %.1f GB/s, product of %d x %d matrices %.2f TFLOP/s\n",
                ceilings.bytes_a_second * 1e-9, int(n), int(n), ceilings.flops * 1e-12);
  return ceilings;
}

// Times kernels and prints a row for each.
class Table {
 public:
  Table(const Stream& stream, Ceilings ceilings) : stream_(stream), ceilings_(ceilings) {
    std::printf("%-28s %10s %10s %14s %9s\n", "kernel", "us", "MB, GFLOP", "GB/s, TFLOP/s", "ceiling");
  }
  void bound_by_memory(const char* name, const std::function<void()>& work) const {
    const double bytes = declared_by(work).bytes, seconds = seconds_of(stream_, work);
    row(name, seconds, bytes * 1e-6, bytes / seconds * 1e-9, bytes / seconds / ceilings_.bytes_a_second);
  }
  void product(const char* name, const std::function<void()>& work) const {
    const double flops = declared_by(work).flops, seconds = seconds_of(stream_, work);
    row(name, seconds, flops * 1e-9, flops / seconds * 1e-12, flops / seconds / ceilings_.flops);
  }
#ifndef CUDA_CPU
  // As gemm (matmul.cu), by the fastest of the 16 algorithms that cuBLAS proposes.
  template <class C>
  void tuned_product(const Blas& blas, const Operand& a, const Operand& b, accum beta, Matrix<C> c) const {
    const auto handle = reinterpret_cast<cublasLtHandle_t>(static_cast<cublasHandle_t>(blas));
    const cublasOperation_t op_a = a.transposed() ? CUBLAS_OP_T : CUBLAS_OP_N,
                            op_b = b.transposed() ? CUBLAS_OP_N : CUBLAS_OP_T;
    cublasLtMatmulDescOpaque_t operation;  // column-major c^T = b a^T: b comes first
    CUBLAS_CHECK(cublasLtMatmulDescInit(&operation, compute_type, data_type<accum>));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSA, &op_b, sizeof op_b));
    CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSB, &op_a, sizeof op_a));
    cublasLtMatrixLayoutOpaque_t of_a, of_b, of_c;
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&of_a, real_type, a.x.columns, a.x.rows, a.x.columns));
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&of_b, real_type, b.x.columns, b.x.rows, b.x.columns));
    CUBLAS_CHECK(cublasLtMatrixLayoutInit(&of_c, data_type<C>, c.columns, c.rows, c.columns));
    cublasLtMatmulPreferenceOpaque_t preference;
    const uint64_t workspace = blas_workspace;
    const uint32_t sums = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;  // as Blas asks: parts are added in `accum`
    CUBLAS_CHECK(cublasLtMatmulPreferenceInit(&preference));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                                      &workspace, sizeof workspace));
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                                                      &sums, sizeof sums));
    cublasLtMatmulHeuristicResult_t algorithms[16];
    int found = 0;
    CUBLAS_CHECK(cublasLtMatmulAlgoGetHeuristic(handle, &operation, &of_b, &of_a, &of_c, &of_c, &preference,
                                                16, algorithms, &found));
    const accum alpha = 1;
    double fastest = std::numeric_limits<double>::infinity();  // seconds
    for (int i = 0; i < found; ++i) {
      fastest =
          std::min(fastest, seconds_of(stream_, [&] {
                     CUBLAS_CHECK(cublasLtMatmul(handle, &operation, &alpha, b.x.data, &of_b, a.x.data, &of_a,
                                                 &beta, c.data, &of_c, c.data, &of_c, &algorithms[i].algo,
                                                 blas.workspace(), blas_workspace, stream_));
                   }));
    }
    const double flops = 2.0 * c.size() * a.columns();
    row(("  the fastest of " + std::to_string(found)).c_str(), fastest, flops * 1e-9, flops / fastest * 1e-12,
        flops / fastest / ceilings_.flops);
  }
#else
  void tuned_product(const auto&...) const {}
#endif

 private:
  static void row(const char* name, double seconds, double amount, double speed, double share) {
    std::printf("%-28s %10.1f %10.1f %14.2f %7.1f %%\n", name, seconds * 1e6, amount, speed, 100 * share);
    std::fflush(stdout);
  }
  const Stream& stream_;
  Ceilings ceilings_;
};

// The three products of a linear layer.
void bench_linear(const Table& table, const Blas& blas, const std::string& name, int64_t rows, int64_t in,
                  int64_t out) {
  Workspace work(blas.stream());
  const Tensor x = work.tensor(rows, in), weight = work.tensor(out, in), y = work.tensor(rows, out);
  const AccumTensor d_weight = work.statistics(out, in);
  table.product((name + " forward").c_str(), [&] { linear_forward(blas, x, weight, y); });
  table.tuned_product(blas, Operand{x, Transpose::no}, Operand{weight, Transpose::no}, 0, y);
  table.product((name + " dgrad").c_str(), [&] { linear_dgrad(blas, y, weight, x); });
  table.tuned_product(blas, Operand{y, Transpose::no}, Operand{weight, Transpose::yes}, 0, x);
  table.product((name + " wgrad").c_str(), [&] { linear_wgrad(blas, y, x, {d_weight, true}); });
  table.tuned_product(blas, Operand{y, Transpose::yes}, Operand{x, Transpose::yes}, 1, d_weight);
}

void bench_norms(const Table& table, const Stream& stream, int64_t rows, int64_t d) {
  Workspace work(stream);
  const Tensor x = work.tensor(rows, d), branch = work.tensor(rows, d), sum = work.tensor(rows, d),
               out = work.tensor(rows, d), weight = work.tensor(1, d);
  const AccumTensor rstd = work.statistics(rows, 1), partials = work.statistics(rmsnorm_bands(rows), d),
                    d_weight = work.statistics(1, d);
  table.bound_by_memory("rmsnorm_forward",
                        [&] { rmsnorm_forward(x, {}, weight.data, 1e-5, x, out, rstd.data, stream); });
  table.bound_by_memory("rmsnorm_forward, of a sum",
                        [&] { rmsnorm_forward(x, branch, weight.data, 1e-5, sum, out, rstd.data, stream); });
  table.bound_by_memory("rmsnorm_backward, added", [&] {
    rmsnorm_backward(branch, x, weight.data, rstd.data, true, out, partials, d_weight.data, stream);
  });
  table.bound_by_memory("residual_add", [&] { residual_add(x, branch, out, stream); });
}

void bench_rotary(const Table& table, const Stream& stream, int64_t rows, HeadShape shape, int positions) {
  Workspace work(stream);
  const Tensor qkv = work.tensor(rows, shape.qkv_columns()),
               q = work.tensor(rows, shape.heads * shape.head_size),
               k = work.tensor(rows, shape.kv_heads * shape.head_size),
               v = work.tensor(rows, shape.kv_heads * shape.head_size),
               d_out = work.tensor(q.rows, q.columns);
  const AccumTensor angles = work.statistics(positions, shape.head_size),
                    dots = work.statistics(rows, shape.heads);
  const int32_t* of_rows = work.ascending(rows, positions);
  fill_rotary_table(rotary_frequencies(1e4, static_cast<int>(angles.columns)), angles, stream);
  table.bound_by_memory("rotary_forward",
                        [&] { rotary_forward(qkv, of_rows, angles, shape, q, k, v, stream); });
  table.bound_by_memory("rotary_backward",
                        [&] { rotary_backward(q, k, v, of_rows, angles, shape, qkv, stream); });
  table.bound_by_memory("attention_dots", [&] { attention_dots(q, d_out, dots, stream); });
}

void bench_swiglu(const Table& table, const Stream& stream, int64_t rows, int64_t f) {
  Workspace work(stream);
  const Tensor gate_up = work.tensor(rows, 2 * f), out = work.tensor(rows, f), d = work.tensor(rows, 2 * f);
  table.bound_by_memory("swiglu_forward", [&] { swiglu_forward(gate_up, out, stream); });
  table.bound_by_memory("swiglu_backward", [&] { swiglu_backward(out, gate_up, d, stream); });
}

void bench_vocabulary(const Table& table, const Stream& stream, int64_t rows, int64_t d, int64_t vocabulary) {
  Workspace work(stream);
  const Tensor logits = work.tensor(rows, vocabulary), rows_of_table = work.tensor(rows, d);
  const Tensor words = work.tensor(vocabulary, d);
  const AccumTensor statistics = work.statistics(3, rows), d_words = work.statistics(vocabulary, d);
  const int32_t *tokens = work.ascending(rows, vocabulary), *by_token = work.ascending(rows, rows);
  table.bound_by_memory("cross_entropy_statistics",
                        [&] { cross_entropy_statistics(logits, tokens, 0, statistics, stream); });
  table.bound_by_memory("cross_entropy_backward", [&] {
    cross_entropy_backward(logits, tokens, 0, 1e-4, nullptr, statistics, stream);
  });
  table.bound_by_memory("embedding_forward",
                        [&] { embedding_forward(words, tokens, 0, rows_of_table, stream); });
  // As many tokens as there are, of which none comes twice.
  if (rows <= vocabulary) {
    table.bound_by_memory("embedding_backward", [&] {
      embedding_backward(rows_of_table, tokens, by_token, 0, {d_words, true}, stream);
    });
  }
}

void bench_optimizer(const Table& table, const Stream& stream, int64_t size) {
  Workspace work(stream);
  const Tensor weights = work.tensor(1, size);
  const AccumTensor gradients = work.statistics(1, size), moment1 = work.statistics(1, size),
                    moment2 = work.statistics(1, size), factors = work.statistics(1, 3);
  const AccumTensor master = has_master_weights
                                 ? work.statistics(1, size)
                                 : AccumTensor{reinterpret_cast<accum*>(weights.data), 1, size};
  DeviceArena memory(Purpose::optimizer);
  const Matrix<double> parts = memory.matrix<double>(1, norm_parts), sum = memory.matrix<double>(1, 1);
  CUDA_CHECK(cudaMemsetAsync(sum.data, 0, sizeof(double), stream));
  table.bound_by_memory("sum_of_squares",
                        [&] { sum_of_squares(gradients.data, size, parts.data, sum.data, stream); });
  table.bound_by_memory("accumulate", [&] { accumulate(moment1.data, gradients.data, size, stream); });
  table.bound_by_memory("adamw_step", [&] {
    adamw_step({1e-3, 0.9, 0.95, 0.1}, weights.data, master.data, gradients.data, moment1.data, moment2.data,
               reinterpret_cast<const StepFactors*>(factors.data), size, stream);
  });
}

// Of one model's sizes, at one micro-batch of `rows` tokens: so many that none of their matrices
// fits into its L2 cache, which isn't flushed between calls (50 MB in an H100; they have 134 MB in bf16).
void bench_kernels() {
  const Stream stream("bench");
  const Blas blas(stream);
  const ModelConfig m = options_of({"--model", "smollm-1.7b"}).model;
  const int64_t rows = 32768, d = m.d_model;
  const HeadShape shape = {m.heads, m.kv_heads, m.head_size()};
  const Ceilings ceilings = measure_ceilings(stream, blas);
  std::printf("\nKernels of %s, %d rows\n", m.name.c_str(), int(rows));
  const Table table(stream, ceilings);
  bench_norms(table, stream, rows, d);
  bench_rotary(table, stream, rows, shape, static_cast<int>(std::min<int64_t>(rows, 2048)));
  bench_swiglu(table, stream, rows, m.d_ff);
  bench_vocabulary(table, stream, rows, d, m.vocab_size);
  bench_optimizer(table, stream, int64_t{3} * d * m.d_ff);
  bench_linear(table, blas, "q, k, v", rows, d, shape.qkv_columns());
  bench_linear(table, blas, "attention out", rows, d, d);
  bench_linear(table, blas, "gate, up", rows, d, 2 * m.d_ff);
  bench_linear(table, blas, "down", rows, m.d_ff, d);
  bench_linear(table, blas, "head", rows, d, m.vocab_size);
}

// ---- Attention --------------------------------------------------------------------------------------------

constexpr int longest_tiled = 8192;  // longer ones take too long without tensor cores

struct AttentionSpeed {
  double forward, backward;  // FLOP/s
};

// FLOPs halved for causality: two products of sequence x sequence x head size in forward, five in backward.
AttentionSpeed speed_of_attention(const Stream& stream, const Blas& blas, Attention kind, int tokens,
                                  int sequence, HeadShape heads) {
  const AttentionShape shape = {tokens / sequence, sequence, heads};
  const AttentionBlock block = whole_sequences(shape);
  Workspace work(stream);
  std::vector<Tensor> x;  // q, k, v, out, and their gradients
  const int width = heads.heads * heads.head_size, of_keys = heads.kv_heads * heads.head_size;
  for (int i = 0; i < 8; ++i) x.push_back(work.tensor(tokens, i % 4 == 1 || i % 4 == 2 ? of_keys : width));
  const AccumTensor lse = work.statistics(tokens, heads.heads), dots = work.statistics(lse.rows, lse.columns);
  const AttentionCore core(kind);
  DeviceArena memory(Purpose::activations);
  const AttentionTensors t = {x[0], x[1], x[2], x[3], lse, {}};
  const AttentionGradients g = {x[7], x[4], x[5], x[6], core.backward_memory(memory, shape), dots};
  const double product = 1.0 * tokens * sequence * width;  // 2 FLOPs a multiply-add, halved
  const double forward = seconds_of(stream, [&] { attention_forward(kind, blas, block, t); });
  const double backward = seconds_of(stream, [&] {
    attention_dots(x[3], x[7], dots, stream);
    attention_backward(kind, blas, block, t, g, false);
  });
  return {2 * product / forward, 5 * product / backward};
}

void bench_attention() {
  const Stream stream("bench");
  const Blas blas(stream);
  const int tokens = 32768, width = 2048, shortest = tokens / 16;
  std::vector<Attention> kinds = {Attention::tiled};
  if (can_run_tensor_core_attention()) kinds.push_back(Attention::tensor_core);
  std::printf("\nAttention, %d tokens, width %d, causal (FLOPs halved)\n", tokens, width);
  std::printf("%-12s %10s %10s %10s %18s %18s\n", "kind", "sequence", "heads", "head size",
              "forward, TFLOP/s", "backward, TFLOP/s");
  const auto row = [&](Attention kind, int of_tokens, int sequence, HeadShape heads) {
    const AttentionSpeed speed = speed_of_attention(stream, blas, kind, of_tokens, sequence, heads);
    std::printf("%-12s %10d %10d %10d %18.3f %18.3f\n", to_string(kind).c_str(), sequence, heads.heads,
                heads.head_size, speed.forward * 1e-12, speed.backward * 1e-12);
    std::fflush(stdout);
  };
  for (const Attention kind : kinds) {
    for (const int size : {64, 128}) {
      for (int sequence = shortest; sequence <= tokens; sequence *= 2) {
        if (kind == Attention::tiled && sequence > longest_tiled) continue;
        row(kind, tokens, sequence, {width / size, width / size, size});
      }
    }
  }
  if (kinds.back() == Attention::tiled) return;
  std::printf("Eight sequences, the heads of smollm-135m and of llama-3.2-1b\n");
  for (const HeadShape heads : {HeadShape{9, 3, 64}, {32, 8, 64}})
    row(kinds.back(), tokens / 2, shortest, heads);
  std::printf("One sequence, four heads and one, which do not fill a GPU (Cost::blocks)\n");
  for (const int heads : {4, 1}) row(kinds.back(), tokens / 4, tokens / 4, {heads, 1, 64});
}

// ---- Training ---------------------------------------------------------------------------------------------

// A step: forward and backward of one micro-batch or of eight, clipping and AdamW, as tests/pytorch_speed.py
// measures PyTorch. MFU counts attention's FLOPs as every program here does, and halved for causality, as
// llm.c does.
void bench_training() {
  const int tokens = 16384;
  const double peak = peak_flops(sizeof(real));
  const std::vector<std::string> names = {"smollm-135m", "smollm-1.7b", "llama-3.2-1b"};
  // All of the models that a GPU trains have heads of 64.
  const std::string attention =
      to_string(can_run_tensor_core_attention() ? Attention::tensor_core : Attention::tiled);
  std::printf(
      "\nTraining, %s, attention %s, micro-batches of %d tokens, median of 5 steps, or of 3 of eight\n",
      precision_name, attention.c_str(), tokens);
  std::printf("%-14s %9s %13s %12s %10s %8s %8s %12s\n", "model", "sequence", "micro-batches", "tokens/s",
              "TFLOP/s", "MFU", "halved", "memory");
  for (const std::string& name : names) {
    for (const auto& [sequence, micro_batches] : {std::pair(2048, 1), {4096, 1}, {2048, 8}}) {
      const std::string batch = std::to_string(tokens / sequence);
      const Options options =
          options_of({"--model", name, "--seq-len", std::to_string(sequence), "--micro-batch-size", batch,
                      "--global-batch-size", std::to_string(tokens / sequence * micro_batches), "--attention",
                      attention});
      const MemoryBytes needed = predict_memory(options).total();
      const size_t bytes = std::accumulate(needed.begin(), needed.end(), size_t{0});
      std::printf("%-14s %9d %13d ", name.c_str(), sequence, micro_batches);
      if (bytes > free_device_memory()) {
        std::printf("needs %s\n", human_bytes(static_cast<double>(bytes)).c_str());
        continue;
      }
      TestModel model(options);
      const std::vector<HostBatch> batches = random_batches(options, 1);
      const int warm_up = micro_batches > 1 ? 1 : 2, steps = micro_batches > 1 ? 3 : 5;
      std::vector<double> taken;  // seconds
      for (int step = 0; step < warm_up + steps; ++step) {
        const double begin = now();
        model.train_step(step, batches);
        taken.push_back(now() - begin);
      }
      std::sort(taken.begin() + warm_up, taken.end());
      const double seconds = taken[warm_up + steps / 2];
      const double a_second = micro_batches * tokens / seconds, flops = flops_per_token(options) * a_second;
      const double of_attention = 6.0 * options.model.layers * options.model.d_model * sequence * a_second;
      std::printf("%12.0f %10.2f ", a_second, flops * 1e-12);
      for (const double counted : {flops, flops - of_attention}) {
        peak > 0 ? std::printf("%6.1f %% ", 100 * counted / peak) : std::printf("%8s ", "-");
      }
      std::printf("%12s\n", human_bytes(static_cast<double>(bytes)).c_str());
      std::fflush(stdout);
    }
  }
}

// ---- A profile --------------------------------------------------------------------------------------------

// This device as a file for --gpu. What takes several GPUs to measure is that of an H100.
void bench_profile() {
  const Stream stream("bench");
  const Blas blas(stream);
  Workspace work(stream);
  const Ceilings ceilings = measure_ceilings(stream, blas, /*print=*/false);
  const cudaDeviceProp device = this_device();
  nlohmann::ordered_json profile = {{"name", device.name}, {"as", "h100"}};
  const auto set = [&](const std::string& name, double value) {
    profile[name] = {{"value", value},
                     {"source", "make bench; without peaks and links, which are those of h100"}};
  };
  set("memory_bytes", static_cast<double>(device.totalGlobalMem));
  set("multiprocessors", device.multiProcessorCount);
  set("attention_blocks", device.multiProcessorCount);
  set("memory_bandwidth", ceilings.bytes_a_second);
  set("memory_achievable", 1);
  const double known = peak_flops(sizeof(real)),
               flops = known > 0 ? known : load_profile("h100").flops(sizeof(real));
  set(PRECISION == 64 ? "flops_fp64" : PRECISION == 32 ? "flops_fp32" : "flops_bf16", flops);
  set("product_achievable", ceilings.flops / flops);
  if (can_run_tensor_core_attention()) {
    for (const int size : {64, 128}) {
      const auto speed = speed_of_attention(stream, blas, Attention::tensor_core, 32768, 8192,
                                            {2048 / size, 2048 / size, size});
      const std::string name = "attention_" + std::to_string(size);
      set(name + "_forward", speed.forward / flops);
      set(name + "_backward", speed.backward / flops);
    }
  }
  const AccumTensor few = work.statistics(1, 1);
  const auto kernel = [&] { accumulate(few.data, few.data, 1, stream); };
  // Behind long kernels, so that the host has launched all before the first begins.
  constexpr int launches = 500;
  const Tensor large = work.tensor(8192, 8192), product = work.tensor(8192, 8192);
  const auto behind_long_ones = [&](int calls) {
    return milliseconds_of(stream, 1, [&] {
      for (int i = 0; i < 8; ++i) linear_forward(blas, large, large, product);
      for (int i = 0; i < calls; ++i) kernel();
    });
  };
  behind_long_ones(1);
  set("kernel_seconds", (behind_long_ones(launches) - behind_long_ones(0)) * 1e-3 / launches);
  CUDA_CHECK(cudaStreamSynchronize(stream));
  const double begin = now();
  for (int i = 0; i < launches; ++i) kernel();
  set("launch_seconds", (now() - begin) / launches);
  const PinnedArray<real> host(large.size());
  set("host_bandwidth",
      static_cast<double>(large.bytes()) / seconds_of(stream, [&] {
        CUDA_CHECK(cudaMemcpyAsync(large.data, host.data(), large.bytes(), cudaMemcpyHostToDevice, stream));
      }));
  std::printf("%s\n", profile.dump(1).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  return run_program([&] {
    if (!modelled_gpu().empty()) configure_device({.gpu = "h100", .dry_run = true});
    const std::vector<std::string> all = {"kernels", "attention", "training"};
    const std::vector<std::string> parts = argc > 1 ? std::vector<std::string>(argv + 1, argv + argc) : all;
    for (const std::string& part : parts) {
      if (part == "kernels") {
        bench_kernels();
      } else if (part == "attention") {
        bench_attention();
      } else if (part == "training") {
        bench_training();
      } else if (part == "profile") {
        bench_profile();
      } else {
        throw UsageError("bench", part, "kernels, attention, training, profile");
      }
    }
  });
}
