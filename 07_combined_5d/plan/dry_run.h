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

// What 07 says of layouts.
class DryRuns {
 public:
  // ranks_per_node: of the GPU's profile, or as --ranks-per-node says.
  explicit DryRuns(int ranks_per_node) : ranks_per_node_(ranks_per_node) {
    require(std::filesystem::exists(program_), "plan", program_.string(), "07's program beside this one");
  }

  // The second step of each plan (the first has no weights that the optimizer's step sends late), with
  // `words`, which are options of 07. On a terminal a line says how far it is.
  void run(std::vector<Plan>& plans,
           const std::function<std::vector<std::string>(const Plan&)>& words) const {
    std::atomic<size_t> next = 0, done = 0;
    const auto work = [&] {
      for (size_t i = next++; i < plans.size(); i = next++) {
        run(plans[i], words(plans[i]));
        if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\rdry runs %zu of %zu", ++done, plans.size());
      }
    };
    std::vector<std::jthread> workers;
    for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i)
      workers.emplace_back(work);
    workers.clear();  // waits for them
    if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\r\033[K");
  }

 private:
  // Sets the plan's seconds and parts, or why 07 refuses it.
  void run(Plan& plan, const std::vector<std::string>& words) const {
    const auto processes = std::ssize(present_ranks(plan.options, plan.shape, ranks_per_node_).ranks);
    std::string command = "OMP_NUM_THREADS=1 UCX_LOG_LEVEL=error ";
    if (processes > 1) command += text("mpirun -n ", processes, " ");
    command += quoted(program_);
    for (const std::string& word : words) command += " " + quoted(word);
    command += text(" --ranks ", plan.shape.ranks(), " --dry-run --steps 2 --log-json /dev/stdout 2>&1");
    std::string printed, summary;
    FILE* const program = popen(command.c_str(), "r");
    char some[4096];
    for (size_t n; program != nullptr && (n = std::fread(some, 1, sizeof some, program)) > 0;)
      printed.append(some, n);
    const bool ended_well = program != nullptr && pclose(program) == 0;
    std::istringstream lines(printed);
    for (std::string line; std::getline(lines, line);) {
      if (line.starts_with("{\"summary\"")) summary = line;
      if (!line.empty() && !line.starts_with("Abort(")) plan.refusal = line;  // the last one; Abort: MPI's
    }
    if (!ended_well) return;
    plan.refusal = summary.empty() ? "with these options 07 does not train" : "";
    if (!summary.empty()) read(plan, nlohmann::json::parse(summary)["summary"]);
  }

  static void read(Plan& plan, const nlohmann::json& summary) {
    const double seconds = summary["modelled"]["seconds"], computes = summary["modelled"]["compute_seconds"];
    std::map<std::string, double> waits;  // that no kernel hides; some happen at the same time
    for (const auto& [stream, use] : summary["streams"].items())
      waits[part_of(stream)] += double(use["seconds"]) * (1 - double(use["hidden"]));
    plan.seconds = seconds;
    plan.parts = {{"compute", computes}, {"idle", seconds - computes}};
    for (const char* part : {"tensor", "context", "experts", "data", "messages"})
      plan.parts.push_back({part, waits[part]});
  }

  static std::string part_of(const std::string& stream) {
    for (const char* axis : {"tensor", "context", "experts"}) {
      if (stream.starts_with(axis)) return axis;
    }
    return stream.ends_with(" in") || stream.ends_with(" out") ? "messages" : "data";
  }

  const std::filesystem::path program_ =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "07_combined_5d";
  const int ranks_per_node_;
};

}  // namespace pentatron
