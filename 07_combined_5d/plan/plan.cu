// The planner: which layout of a run on so many GPUs fits, how fast it is, and why. It needs no GPU. It knows
// the layouts (layouts.h) and roughly how long a step of each takes (coarse.h); then it asks the program
// about the best (dry_run.h).
#include <sys/ioctl.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ranges>

#include "checkpoint/checkpoint_folder.h"
#include "dry_run.h"

using namespace pentatron;

namespace {

using Json = nlohmann::ordered_json;

// Measured over predicted seconds, by kind of layout (kind_of): the 10th and the 90th percentile. "ranges" of
// a GPU's profile that was fitted to another framework's steps (calibrate.py).
using Ranges = std::map<std::string, std::array<double, 2>>;

constexpr double margin = 0.04;            // of a GPU's memory, for fragments: an assumption
constexpr double slowest_published = 1.5;  // over modelled seconds, but for 3 of 50 (common/cpu/README.md)

struct Request {
  int gpus = 8;
  size_t top = 10;
  std::vector<std::string> compare;
  std::string why, only, json, rows;
  double tokens = 0, price = 0, measured = 0;
  bool coarse = false;
  std::string limit;               // of memory, in words
  std::vector<std::string> model;  // the options of 07 that were given
  CombinedOptions base;
  DeviceProfile gpu;
  Ranges ranges;
};

// "2T", "70GiB", "1.5e12". Throws UsageError.
double quantity(const std::string& option, const std::string& words) {
  const std::map<std::string, double> units = {{"", 1},     {"K", 1e3},  {"M", 1e6},      {"B", 1e9},
                                               {"T", 1e12}, {"GB", 1e9}, {"GiB", 1 << 30}};
  char* end = nullptr;
  const double number = std::strtod(words.c_str(), &end);
  const auto unit = units.find(end);
  require(end != words.c_str() && unit != units.end() && number > 0 && !std::isinf(number), option, words,
          "a number above 0, such as 2T, 300B, 70GB or 70GiB");
  return number * unit->second;
}

// The options of 07 for the sizes of a model.
std::vector<std::string> sizes_of(const ModelConfig& m) {
  std::vector<std::string> words;
  const auto say = [&](const char* option, int value) {
    words.insert(words.end(), {option, std::to_string(value)});
  };
  say("--layers", m.layers), say("--d-model", m.d_model), say("--d-ff", m.d_ff);
  say("--heads", m.heads), say("--kv-heads", m.kv_heads), say("--vocab-size", m.vocab_size);
  if (m.experts > 0) say("--experts", m.experts), say("--top-k", m.top_k);
  if (m.experts > 0) say("--shared-experts", m.shared_experts);
  return words;
}

// The sizes of a config.json. Relatives of Llama become Llamas; what this leaves out is a remark.
ModelConfig read_sizes(const std::string& option, std::string path) {
  if (std::filesystem::is_directory(path)) path += "/config.json";
  Json config = Json::parse(MappedFile(option, path).text(), nullptr, false);
  std::string left_out;
  const Json type = config.is_object() ? config["model_type"] : Json();
  if (type == "mistral" || type == "mixtral" || type == "qwen2") {
    if (type == "qwen2") left_out = "its biases of queries, keys and values are left out\n";
    if (config["sliding_window"] > 0 && config["use_sliding_window"] != false)
      left_out += text("its sliding window of ", config["sliding_window"], " tokens is left out\n");
    if (type == "mixtral")
      config["pentatron_experts"] = {{"experts", config.value("num_local_experts", Json(8))},
                                     {"top_k", config.value("num_experts_per_tok", Json(2))}};
    config["model_type"] = type == "mixtral" ? "pentatron_experts" : "llama";
    for (const char* const name : {"sliding_window", "architectures"}) config.erase(name);
  }
  ModelConfig sizes = {};
  read_model_config(option, path, sizes, config.dump());
  sizes.remarks += left_out;
  return sizes;
}

bool is_given(const std::vector<std::string>& words, const char* option) {
  return std::ranges::any_of(words,
                             [&](const auto& word) { return word.substr(0, word.find('=')) == option; });
}

// What 07 makes of its options, with attention on tensor cores if no other one is given. Throws UsageError.
CombinedOptions parse_model(const std::vector<std::string>& words) {
  // Layouts say another micro-batch; attention may be others' (check_sizes).
  std::vector<const char*> arguments = {"plan", "--micro-batch-size", "1", "--dry-run"};
  for (const std::string& word : words) arguments.push_back(word.c_str());
  auto options = parse_options<CombinedOptions>(static_cast<int>(arguments.size()), arguments.data(), "",
                                                Attention::tiled);
  const DeviceProfile gpu = load_profile(options.gpu);
  const bool has_kernel = has_tensor_core_kernels(options.model.head_size()) || gpu.flash_attention > 0;
  if (!is_given(words, "--attention") && has_kernel) options.attention = Attention::tensor_core;
  if (!is_given(words, "--attention") && gpu.unfused_attention > 0) options.attention = Attention::naive;
  // Two matrices of width f have the weights, products and activations of our three of width 2/3 f.
  if (gpu.mlp_matrices == 2) options.model.d_ff = std::max(64, 64 * ((options.model.d_ff + 48) / 96));
  options.as_json.clear();  // each plan copies the options, and needs no text
  return options;
}

// Reads "ranges" of the file that --gpu names. Throws UsageError.
Ranges read_ranges(const std::string& gpu) {
  const MappedFile file("--gpu", profile_path(gpu));
  try {
    const auto json = nlohmann::json::parse(file.text());
    return json.contains("as") && !json.contains("ranges") ? read_ranges(json["as"])
                                                           : json.value("ranges", Ranges());
  } catch (const nlohmann::json::exception& error) {
    throw UsageError("--gpu", gpu, text("other \"ranges\": ", error.what()));
  }
}

std::string words_of_layouts() {
  CombinedOptions any;
  std::vector<std::string> words;
  for (const LayoutNumber& number : numbers_of(any)) words.push_back(number.word + "N");
  return join(words, " ") + ' ' + join(words_of(pp_schedule_names), " ") + " sp " +
         join(words_of(recompute_names), " ");
}

Request parse(int argc, char** argv) {
  Request r;
  CLI::App app{
      "Finds the fastest layout of a run of 07 that fits, without a GPU. Options of model, batch and GPU "
      "(--model, --layers, --seq-len, --global-batch-size, --gpu, --experts ...) are those of 07."};
  app.set_help_flag("-h,--help", "print this text and end");
  app.set_version_flag("--version", version(), "print the version and the commit, and end");
  app.footer(models_and_gpus() + "\n\nWords of layouts:\n  " + words_of_layouts());
  app.allow_extras();
  std::string config;
  double memory_bytes = 0;
  app.add_option("--gpus", r.gpus, "GPUs [8]")->type_name("N")->check(CLI::Range(1, 65536).description(""));
  app.add_option("--top", r.top, "layouts that are shown [10]")
      ->type_name("N")
      ->check(CLI::Range(1, 10000).description(""));
  app.add_flag("--coarse", r.coarse, "times by formulas (coarse.h), without a dry run");
  app.add_option("--compare", r.compare, "layouts beside each other, such as \"tp2 dp4 zero1 mbs1\"")
      ->expected(1, 1000);
  for (const std::string axis : {"tp", "cp", "dp", "pp", "ep", "mbs", "zero"}) {
    const auto limit = [&r, axis](const std::string& numbers) { r.only += " " + axis + numbers; };
    app.add_option_function<std::string>("--" + axis, limit, "only layouts with so many: 4, or 1-8");
  }
  app.add_option_function<std::string>(
      "--only", [&](const std::string& words) { r.only += " " + words; },
      "only layouts with these words, such as \"zero3 1f1b sp\"");
  const auto add_quantity = [&](const std::string& option, double& value, const char* help) {
    const auto assign = [option, &value](const std::string& words) { value = quantity(option, words); };
    app.add_option_function<std::string>(option, assign, help);
  };
  add_quantity("--max-memory", memory_bytes, "that a layout may take of a GPU, such as 70GiB");
  add_quantity("--tokens", r.tokens, "to train on, such as 2T: days and GPU hours");
  add_quantity("--price", r.price, "of a GPU hour: money");
  app.add_option("--measured", r.measured, "a step of the layout of --compare, 1.9s or 1900ms: what differs?")
      ->transform(
          CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"ms", 1e-3}}).description(""))
      ->type_name("TIME");
  app.add_option("--config", config, "config.json of Hugging Face: Llama, Mistral, Mixtral, Qwen2");
  app.add_option("--why", r.why, "why is this layout not the best?");
  app.add_option("--rows", r.rows, "print coarse seconds and memory of each row of this CSV");
  app.add_option("--json", r.json, "write the layouts into this file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    throw HelpRequest(app.help());
  } catch (const CLI::CallForVersion&) {
    throw HelpRequest(app.version() + '\n');
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  require(r.tokens > 0 || r.price == 0, "--tokens", 0, "how many, such as 2T, with --price");
  require(app["--measured"]->empty() || (r.measured > 0 && r.compare.size() == 1 && r.why.empty()),
          "--measured", r.measured, "seconds above 0, and --compare with the layout that took them");
  ModelConfig of_config = {};
  if (!config.empty()) {
    try {
      of_config = read_sizes("--config", config);
    } catch (const UsageError& error) {  // another kind of model
      throw UsageError(text(error.what(), "; or give --layers, --d-model, --heads, --kv-heads, --d-ff, ",
                            "--vocab-size, and where there are experts --experts, --top-k"));
    }
    r.model = sizes_of(of_config);
  }
  for (const std::string& word : app.remaining()) r.model.push_back(word);
  r.base = parse_model(r.model);
  r.base.model.remarks = of_config.remarks;
  const std::string gpu = r.base.gpu.empty() ? "h100" : r.base.gpu;
  r.gpu = load_profile(gpu);
  const auto given = [&](const char* option) { return is_given(r.model, option); };
  for (const char* option :
       {"--tp", "--cp", "--dp", "--pp", "--ep", "--zero-stage", "--shard-ranks", "--micro-batch-size",
        "--pp-schedule", "--vpp", "--sequence-parallel", "--recompute", "--ranks"})
    require(!given(option) || !r.rows.empty(), option, "given",
            "--only, with words of layouts such as \"zero3 mbs2 sp\"");
  const bool has_sizes = std::ranges::any_of(
      std::array{"--layers", "--d-model", "--heads", "--kv-heads", "--d-ff", "--vocab-size"}, given);
  std::string& name = r.base.model.name;
  if (r.rows.empty() && r.gpu.mlp_matrices == 2)
    r.model.insert(r.model.end(), {"--d-ff", std::to_string(r.base.model.d_ff)});
  if (has_sizes) name = !config.empty() ? config : given("--model") ? name + ", changed" : "a model";
  r.limit = text("the ", human_bytes(r.gpu.memory_bytes), " of a GPU less 4 % for fragments");
  r.gpu.memory_bytes =
      memory_bytes > 0 ? std::min(memory_bytes, r.gpu.memory_bytes) : (1 - margin) * r.gpu.memory_bytes;
  if (memory_bytes > 0) r.limit = human_bytes(r.gpu.memory_bytes);
  r.ranges = read_ranges(gpu);
  r.coarse |= !r.ranges.empty();  // another framework: 07 can't be asked about its steps
  if (r.base.ranks_per_node > 0) r.gpu.gpus_per_node = r.base.ranks_per_node;
  return r;
}

std::string command(const Request& r, const Plan& p) {
  std::vector<std::string> words;  // but for those that only a CPU build has
  for (size_t i = 0; i < r.model.size(); ++i) {
    if (r.model[i] == "--gpu")
      ++i;
    else if (!r.model[i].starts_with("--gpu="))
      words.push_back(r.model[i]);
  }
  return text("mpirun -n ", r.gpus, " build/cuda-bf16/07_combined_5d ", join(words, " "), " ",
              join(options_of(p.options), " "));
}

double tokens_per_second(const Request& r, const Plan& p) {  // of a GPU
  return double(r.base.global_batch_size) * r.base.sequence_length / p.seconds / r.gpus;
}
double mfu(const Request& r, const Plan& p) {
  return tokens_per_second(r, p) * flops_per_token(p.options) / r.gpu.flops(has_fp8_products ? 1 : 2);
}

// Layouts of a kind are mispredicted alike.
std::string kind_of(const Plan& p, const DeviceProfile& gpu) {
  if (p.shape.tp > gpu.gpus_per_node) return "tensor over nodes";
  const bool pipeline = p.shape.pp > 1, tensor = p.shape.tp > 1;
  if (pipeline && tensor)
    return p.shape.ranks() > gpu.gpus_per_node ? "tensor and pipeline over nodes" : "tensor and pipeline";
  return pipeline ? "pipeline" : tensor ? "tensor" : "data";
}
// Seconds between which 8 of 10 measured steps of its kind were, where the GPU's profile was fitted to such.
std::optional<std::array<double, 2>> range_of(const Request& r, const Plan& p) {
  const auto range = r.ranges.find(kind_of(p, r.gpu));
  if (range == r.ranges.end()) return {};
  return std::array{p.seconds * range->second[0], p.seconds * range->second[1]};
}

void print_header(const Request& r) {
  const ModelConfig& m = r.base.model;
  std::printf(
      "%s: %d layers, width %d, %s parameters, %d sequences of %d tokens a step; %d %s GPUs, %.0f a "
      "node, attention %s (%s)\n%s%s\n",
      m.name.c_str(), m.layers, m.d_model, human_count(static_cast<double>(parameter_count(m))).c_str(),
      r.base.global_batch_size, r.base.sequence_length, r.gpus, r.gpu.name.c_str(), r.gpu.gpus_per_node,
      r.gpu.flash_attention > 0 ? "FlashAttention-2's" : "ours", to_string(r.base.attention).c_str(),
      m.remarks.c_str(), r.base.attention == Attention::tiled ? slow_heads(m.head_size()).c_str() : "");
}

// Has as many parts of a step as there is room for in the terminal; a pipe has room for all.
void print_plans(const Request& r, const std::vector<Plan>& plans) {
  winsize terminal = {};
  const bool is_terminal = ioctl(STDOUT_FILENO, TIOCGWINSZ, &terminal) == 0 && terminal.ws_col > 0;
  int longest = 6;
  for (const Plan& p : plans) longest = std::max(longest, static_cast<int>(layout_of(p.options).size()));
  const int room = is_terminal ? std::max(0, (terminal.ws_col - longest - 40) / 10) : 100;
  const auto shown = [&](const Plan& p) { return p.parts | std::views::take(room); };
  std::printf("%-*s %9s %10s %11s %6s", longest, "layout", "memory", "step", "tokens/s", "MFU");
  if (room >= 6)
    std::printf("   ms of a step, %s",
                r.coarse ? "by a coarse time" : "by dry runs; of each axis, what no kernel hides");
  std::printf("\n%-*s %9s %10s %11s %6s", longest, "", "GiB", "ms", "a GPU", "%");
  for (const auto& [name, seconds] : shown(plans.front())) std::printf(" %9s", name.c_str());
  std::printf("%s\n", r.ranges.empty() ? "" : "   8 of 10 are in, ms");
  for (const Plan& p : plans) {
    std::printf("%-*s %9.1f %10.1f %11.0f %6.1f", longest, layout_of(p.options).c_str(),
                p.memory() / (1 << 30), p.seconds * 1e3, tokens_per_second(r, p), 100 * mfu(r, p));
    for (const auto& [name, seconds] : shown(p)) std::printf(" %9.1f", seconds * 1e3);
    if (const auto range = range_of(r, p)) std::printf("   %.1f-%.1f", (*range)[0] * 1e3, (*range)[1] * 1e3);
    std::printf("\n");
  }
}

// To train on --tokens with this layout.
double hours_of(const Request& r, const Plan& p) {
  return r.tokens / (tokens_per_second(r, p) * r.gpus) / 3600;
}

Json to_json(const Request& r, const std::vector<Plan>& plans) {
  Json layouts;
  for (const Plan& p : plans) {
    Json& j = layouts.emplace_back(Json{{"layout", layout_of(p.options)},
                                        {"options", options_of(p.options)},
                                        {"command", command(r, p)},
                                        {"micro_batches", p.micro_batches},
                                        {"tensor_bytes", sum_of(p.tensors())},
                                        {"library_bytes", p.libraries},
                                        {"step_seconds", p.seconds},
                                        {"tokens_per_second", tokens_per_second(r, p)},
                                        {"mfu", mfu(r, p)}});
    if (const auto range = range_of(r, p)) j["range_seconds"] = *range;
    if (r.tokens > 0) j["days"] = hours_of(r, p) / 24;
    if (r.price > 0) j["money"] = hours_of(r, p) * r.gpus * r.price;
    for (const auto& [axis, degree] : p.shape.degrees()) j[axis] = degree;
    for (const auto& [part, seconds] : p.parts) j["seconds"][part] = seconds;
    for (size_t i = 0; i < purposes; ++i) j["memory"][std::string(purpose_names[i])] = p.tensors()[i];
  }
  return {{"gpu", r.gpu.name},
          {"gpus", r.gpus},
          {"memory_bytes", r.gpu.memory_bytes},
          {"model", r.base.model.name},
          {"layouts", layouts}};
}

// The time of these plans by dry runs, unless --coarse is given. Without those that 07 refuses; throws
// UsageError if it refuses all, or one where `all` are needed.
void ask_program(const Request& r, std::vector<Plan>& plans, bool all) {
  if (r.coarse) return;
  dry_run(plans, r.model, static_cast<int>(r.gpu.gpus_per_node));
  const auto refused = [](const Plan& p) { return !p.refusal.empty(); };
  const auto first = std::ranges::find_if(plans, refused);
  if (first != plans.end() && (all || std::ranges::all_of(plans, refused)))
    throw UsageError(layout_of(first->options) + ": " + first->refusal);
  std::erase_if(plans, refused);
}

// The search for the fastest layouts, one of each mesh. Dry runs of ten or more decide, however few are
// wanted: the best by coarse time need not be the best. Throws UsageError where there is none.
Search found(const Request& r, Planner& planner, size_t count) {
  Search s = planner.search(std::max<size_t>(count, 10));
  const std::string of = r.only.empty() ? "" : " of those with" + r.only;
  require(s.divide > 0 || of.empty(), "--only", r.only.substr(!of.empty()),
          "words of a layout that shares out ", r.gpus, " GPUs, the model and ", r.base.global_batch_size,
          " sequences; there is none");
  require(s.divide > 0, "--gpus", r.gpus, "a number that divides heads, layers or the batch");
  if (s.fit == 0) {
    throw UsageError("no layout fits: " + layout_of(s.nearest->options) + " needs least" + of + ", " +
                     human_bytes(s.nearest->memory()) + " of " + r.limit +
                     "; take more GPUs, or a shorter --seq-len");
  }
  require(!s.best.empty(), "--global-batch-size", r.base.global_batch_size,
          "another one: no layout that fits can share it out");
  ask_program(r, s.best, /*all=*/false);
  std::ranges::stable_sort(s.best, {}, &Plan::seconds);
  s.best.resize(std::min(count, s.best.size()));
  return s;
}

// Which parts of the step of `asked` are longer than those of `best`.
std::string sentence(const Plan& best, const Plan& asked) {
  std::vector<std::string> more;
  for (size_t i = 0; i < asked.parts.size(); ++i) {
    const double ms = 1e3 * (asked.parts[i].second - best.parts[i].second);
    if (ms > 10 * best.seconds) more.push_back(text(std::lround(ms), " ms more of ", asked.parts[i].first));
  }
  return text(layout_of(asked.options), " takes ", std::lround(1e3 * (asked.seconds - best.seconds)),
              " ms longer: ", more.empty() ? "a little of each" : join(more, ", "), ".");
}

// What --measured may come from: how much longer (or less) each term of the model alone would have to last.
void explain(const Request& r, const Plan& p) {
  const double more = r.measured - p.seconds, percent = 100 * mfu(r, p) * p.seconds;  // of peak in a second
  std::printf("measured %.1f ms is %.1f ms %s than modelled, as if (each alone)\n", 1e3 * r.measured,
              1e3 * std::abs(more), more > 0 ? "more" : "less");
  for (const auto& [part, seconds] : p.parts) {
    if (seconds < 0.01 * p.seconds || seconds + more <= 0) continue;
    std::printf("  %-10s took %.1f ms in place of %.1f", part.c_str(), 1e3 * (seconds + more), 1e3 * seconds);
    if (part == "compute")
      std::printf(", at %.1f %% of the peak in place of %.1f", percent / (seconds + more), percent / seconds);
    std::printf("\n");
  }
  if (more <= 0) return;
  const int passes = p.options.recompute == Recompute::full ? 4 : 3;  // of 14 kernels a layer (coarse.h)
  const double kernels = 14.0 * passes * p.micro_batches * p.options.model.layers / p.shape.pp;
  std::printf("  launches   came %.1f us late, each of a rank's %.0f\n", 1e6 * more / kernels, kernels);
  if (p.hidden > 0)
    std::printf("  hidden     was nothing; %.1f ms of transfers are, %.0f %% of the difference\n",
                1e3 * p.hidden, 100 * p.hidden / more);
}

// The layouts of --compare and --why, or those that are found.
void show(const Request& r) {
  Planner planner = {r.base, r.gpus, r.gpu, read_wishes("--only", r.only)};
  std::vector<Plan> plans;
  for (const std::string& words : r.compare)
    plans.push_back(planner.plan(with_layout(r.base, "--compare", words, r.gpus)));
  if (!r.why.empty()) plans.push_back(planner.plan(with_layout(r.base, "--why", r.why, r.gpus)));
  const bool are_given = !plans.empty();
  if (are_given) ask_program(r, plans, /*all=*/true);
  Search s;
  if (!are_given || !r.why.empty()) s = found(r, planner, are_given ? 1 : r.top);
  plans.insert(plans.begin(), s.best.begin(), s.best.end());
  print_header(r);
  if (!are_given) {
    std::printf(
        "1  fit     %d layouts divide the model; %d of them need at most %s, CUDA and NCCL included\n",
        s.divide, s.fit, r.limit.c_str());
    std::printf("2  batch   %d of these reach the global batch\n", s.reach);
    std::printf("3  speed   the fastest %zu\n\n", plans.size());
  }
  print_plans(r, plans);
  for (const Plan& p : plans) {
    if (p.memory() > r.gpu.memory_bytes)
      std::printf("%s does not fit: it may need %s.\n", layout_of(p.options).c_str(), r.limit.c_str());
  }
  const Plan& first = plans.front();
  if (!r.why.empty()) std::printf("%s\n", sentence(first, plans.back()).c_str());
  if (r.measured > 0) explain(r, first);
  if (!are_given) std::printf("\n%s\n", command(r, first).c_str());
  if (r.tokens > 0) {
    const double hours = hours_of(r, first);
    const auto range =
        range_of(r, first).value_or(std::array{first.seconds, slowest_published * first.seconds});
    const double least = hours * range[0] / first.seconds, most = hours * range[1] / first.seconds;
    std::printf("%s tokens on %d GPUs: %.1f to %.1f days, %.0f to %.0f GPU hours",
                human_count(r.tokens).c_str(), r.gpus, least / 24, most / 24, least * r.gpus, most * r.gpus);
    if (r.price > 0)
      std::printf(", %.0f to %.0f of money", least * r.gpus * r.price, most * r.gpus * r.price);
    std::printf(" (%s); failures, restarts and evaluation come on top\n", layout_of(first.options).c_str());
  }
  if (r.json.empty()) return;
  std::ofstream file(r.json);
  file << to_json(r, plans).dump(1) << std::endl;
  require(file.good(), "--json", r.json, "a file that can be written");
}

// ---- --rows: measured steps, or what one wants to know of many layouts; a line of JSON for each

constexpr std::string_view no_options[] = {"gpus",         "seconds", "tokens_per_second_per_gpu",
                                           "memory_gb",    "layout",  "predicted_seconds",
                                           "predicted_gb", "status"};

std::vector<std::string> cells_of(std::string line) {
  if (line.ends_with('\r')) line.pop_back();
  std::vector<std::string> cells;
  std::istringstream stream(line + ",");
  for (std::string cell; std::getline(stream, cell, ',');) cells.push_back(cell);
  return cells;
}

// What the rows of these columns leave to 07, in a line.
void say_what_is_missing(const Request& r, const std::vector<std::string>& columns) {
  std::vector<std::string> missing;
  for (const std::string name : {"vocab-size", "seq-len", "global-batch-size", "micro-batch-size",
                                 "zero-stage", "recompute", "sequence-parallel"})
    if (std::ranges::count(columns, name) == 0 && !is_given(r.model, ("--" + name).c_str()))
      missing.push_back(name);
  if (!missing.empty())
    std::fprintf(stderr, "%s does not say %s: as 07 has it (--help)\n", r.rows.c_str(),
                 join(missing, ", ").c_str());
}

// The words of 07 of a row.
std::vector<std::string> words_of(const Request& r, const std::vector<std::string>& columns,
                                  const std::vector<std::string>& cells) {
  require(cells.size() == columns.size(), "cells", cells.size(), columns.size(), ", one for each column");
  std::vector<std::string> words = r.model;
  for (size_t i = 0; i < columns.size(); ++i) {
    const std::string &name = columns[i], &cell = cells[i], option = "--" + name;
    if (cell.empty() || cell == "false" || std::ranges::count(no_options, name) > 0) continue;
    require(name != "help" && name != "version", option, cell, "a column that is an option of a run");
    if (name == "config") {
      std::ranges::copy(sizes_of(read_sizes(option, cell)), std::back_inserter(words));
    } else if (words.push_back(option); cell != "true") {
      words.push_back(cell);
    }
    if (name == "heads" && std::ranges::count(columns, "kv-heads") == 0 && !is_given(r.model, "--kv-heads"))
      words.insert(words.end(), {"--kv-heads", cell});
  }
  return words;
}

void print_rows(const Request& r) {
  std::istringstream file{std::string(MappedFile("--rows", r.rows).text())};
  std::string line;
  std::getline(file, line);
  if (line.starts_with("\xEF\xBB\xBF")) line.erase(0, 3);  // a byte-order mark
  const std::vector<std::string> columns = cells_of(line);
  const auto of_gpus = std::ranges::find(columns, "gpus") - columns.begin();
  for (int number = 2; std::getline(file, line); ++number) {
    if (line.empty() || line == "\r") continue;
    const std::vector<std::string> cells = cells_of(line);
    CombinedOptions o;
    int gpus = 0;
    try {
      const std::string said = of_gpus < std::ssize(cells) ? cells[of_gpus] : "";
      const char* const end = said.data() + said.size();
      require(std::from_chars(said.data(), end, gpus).ptr == end && gpus > 0 && gpus <= 65536, "gpus", said,
              "how many, in each row");
      o = parse_model(words_of(r, columns, cells));
    } catch (const UsageError& error) {
      throw UsageError(text("--rows: ", r.rows, ", row ", number, ": ", error.what()));
    }
    Json row;
    try {
      o.dp = mesh_shape(o, gpus).dp;
      const Plan p = Planner{o, gpus, r.gpu}.plan(o);
      row = {{"seconds", p.seconds}, {"kind", kind_of(p, r.gpu)}, {"memory", p.memory()}};
      row["stages"] = {p.stages.front(), p.stages.back()}, row["libraries"] = p.libraries;
      row["has"] = r.gpu.memory_bytes, row["batch"] = o.global_batch_size;
      row["tokens"] = int64_t{o.global_batch_size} * o.sequence_length;
    } catch (const UsageError& refusal) {
      row["refusal"] = refusal.what();
    }
    std::printf("%s\n", row.dump().c_str());
  }
  say_what_is_missing(r, columns);
}

}  // namespace

int main(int argc, char** argv) {
  return run_program([&] {
    const Request r = parse(argc, argv);
    r.rows.empty() ? show(r) : print_rows(r);
  });
}
