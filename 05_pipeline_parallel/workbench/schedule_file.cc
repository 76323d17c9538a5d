// A schedule as a file (--pp-schedule FILE). Here are two ranks and two micro-batches. A line has what one
// rank computes; the program adds the messages.
//
//   F0 F1 B0 B1    # rank 0: F0 is the forward of micro-batch 0, B0 the backward
//   F0 B0 F1 B1    # rank 1
//
// If there is a W in the file, B is the input gradient alone, and W the weight gradient. A rank with several
// chunks begins its line with their stages. F0.1 is the forward of micro-batch 0 in its chunk 1:
//
//   0,3: F0 F0.1 B0.1 B0
//   1,2: F0 F0.1 B0.1 B0
#include <charconv>
#include <iterator>
#include <sstream>
#include <string_view>

#include "../choose_schedule.h"
#include "device/mapped_file.h"

namespace pentatron {
namespace {

struct ScheduleLine {
  std::string location;  // file:line
  std::string stages;    // "0,3:", or empty
  std::vector<std::string> words;
};

// The lines of a file that have any words. `#` begins a comment.
std::vector<ScheduleLine> lines_of(const std::string& name, const std::string& text) {
  std::vector<ScheduleLine> lines;
  std::istringstream in(text);
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    std::istringstream words(line.substr(0, line.find('#')));
    ScheduleLine l = {
        name + ":" + std::to_string(number), "", {std::istream_iterator<std::string>(words), {}}};
    if (l.words.empty()) continue;
    if (l.words[0].back() == ':') {
      l.stages = l.words[0];
      l.words.erase(l.words.begin());
    }
    lines.push_back(l);
  }
  return lines;
}

// Sets v and the placement: each stage is on one rank, and all ranks have as many.
void read_stages(Schedule& s, const std::vector<ScheduleLine>& lines) {
  std::ptrdiff_t most = 0;  // no line has stages
  for (const ScheduleLine& line : lines) {
    if (!line.stages.empty()) most = std::max(most, 1 + std::ranges::count(line.stages, ','));
  }
  if (most == 0) return;
  s.v = static_cast<int>(most);
  s.placement.assign(s.p * s.v, {-1, -1});
  for (int rank = 0; rank < s.p; ++rank) {
    std::istringstream in(lines[rank].stages);
    int chunk = 0, stage = -1;
    for (char after = 0; chunk < s.v; ++chunk) {
      const bool read = static_cast<bool>(in >> stage >> after);
      require(read && after == (chunk + 1 < s.v ? ',' : ':') && stage >= 0 && stage < s.stages() &&
                  s.placement[stage].rank < 0,
              "--pp-schedule", lines[rank].location + ": " + lines[rank].stages.substr(0, 20),
              "stages such as 0,3: with each of 0 to ", s.stages() - 1, " on one rank");
      s.placement[stage] = {rank, chunk};
    }
  }
}

// What a rank computes. Each instruction of the m micro-batches comes once, and those of a micro-batch in
// their order.
Instructions read_line(const Schedule& s, const ScheduleLine& line) {
  const std::vector<Action> actions = compute_actions(s);
  const std::string_view letters = s.splits_backward ? "FBW" : "FB";  // of the actions
  const auto spelled = [&](size_t action, int i, int chunk) {
    return letters[action] + std::to_string(i) + (chunk > 0 ? "." + std::to_string(chunk) : "");
  };
  Instructions compute;
  std::vector done(s.v, std::vector<size_t>(s.m, 0));  // [chunks][micro-batches]: actions
  for (const std::string& word : line.words) {
    const auto check = [&](bool valid, const std::string& expected) {
      if (!valid) throw UsageError("--pp-schedule", line.location + ": " + word.substr(0, 20), expected);
    };
    const size_t action = letters.find(word[0]);
    int i = -1, chunk = 0;
    const char* const end = word.data() + word.size();
    const char* at = std::from_chars(word.data() + 1, end, i).ptr;
    if (s.v > 1 && at != end && *at == '.') at = std::from_chars(at + 1, end, chunk = -1).ptr;
    check(action != letters.npos && at == end && i >= 0 && i < s.m && chunk >= 0 && chunk < s.v,
          "F, B or W, and a micro-batch from 0 to " + std::to_string(s.m - 1) +
              (s.v > 1 ? ", and a chunk from .0 to ." + std::to_string(s.v - 1) : ""));
    size_t& next = done[chunk][i];
    check(action >= next, "it once in a line");
    check(action == next, spelled(next, i, chunk) + " before it");
    ++next;
    compute.push_back({actions[action], i, chunk});
  }
  for (int chunk = 0; chunk < s.v; ++chunk) {
    for (int i = 0; i < s.m; ++i) {
      const size_t next = done[chunk][i];
      if (next < actions.size())
        throw UsageError("--pp-schedule", line.location, spelled(next, i, chunk) + ", which is missing");
    }
  }
  return compute;
}

}  // namespace

void use_schedule(PipelineOptions& o, const std::string& given) {
  for (const auto& [name, named] : pp_schedule_names) {
    if (name == given) return void(o.pp_schedule = named);
  }
  const std::string names = join(words_of(pp_schedule_names), ", ");
  o.pp_schedule_text = MappedFile("--pp-schedule", given, "one of " + names + ", or ").text();
  o.pp_schedule = PpSchedule::from_file;
  o.pp_schedule_file = given;
}

Schedule parse_schedule(const std::string& name, const std::string& text, int p, int m) {
  const std::vector<ScheduleLine> lines = lines_of(name, text);
  require(std::ssize(lines) == p, "--pp-schedule", name, "a line with instructions for each of ", p,
          " ranks; it has ", lines.size());
  Schedule s = {name, false, p, m, 1, looped(p, 1), {}};
  read_stages(s, lines);
  for (const ScheduleLine& line : lines) {
    for (const std::string& word : line.words) s.splits_backward |= word[0] == 'W';
  }
  for (int rank = 0; rank < p; ++rank) s.ranks.push_back(with_messages(s, rank, read_line(s, lines[rank])));
  return s;
}

// A file may put off weight gradients in another order.
bool completes_from_the_end(const Schedule& s) {
  for (int rank = 0; rank < s.p; ++rank) {
    std::vector<size_t> completed(s.stages(), 0);  // [stages]: by which instruction; 0: not on this rank
    for (size_t n = 0; n < s.ranks[rank].size(); ++n) {
      const Instruction& i = s.ranks[rank][n];
      if (i.action == compute_actions(s).back()) completed[s.stage(rank, i.chunk)] = n;
    }
    std::erase(completed, 0);
    if (!std::is_sorted(completed.rbegin(), completed.rend())) return false;
  }
  return true;
}

}  // namespace pentatron
