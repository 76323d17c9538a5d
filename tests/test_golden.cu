// The whole model against PyTorch in float64: make_golden.py wrote the files that are read here.
// precisions: fp64 bf16
#include "catch.h"
#include "device/mapped_file.h"
#include "golden.h"
#include "model.h"
#include "reference.h"

using namespace pentatron;

namespace {

// fp64: far above rounding, far below any mistake. The others: k * C^depth * epsilon with k = 4, C = 1.03
// (TTrace, arXiv 2506.09280) and epsilon 2^-23 (fp32), 2^-10 (fp16) and 2^-7 (bf16). The depth of the logits
// is the modules from the tokens to them: the embedding, eight in each of two layers (norm, q k v, attention,
// o, norm, gate and up, SwiGLU, down), final norm and head. A gradient has passed them twice. Weights are
// compared in fp64 only: AdamW's first steps go in the direction of a sign, which rounding can flip.
constexpr int modules = 1 + 2 * 8 + 2;
double tolerance(int depth) {
  if (PRECISION == 64) return 1e-10;
  return 4 * std::pow(1.03, depth) * epsilon<real>();
}

int integer(const Golden& golden, const std::string& key) { return std::stoi(golden.metadata(key)); }
double number(const Golden& golden, const std::string& key) { return std::stod(golden.metadata(key)); }

Options golden_options(const Golden& g) {
  Options o = test_options(integer(g, "layers"), integer(g, "d_model"), integer(g, "heads"),
                           integer(g, "kv_heads"), integer(g, "d_ff"), integer(g, "vocab_size"),
                           integer(g, "seq_len"), integer(g, "micro_batch_size"),
                           integer(g, "micro_batch_size") * integer(g, "micro_batches"));
  o.model.rope_theta = number(g, "rope_theta");
  o.model.norm_epsilon = number(g, "norm_eps");
  o.steps = integer(g, "steps");
  o.warmup_steps = integer(g, "warmup_steps");
  o.lr = number(g, "lr");
  o.beta1 = number(g, "beta1");
  o.beta2 = number(g, "beta2");
  o.weight_decay = number(g, "weight_decay");
  o.grad_clip = number(g, "grad_clip");
  return o;
}

std::vector<HostBatch> golden_batches(const Golden& g, const Options& o) {
  const size_t rows = o.micro_batch_size * o.sequence_length;
  const std::vector<double> tokens = g["tokens"], targets = g["targets"];
  std::vector<HostBatch> batches(o.global_batch_size / o.micro_batch_size);
  for (size_t i = 0; i < batches.size() * rows; ++i) {
    batches[i / rows].tokens.push_back(static_cast<int32_t>(tokens[i]));
    batches[i / rows].targets.push_back(static_cast<int32_t>(targets[i]));
  }
  return batches;
}

void load_weights(TestModel& model, const Golden& golden) {
  for (size_t id = 0; id < model.parameters.all().size(); ++id) {
    const auto& name = model.parameters[id].name;
    to_device(golden["weights/" + name], model.parameters.weights(id).data, model.stream);
  }
  model.optimizer =
      std::make_unique<Optimizer>(model.options, model.parameters, model.stream);  // copies master weights
}

}  // namespace

TEST_CASE("logits, loss and gradients are PyTorch's", "[01][golden]") {
  const std::string file = GENERATE("mha", "gqa");
  const Recompute recompute = GENERATE(Recompute::none, Recompute::selective, Recompute::full);
  const Attention attention = GENERATE(Attention::naive, Attention::tiled);
  CAPTURE(file, to_string(recompute), to_string(attention));
  const Golden golden(in_tree("tests") + "/golden/" + file + ".safetensors");
  Options options = golden_options(golden);
  options.recompute = recompute;
  options.attention = attention;
  TestModel model(options);
  load_weights(model, golden);
  const std::vector<HostBatch> batches = golden_batches(golden, options);

  std::vector<double> logits;
  for (const Batch& batch : model.loader.load(batches, model.stream)) {
    model.transformer->forward(batch, *model.activations);
    for (const double logit : to_host(model.activations->logits, model.stream)) logits.push_back(logit);
  }
  CHECK(relative_error(logits, golden["logits"]) < tolerance(modules));

  model.accumulate(batches);
  model.totals.wait();
  CHECK(relative_error({model.totals.host_loss()}, {golden["loss"][0]}) < tolerance(modules));
  const double scale = has_loss_scale ? options.loss_scale : 1;  // which the optimizer's step takes out
  CHECK(relative_error({model.totals.host_norm() / scale}, {golden["grad_norm"][0]}) <
        tolerance(2 * modules));
  for (size_t id = 0; id < model.parameters.all().size(); ++id) {
    const auto& name = model.parameters[id].name;
    CAPTURE(name);
    CHECK(relative_error(model.gradients(id), golden["gradients/" + name]) < tolerance(2 * modules));
  }
}

#if PRECISION == 64
TEST_CASE("weights after three AdamW steps are PyTorch's", "[01][golden]") {
  const std::string file = GENERATE("mha", "gqa");
  const Golden golden(in_tree("tests") + "/golden/" + file + ".safetensors");
  const Options options = golden_options(golden);
  TestModel model(options);
  load_weights(model, golden);
  const std::vector<HostBatch> batches = golden_batches(golden, options);

  for (int step = 0; step < integer(golden, "optimizer_steps"); ++step) {
    model.train_step(step, batches);
    CHECK(relative_error({model.totals.host_loss()}, {golden["loss"][step]}) < 1e-9);
    const double scale = has_loss_scale ? options.loss_scale : 1;  // which the optimizer's step takes out
    CHECK(relative_error({model.totals.host_norm() / scale}, {golden["grad_norm"][step]}) < 1e-9);
  }
  for (size_t id = 0; id < model.parameters.all().size(); ++id) {
    const auto& name = model.parameters[id].name;
    CAPTURE(name);
    CHECK(relative_error(model.weights(id), golden["weights_after/" + name]) < 1e-9);
  }
  for (int step = 0; step < options.steps; ++step) {
    CHECK(relative_error({learning_rate(options, step)}, {golden["lr"][step]}) < 1e-14);
  }
}
#endif
