// The planner: which layout of a run on so many GPUs fits, how fast it is, and why. It needs no GPU. It knows
// the layouts that 07 accepts (layouts.h) and roughly how long a step of each takes (coarse.h); then it asks
// the program about the best (dry_run.h).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "calculator.h"
#include "checkpoint/checkpoint_folder.h"
#include "dry_run.h"

using namespace pentatron;

namespace {

struct Request {
  int gpus = 8;
  size_t top = 10;
  std::vector<std::string> compare;
  std::string why, only, json, rows, calculator;
  double tokens = 0, price = 0;
  double memory_bytes = std::numeric_limits<double>::infinity();  // of a GPU, that a layout may take
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
  std::vector<const char*> arguments = {"plan", "--micro-batch-size", "1"};  // layouts say another one
  for (const std::string& word : words) arguments.push_back(word.c_str());
  auto options = parse_options<CombinedOptions>(static_cast<int>(arguments.size()), arguments.data(), "",
                                                Attention::tiled);
  const bool has_kernel = options.model.head_size() == 64 || options.model.head_size() == 128;
  if (!is_given(words, "--attention") && has_kernel) options.attention = Attention::tensor_core;
  return options;
}

// Of the file that --gpu names. Throws UsageError.
Framework read_framework(const std::string& gpu) {
  std::ifstream file(profile_path(gpu));
  try {
    return nlohmann::json::parse(file).value("framework", Framework());
  } catch (const nlohmann::json::exception& error) {
    throw UsageError("--gpu", gpu, text("another \"framework\": ", error.what()));
  }
}

// Throws UsageError if an option is given that says a layout.
void refuse_layouts(const std::vector<std::string>& words) {
  for (const char* option : {"--tp", "--cp", "--dp", "--pp", "--ep", "--zero-stage", "--micro-batch-size",
                             "--pp-schedule", "--vpp", "--sequence-parallel", "--recompute", "--ranks"})
    require(!is_given(words, option), option, "given",
            "--only, with words of layouts such as \"zero3 mbs2 sp\"");
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
  add_quantity("--max-memory", r.memory_bytes, "that a layout may take of a GPU, such as 70GiB");
  add_quantity("--tokens", r.tokens, "to train on, such as 2T: days and GPU hours");
  add_quantity("--price", r.price, "of a GPU hour: money");
  app.add_option("--config", config, "sizes from a config.json of Hugging Face (Llama)");
  app.add_option("--why", r.why, "why is this layout not the best?");
  app.add_option(
      "--rows", r.rows,
      "print coarse seconds, bytes and kind of each line of this file: a layout, |, options of 07");
  app.add_option("--json", r.json, "write the layouts into this file");
  app.add_option("--calculator", r.calculator,
                 "write the memory of many layouts into this file; see calculator.h");
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
  refuse_layouts(r.model);
  const bool has_sizes = std::ranges::any_of(
      std::array{"--layers", "--d-model", "--heads", "--kv-heads", "--d-ff", "--vocab-size"}, given);
  std::string& name = r.base.model.name;
  if (has_sizes) name = !config.empty() ? config : given("--model") ? name + ", changed" : "a model";
  const std::string gpu = r.base.gpu.empty() ? "h100" : r.base.gpu;
  r.gpu = load_profile(gpu);
  r.framework = read_framework(gpu);
  r.coarse |= !r.framework.ranges.empty();  // another framework: 07 can't be asked about its steps
  if (r.base.ranks_per_node > 0) r.gpu.gpus_per_node = r.base.ranks_per_node;
  return r;
}

// The options of 07 for a layout, and the command that runs it.
std::vector<std::string> options_of(const Plan& p) {
  CombinedOptions o = p.options;
  std::vector<std::string> words;
  for (const auto& [word, option, value] : numbers_of(o)) {
    if (value > 1 || word == "zero" || word == "mbs")
      words.insert(words.end(), {option, std::to_string(value)});
  }
  if (o.pipeline.pp > 1)
    words.insert(words.end(), {"--pp-schedule", text(to_string(o.pipeline.pp_schedule))});
  if (o.tensor.sequence_parallel) words.push_back("--sequence-parallel");
  if (o.recompute != Recompute::none)
    words.insert(words.end(), {"--recompute", text(to_string(o.recompute))});
  words.insert(words.end(), {"--attention", text(to_string(o.attention))});
  return words;
}
std::string command(const Request& r, const Plan& p) {
  return text("mpirun -n ", r.gpus, " build/cuda-bf16/07_combined_5d ", join(r.model, " "), " ",
              join(options_of(p), " "));
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

void print_header(const Request& r) {
  const ModelConfig& m = r.base.model;
  std::printf(
      "%s: %d layers, width %d, %s parameters, %d sequences of %d tokens a step; %d %s GPUs, %.0f a "
      "node\n%s\n",
      m.name.c_str(), m.layers, m.d_model, human_count(static_cast<double>(parameter_count(m))).c_str(),
      r.base.global_batch_size, r.base.sequence_length, r.gpus, r.gpu.name.c_str(), r.gpu.gpus_per_node,
      m.remarks.c_str());
}

void print_plans(const Request& r, const std::vector<Plan>& plans) {
  std::printf("%-52s %9s %10s %11s %6s   ms of a step, %s\n%-52s %9s %10s %11s %6s", "layout", "memory",
              "step", "tokens/s", "MFU",
              r.coarse ? "by a coarse time" : "by dry runs; of idle, what waits for each axis", "", "GiB",
              "ms", "a GPU", "%");
  for (const auto& [name, seconds] : plans.front().parts) std::printf(" %9s", name.c_str());
  std::printf("%s\n", r.framework.ranges.empty() ? "" : "   8 of 10 are in, ms");
  for (const Plan& p : plans) {
    std::printf("%-52s %9.1f %10.1f %11.0f %6.1f", layout_of(p.options).c_str(), p.memory.total() / (1 << 30),
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
                                        {"options", options_of(p)},
                                        {"command", command(r, p)},
                                        {"micro_batches", p.micro_batches},
                                        {"tensor_bytes", p.memory.of_tensors()},
                                        {"library_bytes", p.memory.libraries},
                                        {"step_seconds", p.seconds},
                                        {"tokens_per_second", tokens_per_second(r, p)},
                                        {"mfu", mfu(r, p)}});
    if (const auto range = range_of(r, p)) j["range_seconds"] = *range;
    if (r.tokens > 0) j["days"] = hours_of(r, p) / 24;
    if (r.price > 0) j["money"] = hours_of(r, p) * r.gpus * r.price;
    for (const auto& [axis, degree] : p.shape.degrees()) j[axis] = degree;
    for (const auto& [part, seconds] : p.parts) j["seconds"][part] = seconds;
    for (size_t i = 0; i < p.memory.tensors.size(); ++i)
      j["memory"][std::string(purpose_names[i])] = p.memory.tensors[i];
  }
  return {{"gpu", r.gpu.name}, {"gpus", r.gpus}, {"model", r.base.model.name}, {"layouts", layouts}};
}

// Throws UsageError.
void write_file(const std::string& option, const std::string& path, const std::string& words) {
  std::ofstream file(path);
  file << words << std::endl;
  require(file.good(), option, path, "a file that can be written");
}
// Writes what was shown, if --json asks for it. Throws UsageError.
void write_json(const Request& r, const Json& shown) {
  if (!r.json.empty()) write_file("--json", r.json, shown.dump(1));
}

Planner planner_of(const Request& r) {
  return {r.base, r.gpus, r.gpu, r.framework, read_wishes("--only", r.only), r.memory_bytes};
}

// The time of these plans by dry runs, unless --coarse is given. Without those that 07 refuses; throws
// UsageError if it refuses all, or one where `all` are needed.
void ask_program(const Request& r, std::vector<Plan>& plans, bool all) {
  if (r.coarse) return;
  DryRuns(static_cast<int>(r.gpu.gpus_per_node)).run(plans, [&](const Plan& p) {
    std::vector<std::string> words = r.model;
    const std::vector<std::string> layout = options_of(p);
    words.insert(words.end(), layout.begin(), layout.end());
    return words;
  });
  const auto refused = [](const Plan& p) { return !p.refusal.empty(); };
  const auto first = std::ranges::find_if(plans, refused);
  if (first != plans.end() && (all || std::ranges::all_of(plans, refused)))
    throw UsageError(layout_of(first->options) + ": " + first->refusal);
  std::erase_if(plans, refused);
}

// The search for the fastest layouts, one of each mesh. Throws UsageError where there is none.
Search found(const Request& r, Planner& planner, size_t count) {
  Search s = planner.search(r.coarse ? 1 : 2, r.coarse ? count : 2 * count);
  const std::string of = r.only.empty() ? "" : " of those with" + r.only;
  require(s.divide > 0, "--gpus", r.gpus,
          of.empty() ? "a number that divides heads, layers or the batch" : "another one: none" + of);
  if (s.fit == 0) {
    throw UsageError("no layout fits: " + layout_of(s.nearest->options) + " needs least" + of + ", " +
                     human_bytes(s.nearest->memory.total()) + " of " + human_bytes(planner.memory_bytes) +
                     "; take more GPUs, or a shorter --seq-len");
  }
  require(!s.best.empty(), "--global-batch-size", r.base.global_batch_size,
          "a multiple of a number of data ranks that fit");
  ask_program(r, s.best, /*all=*/false);
  std::ranges::stable_sort(s.best, {}, &Plan::seconds);
  std::vector<Plan> of_each_mesh;
  for (const Plan& p : s.best) {
    if (of_its_mesh(of_each_mesh, p) == 0 && of_each_mesh.size() < count) of_each_mesh.push_back(p);
  }
  s.best = of_each_mesh;
  return s;
}

// What --tokens take with this layout.
void print_training(const Request& r, const Plan& p) {
  const double hours = hours_of(r, p);
  std::printf("%s tokens on %d GPUs: %.1f days, %.0f GPU hours", human_count(r.tokens).c_str(), r.gpus,
              hours / 24, hours * r.gpus);
  if (r.price > 0) std::printf(", %.0f of money", hours * r.gpus * r.price);
  std::printf(" (%s)\n", layout_of(p.options).c_str());
}

void show_search(const Request& r, Planner& planner) {
  const Search s = found(r, planner, r.top);
  print_header(r);
  std::printf("1  fit     %d layouts divide the model; %d of them need at most the %s of a GPU\n", s.divide,
              s.fit, human_bytes(planner.memory_bytes).c_str());
  std::printf("2  batch   %d of these reach the global batch\n", s.reach);
  std::printf("3  speed   the fastest %zu\n\n", s.best.size());
  print_plans(r, s.best);
  const Plan& first = s.best.front();
  const auto may_be_faster = [&](const Plan& p) {
    const auto of_first = range_of(r, first), range = range_of(r, p);
    return of_first && range && (*range)[0] <= (*of_first)[1];
  };
  if (const auto alike = std::count_if(s.best.begin() + 1, s.best.end(), may_be_faster); alike > 0)
    std::printf("\nCan't be told apart from the first: %td, whose ranges reach its range.\n", alike);
  std::printf("\n%s\n", command(r, first).c_str());
  if (r.tokens > 0) print_training(r, first);
  write_json(r, to_json(r, s.best));
}

// --compare; --why: beside the best layout.
void show_layouts(const Request& r, Planner& planner) {
  std::vector<Plan> plans;
  for (const std::string& words : r.compare)
    plans.push_back(planner.plan(with_layout(r.base, "--compare", words, r.gpus)));
  if (!r.why.empty()) plans.push_back(planner.plan(with_layout(r.base, "--why", r.why, r.gpus)));
  ask_program(r, plans, /*all=*/true);
  if (!r.why.empty()) plans.insert(plans.begin(), found(r, planner, 1).best.front());
  print_header(r);
  print_plans(r, plans);
  for (const Plan& p : plans) {
    if (p.memory.total() > planner.memory_bytes)
      std::printf("%s does not fit: a GPU has %s.\n", layout_of(p.options).c_str(),
                  human_bytes(planner.memory_bytes).c_str());
  }
  write_json(r, to_json(r, plans));
}

// --rows.
void print_rows(const Request& r) {
  std::ifstream file(r.rows);
  require(file.good(), "--rows", r.rows, "a file that can be read");
  std::map<std::string, CombinedOptions> read;  // by their words: many lines have the same
  for (std::string line, word; std::getline(file, line);) {
    const size_t bar = line.find('|');
    require(bar != line.npos, "--rows", printable(line.substr(0, 80)), "LAYOUT | OPTIONS");
    std::vector<std::string> words;
    for (std::istringstream stream(line.substr(bar + 1)); stream >> word;) words.push_back(word);
    const auto [options, is_new] = read.try_emplace(join(words, " "));
    if (is_new) options->second = parse_model(words);
    const CombinedOptions o = with_layout(options->second, "--rows", line.substr(0, bar), 1);
    const Plan p = Planner(o, shape_of(o).ranks(), r.gpu, r.framework).plan(o);
    std::printf("%.6g %.0f %s\n", p.seconds, p.memory.total(), kind_of(p, r.gpu).c_str());
  }
}

}  // namespace

int main(int argc, char** argv) {
  return run_program([&] {
    const Request r = parse(argc, argv);
    if (!r.rows.empty()) return print_rows(r);
    if (!r.calculator.empty()) {
      Json tables = Calculator(r.base).tables();
      tables["gpu"] = r.gpu.name, tables["memory_bytes"] = std::min(r.gpu.memory_bytes, r.memory_bytes);
      tables["model"] = r.base.model.name, tables["options"] = join(r.model, " ");
      return write_file("--calculator", r.calculator, tables.dump());
    }
    Planner planner = planner_of(r);
    if (!r.compare.empty() || !r.why.empty()) return show_layouts(r, planner);
    show_search(r, planner);
  });
}
