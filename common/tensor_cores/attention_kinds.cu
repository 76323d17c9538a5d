// Which kind of attention computes, and what it needs.
#include <cmath>
#include <cstdio>

#include "clock/device_profile.h"
#include "device/cuda.h"
#include "tensor_cores/attention_tiles.h"

namespace pentatron {

template <class Result>
void attention_forward(Attention kind, const Blas& blas, const AttentionBlock& block,
                       const AttentionTensorsOf<Result>& t) {
  if (kind == Attention::tiled) return tiled_forward(block, t, blas.stream());
  if constexpr (has_tensor_core_attention) {
    if (kind == Attention::tensor_core) return tensor_core_forward(block, t, blas.stream());
  }
  naive_forward(blas, block, t);
}

template <class Result>
void attention_backward(Attention kind, const Blas& blas, const AttentionBlock& block,
                        const AttentionTensors& t, const AttentionGradientsOf<Result>& g, bool add) {
  if (kind == Attention::tiled) return tiled_backward(block, t, g, add, blas.stream());
  if constexpr (has_tensor_core_attention) {
    if (kind == Attention::tensor_core) return tensor_core_backward(block, t, g, add, blas.stream());
  }
  naive_backward(blas, block, t, g, add);
}

size_t tensor_core_bytes(Attention kind, AttentionShape shape, bool sums_in_results) {
  if (kind != Attention::tensor_core) return 0;
  const auto [heads, kv_heads, size] = shape.head;
  const int64_t turns = backward_turns(shape.batch, heads, kv_heads, shape.sequence);
  const int64_t columns = (heads + (kv_heads < heads ? 2 * kv_heads : 0)) * size;  // of q; and of k and v
  const int64_t sums = sums_in_results ? 0 : shape.batch * shape.sequence * columns;
  return turns * sizeof(int32_t) + sums * sizeof(accum);
}

BackwardMemory backward_memory(Attention kind, DeviceArena& arena, AttentionShape shape,
                               bool sums_in_results) {
  if (kind == Attention::tiled) return {};
  if (kind == Attention::naive) return {arena.matrix<real>(shape.score_rows(), shape.sequence)};
  const auto [heads, kv_heads, size] = shape.head;
  const int64_t rows = int64_t{shape.batch} * shape.sequence;
  const int64_t of_queries = sums_in_results ? 0 : rows, of_keys = kv_heads < heads ? of_queries : 0;
  const TensorCoreMemory memory = {
      arena.matrix<int32_t>(1, backward_turns(shape.batch, heads, kv_heads, shape.sequence)),
      arena.matrix<accum>(of_queries, heads * size), arena.matrix<accum>(of_keys, kv_heads * size),
      arena.matrix<accum>(of_keys, kv_heads * size)};
  return {{}, std::make_shared<TensorCoreMemory>(memory)};
}

template decltype(attention_forward<real>) attention_forward<real>;
template decltype(attention_backward<real>) attention_backward<real>;
#if PRECISION == 16
template decltype(attention_forward<accum>) attention_forward<accum>;
template decltype(attention_backward<accum>) attention_backward<accum>;
#endif

void require_tensor_cores() {
  const cudaDeviceProp device = this_device();
  if (has_tensor_core_attention && (device.major >= 8 || is_dry_run())) return;
  throw UsageError("--attention", "tensor-core",
                   "naive or tiled with " + std::string(precision_name) + " on " + device.name +
                       "; it takes PRECISION=bf16 or fp16 on a GPU of compute capability 8.0 or later");
}

static constexpr int cpu = 0;  // its compute capability

bool can_run_tensor_core_attention() {
  const int capability = this_device().major;
  return has_tensor_core_attention && (capability >= 8 || capability == cpu);
}

bool models_any_head(const std::string& gpu) { return load_profile(gpu).flash_attention > 0; }

Attention fastest_attention(int head_size, double error) {
  if (error <= tensor_core_tolerance) return Attention::tensor_core;
  return head_size <= largest_tiled_head ? Attention::tiled : Attention::naive;
}

Attention default_attention(int head_size, Attention on_cpu) {
  if (this_device().major == cpu) return on_cpu;
  double error = INFINITY;
  if (can_run_tensor_core_attention() && has_tensor_core_kernels(head_size)) {
    const Stream stream("check of tensor cores");
    error = tensor_core_error(head_size, stream);
    if (!(error <= tensor_core_tolerance)) {
      std::fprintf(stderr, "attention on tensor cores differs by %.1g from tiled attention, which is used\n",
                   error);
    }
  }
  return fastest_attention(head_size, error);
}

}  // namespace pentatron
