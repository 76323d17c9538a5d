// The planner: which layout of a run on so many GPUs fits, how fast it is, and why. It needs no GPU and runs
// as one process. It knows the layouts that 07 accepts (layouts.h) and what a step of each costs
// (cost_model.h).
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "calculator.h"
#include "explain.h"
#include "score.h"

using namespace pentatron;

namespace {

struct Request {
  int gpus = 8, gpus_per_node = 0;
  size_t top = 10;
  std::vector<std::string> explain, compare;
  std::string json, score, calculator;
  Style style;
  bool heatmap = false;
  std::vector<std::string> model;  // the options of 07 that were given
  CombinedOptions base;
  DeviceProfile gpu;
};

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
  app.add_option("--style", style, "whose implementation: pentatron, nanotron or megatron [pentatron]");
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
  request.model = app.remaining();
  std::vector<const char*> arguments = {argv[0], "--micro-batch-size", "1"};  // layouts say another one
  for (const std::string& word : request.model) arguments.push_back(word.c_str());
  request.base = parse_options<CombinedOptions>(static_cast<int>(arguments.size()), arguments.data(), "",
                                                Attention::tiled);
  if (has_fp8_products) throw UsageError("PRECISION", "fp8", "another one: a plan does not know fp8's time");
  if (request.base.pp_messages == PpMessages::grouped)
    throw UsageError("--pp-messages", "grouped", "streams, the only messages that a plan knows");
  if (request.base.cp_exchange != CpExchange::ring) {
    throw UsageError("--cp-exchange", std::string(to_string(request.base.cp_exchange)),
                     "ring, the only one whose time a plan knows");
  }
  const int size = request.base.model.head_size();
  const bool chosen = std::ranges::count(request.model, "--attention") > 0;
  if (!chosen && (size == 64 || size == 128)) request.base.attention = Attention::tensor_core;
  request.gpu = load_profile(request.base.gpu.empty() ? "h100" : request.base.gpu);
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
  std::printf("%-52s %9s %10s %11s %6s   of the step's time, %%\n", "layout", "memory", "step", "tokens/s",
              "MFU");
  std::printf("%-52s %9s %10s %11s %6s", "", "GiB", "ms", "a GPU", "%");
  for (const auto& [name, seconds] : parts({})) std::printf(" %9s", name);
  std::printf("\n");
  for (const Plan& p : plans) {
    std::printf("%-52s %9.1f %10.1f %11.0f %6.1f", to_string(p.layout).c_str(), p.memory.total() / (1 << 30),
                p.cost.total() * 1e3, p.tokens_per_second, 100 * p.mfu);
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
                                {"tokens_per_second", p.tokens_per_second},
                                {"mfu", p.mfu}};
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

void show_search(const Request& request) {
  const Search s = Planner(request.base, request.gpus, request.gpu, request.style).search(request.top);
  print_header(request);
  std::printf("1  fit     %d layouts divide the model; %d of them need at most the %s of a GPU\n", s.divide,
              s.fit, gib(request.gpu.memory_bytes).c_str());
  if (s.divide == 0)
    throw UsageError("--gpus", std::to_string(request.gpus),
                     "a number that divides heads, layers or the batch");
  if (s.fit == 0) {
    const Plan& p = *s.nearest;
    throw UsageError("no layout fits: " + to_string(p.layout) + " needs least, " + gib(p.memory.total()) +
                     " of " + gib(request.gpu.memory_bytes) + "; take more GPUs, or a shorter --seq-len");
  }
  std::printf("2  batch   %d of these reach the global batch\n", s.reach);
  if (s.best.empty())
    throw UsageError("--global-batch-size", std::to_string(request.base.global_batch_size),
                     "a multiple of a number of data ranks that fit");
  std::printf("3  speed   the fastest %zu\n\n", s.best.size());
  print_plans(s.best);
  std::printf("\n%s\n", command(request, s.best.front()).c_str());
  write_json(request, to_json(request, s.best));
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
      const Search s = Planner(base, n * per_node, request.gpu, request.style).search(1);
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
    const Score s = score({number("model", 1e-3, 1e5), whole("nodes"), whole("mbs"), whole("grad_acc"),
                           whole("dp"), whole("pp"), whole("tp"), static_cast<int>(number("zero", 0, 3))},
                          request.gpu, request.style);
    char numbers[64];
    std::snprintf(numbers, sizeof numbers, ",%.1f,%.0f\n", s.tokens_per_second, s.bytes);
    answer += line + numbers;
  }
  std::cout << answer;
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
    Planner planner(request.base, request.gpus, request.gpu, request.style);
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
