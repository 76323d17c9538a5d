// The options of pipeline parallelism.
#pragma once

#include "options/options.h"

namespace pentatron {

// The order in which pipeline ranks take their micro-batches: that of a paper (orders.h), or of a file.
enum class PpSchedule { afab, one_f_one_b, interleaved, zb_h1, zb_v, dualpipe, dualpipe_v, from_file };
inline const Names<PpSchedule> pp_schedule_names = {{"afab", PpSchedule::afab},
                                                    {"1f1b", PpSchedule::one_f_one_b},
                                                    {"interleaved", PpSchedule::interleaved},
                                                    {"zb-h1", PpSchedule::zb_h1},
                                                    {"zb-v", PpSchedule::zb_v},
                                                    {"dualpipe", PpSchedule::dualpipe},
                                                    {"dualpipe-v", PpSchedule::dualpipe_v}};
inline std::string to_string(PpSchedule schedule) { return name_of(pp_schedule_names, schedule); }

struct PipelineOptions {
  PpSchedule pp_schedule = PpSchedule::one_f_one_b;
  std::string pp_schedule_file;  // path, with from_file
  std::string pp_schedule_text;  // all that is in this file
  int vpp = 1;                   // model chunks on a pipeline rank
  int pp = 0;                    // pipeline ranks; 0: all (in 07: one)
  bool show_schedule = false;    // draw the schedule, and train nothing
};

// A name, or the path of a file, which is read (workbench/schedule_file.cc).
void use_schedule(PipelineOptions& options, const std::string& given);

inline bool is_v_shaped(PpSchedule kind) {
  return kind == PpSchedule::zb_v || kind == PpSchedule::dualpipe_v;
}
// Model chunks on a pipeline rank, unless --vpp says another number.
inline int chunks_of(PpSchedule kind) {
  return kind == PpSchedule::interleaved || kind == PpSchedule::dualpipe || is_v_shaped(kind) ? 2 : 1;
}

// Copies of the model that the pipeline ranks hold together, each rank a part of each copy.
inline int copies_of(PpSchedule kind) { return kind == PpSchedule::dualpipe ? 2 : 1; }

inline std::string schedule_name(const PipelineOptions& o) {
  const bool is_file = o.pp_schedule == PpSchedule::from_file;
  return is_file ? o.pp_schedule_file : to_string(o.pp_schedule);
}

inline void declare(CommandLine& line, const Options&, PipelineOptions& o) {
  line.group("Pipeline parallelism");
  line.add(
      "--pp-schedule", join(words_of(pp_schedule_names), "|") + "|FILE",
      "in which order ranks take their micro-batches; FILE: a line a rank, such as F0 F1 B0 B1",
      [&](const std::string& given) { use_schedule(o, given); }, [&] { return schedule_name(o); });
  line.number("--vpp", o.vpp, 1, 1000, "model chunks on a rank", "1 with afab, 1f1b, zb-h1, else 2");
  line.number("--pp", o.pp, 0, 1 << 20, "pipeline ranks, 0: all there are (in 07: one)");
  line.flag("--show-schedule", o.show_schedule, "draw the schedule, train nothing");
  line.reads("--pp-schedule", o.pp_schedule_file);
  line.afterwards([&] {
    const int chunks = chunks_of(o.pp_schedule);
    if (!line.given("--vpp")) o.vpp = chunks;
    require(o.vpp == chunks || o.pp_schedule == PpSchedule::interleaved, "--vpp", o.vpp, chunks,
            " with --pp-schedule ", schedule_name(o), "; only interleaved can have another number of chunks");
  });
}

}  // namespace pentatron
