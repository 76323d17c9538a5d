// The emulated instructions of a warp, against the figures of the PTX manual ("Matrix Fragments for
// mma.m16n8k16", "ldmatrix"), and what synchronises the threads of a block.
#include <array>
#include <bit>
#include <functional>
#include <random>

#include "catch.h"
#include "cuda_warps.h"

namespace {

using cuda_cpu::fiber;

// The sanitizers don't follow a thread that changes its stack.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr const char* tag = "[.]";
#else
constexpr const char* tag = "[cpu]";
#endif

void run(unsigned threads, const std::function<void()>& body) {
  const auto call = [](const void* bound) { (*static_cast<const std::function<void()>*>(bound))(); };
  cuda_cpu::run_fibers(threads, {call, &body});
}

uint32_t pack(float low, float high) {
  return std::bit_cast<uint32_t>(high) & 0xffff0000u | std::bit_cast<uint32_t>(low) >> 16;
}

// Small whole numbers: exact in bfloat16, and so are their products and sums.
template <int rows, int columns>
std::array<std::array<float, columns>, rows> whole_numbers(std::mt19937& engine) {
  std::array<std::array<float, columns>, rows> matrix;
  for (auto& row : matrix) {
    for (float& x : row) x = static_cast<float>(static_cast<int>(engine() % 33) - 16);
  }
  return matrix;
}

TEST_CASE("warps: mma multiplies the matrices that the lanes hold together", tag) {
  std::mt19937 engine;
  const auto a = whole_numbers<16, 16>(engine);
  const auto b = whole_numbers<16, 8>(engine);
  const auto c = whole_numbers<16, 8>(engine);
  std::array<std::array<float, 8>, 16> d = {};
  run(32, [&] {
    const int g = fiber() / 4, t = fiber() % 4 * 2;
    const uint32_t of_a[4] = {pack(a[g][t], a[g][t + 1]), pack(a[g + 8][t], a[g + 8][t + 1]),
                              pack(a[g][t + 8], a[g][t + 9]), pack(a[g + 8][t + 8], a[g + 8][t + 9])};
    float of_d[4] = {c[g][t], c[g][t + 1], c[g + 8][t], c[g + 8][t + 1]};
    cuda_cpu::mma_m16n8k16<__nv_bfloat16>(of_d, of_a, pack(b[t][g], b[t + 1][g]),
                                          pack(b[t + 8][g], b[t + 9][g]));
    d[g][t] = of_d[0], d[g][t + 1] = of_d[1], d[g + 8][t] = of_d[2], d[g + 8][t + 1] = of_d[3];
  });
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      float sum = c[i][j];
      for (int k = 0; k < 16; ++k) sum += a[i][k] * b[k][j];
      CHECK(d[i][j] == sum);
    }
  }
}

TEST_CASE("warps: ldmatrix gives each lane two elements of four matrices", tag) {
  alignas(16) uint16_t memory[4][8][8];  // [matrix][row][column]
  for (int i = 0; i < 256; ++i) memory[i / 64][i / 8 % 8][i % 8] = static_cast<uint16_t>(i);
  for (const bool transposed : {false, true}) {
    uint32_t got[32][4];
    run(32, [&] { cuda_cpu::ldmatrix_x4(got[fiber()], memory[fiber() / 8][fiber() % 8], transposed); });
    for (int lane = 0; lane < 32; ++lane) {
      const int g = lane / 4, t = lane % 4 * 2;
      for (int m = 0; m < 4; ++m) {
        const uint32_t low = transposed ? memory[m][t][g] : memory[m][g][t];
        const uint32_t high = transposed ? memory[m][t + 1][g] : memory[m][g][t + 1];
        CHECK(got[lane][m] == (low | high << 16));
      }
    }
  }
}

TEST_CASE("warps: reads of rows in the same bank are counted", tag) {
  alignas(128) uint16_t memory[8][64];  // rows of 128 bytes: a column is in one bank
  const auto conflicts = [&](bool permuted) {
    const long before = cuda_cpu::row_reads().with_conflicts;
    run(32, [&] {
      const unsigned row = fiber() % 8, chunk = permuted ? row : 0;
      uint32_t registers[4];
      cuda_cpu::ldmatrix_x4(registers, memory[row] + 8 * chunk, false);
    });
    return cuda_cpu::row_reads().with_conflicts - before;
  };
  CHECK(conflicts(false) == 4);
  CHECK(conflicts(true) == 0);
}

TEST_CASE("warps: values pass between lanes, and copies are there after the wait and the barrier", tag) {
  constexpr unsigned threads = 128;
  float from[threads], to[threads], sums[threads];
  for (unsigned i = 0; i < threads; ++i) from[i] = static_cast<float>(i);
  for (int round = 0; round < 100; ++round) {
    std::fill(std::begin(to), std::end(to), -1.0f);
    run(threads, [&] {
      const unsigned self = fiber();
      cuda_cpu::cp_async(&to[self], &from[self], sizeof(float), self % 2 == 1);
      cuda_cpu::cp_async_wait_all();
      cuda_cpu::synchronize_fibers();
      float sum = to[(self + 33) % threads];  // of another warp
      sum += cuda_cpu::shuffle_xor(sum, 1);
      sums[self] = sum + cuda_cpu::shuffle_xor(sum, 2);
    });
    for (unsigned i = 0; i < threads; ++i) {
      float want = 0;  // of the four lanes of i
      for (unsigned j = i / 4 * 4; j < i / 4 * 4 + 4; ++j) {
        const unsigned source = (j + 33) % threads;
        want += source % 2 == 1 ? 0 : from[source];
      }
      REQUIRE(sums[i] == want);
    }
  }
}

}  // namespace
