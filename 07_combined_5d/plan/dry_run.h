// Asks the program itself: folded dry runs of 07 (../fold.h), a process for each rank that differs.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include "../fold.h"
#include "layouts.h"

namespace pentatron {

// A word of a command line, as a shell reads it.
inline std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? "'\\''" : std::string(1, c);
  return text + "'";
}

// Sets the seconds and parts of a plan as the summary of its log has them.
inline void read_summary(Plan& plan, const nlohmann::json& summary) {
  std::map<std::string, double> waits;  // that no kernel hides; some happen at the same time
  for (const auto& [stream, use] : summary["streams"].items()) {
    std::string part = stream.ends_with(" in") || stream.ends_with(" out") ? "messages" : "data";
    for (const char* axis : {"tensor", "context", "experts"}) {
      if (stream.starts_with(axis)) part = axis;
    }
    waits[part] += double(use["seconds"]) * (1 - double(use["hidden"]));
    plan.hidden += double(use["seconds"]) * double(use["hidden"]);
  }
  plan.seconds = summary["modelled"]["seconds"];
  const double computes = summary["modelled"]["compute_seconds"];
  plan.parts = {{"compute", computes}, {"idle", plan.seconds - computes}};
  for (const char* part : {"tensor", "context", "experts", "data", "messages"})
    plan.parts.push_back({part, waits[part]});
}

// Sets the seconds and parts of a plan, or why 07 refuses it. `model`: the options that were given. The
// second step counts: the first one has no weights that the optimizer's step sends late.
inline void dry_run(Plan& plan, const std::vector<std::string>& model, int ranks_per_node) {
  const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "07_combined_5d";
  const auto processes = std::ssize(present_ranks(plan.options, plan.shape, ranks_per_node).ranks);
  std::string command = "OMP_NUM_THREADS=1 UCX_LOG_LEVEL=error ";
  if (processes > 1) command += text("mpirun -n ", processes, " ");
  command += quoted(program);
  for (const auto& words : {model, options_of(plan.options)}) {
    for (const std::string& word : words) command += " " + quoted(word);
  }
  command += text(" --ranks ", plan.shape.ranks(), " --dry-run --steps 2 --log-json /dev/stdout 2>&1");
  std::string printed, summary;
  FILE* const output = popen(command.c_str(), "r");
  char some[4096];
  for (size_t n; output != nullptr && (n = std::fread(some, 1, sizeof some, output)) > 0;)
    printed.append(some, n);
  const bool ended_well = output != nullptr && pclose(output) == 0;
  std::istringstream lines(printed);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("{\"summary\"")) summary = line;
    if (!line.empty() && !line.starts_with("Abort(")) plan.refusal = line;  // the last one; Abort: MPI's
  }
  if (!ended_well) return;
  plan.refusal = summary.empty() ? "with these options 07 does not train" : "";
  if (!summary.empty()) read_summary(plan, nlohmann::json::parse(summary)["summary"]);
}

// Dry runs of all plans, as many at a time as there are cores. On a terminal a line says how far they are.
inline void dry_run(std::vector<Plan>& plans, const std::vector<std::string>& model, int ranks_per_node) {
  std::atomic<size_t> next = 0, done = 0;
  const auto work = [&] {
    for (size_t i = next++; i < plans.size(); i = next++) {
      dry_run(plans[i], model, ranks_per_node);
      if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\rdry runs %zu of %zu", ++done, plans.size());
    }
  };
  std::vector<std::jthread> workers;
  for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i) workers.emplace_back(work);
  workers.clear();  // waits for them
  if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\r\033[K");
}

}  // namespace pentatron
