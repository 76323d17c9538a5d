// plan --score: predicts layouts that were measured elsewhere. Each row of a CSV file names one; the answer
// is CSV, too: tokens/s a GPU, and bytes of the fullest rank.
#pragma once

#include <cmath>
#include <istream>

#include "layouts.h"

namespace pentatron {

// Models with a head size of 64, 96, 128 and 128, sequences of 4096 tokens and 131072 tokens in the
// vocabulary; the first two tie their head to the embedding.
struct MeasuredModel {
  double billions;
  ModelConfig sizes;
  bool tied;
};
inline const MeasuredModel& measured_model(double billions) {
  static const MeasuredModel models[] = {{1.3, {"1.3B", 16, 2048, 32, 32, 8192, 131072, 1e4, 1e-5}, true},
                                         {3.6, {"3.6B", 28, 3072, 32, 32, 8192, 131072, 1e4, 1e-5}, true},
                                         {8.9, {"8.9B", 32, 4096, 32, 32, 14336, 131072, 1e4, 1e-5}, false},
                                         {80, {"80B", 80, 8192, 64, 64, 28672, 131072, 1e4, 1e-5}, false}};
  const auto apart = [&](const MeasuredModel& m) { return std::abs(std::log(m.billions / billions)); };
  return *std::ranges::min_element(models, {}, apart);
}

// `number`: a column's value, which must be between the two. Throws UsageError.
inline Plan plan_of_row(const std::function<double(const char*, double, double)>& number,
                        const DeviceProfile& gpu, const Style& style) {
  const auto whole = [&](const char* name) { return static_cast<int>(number(name, 1, 1e5)); };
  const MeasuredModel& model = measured_model(number("model", 1e-3, 1e5));
  CombinedOptions o;
  o.model = model.sizes;
  o.sequence_length = 4096;
  o.attention = Attention::tensor_core;
  o.tp = whole("tp"), o.dp = whole("dp"), o.pipeline.pp = whole("pp"), o.micro_batch_size = whole("mbs");
  o.zero.zero_stage = static_cast<int>(number("zero", 0, 3));
  o.tensor.sequence_parallel = o.tp > 1;
  o.global_batch_size = o.dp * o.micro_batch_size * whole("grad_acc");
  require(o.pipeline.pp <= o.model.layers, "--score: pp", o.pipeline.pp, "at most the layers, ",
          o.model.layers);
  const double table = double(o.model.vocab_size) * o.model.d_model / o.tp;
  const bool shares_table = model.tied && o.pipeline.pp == 1;
  const double saved = shares_table ? table * (2 + 2 + 4 + 12.0 / (o.zero.zero_stage > 0 ? o.dp : 1)) : 0;
  return Planner(o, o.tp * o.dp * o.pipeline.pp, gpu, style).plan(o, saved);
}

inline std::vector<std::string> cells_of(const std::string& line) {
  std::vector<std::string> cells;
  std::istringstream stream(line);
  for (std::string cell; std::getline(stream, cell, ',');) {
    std::erase_if(cell, [](char c) { return c == ' ' || c == '\t' || c == '"'; });
    cells.push_back(cell);
  }
  return cells;
}

// The columns are found by their names or, without a line of names, are in the order below. Each row's
// kind_of is added to `kinds`, null where the row is refused. Throws UsageError if all are.
inline std::string scores(std::istream& file, const DeviceProfile& gpu, const Style& style,
                          nlohmann::ordered_json& kinds) {
  std::string names = "model,nodes,mbs,grad_acc,dp,pp,tp,zero", answers, first_error = "no row";
  bool is_predicted = false;
  for (std::string line; std::getline(file, line);) {
    line = line.substr(0, line.find('\r'));
    if (line.find_first_not_of(' ') == line.npos) continue;
    if (answers.empty() && line.find("mbs") != line.npos) {
      names = line;
      continue;
    }
    const std::vector<std::string> columns = cells_of(names), cells = cells_of(line);
    const auto number = [&](const char* name, double lowest, double highest) {
      const size_t at = std::ranges::find(columns, name) - columns.begin();
      const std::string cell = at < cells.size() ? cells[at] : "";
      char* end = nullptr;
      const double value = std::strtod(cell.c_str(), &end);
      require(end != cell.c_str() && value >= lowest && value <= highest, "--score",
              printable(line.substr(0, 80)), "a number for ", name);
      return value;
    };
    answers += line;
    try {
      const Plan p = plan_of_row(number, gpu, style);
      char numbers[64];
      std::snprintf(numbers, sizeof numbers, ",%.1f,%.0f\n", p.tokens_per_second, p.memory.total());
      answers += numbers;
      kinds.push_back(p.kind), is_predicted = true;
    } catch (const UsageError& error) {
      std::string what = error.what();
      if (first_error == "no row") first_error = what;
      std::ranges::replace(what, ',', ';');
      answers += "," + what + ",\n";
      kinds.push_back(nullptr);
    }
  }
  if (!is_predicted) throw UsageError("--score: no row can be predicted; " + first_error);
  return names + ",tokens_per_second_per_gpu,memory_bytes\n" + answers;
}

}  // namespace pentatron
