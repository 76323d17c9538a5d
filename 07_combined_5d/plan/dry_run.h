// Asks the program itself: folded dry runs of 07 (../fold.h), a process for each rank that differs.
#pragma once

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
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

// What 07 says of a layout. A folder for its log, until the process ends.
class DryRuns {
 public:
  // ranks_per_node: of the GPU's profile, or as --ranks-per-node says.
  explicit DryRuns(int ranks_per_node) : ranks_per_node_(ranks_per_node) {
    std::filesystem::create_directory(folder_);
    require(std::filesystem::exists(program_), "plan", program_.string(), "07's program beside this one");
  }
  ~DryRuns() { std::filesystem::remove_all(folder_); }

  // The second step of each plan (the first has no weights that the optimizer's step sends late), with
  // `words`, which are options of 07. Plans that 07 refuses are taken away. On a terminal a line says how far
  // it is.
  void run(std::vector<Plan>& plans,
           const std::function<std::vector<std::string>(const Plan&)>& words) const {
    std::atomic<size_t> next = 0, done = 0;
    std::vector<std::jthread> workers;
    const auto work = [&] {
      for (size_t i = next++; i < plans.size(); i = next++) {
        run(plans[i], words(plans[i]), folder_ / std::to_string(i));
        if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\rdry runs %zu of %zu", ++done, plans.size());
      }
    };
    for (unsigned i = 0; i < std::max(1u, std::thread::hardware_concurrency()); ++i)
      workers.emplace_back(work);
    workers.clear();  // waits for them
    if (isatty(STDERR_FILENO)) std::fprintf(stderr, "\r\033[K");
    std::erase_if(plans, [](const Plan& p) { return p.parts.empty(); });
  }

 private:
  void run(Plan& plan, std::vector<std::string> words, const std::filesystem::path& log) const {
    const auto processes = std::ssize(present_ranks(plan.options, plan.shape, ranks_per_node_).ranks);
    std::string command = "OMP_NUM_THREADS=1 UCX_LOG_LEVEL=error ";
    if (processes > 1) command += text("mpirun -n ", processes, " ");
    command += quoted(program_);
    for (const std::string& word : words) command += " " + quoted(word);
    command += text(" --ranks ", plan.shape.ranks(), " --dry-run --steps 2 --log-json ", quoted(log));
    plan.parts.clear();
    if (std::system((command + " > /dev/null 2>&1").c_str()) != 0) return;
    std::ifstream file(log);
    std::string line, last;
    while (std::getline(file, line)) last = line;
    const auto summary = nlohmann::json::parse(last)["summary"];
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

  const std::filesystem::path folder_ =
      std::filesystem::temp_directory_path() / text("pentatron-plan-", getpid());
  const std::filesystem::path program_ =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "07_combined_5d";
  const int ranks_per_node_;
};

}  // namespace pentatron
