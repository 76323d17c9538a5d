// --show-schedule: draws a schedule as the papers do. Each rank has a row, and time goes to the right. F3 is
// the forward of micro-batch 3, B the backward (or the input gradient), W the weight gradient. Odd chunks
// have small letters. Dots are the bubble. Messages are not drawn.
#pragma once

#include <unistd.h>

#include <array>
#include <cctype>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "../choose_schedule.h"

namespace pentatron {

struct Paint {
  char letter;
  std::array<int, 2> terminal;  // of ANSI's 256 colours, for even and odd chunks
};
inline Paint paint_of(Action compute) {
  if (compute == Action::forward) return {'F', {117, 75}};
  if (compute == Action::weight_gradient) return {'W', {222, 214}};
  return {'B', {120, 71}};
}

// How long each action takes: those of all layers of a rank take 1 each, and a chunk has an equal share of
// the layers. Messages take nothing.
inline double time_of_chunk(const Schedule& s) { return static_cast<double>(s.copies) / s.v; }
inline Simulation play(const Schedule& s) {
  const double time = time_of_chunk(s);
  return simulate(s, Costs{time, time, time});
}

inline double rounded(double time) { return std::round(100 * time) / 100; }
inline double percent(double ratio) { return std::round(1000 * ratio) / 10; }

inline std::string title_of(const Schedule& s, const Simulation& played) {
  std::ostringstream title;
  title << s.name << ": " << s.p << " ranks, ";
  if (s.v > 1) title << s.v << " chunks a rank, ";
  title << s.m << " micro-batches. Time " << rounded(played.total) << " = work " << rounded(played.work)
        << " + bubble " << rounded(played.bubble()) << " (" << percent(played.bubble_ratio())
        << " % of the work)";
  return title.str();
}

inline std::string in_flight_of(const InFlight& peak) {
  const int b = peak.until_input_gradient, w = peak.until_weight_gradient;
  return std::to_string(w) + " in flight" + (b == w ? "" : ", " + std::to_string(b) + " until B");
}

// A row that is longer than `columns` continues below; it is cut between two cells.
inline std::string draw_schedule(const Schedule& s, int columns, bool coloured) {
  struct Cell {
    char letter = '.';
    int colour = 0;
  };
  const size_t cell = 1 + std::to_string(s.m - 1).size();  // columns: room for F and its number
  const double scale = cell / time_of_chunk(s);
  const Simulation played = play(s);
  const size_t length = std::lround(played.total * scale);
  const size_t around = std::string("rank 15   4 in flight, 4 until B").size();
  const size_t cut = (std::max<size_t>(columns, around + 10) - around) / cell * cell;
  std::vector<std::vector<Cell>> rows(s.p, std::vector<Cell>(length));
  for (int rank = 0; rank < s.p; ++rank) {
    for (size_t n = 0; n < s.ranks[rank].size(); ++n) {
      const Instruction& i = s.ranks[rank][n];
      if (is_message(i.action)) continue;
      const Paint paint = paint_of(i.action);
      const bool odd = i.chunk % 2 == 1;
      const std::string label =
          static_cast<char>(odd ? std::tolower(paint.letter) : paint.letter) + std::to_string(i.micro_batch);
      const size_t begin = std::lround(played.times[rank][n].begin * scale);
      const size_t end = std::lround(played.times[rank][n].end * scale);
      for (size_t c = begin; c < end; ++c)
        rows[rank][c] = {c - begin < label.size() ? label[c - begin] : '-', paint.terminal[odd]};
    }
  }
  std::ostringstream text;
  text << title_of(s, played) << '\n';
  for (size_t begin = 0; begin < length; begin += cut) {
    text << '\n';
    for (int rank = 0; rank < s.p; ++rank) {
      const std::string name = "rank " + std::to_string(rank);
      text << name << std::string(8 - name.size(), ' ');
      int colour = 0;
      for (size_t c = begin; c < std::min(begin + cut, length); ++c) {
        const Cell& cell = rows[rank][c];
        if (coloured && cell.colour != colour) {
          text << (cell.colour == 0 ? "\033[0m" : "\033[30;48;5;" + std::to_string(cell.colour) + "m");
          colour = cell.colour;
        }
        text << cell.letter;
      }
      if (colour != 0) text << "\033[0m";
      if (begin == 0) text << "  " << in_flight_of(played.in_flight[rank]);
      text << '\n';
    }
  }
  return text.str();
}

// A line for each schedule that has a name, and for that of the options. In flight: the
// most on a rank, of all its layers (so two chunks of half of them are one).
inline std::string compare_schedules(const PipelineOptions& options, int m) {
  std::ostringstream text;
  text << std::string(13, ' ') << "    time  bubble  of the work  in flight\n";
  const auto add = [&](const PipelineOptions& o) {
    const Schedule s = make_schedule(o, o.pp, m);
    text << std::setw(13) << std::left << s.name << std::right;
    try {
      const Simulation played = play(s);
      int most = 0;
      for (const InFlight& peak : played.in_flight) most = std::max(most, peak.until_weight_gradient);
      text << std::setw(8) << rounded(played.total) << std::setw(8) << rounded(played.bubble())
           << std::setw(11) << percent(played.bubble_ratio()) << " %" << std::setw(11)
           << rounded(double(most) * s.p / s.stages()) << (s.copies > 1 ? ", two copies of the model" : "");
    } catch (const ScheduleError&) {
      text << "  a deadlock with --pp-messages " << to_string(o.pp_messages);
    }
    text << '\n';
  };
  for (const auto& [name, kind] : pp_schedule_names) {
    const bool interleaved = kind == PpSchedule::interleaved;
    if (interleaved && m % options.pp != 0) continue;
    if (kind == PpSchedule::dualpipe && (options.pp % 2 != 0 || m % 2 != 0)) continue;
    PipelineOptions o = options;
    o.pp_schedule = kind;
    if (!interleaved || options.pp_schedule != kind) o.vpp = chunks_of(kind);
    add(o);
  }
  if (options.pp_schedule == PpSchedule::from_file) add(options);
  return text.str();
}

// Rank 0 prints the schedule of m micro-batches, and beside which others it stands.
inline void show_schedule(const PipelineOptions& options, int m, int rank = 0) {
  if (rank > 0) return;
  const Schedule schedule = make_schedule(options, options.pp, m);
  std::cout << draw_schedule(schedule, 100, isatty(STDOUT_FILENO) == 1) << '\n'
            << compare_schedules(options, m);
}

}  // namespace pentatron
