// The time of an operation on a modelled GPU (clock/device_profile.h).
#include <string>

#include "catch.h"
#include "clock/device_profile.h"
#include "device/errors.h"
#include "files.h"

using namespace pentatron;

TEST_CASE("profile: the slower of moving and computing decides", "[profile]") {
  DeviceProfile gpu = load_profile("unit");
  gpu.memory_bandwidth = 100, gpu.memory_achievable = 0.5;
  gpu.flops_fp32 = 1000, gpu.flops_bf16 = 8000;
  gpu.tiled_attention = 0.5;
  gpu.attention_64_forward = 0.5, gpu.attention_64_backward = 0.25;
  gpu.attention_128_forward = 0.2, gpu.attention_128_backward = 0.1;
  gpu.kernel_seconds = 1;
  CHECK(gpu.seconds(shortest_kernel) == 1);
  CHECK(gpu.seconds(moves(200)) == 1 + 4);
  CHECK(gpu.seconds({.bytes = 50, .flops = 2000}) == 1 + 4);
  CHECK(gpu.seconds({.bytes = 500, .flops = 2000}) == 1 + 10);
  CHECK(gpu.seconds({.flops = 8000, .unit = Cost::Unit::tensor_cores}) == 1 + 2);
  CHECK(gpu.seconds({.flops = 8000, .unit = Cost::Unit::tensor_cores, .backward = true}) == 1 + 4);
  CHECK(gpu.seconds({.flops = 8000, .unit = Cost::Unit::tensor_cores, .head_size = 128}) == 1 + 5);
  CHECK(gpu.seconds({.flops = 8000, .unit = Cost::Unit::tensor_cores, .backward = true, .head_size = 128}) ==
        1 + 10);
  gpu.flash_attention = 1, gpu.flash_forward = 0.8, gpu.flash_backward = 0.4;
  for (const int size : {64, 96, 128, 256}) {  // others' kernels take any head
    CHECK(gpu.seconds({.flops = 6400, .unit = Cost::Unit::tensor_cores, .head_size = size}) == 1 + 1);
    CHECK(
        gpu.seconds({.flops = 6400, .unit = Cost::Unit::tensor_cores, .backward = true, .head_size = size}) ==
        1 + 2);
  }
}

TEST_CASE("profile: products are tiles that multiprocessors take by turns", "[profile]") {
  DeviceProfile gpu = load_profile("unit");
  gpu.tile_rows = gpu.tile_columns = 64, gpu.multiprocessors = 4;
  gpu.flops_fp32 = 4 * 2 * 64 * 64;  // a wave of four tiles takes a second for each element of the sum
  const auto seconds = [&](int64_t m, int64_t n, int64_t k) {
    return gpu.seconds(products(m, n, k, 1, 4, 4, false));
  };
  CHECK(seconds(128, 128, 100) == Approx(100));
  CHECK(seconds(256, 256, 100) == Approx(400));
  // Five tiles take two waves, unless there are smaller tiles: here 20 of a quarter, at 85 %, in five waves.
  CHECK(seconds(320, 64, 100) == Approx(5 * 25 / 0.85));
  // One tile leaves three multiprocessors idle, unless its long sum is split.
  CHECK(seconds(64, 64, 100) == Approx(25 / 0.85));
  CHECK(seconds(64, 64, 4096) == Approx(4096 / 4.0));
  // The result is written after the sums.
  gpu.memory_bandwidth = 128 * 128 * 4;
  CHECK(seconds(128, 128, 1000) == Approx(1000 + 1));
  CHECK(gpu.seconds(products(128, 128, 1000, 1, 4, 4, true)) == Approx(1000 + 2));
}

TEST_CASE("profile: on an H100, published rates of cuBLAS", "[profile]") {
  const DeviceProfile h100 = load_profile("h100");
  const auto teraflops = [&](int64_t n) {
    return 2e-12 * static_cast<double>(n * n * n) / h100.seconds(products(n, n, n, 1, 2, 2, false));
  };
  INFO("4096: " << teraflops(4096) << ", 8192: " << teraflops(8192) << " TFLOP/s");
  CHECK(teraflops(4096) == Approx(716).epsilon(0.01));  // measured
  CHECK(teraflops(8192) == Approx(795).epsilon(0.07));
}

// 01_single_gpu/precision.md: in fp8 they took 60 to 75 % of the time that they took in bf16.
TEST_CASE("profile: products in fp8 take the share of bf16's time that was measured", "[profile]") {
  const auto share = [](const char* name, int64_t m, int64_t n, int64_t k, int result, bool adds) {
    const DeviceProfile gpu = load_profile(name);
    return gpu.seconds(products(m, n, k, 1, 1, result, adds)) /
           gpu.seconds(products(m, n, k, 1, 2, result, adds));
  };
  constexpr int64_t rows = 8 * 2048, d = 2048, f = 8192;  // smollm-1.7b
  for (const char* name : {"h100", "h200"}) {
    for (const auto& [in, out] : {std::pair{d, 3 * d}, {d, d}, {d, 2 * f}, {f, d}}) {
      CAPTURE(name, in, out);
      for (const double one : {share(name, rows, out, in, 2, false), share(name, rows, in, out, 2, false),
                               share(name, out, in, rows, 4, true)}) {
        CHECK(one > 0.60);
        CHECK(one < 0.75);
      }
    }
  }
  CHECK(share("b200", rows, f, f, 2, false) < 0.55);  // has no number of its own for fp8
}

// common/kernels/README.md: TFLOP/s of an H200 at 8,192 tokens, and of FlashAttention-2.
TEST_CASE("profile: attention on Hopper is as fast as this project's kernels were", "[profile]") {
  for (const char* name : {"h100", "h100-96gb", "h200", "h800"}) {
    CAPTURE(name);
    const DeviceProfile gpu = load_profile(name);
    const auto teraflops = [&](int size, bool backward) {
      const Cost cost = {.flops = 1e15,
                         .unit = Cost::Unit::tensor_cores,
                         .backward = backward,
                         .head_size = size,
                         .blocks = 1000};
      return 1e-12 * cost.flops / gpu.seconds(cost);
    };
    CHECK(teraflops(64, false) == Approx(266).epsilon(0.005));
    CHECK(teraflops(64, true) == Approx(183).epsilon(0.005));
    CHECK(teraflops(128, false) == Approx(270).epsilon(0.005));
    CHECK(teraflops(128, true) == Approx(160).epsilon(0.005));
    CHECK(gpu.flash_forward * gpu.flops_bf16 * 1e-12 == Approx(319).epsilon(0.005));
    CHECK(gpu.flash_backward * gpu.flops_bf16 * 1e-12 == Approx(285).epsilon(0.005));
  }
}

TEST_CASE("profile: shipped profiles are read, and a file that says which one it is like", "[profile]") {
  const pentatron::tests::TemporaryFolder folder;
  const std::string path =
      folder.write("gpu.json", R"({"name": "mine", "as": "b200", "memory_bandwidth": {"value": 7e12}})");
  CHECK(load_profile(path).name == "mine");
  CHECK(load_profile(path).memory_bandwidth == 7e12);
  CHECK(load_profile(path).memory_bytes == load_profile("b200").memory_bytes);
  for (const char* name : {"a100", "a100-40gb", "h100", "h100-96gb", "h200", "h800", "b200", "unit",
                           "h100-flash", "h100-megatron"})
    CHECK(load_profile(name).name == name);
  const DeviceProfile megatron = load_profile("a100-megatron");
  CHECK(megatron.multiprocessors == load_profile("a100").multiprocessors);
  CHECK(megatron.mlp_matrices == 2);
  const DeviceProfile nanotron = load_profile("h100-nanotron");  // as h100, but for what it says itself
  CHECK(nanotron.multiprocessors == load_profile("h100").multiprocessors);
  CHECK(nanotron.launch_seconds > load_profile("h100").launch_seconds);
}

TEST_CASE("profile: what a file says is refused in one line, whatever it is", "[profile]") {
  const pentatron::tests::TemporaryFolder folder;
  const auto complaint = [&](const std::string& text) -> std::string {
    try {
      load_profile(folder.write("gpu.json", text));
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  const std::string field = complaint(R"({"as": "h100", "line\nbreak": {"value": 1}})");
  CHECK(field.ends_with(R"(there is no field "line\nbreak")"));
  const std::string self = folder.path() + "/gpu", up = "../../../../../../../../../..";  // to the root
  const std::string base = complaint(R"({"as": ")" + up + self + R"("})");
  CHECK(base.ends_with(", unit, not \"" + up + self + "\""));
}
