// Gradients are sums in `accum`. In bf16 each term has few digits, but a sum must not lose more of them. So
// who adds, and when, changes only the last digits of `accum`.
// precisions: fp64 bf16
#include "gather.h"
#include "parallel_model.h"
#include "parity.h"
#include "reference.h"

namespace pentatron {
namespace {

// The gradients that techniques compute, compared with those of the first.
void check_same_sums(const std::vector<Technique>& techniques, const CombinedOptions& options, World& world,
                     Communicator& ranks) {
  std::vector<Tensors> gradients;
  for (const Technique& technique : techniques) {
    ParallelModel model(options, technique, world, ranks);
    model.accumulate(random_batches(options, 1));
    gradients.push_back(gather_parameters(world, model.parameters, Content::gradients, model.stream));
    for (size_t id = 0; id < gradients[0].size(); ++id) {
      INFO(model.parameters[static_cast<int>(id)].name);
      CHECK(relative_error(gradients.back()[id], gradients[0][id]) < 64 * epsilon<accum>());
    }
  }
}

}  // namespace

TEST_CASE("03: sums over micro-batches keep their digits", "[03]") {
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  const CombinedOptions options = test_options<CombinedOptions>(
      /*layers=*/2, /*d_model=*/16, /*heads=*/2, /*kv_heads=*/1, /*d_ff=*/24, /*vocab_size=*/32,
      /*sequence=*/16, /*micro_batch=*/2, /*global_batch=*/2 * 4 * world.ranks());
  check_same_sums({zero(1), zero(2), zero(3)}, options, world, ranks);
}

// Two ranks, because a sum of two has one order, whichever collective makes it.
TEST_CASE("04: sums of norms' gradients keep their digits", "[04]") {
  if (mpi_tests::ranks() % 2 != 0) return;
  World world(nullptr, nullptr);
  const int first = world.rank() / 2 * 2;
  Communicator ranks(world, {first, first + 1}, "ranks");
  const CombinedOptions options = test_options<CombinedOptions>(
      /*layers=*/2, /*d_model=*/16, /*heads=*/2, /*kv_heads=*/2, /*d_ff=*/24, /*vocab_size=*/32,
      /*sequence=*/16, /*micro_batch=*/2, /*global_batch=*/4);
  check_same_sums(
      {{.kind = Technique::tensor_parallel}, {.kind = Technique::tensor_parallel, .sequence_parallel = true}},
      options, world, ranks);
}

}  // namespace pentatron
