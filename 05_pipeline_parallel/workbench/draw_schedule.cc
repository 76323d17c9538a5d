// --show-schedule: draws a schedule as the papers do. Each rank has a row, and time goes to the right. F3 is
// the forward of micro-batch 3, B the backward (or the input gradient), W the weight gradient. Odd chunks
// have small letters. Dots are the bubble. Messages are not drawn.
#include <cctype>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "simulate.h"

namespace pentatron {
namespace {

// How long each action takes: those of all layers of a rank take 1 each, and a chunk has an equal share of
// the layers. Messages take nothing.
double time_of_chunk(const Schedule& s) { return static_cast<double>(s.copies) / s.v; }
Simulation play(const Schedule& s) {
  const double time = time_of_chunk(s);
  return simulate(s, Costs{time, time, time});
}

double rounded(double time) { return std::round(100 * time) / 100; }
double percent(double ratio) { return std::round(1000 * ratio) / 10; }

std::string title_of(const Schedule& s, const Simulation& played) {
  return text(s.name, ": ", s.p, " ranks, ", s.v > 1 ? text(s.v, " chunks a rank, ") : "", s.m,
              " micro-batches. Time ", rounded(played.total), " = work ", rounded(played.work), " + bubble ",
              rounded(played.bubble()), " (", percent(played.bubble_ratio()), " % of the work)");
}

// The letters of one rank: dots, and where it computes FBW, or fbw in odd chunks, with the micro-batch's
// number. Time 1 of a chunk has `cell` columns.
std::string draw_row(const Schedule& s, const Simulation& played, int rank, size_t cell) {
  const double scale = cell / time_of_chunk(s);
  std::string row(std::lround(played.total * scale), '.');
  for (size_t n = 0; n < s.ranks[rank].size(); ++n) {
    const auto [action, i, chunk] = s.ranks[rank][n];
    if (is_message(action)) continue;
    char letter = action == Action::forward ? 'F' : action == Action::weight_gradient ? 'W' : 'B';
    if (chunk % 2 == 1) letter = static_cast<char>(std::tolower(letter));
    std::string pass = letter + std::to_string(i);
    const size_t begin = std::lround(played.times[rank][n].begin * scale);
    const size_t end = std::lround(played.times[rank][n].end * scale);
    pass.resize(end - begin, '-');
    row.replace(begin, pass.size(), pass);
  }
  return row;
}

}  // namespace

// A row longer than a line of 100 columns continues below; it is cut between two cells.
std::string draw_schedule(const Schedule& s) {
  const size_t cell = 1 + std::to_string(s.m - 1).size();  // columns: room for F and its number
  const size_t cut = (100 - std::string("rank 15   4 in flight, 4 until B").size()) / cell * cell;
  const Simulation played = play(s);
  std::vector<std::string> rows;
  for (int rank = 0; rank < s.p; ++rank) rows.push_back(draw_row(s, played, rank, cell));
  std::ostringstream text;
  text << title_of(s, played) << '\n' << std::left;
  for (size_t begin = 0; begin < rows[0].size(); begin += cut) {
    text << '\n';
    for (int rank = 0; rank < s.p; ++rank) {
      text << std::setw(8) << "rank " + std::to_string(rank) << rows[rank].substr(begin, cut);
      const auto [b, w] = played.in_flight[rank];  // until the input gradient, until the weight gradient
      if (begin == 0) text << "  " << w << " in flight";
      if (begin == 0 && b != w) text << ", " << b << " until B";
      text << '\n';
    }
  }
  return text.str();
}

// Prints the schedule of m micro-batches; then a line for each that has a name, and for this one. In flight:
// the most on a rank, of all its layers (so two chunks of half of them are one).
void show_schedule(const PipelineOptions& options, int m) {
  std::ostream& text = std::cout;
  text << draw_schedule(chosen_schedule(options, options.pp, m)) << '\n';
  text << std::string(13, ' ') << "    time  bubble  of the work  in flight\n";
  const auto add = [&](const PipelineOptions& o) {
    const Schedule s = chosen_schedule(o, o.pp, m);
    const Simulation played = play(s);
    int most = 0;
    for (const PeakInFlight& peak : played.in_flight) most = std::max(most, peak.until_weight_gradient);
    text << std::setw(13) << std::left << s.name << std::right << std::setw(8) << rounded(played.total)
         << std::setw(8) << rounded(played.bubble()) << std::setw(11) << percent(played.bubble_ratio())
         << " %" << std::setw(11) << rounded(double(most) * s.p / s.stages())
         << (s.copies > 1 ? ", two copies of the model" : "") << '\n';
  };
  for (const auto& [name, kind] : pp_schedule_names) {
    if (!instead_of(kind, options.pp, m).empty()) continue;
    PipelineOptions o = options;
    o.pp_schedule = kind;
    if (options.pp_schedule != kind) o.vpp = chunks_of(kind);
    add(o);
  }
  if (options.pp_schedule == PpSchedule::from_file) add(options);
}

}  // namespace pentatron
