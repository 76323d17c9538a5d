#include "device/timeline.h"

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <utility>

namespace pentatron::trace {
namespace {

using Spans = std::vector<std::pair<double, double>>;  // [begin, end), disjoint, in order

// Operations of one stream follow one another, but a group's parts may lie within one another.
Spans spans_of(const std::vector<Interval>& intervals, const std::string& stream, double from, double to) {
  Spans sorted, merged;
  for (const Interval& i : intervals) {
    if (i.stream == stream && i.end > from && i.begin < to)
      sorted.push_back({std::max(i.begin, from), std::min(i.end, to)});
  }
  std::ranges::sort(sorted);
  for (const auto& span : sorted) {
    if (merged.empty() || span.first > merged.back().second) {
      merged.push_back(span);
    } else {
      merged.back().second = std::max(merged.back().second, span.second);
    }
  }
  return merged;
}

double length(const Spans& spans) {
  double sum = 0;
  for (const auto& [begin, end] : spans) sum += end - begin;
  return sum;
}

double common_length(const Spans& a, const Spans& b) {
  double sum = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max(0.0, std::min(a[i].second, b[j].second) - std::max(a[i].first, b[j].first));
    a[i].second < b[j].second ? ++i : ++j;
  }
  return sum;
}

std::vector<std::string> streams_of(const std::vector<Interval>& intervals) {
  std::vector<std::string> streams = {compute_stream};
  for (const Interval& i : intervals)
    if (std::ranges::find(streams, i.stream) == streams.end()) streams.push_back(i.stream);
  std::sort(streams.begin() + 1, streams.end());
  return streams;
}

char letter_of(const Interval& i) { return i.stream == compute_stream ? i.pass : '#'; }

}  // namespace

Overlap::Stream Overlap::all_communication() const {
  Stream all;
  for (const auto& [name, stream] : communication) all += stream;
  return all;
}

Overlap& Overlap::operator+=(const Overlap& other) {
  seconds += other.seconds;
  compute += other.compute;
  for (const auto& [name, stream] : other.communication) communication[name] += stream;
  return *this;
}

Overlap overlap_of(const std::vector<Interval>& intervals, double from, double to) {
  const Spans compute = spans_of(intervals, compute_stream, from, to);
  Overlap overlap = {to - from, length(compute), {}};
  for (const std::string& stream : streams_of(intervals)) {
    if (stream == compute_stream) continue;
    const Spans spans = spans_of(intervals, stream, from, to);
    overlap.communication[stream] = {length(spans), common_length(spans, compute)};
  }
  return overlap;
}

std::string draw_timeline(const std::vector<Interval>& intervals, double from, double to, int width) {
  std::ostringstream out;
  for (const std::string& stream : streams_of(intervals)) {
    std::vector<std::map<char, double>> cells(width);
    const double cell = (to - from) / width;
    for (const Interval& i : intervals) {
      if (i.stream != stream || i.end <= from || i.begin >= to) continue;
      const int first = std::clamp(static_cast<int>((i.begin - from) / cell), 0, width - 1);
      const int last = std::clamp(static_cast<int>((i.end - from) / cell), 0, width - 1);
      for (int c = first; c <= last; ++c) {
        const double begin = from + c * cell;
        cells[c][letter_of(i)] += std::max(0.0, std::min(i.end, begin + cell) - std::max(i.begin, begin));
      }
    }
    out << std::left << std::setw(18) << stream;
    for (const auto& seconds_of : cells) {
      const auto longest = std::ranges::max_element(seconds_of, {}, &std::pair<const char, double>::second);
      const double busy = longest == seconds_of.end() ? 0 : longest->second;
      const bool thin = busy < cell / 2 && longest->first == '#';
      out << (busy <= cell / 8 ? '.' : thin ? '+' : longest->first);
    }
    out << '\n';
  }
  return out.str();
}

}  // namespace pentatron::trace
