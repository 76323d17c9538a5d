#include "options/options.h"

#include <cmath>
#include <iomanip>
#include <sstream>
#include <vector>

namespace pentatron {
namespace {

struct Preset {
  ModelConfig model;
  int sequence_length;
  double lr;
};

// As published with each model's weights. The head is always untied here.
const std::vector<Preset> presets = {
    // name, layers, d_model, heads, kv_heads, d_ff, vocab_size, rope_theta, norm_epsilon, rope_scaling
    {{"tiny", 8, 64, 8, 8, 192, 256, 1e4, 1e-5}, 128, 3e-3},
    {{"smollm-135m", 30, 576, 9, 3, 1536, 49152, 1e4, 1e-5}, 1024, 3e-4},
    {{"smollm-1.7b", 24, 2048, 32, 32, 8192, 49152, 1e4, 1e-5}, 1024, 3e-4},
    {{"llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 5e5, 1e-5, {32, 1, 4, 8192}}, 1024, 3e-4},
    {{"llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 1e4, 1e-5}, 1024, 3e-4},
    {{"llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 5e5, 1e-5, {8, 1, 4, 8192}}, 1024, 3e-4},
    {{"llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 5e5, 1e-5, {8, 1, 4, 8192}}, 1024, 1.5e-4},
    {{"llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256, 5e5, 1e-5, {8, 1, 4, 8192}}, 1024, 8e-5},
};

void use_preset(Options& options, const std::string& name) {
  std::vector<std::string> names;
  for (const Preset& preset : presets) {
    names.push_back(preset.model.name);
    if (preset.model.name != name) continue;
    options.model = preset.model;
    options.sequence_length = preset.sequence_length;
    options.lr = preset.lr;
    return;
  }
  throw UsageError("--model", name, "one of " + join(names, ", "));
}

std::string table_of_presets() {
  std::ostringstream table;
  const auto row = [&](const std::string& name, const auto&... cells) {
    table << "  " << std::left << std::setw(14) << name << std::right;
    ((table << std::setw(12) << cells), ...);
    table << '\n';
  };
  table << "Models:\n";
  row("name", "layers", "d-model", "heads", "kv-heads", "d-ff", "vocab-size");
  for (const Preset& preset : presets) {
    const ModelConfig& m = preset.model;
    row(m.name, m.layers, m.d_model, m.heads, m.kv_heads, m.d_ff, m.vocab_size);
  }
  return table.str();
}

}  // namespace

void check_sizes(const Options& o) {
  int exponent = 0;
  const double fraction = std::frexp(o.loss_scale, &exponent);
  require(fraction == 0.5, "--loss-scale", o.loss_scale, "a power of two");
  const ModelConfig& m = o.model;
  const int head = m.head_size();
  require(m.d_model % m.heads == 0, "--heads", m.heads, "a divisor of --d-model (", m.d_model, ")");
  require(head % 2 == 0, "--heads", m.heads,  // rotary positions turn pairs of features
          "an even head size; --d-model / --heads is ", head);
  require(o.attention != Attention::tiled || head <= largest_tiled_head, "--attention", "tiled",
          "naive where --d-model / --heads (", head, ") is more than ", largest_tiled_head);
  require(o.attention != Attention::tensor_core || has_tensor_core_kernels(head) ||
              (o.dry_run && models_any_head(o.gpu)),
          "--attention", "tensor-core", "naive or tiled where --d-model / --heads (", head,
          ") is neither 64 nor 128");
  require(m.heads % m.kv_heads == 0, "--kv-heads", m.kv_heads, "a divisor of --heads (", m.heads, ")");
  const int batch = o.micro_batch_size, sequence = o.sequence_length;
  require(o.global_batch_size % batch == 0, "--global-batch-size", o.global_batch_size,
          "a multiple of --micro-batch-size (", batch, ")");
  constexpr int64_t most_rows = 1 << 24;  // rows of tokens are counted in int, and so are rows x heads
  require(int64_t{batch} * sequence <= most_rows, "--micro-batch-size", batch, "at most ",
          most_rows / sequence, " with --seq-len ", sequence);
  require(o.save_every == 0 || !o.save.empty(), "--save-every", o.save_every, "0 without --save");
  const std::string trains_nothing = " with --dry-run, which trains nothing";
  require(!o.dry_run || o.save.empty(), "--save", o.save, "none", trains_nothing);
  require(!o.dry_run || o.load_folder.empty(), o.load_option(), o.load_folder, "none", trains_nothing);
  require(!o.dry_run || o.sample == 0, "--sample", o.sample, "0", trains_nothing);
}

void declare_common(CommandLine& line, Options& o) {
  line.group("Checkpoints");
  line.words("--save", "DIR", o.save, "write checkpoints into this folder, at least at the end");
  line.number("--save-every", o.save_every, 0, 1'000'000'000, "steps between two of them, 0: none");
  line.flag("--resume", o.resume, "continue from --save, if it has a checkpoint");
  line.words("--load", "DIR", o.load, "continue the run that saved this; what is not given is as it was");
  line.words("--load-weights", "DIR", o.load_weights,
             "begin with the weights of a Llama in Hugging Face's format");

  ModelConfig& m = o.model;
  use_preset(o, presets.front().model.name);
  line.group("Model");
  const auto use = [&](const std::string& name) { use_preset(o, name); };
  line.add("--model", "NAME", "sizes of a model, see below", use, [&] { return m.name; });
  line.number("--layers", m.layers, 1, 1000, "decoder layers");
  line.number("--d-model", m.d_model, 2, 65536, "width of the residual stream");
  line.number("--heads", m.heads, 1, 1024, "attention heads");
  line.number("--kv-heads", m.kv_heads, 1, 1024, "key and value heads");
  line.number("--d-ff", m.d_ff, 1, 1'000'000, "width of the MLP");
  line.number("--vocab-size", m.vocab_size, 2, 1'000'000, "tokens in the vocabulary");

  line.group("Data and batches");
  line.words("--data", "FILE", o.data, "text, or *.bin: tokens of nanoGPT or llm.c", "common/corpus.txt");
  line.reads("--data", o.data);
  line.number("--seq-len", o.sequence_length, 1, 1 << 20, "tokens in a sequence");
  line.number("--micro-batch-size", o.micro_batch_size, 1, 1 << 16, "sequences in one forward and backward");
  line.number("--global-batch-size", o.global_batch_size, 1, 1 << 20, "sequences in one optimizer step");
  line.number("--steps", o.steps, 1, 1'000'000'000, "optimizer steps");
  line.number("--seed", o.seed, 0, UINT64_MAX, "of the initial weights and the choice of text");

  line.group("Optimizer");
  line.choice("--optimizer", o.optimizer, optimizer_names, "what turns gradients into updates");
  line.number("--lr", o.lr, 0, 1000, "highest learning rate; it falls to a tenth");
  line.number("--warmup-steps", o.warmup_steps, 0, 1'000'000'000, "steps in which the learning rate grows");
  line.number("--beta1", o.beta1, 0, 0.999999, "decay of AdamW's first moment");
  line.number("--beta2", o.beta2, 0, 0.999999, "decay of AdamW's second moment");
  line.number("--weight-decay", o.weight_decay, 0, 1000, "decoupled, matrices only");
  line.number("--grad-clip", o.grad_clip, 0, 1e9, "highest norm of the gradient, 0: any");
  line.number("--loss-scale", o.loss_scale, 1, 0x1p40, "in fp16: factor of the gradients at first");

  line.group("Memory");
  line.choice("--recompute", o.recompute, recompute_names, "activations that backward computes again");
  line.choice("--attention", o.attention, attention_names,
              "scores in memory, in tiles, or tiles on tensor cores");
  line.group("Output");
  line.words("--log-json", "FILE", o.log_json, "write each step and a summary, a JSON object a line");
  line.words("--trace", "FILE", o.trace, "write a Chrome trace of the last step");
  line.writes("--log-json", o.log_json);
  line.writes("--trace", o.trace);
  line.flag("--profile", o.profile, "print how long each kernel took in the last step");
  line.number("--log-every", o.log_every, 1, 1'000'000'000, "steps between two printed lines");
  line.number("--sample", o.sample, 0, 1'000'000, "tokens of text that the trained model writes at the end");

  declare_device(line, o);
  line.footer(models_and_gpus());
}

std::string models_and_gpus() {
  std::string text = table_of_presets() + "\nGPUs (--gpu, common/clock/profiles):";
  std::istringstream names(names_in_tree("common/clock/profiles"));
  int number = 0;
  for (std::string name; names >> name;) text += (number++ % 6 == 0 ? "\n  " : " ") + name;
  return text;
}

void declare_device(CommandLine& line, DeviceConfig& config) {
  line.group("Modelled GPU (CPU build)");
  line.words("--gpu", "NAME", config.gpu, "a name of those below, or a file like those", "h100");
  line.flag("--dry-run", config.dry_run, "compute nothing: count memory and time alone");
}

}  // namespace pentatron
