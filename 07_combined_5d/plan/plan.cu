// The planner: which layout of a run on so many GPUs fits, how fast it is, and why. It needs no GPU and runs
// as one process. It knows the layouts that 07 accepts (layouts.h) and what a step of each costs
// (cost_model.h).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "calculator.h"
#include "explain.h"
#include "program/checkpoint_folder.h"
#include "score.h"

using namespace pentatron;

namespace {

struct Request {
  int gpus = 8, gpus_per_node = 0;
  size_t top = 10;
  std::vector<std::string> explain, compare;
  std::string json, score, calculator, why;
  double tokens = 0, price = 0, days = 0;
  Style style;
  Wishes wishes;
  bool heatmap = false;
  std::vector<std::string> model;  // the options of 07 that were given
  CombinedOptions base;
  DeviceProfile gpu;
};

// "2T", "70GiB", "1.5e12". Throws UsageError.
double quantity(const std::string& option, const std::string& text) {
  const std::map<std::string, double> units = {{"", 1},     {"K", 1e3},  {"M", 1e6},      {"B", 1e9},
                                               {"T", 1e12}, {"GB", 1e9}, {"GiB", 1 << 30}};
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const auto unit = units.find(end);
  if (end == text.c_str() || unit == units.end() || !(number > 0) || std::isinf(number))
    throw UsageError(option, text, "a number above 0, such as 2T, 300B, 70GB or 70GiB");
  return number * unit->second;
}

// The options of 07 for the sizes of a config.json of Hugging Face.
std::vector<std::string> sizes_of(const std::string& config) {
  ModelConfig m = {};
  read_model_config("--config", config, m);
  std::vector<std::string> words;
  const auto add = [&](const char* option, int value) {
    words.insert(words.end(), {option, std::to_string(value)});
  };
  add("--layers", m.layers), add("--d-model", m.d_model), add("--heads", m.heads);
  add("--kv-heads", m.kv_heads), add("--d-ff", m.d_ff), add("--vocab-size", m.vocab_size);
  if (m.experts > 0) {
    add("--experts", m.experts), add("--top-k", m.top_k), add("--moe-every", m.moe_every);
    add("--shared-experts", m.shared_experts);
  }
  return words;
}

// What a plan does not know, and what it would take no notice of. Throws UsageError.
void refuse_left_out(const CombinedOptions& o, const std::function<bool(const char*)>& given) {
  const auto leave_out = [](bool asked, const char* option, const std::string& value, const char* known) {
    if (asked) throw UsageError(option, value, std::string(known) + "; a plan leaves this out");
  };
  leave_out(has_fp8_products, "PRECISION", "fp8", "bf16, fp16 or fp32");
  leave_out(o.cp_exchange != CpExchange::ring, "--cp-exchange", std::string(to_string(o.cp_exchange)),
            "ring");
  leave_out(o.tp_overlap != TpOverlap::none, "--tp-overlap", std::string(to_string(o.tp_overlap)), "none");
  leave_out(o.dp_sync != DpSync::bucket, "--dp-sync", "given", "bucket");
  leave_out(o.document_end >= 0, "--documents", std::to_string(o.document_end), "-1");
  leave_out(o.drop_tokens > 0, "--drop-tokens", "given", "0");
  leave_out(o.optimizer != OptimizerKind::adamw, "--optimizer", "sgd", "adamw");
  for (const char* option : {"--link", "--link-between-nodes"})
    leave_out(given(option), option, "given", "the links of a --gpu FILE");
  for (const char* option : {"--zero-stage", "--micro-batch-size", "--pp-schedule", "--vpp",
                             "--sequence-parallel", "--recompute"}) {
    if (given(option))
      throw UsageError(option, "given", "--only, with words of layouts such as \"zero3 mbs2 sp\"");
  }
}

Request parse(int argc, char** argv) {
  Request request;
  CLI::App app{
      "Finds the fastest layout of a run of 07 that fits, without a GPU. Options of the model, the batch "
      "and\n"
      "the GPU (--model, --layers, --seq-len, --global-batch-size, --gpu, --experts ...) are those of 07."};
  app.set_help_flag("--help", "print this text and end");
  app.allow_extras();
  app.add_option("--gpus", request.gpus, "GPUs [8]")->check(CLI::Range(1, 65536));
  app.add_option("--gpus-per-node", request.gpus_per_node, "of them in a node [the profile's]")
      ->check(CLI::Range(1, 65536));
  app.add_option("--top", request.top, "layouts that are shown [10]")->check(CLI::Range(1, 10000));
  app.add_option("--explain", request.explain, "the arithmetic of one layout, such as \"tp2 dp4 zero1 mbs1\"")
      ->expected(1);
  app.add_option("--compare", request.compare, "two layouts, or more, beside each other")->expected(1, 1000);
  app.add_flag("--heatmap", request.heatmap,
               "models and numbers of nodes, up to --gpus: the best layout of each");
  std::string style = "pentatron";
  app.add_option("--style", style,
                 "whose implementation: pentatron, nanotron, megatron, or a file [pentatron]");
  std::map<std::string, std::string> limits, quantities;
  for (const std::string axis : {"tp", "cp", "dp", "pp", "ep", "mbs", "zero"})
    app.add_option("--" + axis, limits[axis], "only layouts with so many: 4, or 1-8");
  app.add_option("--only", request.wishes.words, "only layouts with these words, such as \"zero3 1f1b sp\"");
  for (const auto& [option, help] :
       {std::pair{"--max-memory", "that a layout may take of a GPU, such as 70GiB"},
        {"--tokens", "to train on, such as 2T: days and GPU hours"},
        {"--price", "of a GPU hour: money"},
        {"--days", "the fewest GPUs, up to --gpus, that train --tokens in so many"}})
    app.add_option(option, quantities[option], help);
  std::string config;
  app.add_option("--config", config, "sizes from a config.json of Hugging Face (Llama)");
  app.add_option("--why", request.why, "why is this layout not the best, term by term?");
  app.add_option("--score", request.score,
                 "predict the layouts of this CSV file, and print CSV; see score.h");
  app.add_option("--json", request.json, "write the layouts into this file");
  app.add_option("--calculator", request.calculator,
                 "write the memory of all layouts into this file; see calculator.h");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    throw HelpRequest(app.help());
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  request.style = style_of(style);
  for (const auto& [axis, limit] : limits) {
    if (!limit.empty()) request.wishes.words += (request.wishes.words.empty() ? "" : " ") + axis + limit;
  }
  check_words("--only", request.wishes.words);
  const auto number = [&](const char* option, double& value) {
    if (!quantities[option].empty()) value = quantity(option, quantities[option]);
  };
  number("--max-memory", request.wishes.memory_bytes);
  number("--tokens", request.tokens), number("--price", request.price), number("--days", request.days);
  if (request.tokens == 0 && request.price + request.days > 0)
    throw UsageError("--tokens", "0", "how many, such as 2T, with --price and --days");
  if (!config.empty()) request.model = sizes_of(config);
  for (const std::string& word : app.remaining()) request.model.push_back(word);
  std::vector<const char*> arguments = {argv[0], "--micro-batch-size", "1"};  // layouts say another one
  for (const std::string& word : request.model) arguments.push_back(word.c_str());
  request.base = parse_options<CombinedOptions>(static_cast<int>(arguments.size()), arguments.data(), "",
                                                Attention::tiled);
  const auto given = [&](const char* option) {
    return std::ranges::any_of(
        request.model, [&](const std::string& word) { return word.substr(0, word.find('=')) == option; });
  };
  if (!config.empty()) {
    request.base.model.name = config;
  } else if (std::ranges::any_of(
                 std::array{"--layers", "--d-model", "--heads", "--kv-heads", "--d-ff", "--vocab-size"},
                 given)) {
    request.base.model.name = given("--model") ? request.base.model.name + ", changed" : "a model";
  }
  refuse_left_out(request.base, given);
  const int size = request.base.model.head_size();
  if (!given("--attention") && (size == 64 || size == 128)) request.base.attention = Attention::tensor_core;
  request.gpu = load_profile(request.base.gpu.empty() ? "h100" : request.base.gpu);
  if (request.base.ranks_per_node > 0) request.gpu.gpus_per_node = request.base.ranks_per_node;
  request.gpu.communication_sms = request.base.communication_sms;
  if (request.gpus_per_node > 0) request.gpu.gpus_per_node = request.gpus_per_node;
  return request;
}

// The options of 07 for a layout, and the command that runs it.
std::vector<std::string> options(const Plan& p) {
  const Layout& l = p.layout;
  std::vector<std::string> words;
  const auto add = [&](const std::string& option, const auto& value) {
    std::ostringstream text;
    text << value;
    words.push_back("--" + option);
    words.push_back(text.str());
  };
  for (const auto& [axis, degree] : l.shape.degrees()) {
    if (degree > 1) add(axis, degree);
  }
  add("zero-stage", l.zero_stage);
  add("micro-batch-size", l.micro_batch_size);
  if (l.shape.pp > 1) add("pp-schedule", to_string(l.schedule));
  if (l.vpp > 1) add("vpp", l.vpp);
  if (l.sequence_parallel) words.emplace_back("--sequence-parallel");
  if (l.recompute != Recompute::none) add("recompute", to_string(l.recompute));
  add("attention", to_string(p.options.attention));
  return words;
}
std::string command(const Request& request, const Plan& p) {
  return "mpirun -n " + std::to_string(request.gpus) + " build/cuda-bf16/07_combined_5d " +
         join(request.model, " ") + " " + join(options(p), " ");
}

// The parts of a step's time, as they are shown.
std::vector<std::pair<const char*, double>> parts(const StepCost& c) {
  return {{"compute", c.work.kernels}, {"tensor", c.work.tensor}, {"context", c.work.context},
          {"experts", c.work.experts}, {"bubble", c.bubble},      {"data", c.data},
          {"optimizer", c.optimizer},  {"host", c.host}};
}

std::string gib(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GiB", bytes / (1 << 30));
  return text;
}

void print_header(const Request& r) {
  const ModelConfig& m = r.base.model;
  std::printf(
      "%s: %d layers, width %d, %s parameters, %d sequences of %d tokens a step; %d %s GPUs, %.0f a node\n\n",
      m.name.c_str(), m.layers, m.d_model,
      human_count(static_cast<double>(parameter_count(r.base.model))).c_str(), r.base.global_batch_size,
      r.base.sequence_length, r.gpus, r.gpu.name.c_str(), r.gpu.gpus_per_node);
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
    std::printf("%-52s %9.1f %10.1f %17s %11.0f %6.1f", to_string(p.layout).c_str(),
                p.memory.total() / (1 << 30), p.cost.total() * 1e3, range, p.tokens_per_second, 100 * p.mfu);
    for (const auto& [name, seconds] : parts(p.cost))
      std::printf(" %9.1f", 100 * std::fabs(seconds) / p.cost.total());  // not -0.0
    std::printf("\n");
  }
}

nlohmann::ordered_json to_json(const Request& request, const std::vector<Plan>& plans) {
  nlohmann::ordered_json all;
  for (const Plan& p : plans) {
    nlohmann::ordered_json j = {{"layout", to_string(p.layout)},
                                {"options", options(p)},
                                {"command", command(request, p)},
                                {"micro_batches", p.micro_batches},
                                {"tensor_bytes", p.memory.tensors},
                                {"library_bytes", p.memory.libraries},
                                {"step_seconds", p.cost.total()},
                                {"kind", p.kind},
                                {"tokens_per_second", p.tokens_per_second},
                                {"mfu", p.mfu}};
    if (p.most > 0) j["range_seconds"] = {p.least, p.most};
    for (const auto& [axis, degree] : p.layout.shape.degrees()) j[axis] = degree;
    for (const auto& [part, seconds] : parts(p.cost)) j["seconds"][part] = seconds;
    const MemoryBytes bytes = p.memory.fullest.total();
    for (size_t i = 0; i < bytes.size(); ++i) j["memory"][std::string(purpose_names[i])] = bytes[i];
    all.push_back(j);
  }
  return {{"gpu", request.gpu.name},
          {"gpus", request.gpus},
          {"model", request.base.model.name},
          {"layouts", all}};
}

// Throws UsageError.
void write_file(const std::string& option, const std::string& path, const std::string& text) {
  std::ofstream file(path);
  file << text << std::endl;
  if (!file) throw UsageError(option, path, "a file that can be written");
}
// Writes what was shown, if --json asks for it. Throws UsageError.
void write_json(const Request& request, const nlohmann::ordered_json& shown) {
  if (!request.json.empty()) write_file("--json", request.json, shown.dump(1));
}

// The search for the fastest layouts. Throws UsageError where there is none.
Search found(const Request& request, Planner& planner, size_t count) {
  Search s = planner.search(count);
  const std::string of = request.wishes.words.empty() ? "" : " of those with " + request.wishes.words;
  if (s.divide == 0)
    throw UsageError(
        "--gpus", std::to_string(request.gpus),
        of.empty() ? "a number that divides heads, layers or the batch" : "another one: none" + of);
  if (s.fit == 0) {
    const Plan& p = *s.nearest;
    throw UsageError("no layout fits: " + to_string(p.layout) + " needs least" + of + ", " +
                     gib(p.memory.total()) + " of " + gib(planner.memory_bytes()) +
                     "; take more GPUs, or a shorter --seq-len");
  }
  if (s.best.empty())
    throw UsageError("--global-batch-size", std::to_string(request.base.global_batch_size),
                     "a multiple of a number of data ranks that fit");
  return s;
}
Planner planner_of(const Request& request, int gpus) {
  return {request.base, gpus, request.gpu, request.style, request.wishes};
}

// What --tokens take with this layout.
void print_training(const Request& request, int gpus, const Plan& p) {
  const double hours = request.tokens / (p.tokens_per_second * gpus) / 3600;
  std::printf("%s tokens on %d GPUs: %.1f days, %.0f GPU hours", human_count(request.tokens).c_str(), gpus,
              hours / 24, hours * gpus);
  if (request.price > 0) std::printf(", %.0f of money", hours * gpus * request.price);
  std::printf(" (%s)\n", to_string(p.layout).c_str());
}

// The fewest GPUs that train --tokens in --days: powers of two, and --gpus.
void print_fewest(const Request& request) {
  for (int gpus = 1; gpus <= request.gpus;
       gpus = gpus == request.gpus ? gpus + 1 : std::min(2 * gpus, request.gpus)) {
    Planner planner = planner_of(request, gpus);
    const Search s = planner.search(1);
    if (s.best.empty()) continue;
    if (request.tokens / (s.best[0].tokens_per_second * gpus) > request.days * 86400) continue;
    std::printf("The fewest for %g days: ", request.days);
    return print_training(request, gpus, s.best[0]);
  }
  std::printf("%d GPUs do not train it in %g days.\n", request.gpus, request.days);
}

void show_search(const Request& request) {
  Planner planner = planner_of(request, request.gpus);
  const Search s = found(request, planner, request.top);
  print_header(request);
  std::printf("1  fit     %d layouts divide the model; %d of them need at most the %s of a GPU\n", s.divide,
              s.fit, gib(planner.memory_bytes()).c_str());
  std::printf("2  batch   %d of these reach the global batch\n", s.reach);
  std::printf("3  speed   the fastest %zu\n\n", s.best.size());
  print_plans(s.best);
  const Plan& first = s.best.front();
  const auto may_be_faster = [&](const Plan& p) { return p.most > 0 && p.least <= first.most; };
  if (const auto alike = std::count_if(s.best.begin() + 1, s.best.end(), may_be_faster); alike > 0)
    std::printf("\nCan't be told apart from the first: %td, whose ranges reach its range.\n", alike);
  std::printf("\n%s\n", command(request, first).c_str());
  if (request.tokens > 0) print_training(request, request.gpus, first);
  if (request.days > 0) print_fewest(request);
  write_json(request, to_json(request, s.best));
}

// --why: this layout beside the best one.
void show_why(const Request& request) {
  Planner planner = planner_of(request, request.gpus);
  const Plan best = found(request, planner, 1).best.front();
  const Plan asked = planner.plan(parse_layout("--why", request.why, request.gpus));
  print_header(request);
  std::printf("the best   %s\nthis one   %s\n\n%-12s %10s %10s %10s\n", to_string(best.layout).c_str(),
              to_string(asked.layout).c_str(), "ms a step", "the best", "this one", "more");
  const auto row = [](const char* name, double x, double y) {
    std::printf("%-12s %10.1f %10.1f %+10.1f\n", name, x, y, y - x);
  };
  const auto of_best = parts(best.cost), of_asked = parts(asked.cost);
  for (size_t i = 0; i < of_best.size(); ++i)
    row(of_best[i].first, of_best[i].second * 1e3, of_asked[i].second * 1e3);
  row("sum", best.cost.total() * 1e3, asked.cost.total() * 1e3);
  row("memory, GiB", best.memory.total() / (1 << 30), asked.memory.total() / (1 << 30));
  if (asked.memory.total() > planner.memory_bytes())
    std::printf("\nIt does not fit: a GPU has %s.\n", gib(planner.memory_bytes()).c_str());
  if (asked.most > 0 && asked.least <= best.most)
    std::printf("\nThey can't be told apart: 8 of 10 of its kind take %.1f to %.1f ms.\n", asked.least * 1e3,
                asked.most * 1e3);
  write_json(request, to_json(request, {best, asked}));
}

// Models down, nodes across; each cell has the MFU and the mesh of the fastest layout.
void show_heatmap(const Request& request) {
  std::vector<int> nodes;
  const int per_node = static_cast<int>(request.gpu.gpus_per_node);
  for (int n = 1; n * per_node <= std::max(request.gpus, per_node); n *= 2) nodes.push_back(n);
  nlohmann::ordered_json cells;
  std::printf("MFU of the fastest layout, %d sequences of %d tokens a step, %s, %d GPUs a node\n\n%-14s",
              request.base.global_batch_size, request.base.sequence_length, request.gpu.name.c_str(),
              per_node, "");
  for (const int n : nodes) std::printf(" %10d node%s", n, n == 1 ? " " : "s");
  std::printf("\n");
  for (const char* const model : calculated_models) {
    CombinedOptions base = options_of_model(model);
    base.sequence_length = request.base.sequence_length;
    base.global_batch_size = request.base.global_batch_size;
    std::ostringstream meshes;
    std::printf("%-14s", model);
    for (const int n : nodes) {
      const Search s = Planner(base, n * per_node, request.gpu, request.style, request.wishes).search(1);
      std::string mfu = "-", mesh;
      if (!s.best.empty()) {
        mfu = std::to_string(std::lround(100 * s.best[0].mfu)) + " %";
        for (const auto& [axis, degree] : s.best[0].layout.shape.degrees())
          if (degree > 1) mesh += (mesh.empty() ? "" : " ") + axis + std::to_string(degree);
        Request of_cell = request;
        of_cell.model = {"--model", model, "--seq-len " + std::to_string(base.sequence_length),
                         "--global-batch-size " + std::to_string(base.global_batch_size)};
        of_cell.gpus = n * per_node, of_cell.base = base;
        nlohmann::ordered_json cell = to_json(of_cell, s.best);
        cell["nodes"] = n;
        cells.push_back(cell);
      }
      std::printf(" %16s", mfu.c_str());
      meshes << " " << std::setw(16) << mesh;
    }
    std::printf("\n%-14s%s\n", "", meshes.str().c_str());
  }
  write_json(request, {{"cells", cells}});
}

std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream stream(line);
  for (std::string cell; std::getline(stream, cell, ',');) {
    cell.erase(0, cell.find_first_not_of(" \t\""));
    cell.erase(cell.find_last_not_of(" \t\r\"") + 1);
    cells.push_back(cell);
  }
  return cells;
}

// The columns are found by their names or, without a line of names, in score.h's order.
void print_scores(const Request& request) {
  std::ifstream file(request.score);
  std::string names = "model,nodes,mbs,grad_acc,dp,pp,tp,zero", line;
  if (!std::getline(file, line)) throw UsageError("--score", request.score, "a CSV file that can be read");
  nlohmann::ordered_json kinds = nlohmann::ordered_json::array();  // of the rows, for calibrate.py
  std::string first_error;
  const bool has_names = line.find("mbs") != line.npos;
  if (has_names) names = line.substr(0, line.find('\r'));
  const std::vector<std::string> columns = cells_of(names);
  std::string answer = names + ",tokens_per_second_per_gpu,memory_bytes\n";
  if (has_names) std::getline(file, line);
  for (; file; std::getline(file, line)) {
    line = line.substr(0, line.find('\r'));
    if (line.find_first_not_of(' ') == line.npos) continue;
    const std::vector<std::string> cells = cells_of(line);
    const auto number = [&](const std::string& name, double lowest, double highest) {
      const size_t at = std::find(columns.begin(), columns.end(), name) - columns.begin();
      char* end = nullptr;
      const double value = at < cells.size() ? std::strtod(cells[at].c_str(), &end) : -1;
      if (at < cells.size() && end != cells[at].c_str() && value >= lowest && value <= highest) return value;
      throw UsageError("--score", printable(line.substr(0, 80)), "a number for " + name);
    };
    const auto whole = [&](const char* name) { return static_cast<int>(number(name, 1, 1e5)); };
    answer += line;
    try {
      const Score s = score({number("model", 1e-3, 1e5), whole("nodes"), whole("mbs"), whole("grad_acc"),
                             whole("dp"), whole("pp"), whole("tp"), static_cast<int>(number("zero", 0, 3))},
                            request.gpu, request.style);
      char numbers[64];
      std::snprintf(numbers, sizeof numbers, ",%.1f,%.0f\n", s.tokens_per_second, s.bytes);
      answer += numbers;
      kinds.push_back(s.kind);
    } catch (const UsageError& error) {
      std::string what = error.what();
      if (first_error.empty()) first_error = "; " + what;
      std::ranges::replace(what, ',', ';');
      answer += "," + what + ",\n";
      kinds.push_back(nullptr);
    }
  }
  if (std::ranges::all_of(kinds, [](const auto& kind) { return kind.is_null(); }))
    throw UsageError("--score", request.score, "a row that can be predicted" + first_error);
  std::cout << answer;
  write_json(request, {{"kinds", kinds}});
}

}  // namespace

int main(int argc, char** argv) {
  return run_program([&] {
    const Request request = parse(argc, argv);
    if (!request.score.empty()) return print_scores(request);
    if (request.heatmap) return show_heatmap(request);
    if (!request.calculator.empty()) {
      nlohmann::ordered_json tables = Calculator().tables();
      tables["gpu"] = request.gpu.name, tables["memory_bytes"] = request.gpu.memory_bytes;
      return write_file("--calculator", request.calculator, tables.dump());
    }
    if (!request.why.empty()) return show_why(request);
    Planner planner = planner_of(request, request.gpus);
    std::vector<std::string> named = request.explain;
    named.insert(named.end(), request.compare.begin(), request.compare.end());
    if (named.empty()) return show_search(request);
    std::vector<Plan> plans;
    for (const std::string& words : named)
      plans.push_back(planner.plan(
          parse_layout(request.explain.empty() ? "--compare" : "--explain", words, request.gpus)));
    print_header(request);
    write_json(request, to_json(request, plans));
    if (request.explain.empty()) return print_plans(plans);
    const Plan& p = plans.front();
    Explanation(p, p.layout.shape, request.gpu, planner.schedule_of(p), request.style).print();
    std::printf("\n%s\n", command(request, p).c_str());
  });
}
