// fp16: what a loss scale saves from becoming 0.
// precisions: fp64 fp32 fp16
#include "catch.h"
#include "model.h"
#include "model/data.h"

#ifdef REAL_IS_HALF

#include <cmath>
#include <cstdio>
#include <map>

namespace pentatron {
namespace {

// One micro-batch of the project's text, 4096 tokens, as a step of many micro-batches has it: each token's
// loss counts 2^-20.
Options text_options(double loss_scale) {
  Options o = test_options(/*layers=*/2, /*d_model=*/32, /*heads=*/4, /*kv_heads=*/4, /*d_ff=*/64,
                           /*vocab_size=*/256, /*sequence=*/128, /*micro_batch=*/32, /*global_batch=*/32);
  o.loss_scale = loss_scale;
  return o;
}

struct Gradients {
  std::vector<double> logits;                // [rows * vocabulary], scaled
  std::vector<std::vector<double>> weights;  // [parameters], not scaled
};

Gradients gradients_of(const Options& options) {
  TestModel model(options);
  const TokenData data(in_tree("common/corpus.txt"), options.model.vocab_size, options.sequence_length);
  BatchLoader loader(data, options, 0, 1);
  Gradients result;
  for (Batch batch : loader.load(0, model.stream)) {
    batch.inverse_target_tokens = 0x1p-20;
    model.transformer->forward(batch, *model.activations);
    model.transformer->backward(batch, *model.activations);
    result.logits = to_host(model.activations->logits, model.stream);
  }
  for (int id = 0; id < std::ssize(model.parameters.all()); ++id)
    result.weights.push_back(model.gradients(id));
  return result;
}

double share_of_zeros(const std::vector<double>& x) {
  return static_cast<double>(std::count(x.begin(), x.end(), 0.0)) / static_cast<double>(x.size());
}

}  // namespace

TEST_CASE("fp16: a loss scale of 1 loses gradients that 65536 keeps", "[01]") {
  const Gradients scaled = gradients_of(text_options(65536)), plain = gradients_of(text_options(1));
  CHECK(share_of_zeros(plain.logits) > 0.9);
  CHECK(share_of_zeros(scaled.logits) < 0.001);
  CHECK(share_of_zeros(plain.weights[0]) > share_of_zeros(scaled.weights[0]));
  // Four times as much gives the same gradients: all of them are exact multiples, or rounded alike.
  const Gradients more = gradients_of(text_options(4 * 65536));
  for (size_t id = 0; id < scaled.weights.size(); ++id) {
    CAPTURE(id);
    CHECK(relative_error(scaled.weights[id], more.weights[id]) < 0x1p-10);
    CHECK(relative_error(plain.weights[id], more.weights[id]) > 0x1p-10);
  }
}

// The first step that is taken moves weights by the learning rate of its number. For AdamW it is the first.
TEST_CASE("fp16: a scale that is too large falls until nothing overflows", "[01]") {
  Options options = text_options(0x1p40);
  options.steps = options.warmup_steps = 100, options.weight_decay = 0;
  TestModel model(options);
  const std::vector<HostBatch> batches = random_batches(options, 1);
  const auto master = [&] { return to_host(model.optimizer->states(0).back(), model.stream); };
  const std::vector<double> before = model.weights(0), master_before = master();
  int step = 0;
  double factor = options.loss_scale;
  for (bool overflowed = true; overflowed; ++step) {
    REQUIRE(step < 40);
    model.accumulate(batches);
    model.optimizer->step(step, model.totals.norm_squared());
    model.totals.send(model.parameters.loss_scale());
    model.totals.receive();
    const LossScale now = model.totals.host_loss_scale();
    overflowed = now.skipped == step + 1;
    CHECK(std::isfinite(model.totals.host_norm()) == !overflowed);
    CHECK((model.weights(0) == before) == overflowed);
    CHECK(now.factor == (overflowed ? factor / 2 : factor));
    factor = now.factor;
  }
  double moved = 0;
  const std::vector<double> after = master();
  for (size_t i = 0; i < after.size(); ++i) moved = std::max(moved, std::abs(after[i] - master_before[i]));
  CHECK(moved == Approx(learning_rate(options, step - 1)).epsilon(0.01));
  CHECK(step > 5);
  CHECK(factor > 65536);
}

// Prints the table of 01_single_gpu/precision.md: gradients of the logits by the power of two below them.
TEST_CASE("fp16: table of exponents", "[.exponents]") {
  const Gradients scaled = gradients_of(text_options(65536)), plain = gradients_of(text_options(1));
  std::map<int, std::pair<int, int>> counts;
  const double all = static_cast<double>(scaled.logits.size());
  for (size_t i = 0; i < scaled.logits.size(); ++i) {
    const double size = std::abs(scaled.logits[i]) / 65536;
    std::pair<int, int>& count = counts[size == 0 ? -99 : std::ilogb(size)];
    ++count.first, count.second += plain.logits[i] == 0;
  }
  std::printf("2^  gradients, %%  of them 0 without a scale, %%\n");
  for (const auto& [exponent, count] : counts)
    std::printf("%4d %6.2f %6.1f\n", exponent, 100 * count.first / all, 100.0 * count.second / count.first);
  std::printf("zeros: %.2f %% with, %.2f %% without\n", 100 * share_of_zeros(scaled.logits),
              100 * share_of_zeros(plain.logits));
}

}  // namespace pentatron

#endif
