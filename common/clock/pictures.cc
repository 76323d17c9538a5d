// How a timeline is shown: as rows of characters, as a table of kernels, as a Chrome trace.
#include <algorithm>
#include <fstream>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "clock/timeline.h"
#include "device/errors.h"

namespace pentatron::trace {

std::string draw_timeline(const std::vector<Interval>& intervals, double from, double to, int width) {
  std::ostringstream out;
  std::vector<std::string> streams = {compute_stream};
  for (const Interval& i : intervals) {
    if (std::ranges::find(streams, i.stream) == streams.end()) streams.push_back(i.stream);
  }
  std::sort(streams.begin() + 1, streams.end());
  for (const std::string& stream : streams) {
    std::vector<std::map<char, double>> cells(width);
    const double cell = (to - from) / width;
    for (const Interval& i : intervals) {
      if (i.stream != stream || i.end <= from || i.begin >= to) continue;
      const int first = std::clamp(static_cast<int>((i.begin - from) / cell), 0, width - 1);
      const int last = std::clamp(static_cast<int>((i.end - from) / cell), 0, width - 1);
      for (int c = first; c <= last; ++c) {
        const double begin = from + c * cell;
        const char letter = i.stream == compute_stream ? i.pass : '#';
        cells[c][letter] += std::max(0.0, std::min(i.end, begin + cell) - std::max(i.begin, begin));
      }
    }
    out << std::left << std::setw(18) << stream;
    for (const auto& seconds_of : cells) {
      const auto longest = std::ranges::max_element(seconds_of, {}, &std::pair<const char, double>::second);
      const double busy = longest == seconds_of.end() ? 0 : longest->second;
      if (busy <= cell / 8)
        out << '.';
      else
        out << (longest->first == '#' && busy < cell / 2 ? '+' : longest->first);
    }
    out << '\n';
  }
  return out.str();
}

void print_profile(std::ostream& out, const std::vector<Interval>& intervals) {
  struct Total {
    int64_t calls = 0;
    double seconds = 0;
  };
  std::map<std::string, Total> by_name;
  double all = 0, products = 0;
  for (const Interval& i : intervals) {
    Total& total = by_name[i.name];
    total.calls += 1;
    total.seconds += i.end - i.begin;
    all += i.end - i.begin;
    if (i.name.starts_with("gemm")) products += i.end - i.begin;
  }
  std::vector<std::pair<std::string, Total>> rows(by_name.begin(), by_name.end());
  std::ranges::sort(rows, std::greater(), [](const auto& row) { return row.second.seconds; });

  out << std::fixed << "\nTime by kernel, in the last step         calls      all, ms    each, us   share\n";
  for (const auto& [name, total] : rows) {
    out << std::left << std::setw(36) << name << std::right << std::setw(10) << total.calls << std::setw(12)
        << std::setprecision(2) << total.seconds * 1e3 << std::setw(12) << total.seconds * 1e6 / total.calls
        << std::setw(8) << std::setprecision(1) << 100 * total.seconds / all << " %\n";
  }
  out << "Share of the products (cuBLAS): " << 100 * products / all << " %\n";
}

std::string chrome_events(const std::vector<Interval>& intervals, int rank, int stands_for) {
  auto events = nlohmann::json::array();
  std::map<std::string, int> rows;
  std::map<uint64_t, const Interval*> by_id;
  const auto row_of = [&](const Interval& i) {
    return rows.try_emplace(i.stream, static_cast<int>(rows.size())).first->second;
  };
  const auto event = [&](const char* phase, const std::string& name, const Interval& i, double time) {
    return nlohmann::json{
        {"ph", phase}, {"name", name}, {"pid", rank}, {"tid", row_of(i)}, {"ts", time * 1e6}};
  };
  // One end of an arrow. A viewer joins ends of the same id.
  const auto arrow = [&](const Interval& i, double time, bool from, const std::string& id) {
    events.push_back(event(from ? "s" : "f", "order", i, time));
    events.back().update({{"bp", "e"}, {"cat", "order"}, {"id", id}});
  };
  for (const Interval& i : intervals) by_id[i.id] = &i;
  for (const Interval& i : intervals) {
    nlohmann::json arguments = {{"bytes", i.bytes}, {"pass", std::string(1, i.pass)}};
    if (i.micro_batch >= 0) arguments["micro_batch"] = i.micro_batch;
    if (i.layer >= 0) arguments["layer"] = i.layer;
    events.push_back(event("X", i.name, i, i.begin));
    events.back().update({{"dur", (i.end - i.begin) * 1e6}, {"args", arguments}});
    for (const uint64_t message : i.sent) arrow(i, i.begin, true, "message " + std::to_string(message));
    for (const uint64_t message : i.received) arrow(i, i.end, false, "message " + std::to_string(message));
    const auto other = by_id.find(i.waited_for);
    if (i.waited_for == 0 || other == by_id.end()) continue;
    const std::string id = "wait " + std::to_string(rank) + " " + std::to_string(i.id);
    arrow(*other->second, other->second->end, true, id);
    arrow(i, i.begin, false, id);
  }
  for (const auto& [stream, row] : rows) {
    events.push_back(
        {{"ph", "M"}, {"name", "thread_name"}, {"pid", rank}, {"tid", row}, {"args", {{"name", stream}}}});
  }
  const std::string others = stands_for > 1 ? " and " + std::to_string(stands_for - 1) + " like it" : "";
  events.push_back(
      {{"ph", "M"}, {"name", "process_name"}, {"pid", rank}, {"args", {{"name", rank_name(rank) + others}}}});
  return events.dump();
}

bool write_chrome(const std::string& path, const std::vector<std::string>& events) {
  std::ofstream file(path);
  file << "{\"traceEvents\":[";
  for (const std::string& of_rank : events) {
    file << (&of_rank == &events.front() ? "" : ",\n")
         << of_rank.substr(1, of_rank.size() - 2);  // without brackets
  }
  file << "]}" << std::endl;
  return file.good();
}

}  // namespace pentatron::trace
