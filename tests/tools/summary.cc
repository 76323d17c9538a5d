// summary LABEL=FILE...: what several runs logged with --log-json, as one table. A run is compared with the
// first one whose model has as many parameters: same settings, so their losses and gradient norms should be
// the same at every step but for rounding.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "program/log.h"

using namespace pentatron;

namespace {

using Json = nlohmann::json;

struct Run {
  std::string label;
  Json options;
  std::vector<Json> steps;
  Json summary;
};

Run read(const std::string& argument) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) throw std::runtime_error(argument + ": expected LABEL=FILE");
  const std::string path = argument.substr(equals + 1);
  std::ifstream file(path);
  Run run{argument.substr(0, equals), {}, {}, {}};
  for (std::string line; std::getline(file, line);) {
    const Json object = Json::parse(line);
    if (object.contains("options")) run.options = object["options"];
    if (object.contains("summary")) run.summary = object["summary"];
    if (object.contains("step")) run.steps.push_back(object);
  }
  if (run.summary.is_null()) throw std::runtime_error(path + ": expected a log that ends with a summary");
  if (run.options.is_null()) throw std::runtime_error(path + ": expected a log that begins with options");
  return run;
}

// The largest difference of a value over all steps, relative to that of `reference`.
double largest_difference(const Run& run, const Run& reference, const char* value) {
  if (run.steps.size() != reference.steps.size())
    throw std::runtime_error(run.label + ": expected as many steps as " + reference.label);
  double largest = 0;
  for (size_t i = 0; i < run.steps.size(); ++i) {
    // null stands for a number that is none
    const Json &a = run.steps[i][value], &b = reference.steps[i][value];
    if (!a.is_number() || !b.is_number()) return INFINITY;
    largest = std::max(largest, std::abs(a.get<double>() - b.get<double>()) / std::abs(b.get<double>()));
  }
  return largest;
}

// Bytes of a purpose at the peak, the largest of all ranks.
double memory(const Run& run, const std::string& purpose) {
  double largest = 0;
  for (const Json& rank : run.summary["memory"])
    largest = std::max(largest, rank["measured"][purpose].get<double>());
  return largest;
}

double sum(const Run& run, const char* value) {
  double sum = 0;
  for (const Json& step : run.steps) sum += step[value].get<double>();
  return sum;
}

std::string formatted(const char* format, double value) {
  char text[32];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

// Collectives and messages that a rank issued in a step, the most of all ranks.
double calls(const Run& run) {
  double most = 0;
  for (const Json& rank : run.summary["communication"]) {
    double calls = 0;
    for (const auto& [operation, count] : rank.items())
      if (count.is_object() && operation != "scalars") calls += count["calls"].get<double>();
    most = std::max(most, calls);
  }
  return most / static_cast<double>(run.steps.size());
}

// The first run of the same model.
const Run& reference_of(const Run& run, const std::vector<Run>& runs) {
  const auto parameters = [](const Run& r) { return r.summary["parameters"].get<int64_t>(); };
  return *std::find_if(runs.begin(), runs.end(),
                       [&](const Run& other) { return parameters(other) == parameters(run); });
}

using Row = std::vector<std::string>;

// Every column as wide as its widest cell; the first one begins at the left, the others end at the right.
void print_rows(const std::vector<Row>& rows) {
  std::vector<size_t> widths(rows.front().size());
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const Row& row : rows) {
    for (size_t i = 0; i < row.size(); ++i)
      std::printf(i == 0 ? "%-*s" : "  %*s", static_cast<int>(widths[i]), row[i].c_str());
    std::printf("\n");
  }
}

void print_table(const std::vector<Run>& runs) {
  std::printf(
      "\nloss diff, norm diff: from the first run of the same model; relative, the largest of %zu steps.\n"
      "micro: sequences of a micro-batch. weights to buffers: memory of a rank at the peak. Compare\n"
      "activations only where micro and attention are the same.\n"
      "sent, calls: by a rank in a step. In the CPU build the step time is modelled. hidden: the share of\n"
      "communication during which something is computed.\n\n",
      runs.front().steps.size());
  Row header = {"", "ranks", "micro", "attention", "final loss", "loss diff", "norm diff"};
  header.insert(header.end(), purpose_names.begin(), purpose_names.end());
  header.back() = "buffers";  // of communication
  header.insert(header.end(), {"sent", "calls", "step time", "hidden"});
  std::vector<Row> rows = {header};
  for (const Run& run : runs) {
    const Run& reference = reference_of(run, runs);
    const auto difference = [&](const char* value) {
      return &run != &reference ? formatted("%.1e", largest_difference(run, reference, value)) : "-";
    };
    Row cells = {run.label,
                 std::to_string(run.summary["ranks"].get<int>()),
                 std::to_string(run.options["micro-batch-size"].get<int>()),
                 run.options["attention"].get<std::string>(),
                 formatted("%.4f", run.summary["final_loss"].get<double>()),
                 difference("loss"),
                 difference("grad_norm")};
    for (const std::string_view purpose : purpose_names)
      cells.push_back(human_bytes(memory(run, std::string(purpose))));
    cells.push_back(human_bytes(sum(run, "comm_bytes") / static_cast<double>(run.steps.size())));
    cells.push_back(formatted("%.0f", calls(run)));
    const Json& modelled = run.summary["modelled"];  // null where time is measured
    const double seconds = modelled.is_null() ? sum(run, "seconds") : modelled["seconds"].get<double>();
    cells.push_back(human_seconds(seconds / static_cast<double>(run.steps.size())));
    cells.push_back(modelled.is_null() ? "-" : formatted("%.0f %%", 100 * modelled["hidden"].get<double>()));
    rows.push_back(cells);
  }
  print_rows(rows);
}

}  // namespace

int main(int argc, char** argv) try {
  std::vector<Run> runs;
  for (int i = 1; i < argc; ++i) runs.push_back(read(argv[i]));
  if (runs.empty()) throw std::runtime_error("expected LABEL=FILE...");
  print_table(runs);
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 2;
}
