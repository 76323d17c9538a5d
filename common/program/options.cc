#include "program/options.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>
#include <vector>

#include "program/checkpoint_folder.h"
#include "program/model_config.h"

namespace pentatron {
namespace {

using Json = nlohmann::ordered_json;  // keys stay in their order

struct Preset {
  ModelConfig model;
  int sequence_length;
  double lr;
};

// Sizes as published with each model's weights. The head is always untied here, and the Llama 3 presets have
// no rotary scaling, which only concerns sequences longer than the model was first trained on.
const std::vector<Preset>& presets() {
  static const std::vector<Preset> table = {
      // name, layers, d_model, heads, kv_heads, d_ff, vocab_size, rope_theta, norm_epsilon
      {{"tiny", 8, 64, 8, 8, 192, 256, 1e4, 1e-5}, 128, 3e-3},
      {{"smollm-135m", 30, 576, 9, 3, 1536, 49152, 1e4, 1e-5}, 1024, 3e-4},
      {{"smollm-1.7b", 24, 2048, 32, 32, 8192, 49152, 1e4, 1e-5}, 1024, 3e-4},
      {{"llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, 5e5, 1e-5}, 1024, 3e-4},
      {{"llama-2-7b", 32, 4096, 32, 32, 11008, 32000, 1e4, 1e-5}, 1024, 3e-4},
      {{"llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, 5e5, 1e-5}, 1024, 3e-4},
      {{"llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, 5e5, 1e-5}, 1024, 1.5e-4},
  };
  return table;
}

const std::vector<std::pair<std::string, Recompute>> recompute_names = {
    {"none", Recompute::none}, {"selective", Recompute::selective}, {"full", Recompute::full}};

const std::vector<std::pair<std::string, Attention>> attention_names = {
    {"naive", Attention::naive}, {"tiled", Attention::tiled}, {"tensor-core", Attention::tensor_core}};

const std::vector<std::pair<std::string, OptimizerKind>> optimizer_names = {{"adamw", OptimizerKind::adamw},
                                                                            {"sgd", OptimizerKind::sgd}};

const std::vector<std::pair<std::string, DpSync>> dp_sync_names = {
    {"naive", DpSync::naive}, {"overlap", DpSync::overlap}, {"bucket", DpSync::bucket}};

const std::vector<std::pair<std::string, PpSchedule>> pp_schedule_names = {
    {"afab", PpSchedule::afab},
    {"1f1b", PpSchedule::one_f_one_b},
    {"interleaved", PpSchedule::interleaved},
    {"zb-h1", PpSchedule::zb_h1},
    {"zb-v", PpSchedule::zb_v},
    {"dualpipe", PpSchedule::dualpipe},
    {"dualpipe-v", PpSchedule::dualpipe_v}};  // from_file has no name: all else is a path

const std::vector<std::pair<std::string, PpMessages>> pp_messages_names = {{"streams", PpMessages::streams},
                                                                           {"grouped", PpMessages::grouped}};

const std::vector<std::pair<std::string, TpOverlap>> tp_overlap_names = {{"none", TpOverlap::none},
                                                                         {"chunks", TpOverlap::chunks}};
const std::vector<std::pair<std::string, CpLayout>> cp_layout_names = {{"contiguous", CpLayout::contiguous},
                                                                       {"zigzag", CpLayout::zigzag}};

const std::vector<std::pair<std::string, CpExchange>> cp_exchange_names = {
    {"ring", CpExchange::ring},
    {"all-gather", CpExchange::all_gather},
    {"ulysses", CpExchange::ulysses},
    {"ulysses-ring", CpExchange::ulysses_ring}};

const std::vector<std::pair<std::string, Balance>> balance_names = {
    {"loss", Balance::loss}, {"bias", Balance::bias}, {"none", Balance::none}};

const std::vector<std::pair<std::string, Fp8Format>> fp8_format_names = {{"e4m3", Fp8Format::e4m3},
                                                                         {"e5m2", Fp8Format::e5m2}};

const std::vector<std::pair<std::string, Fp8Scales>> fp8_scales_names = {{"tile", Fp8Scales::tile},
                                                                         {"tensor", Fp8Scales::tensor}};

const std::vector<std::pair<std::string, Dispatch>> dispatch_names = {{"direct", Dispatch::direct},
                                                                      {"once", Dispatch::once}};

const std::vector<std::pair<std::string, ExpertProducts>> expert_products_names = {
    {"grouped", ExpertProducts::grouped}, {"loop", ExpertProducts::loop}};

template <typename Value>
std::string_view name_of(const std::vector<std::pair<std::string, Value>>& names, Value value) {
  for (const auto& [name, named] : names) {
    if (named == value) return name;
  }
  return "?";
}

template <typename Value>
std::vector<std::string> words_of(const std::vector<std::pair<std::string, Value>>& names) {
  std::vector<std::string> words;
  for (const auto& [name, named] : names) words.push_back(name);
  return words;
}

// Writes a number as short as possible: 0.003, 1e-08.
std::string text(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

std::string join(const std::vector<std::string>& words, const std::string& separator) {
  std::string joined;
  for (const std::string& word : words) joined += (joined.empty() ? "" : separator) + word;
  return joined;
}

// The options that have been declared. CLI11 finds them in the arguments and prints the help; the values are
// converted here, in the order of declaration, so that every complaint has the same form and --model comes
// before the options that override its sizes.
class CommandLine {
 public:
  explicit CommandLine(const std::string& description) : app_{description} {
    app_.get_formatter()->column_width(36);
    app_.set_help_flag("--help", "print this text and end")->group("Help");
    app_.allow_extras();  // parse() complains later: a wrong value may have caused them
  }

  void group(const std::string& name) { group_ = name; }

  template <typename Integer>
  void whole(const std::string& option, Integer& value, Integer lowest, Integer highest,
             const std::string& help, const std::string& preset = "") {
    add(
        option, "N", preset.empty() ? std::to_string(value) : preset, help,
        [=, &value](const std::string& given) {
          const std::string expected =
              "a whole number from " + std::to_string(lowest) + " to " + std::to_string(highest);
          value = convert<Integer>(option, given, lowest, highest, expected);
        },
        [&value] { return value; });
  }

  void number(const std::string& option, double& value, double lowest, double highest,
              const std::string& help, const std::string& preset = "") {
    add(
        option, "X", preset.empty() ? text(value) : preset, help,
        [=, &value](const std::string& given) {
          value = convert<double>(option, given, lowest, highest,
                                  "a number from " + text(lowest) + " to " + text(highest));
        },
        [&value] { return value; });
  }

  void file(const std::string& option, std::string& path, const std::string& help,
            const std::string& placeholder = "FILE") {
    add(
        option, placeholder, "", help, [=, &path](const std::string& given) { path = given; },
        [&path] { return path; });
  }

  void link(const std::string& option, std::string& link, const std::string& help) {
    const auto assign = [=, &link](const std::string& given) {
      const size_t comma = std::min(given.find(','), given.size());
      const std::string_view all = given, latency = all.substr(0, comma);
      const std::string_view bandwidth = all.substr(std::min(comma + 1, all.size()));
      if (!is_quantity(latency, 0, {"ns", "us", "ms", "s"}) ||
          !is_quantity(bandwidth, 1, {"B/s", "KB/s", "MB/s", "GB/s"})) {
        throw UsageError(option, given, "a latency and a bandwidth such as 5us,50GB/s");
      }
      link = given;
    };
    add(option, "LINK", "", help, assign, [&link] { return link; });
  }

  void pipeline_costs(const std::string& option, std::vector<double>& costs, const std::string& help) {
    const auto assign = [=, &costs](const std::string& given) {
      const std::string expected =
          "four numbers such as 1,1.2,0.8,0.1: forward, input gradient, weight gradient (above 0), transfer; "
          "none over 100 times the first";
      costs.clear();
      std::istringstream in(given);
      for (std::string part; std::getline(in, part, ',');)
        costs.push_back(convert<double>(option, part, costs.size() < 3 ? 1e-9 : 0, 1e9, expected));
      const bool complete = costs.size() == 4 && given.back() != ',';
      if (!complete || *std::max_element(costs.begin(), costs.end()) > 100 * costs[0])
        throw UsageError(option, given, expected);
    };
    add(option, "F,B,W,T", "", help, assign, [&costs] { return costs; });
  }

  template <typename Value>
  void choice(const std::string& option, Value& value,
              const std::vector<std::pair<std::string, Value>>& names, const std::string& help) {
    const std::vector<std::string> words = words_of(names);
    add(
        option, join(words, "|"), std::string(name_of(names, value)), help,
        [=, &value](const std::string& given) {
          for (const auto& [name, named] : names) {
            if (name == given) {
              value = named;
              return;
            }
          }
          throw UsageError(option, given, "one of " + join(words, ", "));
        },
        [=, &value] { return name_of(names, value); });
  }

  void flag(const std::string& option, bool& value, const std::string& help) {
    CLI::Option* added = app_.add_flag(option, help);
    added->group(group_);
    entries_.push_back({added, [&value](const std::string&) { value = true; }, [&value] { return value; }});
  }

  // Declares an option. `assign` converts and stores its value, and throws UsageError if the value is
  // wrong. `value` returns what was stored.
  void add(const std::string& option, const std::string& placeholder, const std::string& preset,
           const std::string& help, std::function<void(const std::string&)> assign,
           std::function<Json()> value) {
    const std::string shown = preset.empty() ? help : help + " [" + preset + "]";
    CLI::Option* added = app_.add_option(option, CLI::callback_t(), shown);
    added->type_name(placeholder)->group(group_)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    entries_.push_back({added, std::move(assign), std::move(value)});
  }

  void footer(const std::string& words) { app_.footer(words); }

  void parse(int argc, const char* const* argv);
  // Sets an option, if there is one of this name, as if it had been given.
  void assign(const std::string& name, const std::string& value) {
    for (const Entry& entry : entries_) {
      if (entry.option->get_lnames().front() == name) entry.assign(value);
    }
  }
  bool given(const std::string& option) const {
    const CLI::Option* const declared = app_.get_option_no_throw(option);
    return declared && declared->count() > 0;
  }

  // A JSON object with the present value of every option: {"layers": 8, ...}.
  std::string as_json() const {
    Json json;
    for (const Entry& entry : entries_) json[entry.option->get_lnames().front()] = entry.value();
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);  // a path may have any bytes
  }

 private:
  struct Entry {
    CLI::Option* option;
    std::function<void(const std::string&)> assign;
    std::function<Json()> value;
  };

  // A number, at least `lowest`, and a unit.
  static bool is_quantity(std::string_view given, double lowest,
                          std::initializer_list<std::string_view> units) {
    double value = 0;
    const char* const end = given.data() + given.size();
    const auto [unit, error] = std::from_chars(given.data(), end, value);
    return error == std::errc() && std::isfinite(value) && value >= lowest &&
           std::find(units.begin(), units.end(), std::string_view(unit, end - unit)) != units.end();
  }

  template <typename Number>
  static Number convert(const std::string& option, const std::string& given, Number lowest, Number highest,
                        const std::string& expected) {
    Number value{};
    const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
    const bool complete = error == std::errc() && end == given.data() + given.size();
    if (!complete || !(value >= lowest && value <= highest))
      throw UsageError(option, given, expected);  // NaN too
    return value;
  }

  CLI::App app_;
  std::string group_;
  std::vector<Entry> entries_;
};

void CommandLine::parse(int argc, const char* const* argv) {
  try {
    app_.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    throw HelpRequest(app_.help());
  } catch (const CLI::ArgumentMismatch& error) {
    const std::string message = error.what();  // "--steps: 1 required ..."
    throw UsageError(message.substr(0, message.find_first_of(": ")) +
                     ": value missing; expected one after it");
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  for (const Entry& entry : entries_) {
    if (entry.option->count() > 0) entry.assign(entry.option->results().back());
  }
  if (!app_.remaining().empty()) {
    throw UsageError(app_.remaining().front() + ": unknown option; expected one of those that --help lists");
  }
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

// Options of the training, which --load takes from the checkpoint unless they are given.
constexpr const char* training_options[] = {
    "data",         "documents", "seq-len",      "micro-batch-size", "global-batch-size", "steps",
    "seed",         "optimizer", "lr",           "min-lr",           "warmup-steps",      "beta1",
    "beta2",        "epsilon",   "weight-decay", "grad-clip",        "aux-loss",          "balance",
    "balance-rate", "z-loss",    "drop-tokens",  "scale-window",     "fp8-gradients",     "fp8-scales"};

// --load and --load-weights: the model is that of the folder.
void use_checkpoint(CommandLine& line, Options& options, const std::string& option,
                    const std::string& folder) {
  const bool continues = option == "--load";
  if (!(continues ? options.load_weights : options.load).empty())
    throw UsageError(option, folder, "one of --load and --load-weights");
  (continues ? options.load : options.load_weights) = folder;
  options.load_folder = find_checkpoint(option, folder, continues ? "trainer_state.json" : "config.json");
  read_model_config(option, options.load_folder, options);
  if (!continues) return;
  const TrainerState state = read_trainer_state(option, options.load_folder);
  for (const char* const name : training_options) {
    if (state.options.contains(name)) line.assign(name, state.options.at(name));
  }
}

void declare_model(CommandLine& line, Options& options) {
  ModelConfig& model = options.model;
  line.group("Model");
  line.add(
      "--load", "DIR", "", "continue the run that saved this; what is not given is as it was",
      [&](const std::string& folder) { use_checkpoint(line, options, "--load", folder); },
      [&] { return options.load; });
  line.add(
      "--load-weights", "DIR", "", "begin with the weights of a Llama in Hugging Face's format",
      [&](const std::string& folder) { use_checkpoint(line, options, "--load-weights", folder); },
      [&] { return options.load_weights; });
  line.add(
      "--model", "NAME", model.name, "sizes of a model, see below",
      [&](const std::string& name) { use_preset(options, name); }, [&] { return model.name; });
  line.whole("--layers", model.layers, 1, 1000, "decoder layers");
  line.whole("--d-model", model.d_model, 2, 65536, "width of the residual stream");
  line.whole("--heads", model.heads, 1, 1024, "attention heads");
  line.whole("--kv-heads", model.kv_heads, 1, 1024, "key and value heads");
  line.whole("--d-ff", model.d_ff, 1, 1'000'000, "width of the MLP");
  line.whole("--vocab-size", model.vocab_size, 2, 1'000'000, "tokens in the vocabulary");
}

void declare_data(CommandLine& line, Options& options) {
  line.group("Data and batches");
  line.file("--data", options.data, "text, or *.bin: tokens of nanoGPT or llm.c [common/corpus.txt]");
  line.whole("--seq-len", options.sequence_length, 1, 1 << 20, "tokens in a sequence");
  line.whole("--documents", options.document_end, -1, 999'999,
             "token that ends a document, -1: attention sees all");
  line.whole("--micro-batch-size", options.micro_batch_size, 1, 1 << 16,
             "sequences in one forward and backward");
  line.whole("--global-batch-size", options.global_batch_size, 1, 1 << 20, "sequences in one optimizer step");
  line.whole("--steps", options.steps, 1, 1'000'000'000, "optimizer steps");
  line.whole<uint64_t>("--seed", options.seed, 0, UINT64_MAX,
                       "of the initial weights and the choice of text");
}

void declare_optimizer(CommandLine& line, Options& options) {
  line.group("Optimizer");
  line.choice("--optimizer", options.optimizer, optimizer_names, "what turns gradients into updates");
  line.number("--lr", options.lr, 0, 1000, "highest learning rate");
  line.number("--min-lr", options.min_lr, 0, 1000, "learning rate to which it falls", "a tenth of --lr");
  line.whole("--warmup-steps", options.warmup_steps, 0, 1'000'000'000,
             "steps in which the learning rate grows");
  line.number("--beta1", options.beta1, 0, 0.999999, "decay of AdamW's first moment");
  line.number("--beta2", options.beta2, 0, 0.999999, "decay of AdamW's second moment");
  line.number("--epsilon", options.epsilon, 1e-30, 1, "added to AdamW's denominator");
  line.number("--weight-decay", options.weight_decay, 0, 1000, "decoupled, matrices only");
  line.number("--grad-clip", options.grad_clip, 0, 1e9, "highest norm of the gradient, 0: any");
  line.choice("--fp8-gradients", options.fp8_gradients, fp8_format_names, "in fp8: their format");
  line.choice("--fp8-scales", options.fp8_scales, fp8_scales_names, "in fp8: one a tile, or one a tensor");
  line.number("--loss-scale", options.loss_scale, 1, 0x1p40, "in fp16: factor of the gradients at first");
  line.whole("--scale-window", options.scale_window, 0, 1'000'000'000,
             "good steps after which it doubles, 0: it never changes");
}

void declare_device(CommandLine& line, Options& options) {
  line.group("Modelled GPU (CPU build)");
  line.file("--gpu", options.gpu, "a100, h100, h200, b200, unit or a file of such numbers [h100]");
  line.flag("--dry-run", options.dry_run, "compute nothing: count memory and time alone");
}

void declare_run(CommandLine& line, Options& options) {
  line.group("Memory");
  line.choice("--recompute", options.recompute, recompute_names, "activations that backward computes again");
  line.choice("--attention", options.attention, attention_names,
              "scores in memory, in tiles, or tiles on tensor cores");
  line.group("Output");
  line.file("--log-json", options.log_json, "write each step and a summary, a JSON object a line");
  line.file("--trace", options.trace, "write a Chrome trace of the first 250,000 operations");
  line.flag("--profile", options.profile, "print at the end how long each kernel took in all");
  line.whole("--trace-steps", options.trace_steps, 0, 1'000'000'000,
             "the last steps, which these two are about, 0: all");
  line.file("--save", options.save, "write checkpoints into this folder, at least at the end", "DIR");
  line.whole("--save-every", options.save_every, 0, 1'000'000'000, "steps between two of them, 0: none");
  line.whole("--keep", options.keep, 1, 1'000'000, "checkpoints that stay; older ones are removed");
  line.whole("--log-every", options.log_every, 1, 1'000'000'000, "steps between two printed lines");
  line.whole("--sample", options.sample, 0, 1'000'000,
             "tokens of text that the trained model writes at the end");
}

// A name, or the path of a file, which is read here.
void use_schedule(Options& options, const std::string& given) {
  for (const auto& [name, named] : pp_schedule_names) {
    if (name == given) {
      options.pp_schedule = named;
      return;
    }
  }
  constexpr size_t most = 1 << 20;
  std::ifstream file(given, std::ios::binary);
  std::string& text = options.pp_schedule_text;
  text.resize(most + 1);
  file.read(text.data(), std::ssize(text));
  text.resize(file.gcount());
  if (!file.is_open() || file.bad()) {
    throw UsageError("--pp-schedule", given,
                     "one of " + join(words_of(pp_schedule_names), ", ") + ", or a file that can be read");
  }
  if (text.size() > most) throw UsageError("--pp-schedule", given, "a file of at most 1 MiB");
  options.pp_schedule = PpSchedule::from_file;
  options.pp_schedule_file = given;
}

// Model chunks on a pipeline rank, unless --vpp says another number.
int chunks_of(PpSchedule schedule) {
  return schedule == PpSchedule::interleaved || schedule == PpSchedule::zb_v ||
                 schedule == PpSchedule::dualpipe || schedule == PpSchedule::dualpipe_v
             ? 2
             : 1;
}

std::string schedule_name(const Options& options) {
  const bool is_file = options.pp_schedule == PpSchedule::from_file;
  return is_file ? options.pp_schedule_file : std::string(to_string(options.pp_schedule));
}

void declare_group(CommandLine& line, Options& options, OptionGroup group) {
  switch (group) {
    case OptionGroup::communication:
      line.group("Communication");
      line.number("--timeout", options.timeout, 0.1, 1e6,
                  "seconds after which a stream that stands still ends the run");
      line.flag("--deterministic", options.deterministic,
                "sums in a fixed order: NCCL_ALGO=Ring, which may be slower");
      line.link("--link", options.link,
                "modelled link between ranks, such as 5us,50GB/s (NCCL over MPI) [the GPU's]");
      line.link("--link-between-nodes", options.link_between_nodes, "the same between nodes [the GPU's]");
      line.whole("--ranks-per-node", options.ranks_per_node, 0, 1 << 20,
                 "ranks of a modelled node, 0: the GPU's number");
      return;
    case OptionGroup::data_parallel:
      line.group("Data parallelism");
      line.choice("--dp-sync", options.dp_sync, dp_sync_names,
                  "when gradients are summed over the ranks (without ZeRO)");
      line.number("--bucket-mb", options.bucket_mb, 1e-6, 1e6,
                  "megabytes of gradients that are summed at once",
                  "25, or an eighth of all where that is less");
      return;
    case OptionGroup::zero:
      line.group("ZeRO");
      line.whole("--zero-stage", options.zero_stage, 0, 3,
                 "1: optimizer states, 2: and gradients, 3: and weights are sharded");
      return;
    case OptionGroup::tensor_parallel:
      line.group("Tensor parallelism");
      line.flag("--sequence-parallel", options.sequence_parallel,
                "split the rows of tokens outside of attention and MLP, too");
      line.flag("--fp8-communication", options.fp8_communication,
                "in fp8: with --sequence-parallel, inputs of products are gathered in 8 bits");
      line.choice("--tp-overlap", options.tp_overlap, tp_overlap_names,
                  "whether forward's products are cut, so that their communication hides");
      line.whole("--tp-chunks", options.tp_chunks, 2, 64, "into so many chunks of rows");
      return;
    case OptionGroup::pipeline:
      line.group("Pipeline parallelism");
      line.add(
          "--pp-schedule", join(words_of(pp_schedule_names), "|") + "|FILE", schedule_name(options),
          "in which order ranks take their micro-batches; FILE: a line a rank, such as F0 F1 B0 B1",
          [&](const std::string& given) { use_schedule(options, given); },
          [&] { return schedule_name(options); });
      line.whole("--vpp", options.vpp, 1, 1000, "model chunks on a rank", "1 with afab, 1f1b, zb-h1, else 2");
      line.pipeline_costs("--pp-costs", options.pp_costs,
                          "times of a rank's layers, for zb-h1 and for pictures, such as 1,1.2,0.8,0.1");
      line.whole("--pp-max-in-flight", options.pp_max_in_flight, 0, 1 << 20,
                 "refuse a schedule if a rank keeps more micro-batches, over its chunks; 0: any number");
      line.choice("--pp-messages", options.pp_messages, pp_messages_names,
                  "a stream for each kind and direction, or one for groups of a send and a receive");
      line.whole("--pp", options.pp, 0, 1 << 20, "pipeline ranks, 0: all there are (in 07: one)");
      line.flag("--show-schedule", options.show_schedule, "draw the schedule, train nothing");
      line.file("--show-schedule-svg", options.show_schedule_svg, "and write it as an SVG picture");
      return;
    case OptionGroup::context_parallel:
      line.group("Context parallelism");
      line.choice("--cp-layout", options.cp_layout, cp_layout_names,
                  "which tokens of a sequence a rank holds: a block, or an early and a late one");
      line.choice("--cp-exchange", options.cp_exchange, cp_exchange_names,
                  "keys and values by hops or gathered, tokens for heads, or both in groups");
      line.whole("--ulysses", options.ulysses, 2, 1 << 20,
                 "ranks that exchange tokens for heads, with ulysses-ring");
      return;
    case OptionGroup::mesh:
      line.group("Mesh");
      line.whole("--tp", options.tp, 1, 1 << 20, "tensor ranks");
      line.whole("--cp", options.cp, 1, 1 << 20, "context ranks");
      line.whole("--dp", options.dp, 0, 1 << 20, "data ranks, 0: what the other axes leave");
      line.whole("--ep", options.ep, 1, 1 << 20, "ranks that share out the experts");
      line.flag("--show-mesh", options.show_mesh, "print who is who, train nothing");
      return;
    case OptionGroup::experts:
      line.group("Experts");
      line.whole("--experts", options.experts, 0, 1024, "MLPs of a layer that has several, 0: none has");
      line.whole("--top-k", options.top_k, 1, 1024, "experts that a token is sent to");
      line.whole("--shared-experts", options.shared_experts, 0, 1024,
                 "experts that get all tokens, beside those");
      line.whole("--moe-every", options.moe_every, 1, 1000, "the last of so many layers has experts");
      line.choice("--balance", options.balance, balance_names,
                  "experts by a loss, by a bias of the choice, or not");
      line.number("--aux-loss", options.aux_loss, 0, 1000, "weight of this loss");
      line.number("--balance-rate", options.balance_rate, 1e-9, 1, "step of this bias");
      line.number("--z-loss", options.z_loss, 0, 1000, "weight of the squares of the router's log-sum-exps");
      line.number("--drop-tokens", options.drop_tokens, 0, 1e6,
                  "an expert takes so many times an even share of a micro-batch, 0: all");
      line.number("--expert-buffer", options.expert_buffer, 0, 1e6,
                  "room for so many times an even share of rows, 0: for all cases");
      line.choice("--expert-products", options.expert_products, expert_products_names,
                  "of a rank's experts: one launch, or one each");
      line.whole("--expert-chunks", options.expert_chunks, 1, 1024,
                 "parts of a micro-batch that travel while the experts compute others");
      line.choice("--dispatch", options.dispatch, dispatch_names,
                  "rows that tensor ranks all hold: each sends all, or a share");
      return;
  }
}

void check_experts(const Options& options) {
  const ModelConfig& model = options.model;
  const auto check = [](bool valid, const char* option, int value, const std::string& expected) {
    if (!valid) throw UsageError(option, std::to_string(value), expected);
  };
  if (options.experts == 0) {
    check(options.shared_experts == 0, "--shared-experts", options.shared_experts, "0 without --experts");
    return check(options.ep == 1, "--ep", options.ep, "1 without --experts");
  }
  const std::string experts = "--experts (" + std::to_string(options.experts) + ")";
  check(options.top_k <= options.experts, "--top-k", options.top_k, "at most " + experts);
  check(options.moe_every <= model.layers, "--moe-every", options.moe_every,
        "at most --layers (" + std::to_string(model.layers) + ")");
  check(options.experts % options.ep == 0, "--ep", options.ep, "a divisor of " + experts);
  const int64_t rows = int64_t{options.micro_batch_size} * options.sequence_length / options.cp;
  check(rows % options.expert_chunks == 0, "--expert-chunks", options.expert_chunks,
        "a divisor of the tokens that a rank has of a micro-batch (" + std::to_string(rows) + ")");
  if (options.drop_tokens > 0 && options.expert_chunks > 1)
    throw UsageError("--drop-tokens", text(options.drop_tokens),
                     "0 with --expert-chunks, which split the micro-batch, too");
  if (options.drop_tokens > 0 && options.cp > 1) {
    throw UsageError(
        "--drop-tokens", text(options.drop_tokens),
        "0 with --cp: an expert takes the first tokens of a micro-batch, which context ranks split");
  }
  if (options.expert_buffer > 0 && options.expert_buffer < 1)
    throw UsageError("--expert-buffer", text(options.expert_buffer), "0, or 1 or more");
  // A sample does not need all rows of a micro-batch. The others are alike, and would all choose the
  // same experts.
  check(options.expert_buffer == 0 || options.sample == 0, "--sample", options.sample,
        "0 with --expert-buffer");
}

void check_sizes(const Options& options) {
  int exponent = 0;
  if (std::frexp(options.loss_scale, &exponent) != 0.5)
    throw UsageError("--loss-scale", text(options.loss_scale), "a power of two");
  const ModelConfig& model = options.model;
  if (model.d_model % model.heads != 0) {
    throw UsageError("--heads", std::to_string(model.heads),
                     "a divisor of --d-model (" + std::to_string(model.d_model) + ")");
  }
  if (model.head_size() % 2 != 0) {  // rotary positions turn pairs of features
    throw UsageError("--heads", std::to_string(model.heads),
                     "an even head size; --d-model / --heads is " + std::to_string(model.head_size()));
  }
  if (options.attention == Attention::tiled && model.head_size() > largest_tiled_head) {
    throw UsageError("--attention", "tiled",
                     "naive where --d-model / --heads (" + std::to_string(model.head_size()) +
                         ") is more than " + std::to_string(largest_tiled_head));
  }
  if (options.attention == Attention::tensor_core && model.head_size() != 64 && model.head_size() != 128) {
    throw UsageError("--attention", "tensor-core",
                     "naive or tiled where --d-model / --heads (" + std::to_string(model.head_size()) +
                         ") is neither 64 nor 128");
  }
  if (model.heads % model.kv_heads != 0) {
    throw UsageError("--kv-heads", std::to_string(model.kv_heads),
                     "a divisor of --heads (" + std::to_string(model.heads) + ")");
  }
  if (options.document_end >= model.vocab_size) {
    throw UsageError("--documents", std::to_string(options.document_end),
                     "a token below --vocab-size (" + std::to_string(model.vocab_size) + "), or -1");
  }
  check_experts(options);
  if (options.global_batch_size % options.micro_batch_size != 0) {
    throw UsageError("--global-batch-size", std::to_string(options.global_batch_size),
                     "a multiple of --micro-batch-size (" + std::to_string(options.micro_batch_size) + ")");
  }
  constexpr int64_t most_rows = 1 << 24;  // rows of tokens are counted in int, and so are rows x heads
  if (int64_t{options.micro_batch_size} * options.sequence_length > most_rows) {
    throw UsageError("--micro-batch-size", std::to_string(options.micro_batch_size),
                     "at most " + std::to_string(most_rows / options.sequence_length) + " with --seq-len " +
                         std::to_string(options.sequence_length));
  }
  if (options.dry_run && !options.save.empty())
    throw UsageError("--save", options.save, "none with --dry-run, which trains nothing");
  if (options.dry_run && !options.load_folder.empty())
    throw UsageError(options.load.empty() ? "--load-weights" : "--load", options.load_folder,
                     "none with --dry-run, which trains nothing");
  if (options.dry_run && options.sample > 0)
    throw UsageError("--sample", std::to_string(options.sample), "0 with --dry-run, which trains nothing");
  if (options.min_lr > options.lr) {
    throw UsageError("--min-lr", text(options.min_lr), "at most --lr (" + text(options.lr) + ")");
  }
  const int chunks = chunks_of(options.pp_schedule);
  if (options.vpp > 0 && options.vpp != chunks && options.pp_schedule != PpSchedule::interleaved) {
    throw UsageError("--vpp", std::to_string(options.vpp),
                     std::to_string(chunks) + " with --pp-schedule " + schedule_name(options) +
                         "; only interleaved can have another number of chunks");
  }
}

// Throws UsageError unless `path` could be written. Nothing is written here: the log of an earlier run
// must survive a request that turns out to be impossible.
void check_writable(const std::string& option, const std::string& path) {
  std::error_code ignored;
  const bool exists = std::filesystem::exists(path, ignored);
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const std::string folder = parent.empty() ? "." : parent;
  const bool writable =
      exists ? !std::filesystem::is_directory(path, ignored) && access(path.c_str(), W_OK) == 0
             : std::filesystem::is_directory(folder, ignored) && access(folder.c_str(), W_OK) == 0;
  if (!writable) throw UsageError(option, path, "a file that can be written");
}

bool same_file(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return false;
  namespace fs = std::filesystem;
  std::error_code ignored;  // a file that does not exist yet equals no other
  return fs::equivalent(a, b, ignored) || fs::weakly_canonical(fs::absolute(a, ignored), ignored) ==
                                              fs::weakly_canonical(fs::absolute(b, ignored), ignored);
}

void check_files(const Options& options) {
  const std::vector<std::pair<std::string, std::string>> outputs = {
      {"--log-json", options.log_json},
      {"--trace", options.trace},
      {"--show-schedule-svg", options.show_schedule_svg}};
  for (const auto& [option, path] : outputs) {
    if (path.empty()) continue;
    if (same_file(path, options.data)) throw UsageError(option, path, "another file than that of --data");
    if (same_file(path, options.pp_schedule_file))
      throw UsageError(option, path, "another file than that of --pp-schedule");
    check_writable(option, path);
    for (const auto& [other, its_path] : outputs) {
      if (other == option) break;
      if (same_file(path, its_path)) throw UsageError(option, path, "another file than that of " + other);
    }
  }
}

}  // namespace

int64_t parameter_count(const Options& options) {
  const ModelConfig& m = options.model;
  const int64_t d = m.d_model, q = int64_t{m.heads} * m.head_size(), kv = int64_t{m.kv_heads} * m.head_size();
  const int64_t norms = 2 * d, attention = d * (q + 2 * kv) + q * d, mlp = 3 * d * m.d_ff;
  const int64_t routed = options.experts > 0 ? m.layers / options.moe_every : 0;  // layers with experts
  const int64_t bias = options.has_balance_bias() ? 1 : 0;
  const int64_t mlps = (m.layers - routed) * mlp +
                       routed * (options.experts * (d + mlp + bias) + options.shared_experts * mlp);
  return m.layers * (norms + attention) + mlps + d + 2 * d * m.vocab_size;
}

int64_t active_parameter_count(const Options& options) {
  const ModelConfig& m = options.model;
  if (options.experts == 0) return parameter_count(options);
  const int64_t idle = int64_t{m.layers / options.moe_every} * (options.experts - options.top_k);  // experts
  return parameter_count(options) - idle * 3 * m.d_model * m.d_ff;
}

std::string_view to_string(Recompute recompute) { return name_of(recompute_names, recompute); }
std::string_view to_string(Attention attention) { return name_of(attention_names, attention); }
std::string_view to_string(OptimizerKind optimizer) { return name_of(optimizer_names, optimizer); }
std::string_view to_string(DpSync sync) { return name_of(dp_sync_names, sync); }
std::string_view to_string(PpMessages messages) { return name_of(pp_messages_names, messages); }
std::string_view to_string(PpSchedule schedule) { return name_of(pp_schedule_names, schedule); }
std::string_view to_string(TpOverlap overlap) { return name_of(tp_overlap_names, overlap); }
std::string_view to_string(CpLayout layout) { return name_of(cp_layout_names, layout); }
std::string_view to_string(CpExchange exchange) { return name_of(cp_exchange_names, exchange); }
std::string_view to_string(Balance balance) { return name_of(balance_names, balance); }
std::string_view to_string(Dispatch dispatch) { return name_of(dispatch_names, dispatch); }
std::string_view to_string(ExpertProducts products) { return name_of(expert_products_names, products); }

std::string changed_options(const Options& options, const TrainerState& state) {
  std::string words;
  const Json now = Json::parse(options.as_json);
  for (const char* const name : training_options) {
    if (!now.contains(name) || !state.options.contains(name)) continue;
    const std::string here = now[name].is_string() ? now[name].get<std::string>() : now[name].dump();
    const std::string& there = state.options.at(name);
    if (here != there) words += std::string("; --") + name + " is " + here + " and was " + there;
  }
  return words;
}

Options parse_options(int argc, const char* const* argv, std::string_view description,
                      std::initializer_list<OptionGroup> groups, Attention attention) {
  Options options;
  options.attention = attention;
  use_preset(options, presets().front().model.name);
  options.data = PENTATRON_CORPUS;
  options.min_lr = options.bucket_mb = -1;  // not given

  CommandLine line{std::string(description)};
  declare_model(line, options);
  declare_data(line, options);
  declare_optimizer(line, options);
  declare_run(line, options);
  declare_device(line, options);
  for (const OptionGroup group : groups) declare_group(line, options, group);
  line.footer(table_of_presets());
  line.parse(argc, argv);

  if (!options.load_folder.empty()) {  // also --model or --layers may have been given
    const char* const option = options.load.empty() ? "--load-weights" : "--load";
    Options saved;
    read_model_config(option, options.load_folder, saved);
    const std::string difference = model_difference(options, saved);
    if (!difference.empty()) throw UsageError(option, options.load_folder, "the same model; " + difference);
  }
  if (line.given("--tp-chunks") && options.tp_overlap == TpOverlap::none)
    throw UsageError("--tp-chunks", std::to_string(options.tp_chunks), "none without --tp-overlap chunks");
  if (options.fp8_communication && !options.sequence_parallel)
    throw UsageError("--fp8-communication", "given", "together with --sequence-parallel");
  if (options.fp8_communication && options.fp8_scales == Fp8Scales::tensor)
    throw UsageError("--fp8-communication", "given",
                     "none with --fp8-scales tensor, whose scale no rank has");
  if (options.fp8_communication && options.experts > 0)
    throw UsageError("--fp8-communication", "given", "none with --experts, whose router reads bf16");
  if (!line.given("--attention")) options.attention = default_attention(options.model, attention);
  if (options.min_lr < 0) options.min_lr = options.lr / 10;
  if (options.bucket_mb < 0) options.bucket_mb = std::min(25.0, 4e-6 * parameter_count(options) / 8);
  if (options.vpp == 0) options.vpp = chunks_of(options.pp_schedule);
  if (!options.show_schedule_svg.empty()) options.show_schedule = true;
  check_sizes(options);
  check_files(options);
  options.as_json = line.as_json();
  return options;
}

Options parse_primer_options(int argc, const char* const* argv, std::string_view description) {
  Options options;
  CommandLine line{std::string(description)};
  declare_device(line, options);
  declare_group(line, options, OptionGroup::communication);
  line.group("Messages");
  line.whole<int64_t>("--max-bytes", options.max_bytes, 4096, int64_t{1} << 32,
                      "the largest message; they begin with 4096 bytes, each four times the one before");
  line.parse(argc, argv);
  return options;
}

}  // namespace pentatron
