// The memory prediction for models that no test can allocate.
// precisions: fp64 bf16

#include "../03_zero/zero_memory.h"
#include "catch.h"
#include "run/parse_options.h"

namespace pentatron {
namespace {

// Rajbhandari et al. (2020), section 3, with gradients of 4 bytes: in bf16, K = 12 bytes of optimizer state a
// parameter.
TEST_CASE("03: memory of Llama-8B on eight ranks is as published", "[03][memory]") {
  const char* arguments[] = {"program", "--model", "llama-3.1-8b"};
  const Options options = parse_options<Options>(3, arguments, "");
  constexpr double gib = 1024.0 * 1024 * 1024;
  const double all = 8'030'261'248 / gib;                              // parameters
  const double unit = (128256 * 4096.0 + 4096) / gib;                  // the largest: the head with its norm
  const double weight = PRECISION / 8, sum = PRECISION == 64 ? 8 : 4;  // bytes
  const double k = PRECISION == 16 ? 12 : 2 * sum;
  // Arrays end at a multiple of 256 bytes: two of the optimizer, or three, for each of 34 units.
  const auto in_gib = [](double expected) { return Approx(expected).margin(34 * 3 * 256 / gib).epsilon(0); };
  for (int stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    auto [resident, unit_buffers] = zero_memory(options, {.zero_stage = stage}, 8);
    CHECK(resident[Purpose::weights] / gib == in_gib(weight * all / (stage >= 3 ? 8 : 1)));
    CHECK(resident[Purpose::gradients] / gib == in_gib(sum * all / (stage >= 2 ? 8 : 1)));
    CHECK(resident[Purpose::optimizer] / gib == in_gib(k * all / (stage >= 1 ? 8 : 1)));
    CHECK(unit_buffers[Purpose::weights] / gib == in_gib(stage >= 3 ? 2 * weight * unit : 0));
    CHECK(unit_buffers[Purpose::gradients] / gib == in_gib(stage >= 2 ? 2 * sum * unit : 0));
  }
}

}  // namespace
}  // namespace pentatron
