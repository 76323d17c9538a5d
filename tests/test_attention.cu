// The products of matmul.h, and attention, against plain loops in double.
// precisions: fp64 fp32 bf16 fp16
#include <algorithm>
#include <random>
#include <tuple>
#include <utility>

#include "clock/device_profile.h"
#include "device.h"
#include "kernels/merge.h"
#include "options/options.h"
#include "reference_attention.h"
#include "tensor_cores/attention_tiles.h"
#ifdef CUDA_CPU
#include <cuda_warps.h>
#endif

namespace pentatron {
namespace {

// op(a) op(b).
HostMatrix product(const HostMatrix& a, bool transpose_a, const HostMatrix& b, bool transpose_b) {
  const int64_t depth = transpose_a ? a.rows : a.columns;
  HostMatrix c(transpose_a ? a.columns : a.rows, transpose_b ? b.rows : b.columns);
  for (int64_t i = 0; i < c.rows; ++i) {
    for (int64_t j = 0; j < c.columns; ++j) {
      for (int64_t k = 0; k < depth; ++k) {
        c(i, j) += (transpose_a ? a(k, i) : a(i, k)) * (transpose_b ? b(j, k) : b(k, j));
      }
    }
  }
  return c;
}

TEST_CASE("linear layer: the three products", "[01][kernels]") {
  struct Sizes {
    int64_t rows, in, out;
  };
  Device device;
  Random random;
  for (const auto [rows, in, out] :
       {Sizes{1, 1, 1}, {1, 10, 97}, {37, 97, 10}, {301, 10, 37}, {37, 259, 1}, {129, 65, 259}}) {
    CAPTURE(rows, in, out);
    const HostMatrix x = random.normal<real>(rows, in), weight = random.normal<real>(out, in),
                     d_y = random.normal<real>(rows, out), before = random.normal<accum>(out, in);
    const Tensor device_x = device.upload<real>(x), device_weight = device.upload<real>(weight),
                 device_d_y = device.upload<real>(d_y);

    const Tensor y = device.fresh<real>(rows, out), d_x = device.fresh<real>(rows, in);
    linear_forward(device.blas, device_x, device_weight, y);
    require_close(device.download(y), product(x, false, weight, true), sum_of<real>(in));
    linear_dgrad(device.blas, device_d_y, device_weight, d_x);
    require_close(device.download(d_x), product(d_y, false, weight, false), sum_of<real>(out));

    HostMatrix want = product(d_y, true, x, false);
    const AccumTensor d_weight = device.fresh<accum>(out, in);
    linear_wgrad(device.blas, device_d_y, device_x, {d_weight, false});
    require_close(device.download(d_weight), want, sum_of<accum>(rows));
    linear_wgrad(device.blas, device_d_y.row_range(0, 0), device_x.row_range(0, 0), {d_weight, false});
    REQUIRE(device.download(d_weight) == HostMatrix(out, in));
    device.write(d_weight, before);
    linear_wgrad(device.blas, device_d_y, device_x, {d_weight, true});
    for (size_t i = 0; i < want.values.size(); ++i) want.values[i] += before.values[i];
    require_close(device.download(d_weight), want, sum_of<accum>(rows));
  }
}

// Matrices of a batch side by side in the rows of one wider matrix, as the heads of attention lie:
// transposes, factors, and untouched columns between the results.
TEST_CASE("batched_product: transposes, factors and strides", "[01][kernels]") {
  Device device;
  Random random;
  const int m = 13, n = 7, k = 37, count = 3, gap = 5;
  // A column block of `width` for each matrix of the batch, and a gap after it.
  const auto wide = [&](int width) { return int64_t{count} * (width + gap); };
  for (const bool transpose_a : {false, true}) {
    for (const bool transpose_b : {false, true}) {
      for (const auto& [alpha, beta] : {std::pair{1.0, 0.0}, {0.375, 1.0}, {-2.0, 0.5}}) {
        CAPTURE(transpose_a, transpose_b, alpha, beta);
        const int a_rows = transpose_a ? k : m, a_width = transpose_a ? m : k;
        const int b_rows = transpose_b ? n : k, b_width = transpose_b ? k : n;
        const HostMatrix a = random.normal<real>(a_rows, wide(a_width)),
                         b = random.normal<real>(b_rows, wide(b_width)),
                         before = random.normal<real>(m, wide(n));
        const Tensor c = device.upload<real>(before);
        HostMatrix want = before;
        for (int i = 0; i < count; ++i) {
          const HostMatrix of_batch = product(a.slice(0, a_rows, i * (a_width + gap), a_width), transpose_a,
                                              b.slice(0, b_rows, i * (b_width + gap), b_width), transpose_b);
          for (int row = 0; row < m; ++row) {
            for (int column = 0; column < n; ++column) {
              double& element = want(row, i * (n + gap) + column);
              element = alpha * of_batch(row, column) + beta * element;
            }
          }
        }
        const auto op = [](bool transpose) { return transpose ? Transpose::yes : Transpose::no; };
        const auto batch_of = [&](Tensor matrix, int width) {
          return BatchedMatrix{matrix.data, real_type, matrix.columns, width + gap};
        };
        batched_product(device.blas, op(transpose_a), op(transpose_b), m, n, k, alpha,
                        batch_of(device.upload<real>(a), a_width), batch_of(device.upload<real>(b), b_width),
                        beta, batch_of(c, n), count, "test");
        const HostMatrix got = device.download(c);
        require_close(got, want, sum_of<real>(k));
        for (int i = 0; i < count; ++i) {
          const int first = i * (n + gap) + n;
          REQUIRE(got.slice(0, m, first, gap) == before.slice(0, m, first, gap));
        }
      }
    }
  }
}

// The ways to compute attention that there are here for heads of this size. On the CPU tensor cores are
// emulated.
std::vector<Attention> kinds(int head_size) {
  std::vector<Attention> kinds = {Attention::naive, Attention::tiled};
  if (can_run_tensor_core_attention() && (head_size == 64 || head_size == 128)) {
    kinds.push_back(Attention::tensor_core);
  }
  return kinds;
}

// A block on the device: its scores memory, where there is any, is as large as it has to be.
class DeviceBlock {
 public:
  DeviceBlock(Device& device, Attention kind, const AttentionBlock& block)
      : device_(device), kind_(kind), block_(block) {}

  // `kept`: the scores of every sequence.
  Scores scores(bool kept) { return {fresh_scores(kept ? block_.batch : 1), kept}; }
  template <class Result>
  void forward(Tensor q, Tensor k, Tensor v, Scores scores, Matrix<Result> out, AccumTensor lse) {
    attention_forward<Result>(kind_, device_.blas, block_, {q, k, v, out, lse, scores});
  }
  template <class Result>
  void backward(Tensor q, Tensor k, Tensor v, Scores scores, AccumTensor lse, Tensor d_out, AccumTensor dots,
                bool add, Matrix<Result> d_q, Matrix<Result> d_k, Matrix<Result> d_v) {
    attention_backward<Result>(kind_, device_.blas, block_, {q, k, v, {}, lse, scores},
                               {d_out, d_q, d_k, d_v, backward_memory(q, k), dots}, add);
  }
  // Looks whether something was written beside the scores.
  void check_scores() {
    for (const Tensor memory : memories_) device_.download(memory);
  }

 private:
  BackwardMemory backward_memory(Tensor q, Tensor k) {
    if (kind_ != Attention::tensor_core) return {fresh_scores(1)};
    const int64_t turns = backward_turns(block_.batch, block_.head.heads, block_.head.kv_heads,
                                         std::max(block_.queries, block_.keys));
    const TensorCoreMemory memory = {
        device_.fresh<int32_t>(1, turns), device_.fresh<accum>(q.rows, q.columns),
        device_.fresh<accum>(k.rows, k.columns), device_.fresh<accum>(k.rows, k.columns)};
    return {{}, std::make_shared<TensorCoreMemory>(memory)};
  }
  Tensor fresh_scores(int sequences) {
    if (kind_ != Attention::naive) return {};
    memories_.push_back(
        device_.fresh<real>(int64_t{sequences} * block_.head.heads * block_.queries, block_.keys));
    return memories_.back();
  }

  Device& device_;
  Attention kind_;
  AttentionBlock block_;
  std::vector<Tensor> memories_;
};

// What reference_attention does, on the device, with the scores kept for backward or computed again.
template <class Result>
void device_attention(Device& device, Attention kind, const AttentionBlock& block, BlockData& a, bool kept,
                      bool add = false) {
  const Tensor q = device.upload<real>(a.q), k = device.upload<real>(a.k), v = device.upload<real>(a.v),
               d_out = device.upload<real>(a.d_out);
  const Matrix<Result> out = device.upload<Result>(a.out);
  const AccumTensor lse = device.upload<accum>(a.lse);
  DeviceBlock on_device(device, kind, block);
  const Scores scores = on_device.scores(kept);
  on_device.forward(q, k, v, scores, out, lse);
  a.out = device.download(out), a.lse = device.download(lse);

  const AccumTensor dots = device.fresh<accum>(q.rows, block.head.heads);
  attention_dots(device.upload<real>(rounded<real>(a.out)), d_out, dots, device.stream);
  const Matrix<Result> d_q = device.upload<Result>(a.d_q), d_k = device.upload<Result>(a.d_k),
                       d_v = device.upload<Result>(a.d_v);
  const Scores in_backward = kept ? scores : on_device.scores(false);  // in between, other layers used them
  on_device.backward(q, k, v, in_backward, lse, d_out, dots, add, d_q, d_k, d_v);
  a.d_q = device.download(d_q), a.d_k = device.download(d_k), a.d_v = device.download(d_v);
  on_device.check_scores();
}

// `blocks`: how many were summed to a result.
template <class Result>
void require_close(const BlockData& got, const BlockData& want, Attention kind, const AttentionBlock& block,
                   int blocks = 1) {
  // Stored on the way: scores and probabilities; out, the gradients of both and, of a group's heads but the
  // first, the sum so far. Tiles store none of these but out; tensor cores take the probabilities and the
  // gradients of the scores rounded.
  const int group = block.head.heads / block.head.kv_heads, size = block.head.head_size;
  const double terms = block.queries + block.keys + size;
  const bool naive = kind == Attention::naive;
  const int sums = naive && sizeof(Result) == sizeof(real) ? group - 1 : 0;
  const int rounded = kind == Attention::tensor_core ? 1 : 0;
  require_close(got.out, want.out, sum_of<Result>(terms * blocks, naive ? 2 : rounded));
  require_close(got.lse, want.lse, sum_of<accum>(terms * blocks, naive ? 1 : 0));
  require_close(got.d_v, want.d_v, sum_of<Result>(terms * blocks, naive ? 2 + sums : rounded));
  require_close(got.d_q, want.d_q, sum_of<Result>(terms * blocks, naive ? 5 : 1 + rounded));
  require_close(got.d_k, want.d_k, sum_of<Result>(terms * blocks, naive ? 5 + sums : 1 + rounded));
}

// Kernels with wide blocks run, though these few would not fill a GPU.
struct AllBlocksAreEnough {
  const double before = std::exchange(enough_blocks, 1);
  ~AllBlocksAreEnough() { enough_blocks = before; }
};

bool same_bits(const BlockData& a, const BlockData& b) {
  return a.out == b.out && a.lse == b.lse && a.d_q == b.d_q && a.d_k == b.d_k && a.d_v == b.d_v;
}

TEST_CASE("attention: forward and backward, heads in groups, several sequences", "[01][kernels]") {
  Device device;
  Random random;
  for (const AttentionShape shape : {AttentionShape{1, 37, {1, 1, 10}},
                                     {2, 7, {4, 1, 6}},
                                     {3, 37, {4, 2, 10}},
                                     {2, 65, {3, 3, 16}},
                                     {1, 97, {6, 2, 14}},
                                     {1, 301, {2, 1, 6}}}) {
    CAPTURE(shape.batch, shape.sequence, shape.head.heads, shape.head.kv_heads, shape.head.head_size);
    const AttentionBlock block = whole_sequences(shape);
    BlockData want(block, random);
    BlockData kept = want, again = want, tiled = want;
    reference_attention(block, want);
    device_attention<real>(device, Attention::naive, block, kept, true);
    require_close<real>(kept, want, Attention::naive, block);
    device_attention<real>(device, Attention::naive, block, again, false);
    REQUIRE(same_bits(kept, again));
    device_attention<real>(device, Attention::tiled, block, tiled, false);
    require_close<real>(tiled, want, Attention::tiled, block);
  }
}

// Results as `real`, assigned, and as `accum`, added.
void check_block(Device& device, Attention kind, const AttentionBlock& block, const BlockData& before) {
  CAPTURE(to_string(kind), block.batch, block.queries, block.keys, block.head.heads, block.head.kv_heads,
          block.head.head_size, block.diagonal);
  BlockData want = before, got = before;
  reference_attention(block, want);
  device_attention<real>(device, kind, block, got, false);
  require_close<real>(got, want, kind, block);

  want = got = before;
  reference_attention(block, want, true);
  device_attention<accum>(device, kind, block, got, false, true);
  require_close<accum>(got, want, kind, block);
}

#if defined(CUDA_CPU) && PRECISION == 64
TEST_CASE("attention: in tiles, on GPUs with little shared memory", "[01][standin]") {
  Device device;
  Random random;
  const AttentionBlock block = {1, 69, 69, 69, {2, 2, 128}, true};
  const BlockData before(block, random);
  for (const std::string kib : {"64", "99", "227"}) {
    CAPTURE(kib);
    setenv("CUDA_CPU_SHARED_KIB", kib.c_str(), 1);
    check_block(device, Attention::tiled, block, before);
  }
  unsetenv("CUDA_CPU_SHARED_KIB");
}
#endif

// A tile has 64 rows, or fewer where the head is large.
TEST_CASE("attention: blocks of a sequence, diagonal or full, assigned or added", "[06][kernels]") {
  Device device;
  Random random;
  for (const AttentionBlock& block : {AttentionBlock{1, 37, 37, 37, {1, 1, 10}, true},
                                      {2, 65, 65, 70, {4, 2, 6}, true},
                                      {2, 65, 37, 70, {4, 2, 6}, false},
                                      {2, 37, 130, 131, {4, 1, 16}, false},
                                      {3, 1, 5, 7, {6, 3, 2}, false},
                                      {1, 64, 128, 128, {2, 2, 8}, false},
                                      {1, 130, 70, 131, {2, 2, 14}, true},
                                      {2, 20, 70, 71, {2, 1, 34}, true},
                                      {1, 69, 69, 69, {2, 2, 128}, true},
                                      {1, 33, 21, 33, {2, 1, 256}, false}}) {
    const BlockData before(block, random);
    for (const Attention kind : kinds(block.head.head_size)) check_block(device, kind, block, before);
  }
}

// Tests that need long sequences take seconds where tensor cores are emulated. fp16's differ from bf16's in
// one instruction, which shorter tests show.
constexpr bool tensor_cores_are_tested_in_bf16 =
#if defined(REAL_IS_HALF) && defined(CUDA_CPU)
    true;
#else
    false;
#endif

// There a tile has 128, 64 or 32 rows, and a warp 32 or 16 of them.
TEST_CASE("attention on tensor cores: the check before it becomes the default", "[01][kernels]") {
  CHECK(fastest_attention(64, 0.01) == Attention::tensor_core);
  CHECK(fastest_attention(64, 0.1) == Attention::tiled);
  CHECK(fastest_attention(64, NAN) == Attention::tiled);
  CHECK(fastest_attention(2 * largest_tiled_head, INFINITY) == Attention::naive);
  if (!can_run_tensor_core_attention()) return;
  Device device;
  for (const int size : {64, 128}) {
    const double error = tensor_core_error(size, device.stream);
    CHECK(error > 0);  // the sums have another order
    CHECK(error < tensor_core_tolerance);
  }
}

TEST_CASE("attention on tensor cores: blocks of a sequence", "[06][kernels]") {
  if (!can_run_tensor_core_attention()) return;
  CHECK(tensor_core_warps({1, 4096, 4096, 4096, {8, 2, 128}, true}, true) == 8);
  CHECK(tensor_core_warps({1, 4096, 4096, 4096, {4, 2, 128}, true}, true) == 4);  // would leave some idle
  const AllBlocksAreEnough also_wide_ones;
  Device device;
  Random random;
  for (const int size : {64, 128}) {
    if (size == 128 && tensor_cores_are_tested_in_bf16) continue;
    for (const AttentionBlock& block : {AttentionBlock{2, 150, 150, 150, {4, 2, size}, true},
                                        {1, 257, 257, 257, {1, 1, size}, true},
                                        {1, 128, 256, 256, {2, 2, size}, false},
                                        {2, 65, 37, 70, {4, 2, size}, false},
                                        {3, 1, 5, 7, {6, 3, size}, false},
                                        {1, 200, 33, 200, {3, 1, size}, false},
                                        {2, 33, 150, 151, {2, 2, size}, false},
                                        {1, 150, 131, 151, {2, 1, size}, true},
                                        {2, 20, 170, 171, {2, 1, size}, true}}) {
      check_block(device, Attention::tensor_core, block, BlockData(block, random));
    }
  }
#ifdef CUDA_CPU
  setenv("CUDA_CPU_SHARED_KIB", "99", 1);  // too little for blocks of 8 warps
  const AttentionBlock block = {1, 150, 131, 151, {2, 1, 128}, true};
  CHECK(tensor_core_warps(block, true) == 4);
  if (!tensor_cores_are_tested_in_bf16) check_block(device, Attention::tensor_core, block, {block, random});
  unsetenv("CUDA_CPU_SHARED_KIB");
  CHECK(tensor_core_warps(block, true) == 8);
  CHECK(cuda_cpu::row_reads().all > 0);
  CHECK(cuda_cpu::row_reads().with_conflicts == 0);
#endif
}

TEST_CASE("attention on tensor cores: the longest blocks begin first", "[01][kernels]") {
  for (const auto& [tiles, heads, sequences, size] : {std::tuple(1, 1, 1, 32),
                                                      {22, 3, 8, 32},
                                                      {3, 8, 4, 32},
                                                      {5, 7, 13, 32},
                                                      {2, 32, 3, 32},
                                                      {5, 7, 13, 8}}) {
    CAPTURE(tiles, heads, sequences, size);
    const int pairs = heads * sequences, sections = std::max(1, pairs / size);
    std::vector<int> next(pairs);  // tile of each pair
    for (int number = 0; number < tiles * pairs; ++number) {
      const Place place = place_of(number, tiles, heads, sequences, size);
      const int pair = place.sequence * heads + place.head, section = std::min(pair / size, sections - 1);
      REQUIRE(place.tile == next.at(pair)++);                        // a turn waits for tiles that have begun
      REQUIRE((place.head == 0 || next.at(pair - 1) > place.tile));  // and for such heads
      const auto first = next.begin() + section * size,
                 last = section + 1 < sections ? first + size : next.end();
      REQUIRE(*std::max_element(first, last) - *std::min_element(first, last) <= 1);
      REQUIRE(std::all_of(next.begin(), first, [&](int done) { return done == tiles; }));
      REQUIRE(std::all_of(last, next.end(), [](int begun) { return begun == 0; }));
    }
  }
}

TEST_CASE("attention on tensor cores: what a section of pairs reads fits into the L2 cache",
          "[01][kernels]") {
  CHECK(section_of(2048, 64) == 32);
  CHECK(section_of(1024, 128) == 32);
  CHECK(section_of(512, 64) == 32);  // more would gain nothing
  CHECK(section_of(8192, 64) == 8);
  CHECK(section_of(8192, 128) == 4);
  CHECK(section_of(131072, 128) == 4);  // fewer would leave a long block for the end
}

// An H100 has 132 multiprocessors. tests/tools/makespan.py 132 simulates one head: 4.06 and 3.05.
TEST_CASE("attention on tensor cores: blocks that do not fill a GPU take longer in modelled time",
          "[01][profile]") {
  const DeviceProfile h100 = load_profile("h100");
  const auto longer = [&](const AttentionBlock& block, bool backward) {
    Cost cost = attention_cost(block, backward ? 5 : 2, Cost::Unit::tensor_cores, backward);
    const double seconds = h100.seconds(cost);
    cost.blocks = 1e9;
    return (seconds - h100.kernel_seconds) / (h100.seconds(cost) - h100.kernel_seconds);
  };
  CHECK(longer({1, 8192, 8192, 8192, {32, 8, 64}, true}, true) == 1);
  const AttentionBlock one = {1, 8192, 8192, 8192, {1, 1, 64}, true};
  CHECK(longer(one, false) == Approx(4.06).epsilon(0.005));
  CHECK(longer(one, true) == Approx(3.05).epsilon(0.01));
  // Where each query sees all keys, all blocks are equal: 2 x 16 of 128 queries, and 2 x 32 of 64 keys.
  const AttentionBlock full = {1, 2048, 2048, 4096, {2, 1, 128}, false};
  CHECK(longer(full, false) == Approx(132.0 / 32));
  CHECK(longer(full, true) == Approx(132.0 / 64));
}

// Blocks that run at the same time add to the same d_q.
TEST_CASE("attention on tensor cores: backward repeats bit for bit", "[06][kernels]") {
  if (!can_run_tensor_core_attention()) return;
#ifndef CUDA_CPU
  constexpr int n = 500;
#else
  constexpr int n = 200;  // emulated; a block has 96 or 128 keys
#endif
  const AllBlocksAreEnough also_wide_ones;
  Device device;
  Random random;
  for (const int size : {64, 128}) {
    for (const bool diagonal : {true, false}) {
      const AttentionBlock block = {1, n, n, n, {2, 1, size}, diagonal};
      const BlockData before(block, random);
      BlockData first = before, again = before;
      device_attention<real>(device, Attention::tensor_core, block, first, false);
      device_attention<real>(device, Attention::tensor_core, block, again, false);
      CHECK(same_bits(first, again));

      BlockData want = before, got = before;  // as other tests do not: `accum` assigned, `real` added
      reference_attention(block, want);
      device_attention<accum>(device, Attention::tensor_core, block, got, false);
      require_close<accum>(got, want, Attention::tensor_core, block);
      want = got = before;
      reference_attention(block, want, true);
      device_attention<real>(device, Attention::tensor_core, block, got, false, true);
      require_close<real>(got, want, Attention::tensor_core, block);
    }
  }
}

// How far a row of a head is off at most: over its own length and that of a row in the mean. The first 128
// rows of each sequence are left out: they see few keys, their elements cancel, and other tests have them.
double worst_row(const HostMatrix& got, const HostMatrix& want, int rows_of_sequence, int size) {
  const auto length = [&](const HostMatrix& m, int64_t row, int64_t first) {
    double sum = 0;
    for (int64_t j = first; j < first + size; ++j) sum += m(row, j) * m(row, j);
    return std::sqrt(sum);
  };
  HostMatrix off = got;
  double mean = 0, worst = 0;
  for (size_t i = 0; i < off.values.size(); ++i) {
    off.values[i] -= want.values[i];
    mean += want.values[i] * want.values[i];
  }
  mean = std::sqrt(mean * size / want.values.size());
  for (int64_t row = 0; row < want.rows; ++row) {
    for (int64_t first = 0; row % rows_of_sequence >= 128 && first < want.columns; first += size) {
      const double share = length(off, row, first) / (length(want, row, first) + mean);
      worst = share <= worst ? worst : share;  // also NaN
    }
  }
  return worst;
}

// An H100 has 264 places for blocks. More of them, in several sections, wait for a place and for turns.
// (Emulated, that would take an hour: so there are few.)
TEST_CASE("attention on tensor cores: more blocks than a GPU runs at once", "[06][kernels][gpu]") {
  if (!can_run_tensor_core_attention()) return;
#ifndef CUDA_CPU
  constexpr int sequences = 4, n = 4096, heads = 8, kv_heads = 2;
#else
  constexpr int sequences = 1, n = 512, heads = 2, kv_heads = 1;
#endif
  Device device;
  Random random;
  for (const int size : {64, 128}) {
    const AttentionBlock block = {sequences, n, n, n, {heads, kv_heads, size}, true};
    const BlockData before(block, random);
    BlockData tiled = before, first = before;
    device_attention<real>(device, Attention::tensor_core, block, first, false);
    for (int repeat = 0; repeat < 3; ++repeat) {
      BlockData again = before;
      device_attention<real>(device, Attention::tensor_core, block, again, false);
      CHECK(same_bits(again, first));
    }
    device_attention<real>(device, Attention::tiled, block, tiled, false);
    CHECK(worst_row(first.out, tiled.out, block.queries, size) < 0.01);
    CHECK(worst_row(first.d_q, tiled.d_q, block.queries, size) < 0.01);
    CHECK(worst_row(first.d_k, tiled.d_k, block.keys, size) < 0.01);
    CHECK(worst_row(first.d_v, tiled.d_v, block.keys, size) < 0.01);
  }
}

double largest_of(const HostMatrix& matrix) {  // NaN if there is one
  double largest = 0;
  for (const double x : matrix.values) largest = std::abs(x) <= largest ? largest : std::abs(x);
  return largest;
}

// Where every probability is 0 or 1, a score has no gradient: d_p - rowsum(d_out * out) is a difference of
// two sums that are equal but for rounding, and that is all that may reach q and k.
void check_certain_attention(Device& device, const AttentionBlock& block, const BlockData& inputs) {
  const auto [heads, kv_heads, size] = block.head;
  BlockData want = inputs;
  reference_attention(block, want);
  for (const Attention kind : kinds(size)) {
    CAPTURE(to_string(kind));
    BlockData got = inputs;
    device_attention<real>(device, kind, block, got, true);
    // On tensor cores a probability is exp2 of a difference with the largest score, or in backward with lse,
    // which a float rounds to half a unit.
    const double of_exp2 = kind == Attention::tensor_core ? epsilon<accum>() / 2 * largest_of(want.lse) : 0;
    const auto with_exp2 = [&](Tolerance tolerance) {
      tolerance.of_element += of_exp2;
      return tolerance;
    };
    require_close(got.out, want.out, with_exp2(sum_of<real>(1)));
    require_close(got.lse, want.lse, sum_of<accum>(size, 1));
    require_close(got.d_v, want.d_v, with_exp2(sum_of<real>(block.queries, heads / kv_heads - 1)));

    const double d_p = size * largest_of(want.d_out) * largest_of(want.v);
    const double d_score = epsilon<real>() * d_p / std::sqrt(size);
    REQUIRE(largest_of(got.d_q) <= d_score * largest_of(want.k));
    REQUIRE(largest_of(got.d_k) <= d_score * largest_of(want.q) * block.queries * heads);
  }
}

TEST_CASE("attention: sequences of one token", "[01][kernels]") {
  Device device;
  Random random;
  for (const AttentionShape shape :
       {AttentionShape{1, 1, {1, 1, 2}}, {3, 1, {4, 2, 6}}, {3, 1, {4, 2, 64}}}) {
    CAPTURE(shape.batch, shape.head.heads);
    const AttentionBlock block = whole_sequences(shape);
    check_certain_attention(device, block, BlockData(block, random));
  }
}

TEST_CASE("attention: scores of 10000 stay finite", "[01][kernels]") {
  Device device;
  Random random;
  struct Case {
    int sequence, size;  // a prime; a power of 4
    bool negative;       // every score, and every query sees every key
  };
  for (const auto [sequence, size, negative] :
       {Case{37, 4, false}, {151, 4, false}, {151, 64, false}, {37, 4, true}, {151, 64, true}}) {
    CAPTURE(sequence, size, negative);
    const AttentionBlock block = {1, sequence, sequence, sequence, {1, 1, size}, !negative};
    BlockData inputs(block, random);
    // Scores 640 m, m different for every key and at most 75 (or from -151 to -1): each row's softmax is 1 at
    // one key, 0 at the others. q and k are exact even in bfloat16.
    inputs.q = inputs.k = HostMatrix(sequence, size);
    for (int i = 0; i < sequence; ++i) {
      inputs.q(i, 0) = (i % 2 || negative ? 80 : -80) * std::sqrt(size);
      inputs.k(i, 0) = 8 * (negative ? -1 - 16 * i % sequence : 16 * i % sequence - sequence / 2);
    }
    check_certain_attention(device, block, inputs);
  }
}

// A row of each combination of lse so far and lse of a further block: equal, near, far away.
TEST_CASE("attention: merging, near and far apart", "[06][kernels]") {
  Device device;
  Random random;
  const std::vector<std::pair<double, double>> cases = {{1, 1},      {-0.5, 1.5}, {1.5, -0.5},
                                                        {1e4, -1e4}, {-1e4, 1e4}, {3e4, 3e4}};
  const int rows = std::ssize(cases), heads = 2, size = 6;
  const AttentionBlock block = {2, rows / 2, 1, rows / 2, {heads, heads, size}, false};
  HostMatrix out = random.normal<accum>(rows, heads * size), lse(rows, heads);
  HostMatrix added = random.normal<accum>(rows, heads * size), added_lse(rows, heads);
  for (int row = 0; row < rows; ++row) {
    for (int head = 0; head < heads; ++head) {
      std::tie(lse(row, head), added_lse(row, head)) = cases[(row + head) % rows];
    }
  }
  const AccumTensor device_out = device.upload<accum>(out), device_added = device.upload<accum>(added);
  const AccumTensor device_lse = device.upload<accum>(lse);
  attention_merge(block, device_added, device.upload<accum>(added_lse), device_out, device_lse,
                  device.stream);
  const HostMatrix got = device.download(device_out), got_lse = device.download(device_lse);

  for (int row = 0; row < rows; ++row) {
    for (int head = 0; head < heads; ++head) {
      const double a = lse(row, head), b = added_lse(row, head);
      CAPTURE(a, b);
      const double largest = std::max(a, b), of_a = std::exp(a - largest), of_b = std::exp(b - largest);
      CHECK(std::abs(got_lse(row, head) - (largest + std::log(of_a + of_b))) <=
            4 * epsilon<accum>() * std::abs(largest));
      for (int j = head * size; j < (head + 1) * size; ++j) {
        const double want = (of_a * out(row, j) + of_b * added(row, j)) / (of_a + of_b);
        CHECK(std::abs(got(row, j) - want) <= 16 * epsilon<accum>());
      }
    }
  }
}

// As ring attention does: the queries of each part of a sequence meet the keys of one part after the other,
// in any order, and forward's results merge, while backward's add up.
TEST_CASE("attention: a sequence in parts has the results of the whole", "[06][kernels]") {
  if (tensor_cores_are_tested_in_bf16) return;
  Device device;
  Random random;
  std::mt19937 shuffle(1);
  const AttentionShape shape{2, 150, {4, 2, GENERATE(10, 64)}};
  const AttentionBlock whole = whole_sequences(shape);
  BlockData want(whole, random);
  for (HostMatrix* x : {&want.out, &want.d_q, &want.d_k, &want.d_v}) *x = HostMatrix(x->rows, x->columns);
  BlockData got = want;
  reference_attention(whole, want);
  const Tensor q = device.upload<real>(want.q), k = device.upload<real>(want.k),
               v = device.upload<real>(want.v), d_out = device.upload<real>(want.d_out);

  const std::vector<std::vector<int>> cuts = {
      {0, 66, 150}, {0, 1, 65, 150}, {0, 70, 71, 100, 150}, {0, 10, 30, 60, 149, 150}};
  for (const std::vector<int>& cut : cuts) {
    for (const Attention kind : kinds(shape.head.head_size)) {
      const int parts = std::ssize(cut) - 1;
      CAPTURE(parts, to_string(kind));
      std::vector<std::pair<int, int>> pairs;  // part of the queries, part of the keys
      for (int i = 0; i < parts; ++i) {
        for (int j = 0; j <= i; ++j) pairs.emplace_back(i, j);
      }
      std::shuffle(pairs.begin(), pairs.end(), shuffle);
      const auto block_of = [&](int i, int j) {
        return AttentionBlock{shape.batch,    cut[i + 1] - cut[i], cut[j + 1] - cut[j],
                              shape.sequence, shape.head,          i == j};
      };
      const auto from = [](auto x, int first) { return x.row_range(first, x.rows - first); };

      const AccumTensor out = device.fresh<accum>(q.rows, q.columns),
                        lse = device.fresh<accum>(q.rows, shape.head.heads);
      const AccumTensor block_out = device.fresh<accum>(q.rows, q.columns),
                        block_lse = device.fresh<accum>(q.rows, shape.head.heads);
      std::vector<bool> merges(parts);  // a part's first block begins its result
      for (const auto& [i, j] : pairs) {
        const AttentionBlock block = block_of(i, j);
        DeviceBlock on_device(device, kind, block);
        const AccumTensor to_out = from(merges[i] ? block_out : out, cut[i]),
                          to_lse = from(merges[i] ? block_lse : lse, cut[i]);
        on_device.forward(from(q, cut[i]), from(k, cut[j]), from(v, cut[j]), on_device.scores(false), to_out,
                          to_lse);
        on_device.check_scores();
        if (merges[i])
          attention_merge(block, to_out, to_lse, from(out, cut[i]), from(lse, cut[i]), device.stream);
        merges[i] = true;
      }
      got.out = device.download(out), got.lse = device.download(lse);

      const AccumTensor dots = device.fresh<accum>(q.rows, shape.head.heads);
      attention_dots(device.upload<real>(rounded<real>(got.out)), d_out, dots, device.stream);
      const auto zeros = [&](Tensor like) {
        return device.upload<accum>(HostMatrix(like.rows, like.columns));
      };
      const AccumTensor d_q = zeros(q), d_k = zeros(k), d_v = zeros(v);
      std::shuffle(pairs.begin(), pairs.end(), shuffle);
      for (const auto& [i, j] : pairs) {
        DeviceBlock on_device(device, kind, block_of(i, j));
        on_device.backward(from(q, cut[i]), from(k, cut[j]), from(v, cut[j]), on_device.scores(false),
                           from(lse, cut[i]), from(d_out, cut[i]), from(dots, cut[i]), true,
                           from(d_q, cut[i]), from(d_k, cut[j]), from(d_v, cut[j]));
        on_device.check_scores();
      }
      got.d_q = device.download(d_q), got.d_k = device.download(d_k), got.d_v = device.download(d_v);
      require_close<accum>(got, want, kind, whole, parts);
    }
  }
}

}  // namespace
}  // namespace pentatron
