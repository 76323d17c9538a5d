// The model as a whole: gradients against finite differences, recomputation, repeatability, memory, and that
// it learns.
// precisions: fp64 bf16
#include <numeric>

#include "catch.h"
#include "kernels/attention.h"
#include "model.h"
#include "model/memory.h"
#include "run/program.h"

using namespace pentatron;

namespace {

// Sizes that are no multiple of anything, and two query heads for each key and value head.
Options odd_options() { return test_options(3, 20, 2, 1, 13, 11, 7, 3, 6); }

// Everything one step leaves behind, bit for bit: loss, norm, gradients, weights.
std::vector<double> fingerprint(const Options& options) {
  TestModel model(options);
  std::vector<double> numbers;
  const auto append = [&](const std::vector<double>& more) {
    numbers.insert(numbers.end(), more.begin(), more.end());
  };
  for (int step = 0; step < 2; ++step) {
    model.train_step(step, random_batches(options, step));
    append({model.totals.host_loss(), model.totals.host_norm()});
  }
  for (size_t id = 0; id < model.parameters.all().size(); ++id) {
    append(model.gradients(id));
    append(model.weights(id));
  }
  return numbers;
}

// What the model tells its hooks in backward.
struct RecordingHooks : UnitHooks {
  std::vector<std::string> events;
  void before_weights(int unit, Pass pass) override {
    if (pass == Pass::backward) events.push_back("weights of " + std::to_string(unit));
  }
  void after_gradients(int unit, bool) override { events.push_back("gradients of " + std::to_string(unit)); }
};

MemoryBytes minus(MemoryBytes a, const MemoryBytes& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i];
  return a;
}

}  // namespace

#if PRECISION == 64
TEST_CASE("a unit's gradients are complete before backward goes on to the next unit", "[01][02]") {
  RecordingHooks hooks;
  const Options options = odd_options();  // three layers, two micro-batches
  TestModel model(options, {&hooks});
  model.train_step(0, random_batches(options, 1));
  std::vector<std::string> expected;
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    for (const char* unit : {"4", "3", "2", "1"}) {
      expected.push_back(std::string("weights of ") + unit);
      expected.push_back(std::string("gradients of ") + unit);
    }
    expected.push_back("gradients of 0");
  }
  CHECK(hooks.events == expected);
}

TEST_CASE("gradients are the slopes of the loss", "[01][transformer]") {
  Options options = odd_options();
  TestModel model(options);
  std::vector<HostBatch> batches = random_batches(options, 1);
  for (size_t row = 0; row < batches[0].targets.size(); row += 3) batches[0].targets[row] = ignored_target;
  const auto loss = [&] {
    model.accumulate(batches);
    model.totals.wait();
    return model.totals.host_loss();
  };

  loss();
  const int id =
      GENERATE(range(0, 2 + 9 * 3 + 1));  // every parameter: embedding, nine a layer, final norm, head
  REQUIRE(id < std::ssize(model.parameters.all()));
  CAPTURE(model.parameters[id].name);
  const std::vector<double> gradient = model.gradients(id), weights = model.weights(id);
  std::vector<double> direction;  // along the gradient and across it
  for (size_t i = 0; i < weights.size(); ++i)
    direction.push_back(gradient[i] + 0.01 * std::sin(double(i + 1)));
  const double slope = std::inner_product(gradient.begin(), gradient.end(), direction.begin(), 0.0);
  const double step =
      1e-4 / std::sqrt(std::inner_product(direction.begin(), direction.end(), direction.begin(), 0.0));
  const auto loss_at = [&](double distance) {
    std::vector<double> moved = weights;
    for (size_t i = 0; i < moved.size(); ++i) moved[i] += distance * step * direction[i];
    to_device(moved, model.parameters.weights(id).data, model.stream);
    return loss();
  };
  // Central differences of fourth order: the error is of order step^4 and of rounding, both below 1e-8 here.
  const double measured = (8 * (loss_at(1) - loss_at(-1)) - (loss_at(2) - loss_at(-2))) / (12 * step);
  CHECK(std::abs(measured - slope) < 1e-7 * std::abs(slope));
}
#endif

TEST_CASE("recomputation leaves every bit as it is", "[01][transformer]") {
  Options options = odd_options();
  options.attention = GENERATE(Attention::naive, Attention::tiled);
  const std::vector<double> kept = fingerprint(options);
  options.recompute = GENERATE(Recompute::selective, Recompute::full);
  CHECK(fingerprint(options) == kept);
}

TEST_CASE("a run repeats bit for bit", "[01][transformer]") {
  CHECK(fingerprint(odd_options()) == fingerprint(odd_options()));
}

TEST_CASE("one batch accumulated in parts has the gradient of the whole", "[01][transformer]") {
  Options whole = odd_options(), parts = odd_options();
  whole.micro_batch_size = 6;
  parts.micro_batch_size = 1;
  TestModel a(whole), b(parts);
  const HostBatch all = random_batches(whole, 3)[0];
  std::vector<HostBatch> split(6);
  for (size_t row = 0; row < all.tokens.size(); ++row) {
    split[row / whole.sequence_length].tokens.push_back(all.tokens[row]);
    split[row / whole.sequence_length].targets.push_back(all.targets[row]);
  }
  a.accumulate({all});
  b.accumulate(split);
  // The order of sums differs: rounding of `real` in the activations, times the depth of three layers.
  const double tolerance = PRECISION == 64 ? 1e-13 : PRECISION == 32 ? 2e-6 : 4e-2;
  for (size_t id = 0; id < a.parameters.all().size(); ++id) {
    CAPTURE(a.parameters[id].name);
    CHECK(relative_error(b.gradients(id), a.gradients(id)) < tolerance);
  }
}

// Of the initialisation (kaiming uniform's): 1 / sqrt(3 fan_in), and what adds to the stream is smaller.
TEST_CASE("weights begin with the standard deviation of their layer", "[01][transformer]") {
  const Options options = test_options(/*layers=*/2, /*d_model=*/64, /*heads=*/4, /*kv_heads=*/2,
                                       /*d_ff=*/192, /*vocab_size=*/100, /*sequence=*/4, 1, 1);
  TestModel model(options);
  for (int id = 0; id < std::ssize(model.parameters.all()); ++id) {
    const Parameter& p = model.parameters[id];
    CAPTURE(p.name);
    const std::vector<double> weights = model.weights(id);
    if (p.rows == 1) {  // a norm's
      CHECK(std::all_of(weights.begin(), weights.end(), [](double w) { return w == 1; }));
      continue;
    }
    const bool onto_stream = p.name.ends_with("o_proj.weight") || p.name.ends_with("down_proj.weight");
    const double expected = std::sqrt(1 / (3.0 * p.columns)) / (onto_stream ? std::sqrt(2.0 * 2) : 1);
    double squares = 0;
    for (const double w : weights) squares += w * w;
    CHECK(std::sqrt(squares / weights.size()) == Approx(expected).epsilon(0.06));
  }
}

// 6 for each of 2 * 49,152 weights of layers, 5 * 64 of norms and 6,400 of the head; 12 * 2 * 64 * 4 for
// attention.
TEST_CASE("floating-point operations of a token, counted by hand", "[01][transformer]") {
  const Options options = test_options(/*layers=*/2, /*d_model=*/64, /*heads=*/4, /*kv_heads=*/2,
                                       /*d_ff=*/192, /*vocab_size=*/100, /*sequence=*/4, 1, 1);
  CHECK(flops_per_token(options) == 6 * 105'024 + 12 * 2 * 64 * 4);
}

// Of a layer's 49,152 weights above 36,864 are the MLP's. A token uses three such experts, not eleven, and
// each layer's router of 64 * 10.
TEST_CASE("floating-point operations of a token count the experts that it uses", "[07][experts]") {
  Options options = test_options(2, 64, 4, 2, 192, 100, 4, 1, 1);
  options.model.experts = 10, options.model.top_k = 2, options.model.shared_experts = 1;
  CHECK(flops_per_token(options) == 6 * (105'024 + 2 * (2 * 36'864 + 640)) + 12 * 2 * 64 * 4);
}

#if PRECISION == 64
// As Llama 3.1 publishes it, in wavelengths: those that fit into the original context high_freq_factor times
// stay, those that don't fit low_freq_factor times grow by the factor, and between them the frequency is a
// mean.
TEST_CASE("rotary frequencies of Llama 3, also between those that stay and those that grow", "[01]") {
  ModelConfig model = {"x", 1, 128, 2, 2, 8, 8, 1e4, 1e-5, {8, 1, 4, 64}};
  const std::vector<double> scaled = rotary_frequencies(model);
  REQUIRE(scaled.size() == 32);
  int stay = 0, between = 0, grow = 0;
  for (int i = 0; i < 32; ++i) {
    CAPTURE(i);
    const double frequency = 1 / std::pow(10'000, 2 * i / 64.0),
                 wavelength = 2 * 3.141592653589793 / frequency;
    double expected = frequency;
    if (wavelength > 64 / 1.0) {
      expected = frequency / 8, ++grow;
    } else if (wavelength > 64 / 4.0) {
      const double smooth = (64 / wavelength - 1) / (4 - 1);
      expected = (1 - smooth) * frequency / 8 + smooth * frequency, ++between;
    } else {
      ++stay;
    }
    CHECK(scaled[i] == Approx(expected).epsilon(1e-14));
  }
  CHECK(stay == 4);
  CHECK(between == 5);
  CHECK(grow == 23);
}
#endif

TEST_CASE("memory is as predicted", "[01][transformer][memory]") {
  Options options =
      GENERATE(test_options(2, 64, 4, 2, 96, 256, 32, 2, 4), test_options(4, 48, 6, 6, 128, 100, 64, 3, 3),
               test_options(1, 128, 8, 4, 200, 300, 100, 1, 4));
  options.recompute = GENERATE(Recompute::none, Recompute::selective, Recompute::full);
  options.optimizer = GENERATE(OptimizerKind::adamw, OptimizerKind::sgd);
  options.attention = GENERATE(Attention::naive, Attention::tiled);
  CAPTURE(options.model.d_model, to_string(options.recompute), to_string(options.optimizer),
          to_string(options.attention));
  const MemoryBytes before = memory_in_use();
  TestModel model(options);
  const MemoryBytes measured = minus(memory_in_use(), before), predicted = predict_memory(options).total();
  for (size_t i = 0; i < purposes; ++i) {
    CAPTURE(purpose_names[i], predicted[i], measured[i]);
    CHECK(measured[i] == predicted[i]);
  }
}

// A step's loss and gradients with one kind of attention are those with the other.
void check_attention(Options options, Attention reference, Attention kind) {
  options.recompute = GENERATE(Recompute::none, Recompute::selective, Recompute::full);
  CAPTURE(to_string(options.recompute));
  options.attention = reference;
  TestModel want(options);
  options.attention = kind;
  TestModel got(options);
  for (TestModel* model : {&want, &got}) {
    model->accumulate(random_batches(options, 1));
    model->totals.wait();
  }
  const double tolerance = PRECISION == 64 ? 1e-11 : PRECISION == 32 ? 1e-5 : 4e-2;
  CHECK(relative_error({got.totals.host_loss()}, {want.totals.host_loss()}) < tolerance);
  for (size_t id = 0; id < want.parameters.all().size(); ++id) {
    CAPTURE(want.parameters[id].name);
    CHECK(relative_error(got.gradients(id), want.gradients(id)) < tolerance);
  }
}

TEST_CASE("tiled attention: a step has the naive one's loss and gradients", "[06][transformer]") {
  // 70 tokens are more than a tile; two query heads for each key and value head.
  check_attention(test_options(3, 20, 2, 1, 13, 11, 70, 2, 4), Attention::naive, Attention::tiled);
}

TEST_CASE("attention on tensor cores: a step has the tiled one's loss and gradients", "[06][transformer]") {
  try {
    require_tensor_cores();
  } catch (const UsageError&) {  // the model refuses it, too, where it is not to be used
    CHECK_THROWS_AS(AttentionCore(Attention::tensor_core), UsageError);
    return;
  }
  const int head_size = GENERATE(64, 128);
  check_attention(test_options(2, 2 * head_size, 2, 1, 64, 11, 150, 2, 4), Attention::tiled,
                  Attention::tensor_core);
}

TEST_CASE("tiled attention: memory is linear in the sequence", "[06][transformer][memory]") {
  // Above 256 rows, where rmsnorm_bands no longer grows, so that every term is linear but the scores.
  const auto bytes = [](Attention attention, Recompute recompute, int sequence) {
    Options options = test_options(2, 16, 4, 2, 8, 11, sequence, 1, 1);
    options.attention = attention;
    options.recompute = recompute;
    const size_t before = memory_in_use()[3];
    const TestModel model(options);
    const size_t measured = memory_in_use()[3] - before;
    CHECK(measured == predict_memory(options).total()[Purpose::activations]);
    return static_cast<int64_t>(measured);
  };
  for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
    CAPTURE(to_string(recompute));
    const auto growth = [&](Attention attention, int sequence) {
      return bytes(attention, recompute, sequence + 300) - bytes(attention, recompute, sequence);
    };
    CHECK(growth(Attention::tiled, 300) == growth(Attention::tiled, 600));
    CHECK(growth(Attention::naive, 300) < growth(Attention::naive, 600));
  }
}

TEST_CASE("no step allocates", "[01][transformer][memory]") {
  TestModel model(odd_options());
  const MemoryBytes before = memory_peak();
#ifdef CUDA_CPU
  const auto counts = [] {
    const cuda_cpu::Counters c = cuda_cpu::counters();
    return std::vector<long>{c.allocations, c.frees, c.synchronous_copies};
  };
  model.train_step(0, random_batches(model.options, 0));
  const std::vector<long> after_first = counts();
#endif
  for (int step = 1; step < 4; ++step) model.train_step(step, random_batches(model.options, step));
  CHECK(memory_peak() == before);
#ifdef CUDA_CPU
  CHECK(counts() == after_first);
#endif
}

TEST_CASE("one batch can be learned by heart", "[01][transformer]") {
  Options options = test_options(2, 32, 4, 2, 64, 17, 16, 4, 4);
  options.steps = 150;
  options.warmup_steps = 10;
  TestModel model(options);
  const std::vector<HostBatch> batches = random_batches(options, 5);
  for (int step = 0; step < options.steps; ++step) model.train_step(step, batches);
  CHECK(model.totals.host_loss() < 0.05);
}
