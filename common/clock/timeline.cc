#include "clock/timeline.h"

#include <algorithm>
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
    if (merged.empty() || span.first > merged.back().second) merged.push_back(span);
    merged.back().second = std::max(merged.back().second, span.second);
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
  for (const Interval& i : intervals) {
    if (i.stream == compute_stream || overlap.communication.contains(i.stream)) continue;
    const Spans spans = spans_of(intervals, i.stream, from, to);
    overlap.communication[i.stream] = {length(spans), common_length(spans, compute)};
  }
  return overlap;
}

}  // namespace pentatron::trace
