#include "run/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "checkpoint/checkpoint_folder.h"

namespace pentatron {
namespace {

struct Preset {
  ModelConfig model;
  int sequence_length;
  double lr;
};

// As published with each model's weights. The head is always untied here.
const std::vector<Preset>& presets() {
  static const std::vector<Preset> table = {
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
  return table;
}

void use_preset(Options& options, const std::string& name) {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) {
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
  for (const Preset& preset : presets()) {
    const ModelConfig& m = preset.model;
    row(m.name, m.layers, m.d_model, m.heads, m.kv_heads, m.d_ff, m.vocab_size);
  }
  return table.str();
}

// --load, --resume and --load-weights: the model is that of the folder.
void use_checkpoint(CommandLine& line, Options& options, const std::string& option,
                    const std::string& folder) {
  const bool continues = option != "--load-weights";
  options.load_folder = find_checkpoint(option, folder, continues ? "trainer_state.json" : "config.json");
  read_model_config(option, options.load_folder, options.model);
  if (!continues) return;
  const TrainerState state = read_trainer_state(option, options.load_folder);
  for (const std::string& name : line.training()) {
    if (state.options.contains(name)) line.assign(name, state.options.at(name));
  }
}

// They come first, because a checkpoint says what the model and the training are.
void declare_checkpoints(CommandLine& line, Options& options) {
  line.group("Checkpoints");
  line.words("--save", "DIR", options.save, "write checkpoints into this folder, at least at the end");
  line.whole("--save-every", options.save_every, 0, 1'000'000'000, "steps between two of them, 0: none");
  line.flag("--resume", options.resume, "continue from --save, if it has a checkpoint", [&] {
    require(!options.save.empty(), "--resume", "given", "--save, the folder from which the run goes on");
    if (!std::filesystem::exists(options.save + "/latest")) return;
    use_checkpoint(line, options, "--resume", options.save);
    options.load = options.save;
  });
  const auto loads = [&](const std::string& option, std::string& value, const std::string& other,
                         const std::string& help) {
    const auto load = [&, option](const std::string& folder) {
      if (options.resume && !options.save.empty() && options.load == options.save) return;  // newer than this
      require(other.empty(), option, folder, "one of --load and --load-weights");
      use_checkpoint(line, options, option, folder);
      value = folder;
    };
    line.add(option, "DIR", value, help, load, [&value] { return value; });
  };
  loads("--load", options.load, options.load_weights,
        "continue the run that saved this; what is not given is as it was");
  loads("--load-weights", options.load_weights, options.load,
        "begin with the weights of a Llama in Hugging Face's format");
}

void declare_model(CommandLine& line, Options& options) {
  ModelConfig& model = options.model;
  line.group("Model");
  line.words("--model", "NAME", model.name, "sizes of a model, see below",
             [&](const std::string& name) { use_preset(options, name); });
  line.whole("--layers", model.layers, 1, 1000, "decoder layers");
  line.whole("--d-model", model.d_model, 2, 65536, "width of the residual stream");
  line.whole("--heads", model.heads, 1, 1024, "attention heads");
  line.whole("--kv-heads", model.kv_heads, 1, 1024, "key and value heads");
  line.whole("--d-ff", model.d_ff, 1, 1'000'000, "width of the MLP");
  line.whole("--vocab-size", model.vocab_size, 2, 1'000'000, "tokens in the vocabulary");
}

void declare_data(CommandLine& line, Options& options) {
  line.group("Data and batches");
  line.input("--data", options.data, "text, or *.bin: tokens of nanoGPT or llm.c [common/corpus.txt]");
  line.whole("--seq-len", options.sequence_length, 1, 1 << 20, "tokens in a sequence");
  line.whole("--micro-batch-size", options.micro_batch_size, 1, 1 << 16,
             "sequences in one forward and backward");
  line.whole("--global-batch-size", options.global_batch_size, 1, 1 << 20, "sequences in one optimizer step");
  line.whole("--steps", options.steps, 1, 1'000'000'000, "optimizer steps");
  line.whole<uint64_t>("--seed", options.seed, 0, UINT64_MAX,
                       "of the initial weights and the choice of text");
  line.of_training({"data", "seq-len", "micro-batch-size", "global-batch-size", "steps", "seed"});
}

void declare_optimizer(CommandLine& line, Options& options) {
  line.group("Optimizer");
  line.choice("--optimizer", options.optimizer, optimizer_names, "what turns gradients into updates");
  line.number("--lr", options.lr, 0, 1000, "highest learning rate; it falls to a tenth");
  line.whole("--warmup-steps", options.warmup_steps, 0, 1'000'000'000,
             "steps in which the learning rate grows");
  line.number("--beta1", options.beta1, 0, 0.999999, "decay of AdamW's first moment");
  line.number("--beta2", options.beta2, 0, 0.999999, "decay of AdamW's second moment");
  line.number("--weight-decay", options.weight_decay, 0, 1000, "decoupled, matrices only");
  line.number("--grad-clip", options.grad_clip, 0, 1e9, "highest norm of the gradient, 0: any");
  line.number("--loss-scale", options.loss_scale, 1, 0x1p40, "in fp16: factor of the gradients at first");
  line.of_training({"optimizer", "lr", "warmup-steps", "beta1", "beta2", "weight-decay", "grad-clip"});
}

void declare_run(CommandLine& line, Options& options) {
  line.group("Memory");
  line.choice("--recompute", options.recompute, recompute_names, "activations that backward computes again");
  line.choice("--attention", options.attention, attention_names,
              "scores in memory, in tiles, or tiles on tensor cores");
  line.group("Output");
  line.output("--log-json", options.log_json, "write each step and a summary, a JSON object a line");
  line.output("--trace", options.trace, "write a Chrome trace of the last step");
  line.flag("--profile", options.profile, "print how long each kernel took in the last step");
  line.whole("--log-every", options.log_every, 1, 1'000'000'000, "steps between two printed lines");
  line.whole("--sample", options.sample, 0, 1'000'000,
             "tokens of text that the trained model writes at the end");
}

// A number, at least `lowest`, and a unit.
bool is_quantity(std::string_view given, double lowest, std::initializer_list<std::string_view> units) {
  double value = 0;
  const char* const end = given.data() + given.size();
  const auto [unit, error] = std::from_chars(given.data(), end, value);
  return error == std::errc() && std::isfinite(value) && value >= lowest &&
         std::find(units.begin(), units.end(), std::string_view(unit, end - unit)) != units.end();
}

// A latency and a bandwidth.
void check_link(const std::string& given) {
  const size_t comma = std::min(given.find(','), given.size());
  const std::string_view all = given, latency = all.substr(0, comma);
  const std::string_view bandwidth = all.substr(std::min(comma + 1, all.size()));
  require(is_quantity(latency, 0, {"ns", "us", "ms", "s"}) &&
              is_quantity(bandwidth, 1, {"B/s", "KB/s", "MB/s", "GB/s"}),
          "--link", given, "a latency and a bandwidth such as 5us,50GB/s");
}

void check_sizes(const Options& options) {
  int exponent = 0;
  const double fraction = std::frexp(options.loss_scale, &exponent);
  require(fraction == 0.5, "--loss-scale", options.loss_scale, "a power of two");
  const ModelConfig& model = options.model;
  const int head = model.head_size();
  require(model.d_model % model.heads == 0, "--heads", model.heads, "a divisor of --d-model (", model.d_model,
          ")");
  require(head % 2 == 0, "--heads", model.heads,  // rotary positions turn pairs of features
          "an even head size; --d-model / --heads is ", head);
  require(options.attention != Attention::tiled || head <= largest_tiled_head, "--attention", "tiled",
          "naive where --d-model / --heads (", head, ") is more than ", largest_tiled_head);
  require(options.attention != Attention::tensor_core || head == 64 || head == 128, "--attention",
          "tensor-core", "naive or tiled where --d-model / --heads (", head, ") is neither 64 nor 128");
  require(model.heads % model.kv_heads == 0, "--kv-heads", model.kv_heads, "a divisor of --heads (",
          model.heads, ")");
  const int batch = options.micro_batch_size, sequence = options.sequence_length;
  require(options.global_batch_size % batch == 0, "--global-batch-size", options.global_batch_size,
          "a multiple of --micro-batch-size (", batch, ")");
  constexpr int64_t most_rows = 1 << 24;  // rows of tokens are counted in int, and so are rows x heads
  require(int64_t{batch} * sequence <= most_rows, "--micro-batch-size", batch, "at most ",
          most_rows / sequence, " with --seq-len ", sequence);
  const std::string trains_nothing = " with --dry-run, which trains nothing";
  require(!options.dry_run || options.save.empty(), "--save", options.save, "none", trains_nothing);
  require(!options.dry_run || options.load_folder.empty(), options.load_option(), options.load_folder, "none",
          trains_nothing);
  require(!options.dry_run || options.sample == 0, "--sample", options.sample, "0", trains_nothing);
}

}  // namespace

std::string changed_options(const Options& options, const TrainerState& state) {
  std::string words;
  const auto now = nlohmann::json::parse(options.as_json);
  for (const std::string& name : options.training) {
    if (!now.contains(name) || !state.options.contains(name)) continue;
    const std::string here = now[name].is_string() ? now[name].get<std::string>() : now[name].dump();
    const std::string& there = state.options.at(name);
    if (here != there) words += "; --" + name + " is " + here + " and was " + there;
  }
  return words;
}

void declare_device(CommandLine& line, DeviceConfig& config) {
  line.group("Modelled GPU (CPU build)");
  line.words("--gpu", "FILE", config.gpu, "h100, another of common/clock/profiles, or such a file [h100]");
  line.flag("--dry-run", config.dry_run, "compute nothing: count memory and time alone");
}

void declare_communication(CommandLine& line, CommunicationConfig& config) {
  line.group("Communication");
  line.number("--timeout", config.timeout, 0.1, 1e6,
              "seconds after which a stream that stands still ends the run");
  line.words("--link", "LINK", config.link,
             "modelled link between ranks, such as 5us,50GB/s, used as it is (NCCL over MPI) [the GPU's]",
             check_link);
  line.whole("--ranks-per-node", config.ranks_per_node, 0, 1 << 20,
             "ranks of a modelled node, 0: the GPU's number");
}

void parse_options(int argc, const char* const* argv, std::string_view description, Options& options,
                   Attention attention, const std::function<void(CommandLine&)>& declare,
                   const std::function<void(const CommandLine&)>& complete) {
  options.attention = attention;
  use_preset(options, presets().front().model.name);

  CommandLine line(description);
  declare_checkpoints(line, options);
  declare_model(line, options);
  declare_data(line, options);
  declare_optimizer(line, options);
  declare_run(line, options);
  declare_device(line, options);
  declare(line);
  line.footer(table_of_presets());
  line.parse(argc, argv);

  if (!options.load_folder.empty()) {  // also --model or --layers may have been given
    ModelConfig saved = {};
    read_model_config(options.load_option(), options.load_folder, saved);
    const std::string difference = model_difference(options.model, saved);
    require(difference.empty(), options.load_option(), options.load_folder, "the same model; ", difference);
    options.model.remarks = saved.remarks;
  }
  if (options.data.empty() && !line.given("--data")) options.data = PENTATRON_CORPUS;
  if (!line.given("--attention")) options.attention = default_attention(options.model, attention);
  check_sizes(options);
  complete(line);
  line.check_files();
  options.training = line.training();
  options.as_json = line.as_json();
}

}  // namespace pentatron
