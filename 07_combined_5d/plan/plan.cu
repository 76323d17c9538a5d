// The planner: which layout of a run on so many GPUs fits, how fast it is, and why. It needs no GPU and runs
// as one process. It knows the layouts that 07 accepts (layouts.h) and what a step of each costs
// (cost_model.h).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "calculator.h"
#include "checkpoint/checkpoint_folder.h"
#include "explain.h"
#include "score.h"

using namespace pentatron;

namespace {

struct Request {
  int gpus = 8;
  size_t top = 10;
  std::vector<std::string> compare;
  std::string explain, why, only, json, score, calculator, profile;
  double tokens = 0, price = 0, days = 0;
  double memory_bytes = std::numeric_limits<double>::infinity();  // of a GPU, that a layout may take
  std::string style_name = "pentatron";
  Style style;
  bool heatmap = false, names_model = false;
  std::vector<std::string> model;  // the options of 07 that were given
  CombinedOptions base;
  DeviceProfile gpu;
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

// What a plan does not know, and what it would take no notice of. Throws UsageError.
void refuse_left_out(const CombinedOptions& o, const std::function<bool(const char*)>& given) {
  const auto expect = [](bool good, const char* option, const auto& value, const char* known) {
    require(good, option, value, known, "; a plan leaves this out");
  };
  expect(!has_fp8_products, "PRECISION", "fp8", "bf16, fp16 or fp32");
  expect(o.tensor.tp_overlap == 1, "--tp-overlap", o.tensor.tp_overlap, "1");
  expect(o.data_parallel.dp_sync == DpSync::bucket, "--dp-sync", "given", "bucket");
  expect(o.optimizer == OptimizerKind::adamw, "--optimizer", "sgd", "adamw");
  expect(!given("--link"), "--link", "given", "the links of a --gpu FILE");
  for (const char* option :
       {"--zero-stage", "--micro-batch-size", "--pp-schedule", "--vpp", "--sequence-parallel", "--recompute"})
    require(!given(option), option, "given", "--only, with words of layouts such as \"zero3 mbs2 sp\"");
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
  int gpus_per_node = 0;
  app.add_option("--gpus", r.gpus, "GPUs [8]")->check(CLI::Range(1, 65536));
  app.add_option("--gpus-per-node", gpus_per_node, "of them in a node [the profile's]")
      ->check(CLI::Range(1, 65536));
  app.add_option("--top", r.top, "layouts that are shown [10]")->check(CLI::Range(1, 10000));
  app.add_option("--explain", r.explain, "the arithmetic of one layout, such as \"tp2 dp4 zero1 mbs1\"");
  app.add_option("--compare", r.compare, "two layouts, or more, beside each other")->expected(1, 1000);
  app.add_flag("--heatmap", r.heatmap, "models and numbers of nodes, up to --gpus: the best layout of each");
  app.add_option("--style", r.style_name,
                 "whose implementation: pentatron, flash, nanotron, megatron, or a file [pentatron]");
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
  add_quantity("--days", r.days, "the fewest GPUs, up to --gpus, that train --tokens in so many");
  app.add_option("--config", config, "sizes from a config.json of Hugging Face (Llama)");
  app.add_option("--why", r.why, "why is this layout not the best, term by term?");
  app.add_option("--score", r.score, "predict the layouts of this CSV file, and print CSV; see score.h");
  app.add_option("--json", r.json, "write the layouts into this file");
  app.add_option("--calculator", r.calculator,
                 "write the memory of all layouts into this file; see calculator.h");
  app.add_option("--profile", r.profile,
                 "write the GPU as --style uses it into this file, for --gpu of dry runs");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    throw HelpRequest(app.help());
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  require(r.tokens > 0 || r.price + r.days == 0, "--tokens", 0,
          "how many, such as 2T, with --price and --days");
  require(!r.heatmap || r.days == 0, "--days", r.days, "none: each cell of a heatmap says its days");
  r.style = style_of(r.style_name);
  ModelConfig of_config = {};
  if (!config.empty()) {
    read_model_config("--config", config, of_config);
    r.model = sizes_of(of_config);
  }
  for (const std::string& word : app.remaining()) r.model.push_back(word);
  r.base = parse_model(r.model);
  r.base.model.remarks = of_config.remarks;
  const auto given = [&](const char* option) { return is_given(r.model, option); };
  refuse_left_out(r.base, given);
  const bool has_sizes = std::ranges::any_of(
      std::array{"--layers", "--d-model", "--heads", "--kv-heads", "--d-ff", "--vocab-size"}, given);
  std::string& name = r.base.model.name;
  if (has_sizes) name = !config.empty() ? config : given("--model") ? name + ", changed" : "a model";
  r.names_model = has_sizes || given("--model");
  r.gpu = load_profile(r.base.gpu.empty() ? "h100" : r.base.gpu);
  if (r.base.ranks_per_node > 0) r.gpu.gpus_per_node = r.base.ranks_per_node;
  if (gpus_per_node > 0) r.gpu.gpus_per_node = gpus_per_node;
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

// The models of the calculator and of the heatmap: first the one that was asked for.
std::vector<CalculatedModel> models_of(const Request& r) {
  std::vector<CalculatedModel> models;
  if (r.names_model) models.push_back({r.base.model.name, join(r.model, " "), r.base});
  for (const char* const name :
       {"smollm-1.7b", "llama-3.2-1b", "llama-2-7b", "llama-3.1-8b", "llama-3.1-70b"}) {
    if (!r.names_model || name != r.base.model.name)
      models.push_back({name, text("--model ", name), parse_model({"--model", name})});
  }
  return models;
}

// The parts of a step's time, as they are shown.
std::vector<std::pair<const char*, double>> parts(const StepCost& c) {
  return {{"compute", c.work.kernels}, {"tensor", c.work.tensor}, {"context", c.work.context},
          {"experts", c.work.experts}, {"bubble", c.bubble},      {"data", c.data},
          {"optimizer", c.optimizer},  {"host", c.host}};
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

void print_plans(const std::vector<Plan>& plans) {
  std::printf("%-52s %9s %10s %17s %11s %6s   of the step's time, %%\n", "layout", "memory", "step",
              "8 of 10 are in", "tokens/s", "MFU");
  std::printf("%-52s %9s %10s %17s %11s %6s", "", "GiB", "ms", "ms", "a GPU", "%");
  for (const auto& [name, seconds] : parts({})) std::printf(" %9s", name);
  std::printf("\n");
  for (const Plan& p : plans) {
    char range[32] = "-";
    if (p.most > 0) std::snprintf(range, sizeof range, "%.1f-%.1f", p.least * 1e3, p.most * 1e3);
    std::printf("%-52s %9.1f %10.1f %17s %11.0f %6.1f", layout_of(p.options).c_str(),
                p.memory.total() / (1 << 30), p.cost.total() * 1e3, range, p.tokens_per_second, 100 * p.mfu);
    for (const auto& [name, seconds] : parts(p.cost))
      std::printf(" %9.1f", 100 * std::fabs(seconds) / p.cost.total());  // not -0.0
    std::printf("\n");
  }
}

// To train on --tokens with this layout.
double hours_of(const Request& r, const Plan& p) { return r.tokens / (p.tokens_per_second * r.gpus) / 3600; }

using Json = nlohmann::ordered_json;

Json to_json(const Request& r, const std::vector<Plan>& plans) {
  Json layouts;
  for (const Plan& p : plans) {
    Json& j = layouts.emplace_back(Json{{"layout", layout_of(p.options)},
                                        {"options", options_of(p)},
                                        {"command", command(r, p)},
                                        {"micro_batches", p.micro_batches},
                                        {"tensor_bytes", p.memory.tensors},
                                        {"library_bytes", p.memory.libraries},
                                        {"step_seconds", p.cost.total()},
                                        {"kind", p.kind},
                                        {"tokens_per_second", p.tokens_per_second},
                                        {"mfu", p.mfu}});
    if (p.most > 0) j["range_seconds"] = {p.least, p.most};
    if (r.tokens > 0) j["days"] = hours_of(r, p) / 24;
    if (r.price > 0) j["money"] = hours_of(r, p) * r.gpus * r.price;
    for (const auto& [axis, degree] : p.shape.degrees()) j[axis] = degree;
    for (const auto& [part, seconds] : parts(p.cost)) j["seconds"][part] = seconds;
    const MemoryBytes bytes = p.memory.fullest.total();
    for (size_t i = 0; i < bytes.size(); ++i) j["memory"][std::string(purpose_names[i])] = bytes[i];
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
  return {r.base, r.gpus, r.gpu, r.style, read_wishes("--only", r.only), r.memory_bytes};
}

// The search for the fastest layouts. Throws UsageError where there is none.
Search found(const Request& r, Planner& planner, size_t count) {
  Search s = planner.search(count);
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

// The fewest GPUs that train --tokens in --days: powers of two, and --gpus.
void print_fewest(const Request& request) {
  Request r = request;
  for (r.gpus = 1; r.gpus <= request.gpus;
       r.gpus = r.gpus == request.gpus ? r.gpus + 1 : std::min(2 * r.gpus, request.gpus)) {
    const Search s = planner_of(r).search(1);
    if (s.best.empty()) continue;
    if (r.tokens / (s.best[0].tokens_per_second * r.gpus) > r.days * 86400) continue;
    std::printf("The fewest for %g days: ", r.days);
    return print_training(r, s.best[0]);
  }
  std::printf("%d GPUs do not train it in %g days.\n", request.gpus, request.days);
}

void show_search(const Request& r, Planner& planner) {
  const Search s = found(r, planner, r.top);
  print_header(r);
  std::printf("1  fit     %d layouts divide the model; %d of them need at most the %s of a GPU\n", s.divide,
              s.fit, human_bytes(planner.memory_bytes).c_str());
  std::printf("2  batch   %d of these reach the global batch\n", s.reach);
  std::printf("3  speed   the fastest %zu\n\n", s.best.size());
  print_plans(s.best);
  const Plan& first = s.best.front();
  const auto may_be_faster = [&](const Plan& p) { return p.most > 0 && p.least <= first.most; };
  if (const auto alike = std::count_if(s.best.begin() + 1, s.best.end(), may_be_faster); alike > 0)
    std::printf("\nCan't be told apart from the first: %td, whose ranges reach its range.\n", alike);
  std::printf("\n%s\n", command(r, first).c_str());
  if (r.tokens > 0) print_training(r, first);
  if (r.days > 0) print_fewest(r);
  write_json(r, to_json(r, s.best));
}

// --why: this layout beside the best one.
void show_why(const Request& r, Planner& planner) {
  const Plan best = found(r, planner, 1).best.front();
  const Plan asked = planner.plan(with_layout(r.base, "--why", r.why, r.gpus));
  print_header(r);
  std::printf("the best   %s\nthis one   %s\n\n%-12s %10s %10s %10s\n", layout_of(best.options).c_str(),
              layout_of(asked.options).c_str(), "ms a step", "the best", "this one", "more");
  const auto row = [](const char* name, double x, double y, double unit) {
    std::printf("%-12s %10.1f %10.1f %+10.1f\n", name, x / unit, y / unit, (y - x) / unit);
  };
  const auto of_best = parts(best.cost), of_asked = parts(asked.cost);
  for (size_t i = 0; i < of_best.size(); ++i)
    row(of_best[i].first, of_best[i].second, of_asked[i].second, 1e-3);
  row("sum", best.cost.total(), asked.cost.total(), 1e-3);
  row("memory, GiB", best.memory.total(), asked.memory.total(), 1 << 30);
  if (asked.memory.total() > planner.memory_bytes)
    std::printf("\nIt does not fit: a GPU has %s.\n", human_bytes(planner.memory_bytes).c_str());
  if (asked.most > 0 && asked.least <= best.most)
    std::printf("\nThey can't be told apart: 8 of 10 of its kind take %.1f to %.1f ms.\n", asked.least * 1e3,
                asked.most * 1e3);
  write_json(r, to_json(r, {best, asked}));
}

// --explain, or --compare.
void show_layouts(const Request& r, Planner& planner) {
  std::vector<Plan> plans;
  if (!r.explain.empty()) plans.push_back(planner.plan(with_layout(r.base, "--explain", r.explain, r.gpus)));
  for (const std::string& words : r.compare)
    plans.push_back(planner.plan(with_layout(r.base, "--compare", words, r.gpus)));
  print_header(r);
  write_json(r, to_json(r, plans));
  if (r.explain.empty()) return print_plans(plans);
  const Plan& p = plans.front();
  Explanation(p, r.gpu, planner.schedule_of(p), r.style).print();
  std::printf("\n%s\n", command(r, p).c_str());
}

// Models down, nodes across; each cell has the MFU and the mesh of the fastest layout, and the days that
// --tokens take.
void show_heatmap(const Request& request) {
  std::vector<int> nodes;
  const int per_node = static_cast<int>(request.gpu.gpus_per_node);
  for (int n = 1; n * per_node <= std::max(request.gpus, per_node); n *= 2) nodes.push_back(n);
  Request r = request;  // of a cell
  Json cells;
  std::printf("MFU of the fastest layout, %d sequences of %d tokens a step, %s, %d GPUs a node\n\n%-14s",
              r.base.global_batch_size, r.base.sequence_length, r.gpu.name.c_str(), per_node, "");
  for (const int n : nodes) std::printf(" %10d node%s", n, n == 1 ? " " : "s");
  std::printf("\n");
  for (const CalculatedModel& model : models_of(request)) {
    r.base = model.options;
    r.base.sequence_length = request.base.sequence_length;
    r.base.global_batch_size = request.base.global_batch_size;
    r.model = {model.words, text("--seq-len ", r.base.sequence_length),
               text("--global-batch-size ", r.base.global_batch_size)};
    std::ostringstream meshes, days;
    std::printf("%-14s", model.name.c_str());
    for (const int n : nodes) {
      r.gpus = n * per_node;
      const Search s = planner_of(r).search(1);
      std::vector<std::string> mesh;
      for (const Plan& p : s.best) {
        for (const auto& [axis, degree] : p.shape.degrees()) {
          if (degree > 1) mesh.push_back(text(axis, degree));
        }
        Json& cell = cells.emplace_back(to_json(r, s.best));
        cell["nodes"] = n;
      }
      std::printf(" %16s", s.best.empty() ? "-" : text(std::lround(100 * s.best[0].mfu), " %").c_str());
      meshes << " " << std::setw(16) << join(mesh, " ");
      if (r.tokens > 0 && !s.best.empty())
        days << " " << std::setw(16) << text(std::lround(hours_of(r, s.best[0]) / 24), " days");
      else if (r.tokens > 0)
        days << " " << std::setw(16) << "";
    }
    std::printf("\n%-14s%s\n", "", meshes.str().c_str());
    if (r.tokens > 0) std::printf("%-14s%s\n", "", days.str().c_str());
  }
  write_json(request, {{"cells", cells}});
}

void print_scores(const Request& r) {
  std::ifstream file(r.score);
  require(file.good(), "--score", r.score, "a CSV file that can be read");
  Json kinds = Json::array();  // for calibrate.py
  std::cout << scores(file, r.gpu, r.style, kinds);
  write_json(r, {{"kinds", kinds}});
}

}  // namespace

int main(int argc, char** argv) {
  return run_program([&] {
    const Request r = parse(argc, argv);
    if (!r.score.empty()) return print_scores(r);
    if (!r.profile.empty())
      return write_file("--profile", r.profile,
                        to_json(used_by(r.style, r.gpu), r.gpu.name + " as " + r.style_name + " uses it"));
    if (r.heatmap) return show_heatmap(r);
    if (!r.calculator.empty()) {
      Json tables = Calculator(models_of(r), read_wishes("--only", r.only)).tables();
      tables["gpu"] = r.gpu.name, tables["memory_bytes"] = std::min(r.gpu.memory_bytes, r.memory_bytes);
      tables["model"] = r.names_model ? r.base.model.name : "llama-3.1-8b";
      return write_file("--calculator", r.calculator, tables.dump());
    }
    Planner planner = planner_of(r);
    if (!r.why.empty()) return show_why(r, planner);
    if (!r.explain.empty() || !r.compare.empty()) return show_layouts(r, planner);
    show_search(r, planner);
  });
}
