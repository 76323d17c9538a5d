// The memory prediction for models that no test can allocate.

#include "catch.h"
#include "model/memory.h"
#include "run/parse_options.h"

using namespace pentatron;

namespace {

constexpr double gib = 1024.0 * 1024 * 1024;

MemoryPrediction llama_8b(int stage) {
  const char* arguments[] = {"program", "--model", "llama-3.1-8b"};
  const ElementSizes bf16 = {2, 4, true};
  return predict_memory(parse_options<Options>(3, arguments, ""), bf16, 8,
                        {.replicas = {8}, .sharded_states = stage});
}

}  // namespace

// Rajbhandari et al. (2020), section 3, with gradients of 4 bytes: K = 12 bytes of optimizer state a
// parameter.
TEST_CASE("03: memory of Llama-8B on eight ranks is as published", "[03][memory]") {
  const double all = 8'030'261'248 / gib;  // parameters
  for (int stage = 0; stage <= 3; ++stage) {
    INFO("stage " << stage);
    const MemoryPrediction p = llama_8b(stage);
    CHECK(p.resident[0] / gib == Approx(2 * all / (stage >= 3 ? 8 : 1)).epsilon(1e-6));
    CHECK(p.resident[1] / gib == Approx(4 * all / (stage >= 2 ? 8 : 1)).epsilon(1e-6));
    CHECK(p.resident[2] / gib == Approx(12 * all / (stage >= 1 ? 8 : 1)).epsilon(1e-6));
    // Two units; the largest is the head with its norm.
    const double unit = (128256 * 4096.0 + 4096) / gib;
    CHECK(p.unit_buffers[0] / gib == Approx(stage >= 3 ? 2 * 2 * unit : 0).epsilon(1e-6));
    CHECK(p.unit_buffers[1] / gib == Approx(stage >= 2 ? 2 * 4 * unit : 0).epsilon(1e-6));
  }
}
