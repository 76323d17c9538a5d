// The planner: which layout of a run on so many GPUs fits, how fast it is, and why. It needs no GPU. It knows
// the layouts (layouts.h) and roughly how long a step of each takes (coarse.h); then it asks the program
// about the best (dry_run.h).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "checkpoint/checkpoint_folder.h"
#include "dry_run.h"

using namespace pentatron;

namespace {

// "framework" of a GPU's profile that was fitted to another framework's steps (calibrate.py).
struct Framework {
  double contention = 0;  // as in Planner (layouts.h)
  // Measured over predicted seconds, by kind of layout (kind_of): the 10th and the 90th percentile.
  std::map<std::string, std::array<double, 2>> ranges;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Framework, contention, ranges)

struct Request {
  int gpus = 8;
  size_t top = 10;
  std::vector<std::string> compare;
  std::string why, only, json, rows;
  double tokens = 0, price = 0;
  bool coarse = false;
  std::vector<std::string> model;  // the options of 07 that were given
  CombinedOptions base;
  DeviceProfile gpu;
  Framework framework;
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
  std::vector<std::pair<std::string, int>> sizes = {{"--layers", m.layers}, {"--d-model", m.d_model},
                                                    {"--heads", m.heads},   {"--kv-heads", m.kv_heads},
                                                    {"--d-ff", m.d_ff},     {"--vocab-size", m.vocab_size}};
  if (m.experts > 0) {
    sizes.insert(sizes.end(),
                 {{"--experts", m.experts}, {"--top-k", m.top_k}, {"--shared-experts", m.shared_experts}});
  }
  std::vector<std::string> words;
  for (const auto& [option, value] : sizes) words.insert(words.end(), {option, std::to_string(value)});
  return words;
}

bool is_given(const std::vector<std::string>& words, const char* option) {
  return std::ranges::any_of(words,
                             [&](const auto& word) { return word.substr(0, word.find('=')) == option; });
}

// What 07 makes of its options. Attention is on tensor cores, if it can be and no other one is given. Throws
// UsageError.
CombinedOptions parse_model(const std::vector<std::string>& words) {
  // Layouts say another micro-batch; attention may be others' (check_sizes).
  std::vector<const char*> arguments = {"plan", "--micro-batch-size", "1", "--dry-run"};
  for (const std::string& word : words) arguments.push_back(word.c_str());
  auto options = parse_options<CombinedOptions>(static_cast<int>(arguments.size()), arguments.data(), "",
                                                Attention::tiled);
  const bool has_kernel = has_tensor_core_kernels(options.model.head_size()) ||
                          load_profile(options.gpu).flash_attention > 0;
  if (!is_given(words, "--attention") && has_kernel) options.attention = Attention::tensor_core;
  options.as_json.clear();  // each plan copies the options, and needs no text
  return options;
}

// Reads "framework" of the file that --gpu names. Throws UsageError.
Framework read_framework(const std::string& gpu) {
  const MappedFile file("--gpu", profile_path(gpu));
  try {
    const auto json = nlohmann::json::parse(file.text()).value("framework", nlohmann::json::object());
    for (const auto& [name, value] : json.items())
      require(name == "contention" || name == "ranges", "--gpu", gpu,
              "contention and ranges in its \"framework\"; there is no field ", name);
    return json;
  } catch (const nlohmann::json::exception& error) {
    throw UsageError("--gpu", gpu, text("another \"framework\": ", error.what()));
  }
}

Request parse(int argc, char** argv) {
  Request r;
  CLI::App app{
      "Finds the fastest layout of a run of 07 that fits, without a GPU. Options of the model, the batch "
      "and\n"
      "the GPU (--model, --layers, --seq-len, --global-batch-size, --gpu, --experts ...) are those of 07."};
  app.set_help_flag("--help", "print this text and end");
  app.allow_extras();
  std::string config;
  double memory_bytes = INFINITY;
  app.add_option("--gpus", r.gpus, "GPUs [8]")->check(CLI::Range(1, 65536));
  app.add_option("--top", r.top, "layouts that are shown [10]")->check(CLI::Range(1, 10000));
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
  app.add_option("--config", config, "sizes from a config.json of Hugging Face (Llama)");
  app.add_option("--why", r.why, "why is this layout not the best?");
  app.add_option("--rows", r.rows,
                 "print coarse seconds and memory of each line of this file: a layout, |, options of 07");
  app.add_option("--json", r.json, "write the layouts into this file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    throw HelpRequest(app.help());
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  require(r.tokens > 0 || r.price == 0, "--tokens", 0, "how many, such as 2T, with --price");
  ModelConfig of_config = {};
  if (!config.empty()) {
    read_model_config("--config", config, of_config);
    r.model = sizes_of(of_config);
  }
  for (const std::string& word : app.remaining()) r.model.push_back(word);
  r.base = parse_model(r.model);
  r.base.model.remarks = of_config.remarks;
  const auto given = [&](const char* option) { return is_given(r.model, option); };
  for (const char* option :
       {"--tp", "--cp", "--dp", "--pp", "--ep", "--zero-stage", "--shard-ranks", "--micro-batch-size",
        "--pp-schedule", "--vpp", "--sequence-parallel", "--recompute", "--ranks"})
    require(!given(option), option, "given", "--only, with words of layouts such as \"zero3 mbs2 sp\"");
  const bool has_sizes = std::ranges::any_of(
      std::array{"--layers", "--d-model", "--heads", "--kv-heads", "--d-ff", "--vocab-size"}, given);
  std::string& name = r.base.model.name;
  if (has_sizes) name = !config.empty() ? config : given("--model") ? name + ", changed" : "a model";
  const std::string gpu = r.base.gpu.empty() ? "h100" : r.base.gpu;
  r.gpu = load_profile(gpu);
  r.gpu.memory_bytes = std::min(r.gpu.memory_bytes, memory_bytes);
  r.framework = read_framework(gpu);
  r.coarse |= !r.framework.ranges.empty();  // another framework: 07 can't be asked about its steps
  if (r.base.ranks_per_node > 0) r.gpu.gpus_per_node = r.base.ranks_per_node;
  return r;
}

std::string command(const Request& r, const Plan& p) {
  return text("mpirun -n ", r.gpus, " build/cuda-bf16/07_combined_5d ", join(r.model, " "), " ",
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
  const auto range = r.framework.ranges.find(kind_of(p, r.gpu));
  if (range == r.framework.ranges.end()) return {};
  return std::array{p.seconds * range->second[0], p.seconds * range->second[1]};
}

// Whose kernels are modelled, and their shares of the peak.
std::string attention_of(const Request& r) {
  if (r.base.attention != Attention::tensor_core) return "ours, " + to_string(r.base.attention);
  const bool flash = r.gpu.flash_attention > 0, wide = r.base.model.head_size() == 128;
  const double forward = wide ? r.gpu.attention_128_forward : r.gpu.attention_64_forward,
               backward = wide ? r.gpu.attention_128_backward : r.gpu.attention_64_backward;
  const auto percent = [](double share) { return std::lround(100 * share); };
  return text(flash ? "FlashAttention-2's" : "ours", " at ", percent(flash ? r.gpu.flash_forward : forward),
              " and ", percent(flash ? r.gpu.flash_backward : backward), " % of the peak");
}

void print_header(const Request& r) {
  const ModelConfig& m = r.base.model;
  std::printf(
      "%s: %d layers, width %d, %s parameters, %d sequences of %d tokens a step; %d %s GPUs, %.0f a "
      "node, attention %s\n%s%s\n",
      m.name.c_str(), m.layers, m.d_model, human_count(static_cast<double>(parameter_count(m))).c_str(),
      r.base.global_batch_size, r.base.sequence_length, r.gpus, r.gpu.name.c_str(), r.gpu.gpus_per_node,
      attention_of(r).c_str(), m.remarks.c_str(),
      r.base.attention == Attention::tiled ? slow_heads(m.head_size()).c_str() : "");
}

void print_plans(const Request& r, const std::vector<Plan>& plans) {
  std::printf("%-52s %9s %10s %11s %6s   ms of a step, %s\n%-52s %9s %10s %11s %6s", "layout", "memory",
              "step", "tokens/s", "MFU",
              r.coarse ? "by a coarse time" : "by dry runs; of each axis, what no kernel hides", "", "GiB",
              "ms", "a GPU", "%");
  for (const auto& [name, seconds] : plans.front().parts) std::printf(" %9s", name.c_str());
  std::printf("%s\n", r.framework.ranges.empty() ? "" : "   8 of 10 are in, ms");
  for (const Plan& p : plans) {
    std::printf("%-52s %9.1f %10.1f %11.0f %6.1f", layout_of(p.options).c_str(), p.memory() / (1 << 30),
                p.seconds * 1e3, tokens_per_second(r, p), 100 * mfu(r, p));
    for (const auto& [name, seconds] : p.parts) std::printf(" %9.1f", seconds * 1e3);
    if (const auto range = range_of(r, p)) std::printf("   %.1f-%.1f", (*range)[0] * 1e3, (*range)[1] * 1e3);
    std::printf("\n");
  }
}

// To train on --tokens with this layout.
double hours_of(const Request& r, const Plan& p) {
  return r.tokens / (tokens_per_second(r, p) * r.gpus) / 3600;
}

using Json = nlohmann::ordered_json;

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
                     human_bytes(s.nearest->memory()) + " of " + human_bytes(r.gpu.memory_bytes) +
                     "; take more GPUs, or a shorter --seq-len");
  }
  require(!s.best.empty(), "--global-batch-size", r.base.global_batch_size,
          "another one: no layout that fits can share it out");
  ask_program(r, s.best, /*all=*/false);
  std::ranges::stable_sort(s.best, {}, &Plan::seconds);
  s.best.resize(std::min(count, s.best.size()));
  return s;
}

// The layouts of --compare and --why, or those that are found.
void show(const Request& r) {
  Planner planner = {r.base, r.gpus, r.gpu, read_wishes("--only", r.only), r.framework.contention};
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
    std::printf("1  fit     %d layouts divide the model; %d of them need at most the %s of a GPU\n", s.divide,
                s.fit, human_bytes(r.gpu.memory_bytes).c_str());
    std::printf("2  batch   %d of these reach the global batch\n", s.reach);
    std::printf("3  speed   the fastest %zu\n\n", plans.size());
  }
  print_plans(r, plans);
  for (const Plan& p : plans) {
    if (p.memory() > r.gpu.memory_bytes)
      std::printf("%s does not fit: a GPU has %s.\n", layout_of(p.options).c_str(),
                  human_bytes(r.gpu.memory_bytes).c_str());
  }
  const Plan& first = plans.front();
  if (!are_given) std::printf("\n%s\n", command(r, first).c_str());
  if (r.tokens > 0) {
    const double hours = hours_of(r, first);
    std::printf("%s tokens on %d GPUs: %.1f days, %.0f GPU hours", human_count(r.tokens).c_str(), r.gpus,
                hours / 24, hours * r.gpus);
    if (r.price > 0) std::printf(", %.0f of money", hours * r.gpus * r.price);
    std::printf(" (%s)\n", layout_of(first.options).c_str());
  }
  if (r.json.empty()) return;
  std::ofstream file(r.json);
  file << to_json(r, plans).dump(1) << std::endl;
  require(file.good(), "--json", r.json, "a file that can be written");
}

// --rows: a line of JSON for each.
void print_rows(const Request& r) {
  std::istringstream file{std::string(MappedFile("--rows", r.rows).text())};
  std::map<std::string, CombinedOptions> read;  // by their words: many lines have the same
  for (std::string line, word; std::getline(file, line);) {
    const size_t bar = line.find('|');
    require(bar != line.npos, "--rows", printable(line.substr(0, 80)), "LAYOUT | OPTIONS");
    Json row;
    try {
      const auto [options, is_new] = read.try_emplace(line.substr(bar + 1));
      if (is_new) {
        std::vector<std::string> words = r.model;
        for (std::istringstream stream(options->first); stream >> word;) words.push_back(word);
        options->second = parse_model(words);
      }
      const CombinedOptions o = with_layout(options->second, "--rows", line.substr(0, bar), 1);
      const Plan p =
          Planner{o, o.tp * o.cp * o.dp * o.pipeline.pp, r.gpu, {}, r.framework.contention}.plan(o);
      row = {{"seconds", p.seconds}, {"kind", kind_of(p, r.gpu)}, {"memory", p.memory()}};
      row["stages"] = {p.stages.front(), p.stages.back()}, row["libraries"] = p.libraries;
    } catch (const UsageError& refusal) {
      row["refusal"] = refusal.what();
    }
    std::printf("%s\n", row.dump().c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_program([&] {
    const Request r = parse(argc, argv);
    r.rows.empty() ? show(r) : print_rows(r);
  });
}
