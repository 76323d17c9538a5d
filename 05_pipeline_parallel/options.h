// The options of pipeline parallelism.
#pragma once

#include <fstream>

#include "options/options.h"

namespace pentatron {

// The order in which pipeline ranks take their micro-batches: that of a paper (orders.h), or any one, which a
// file says.
enum class PpSchedule { afab, one_f_one_b, interleaved, zb_h1, zb_v, dualpipe, dualpipe_v, from_file };
inline const Names<PpSchedule> pp_schedule_names = {{"afab", PpSchedule::afab},
                                                    {"1f1b", PpSchedule::one_f_one_b},
                                                    {"interleaved", PpSchedule::interleaved},
                                                    {"zb-h1", PpSchedule::zb_h1},
                                                    {"zb-v", PpSchedule::zb_v},
                                                    {"dualpipe", PpSchedule::dualpipe},
                                                    {"dualpipe-v", PpSchedule::dualpipe_v}};
inline std::string_view to_string(PpSchedule schedule) { return name_of(pp_schedule_names, schedule); }

// How pipeline ranks exchange activations and gradients: on a stream for each kind and direction, or in
// groups on one.
enum class PpMessages { streams, grouped };
inline const Names<PpMessages> pp_messages_names = {{"streams", PpMessages::streams},
                                                    {"grouped", PpMessages::grouped}};
inline std::string_view to_string(PpMessages messages) { return name_of(pp_messages_names, messages); }

struct PipelineOptions {
  PpSchedule pp_schedule = PpSchedule::one_f_one_b;
  std::string pp_schedule_file;  // path, with from_file
  std::string pp_schedule_text;  // all that is in this file
  PpMessages pp_messages = PpMessages::streams;
  int vpp = 1;                 // model chunks on a pipeline rank
  int pp = 0;                  // pipeline ranks; 0: all (in 07: one)
  bool show_schedule = false;  // draw the schedule, and train nothing
};

// A name, or the path of a file, which is read here.
inline void use_schedule(PipelineOptions& o, const std::string& given) {
  for (const auto& [name, named] : pp_schedule_names) {
    if (name == given) {
      o.pp_schedule = named;
      return;
    }
  }
  constexpr size_t most = 1 << 20;
  std::ifstream file(given, std::ios::binary);
  std::string& text = o.pp_schedule_text;
  text.resize(most + 1);
  file.read(text.data(), std::ssize(text));
  text.resize(file.gcount());
  require(file.is_open() && !file.bad(), "--pp-schedule", given, "one of ",
          join(words_of(pp_schedule_names), ", "), ", or a file that can be read");
  require(text.size() <= most, "--pp-schedule", given, "a file of at most 1 MiB");
  o.pp_schedule = PpSchedule::from_file;
  o.pp_schedule_file = given;
}

// Model chunks on a pipeline rank, unless --vpp says another number.
inline int chunks_of(PpSchedule schedule) {
  return schedule == PpSchedule::interleaved || schedule == PpSchedule::zb_v ||
                 schedule == PpSchedule::dualpipe || schedule == PpSchedule::dualpipe_v
             ? 2
             : 1;
}

inline std::string schedule_name(const PipelineOptions& o) {
  const bool is_file = o.pp_schedule == PpSchedule::from_file;
  return is_file ? o.pp_schedule_file : std::string(to_string(o.pp_schedule));
}

inline void declare(CommandLine& line, const Options&, PipelineOptions& o) {
  line.group("Pipeline parallelism");
  line.add(
      "--pp-schedule", join(words_of(pp_schedule_names), "|") + "|FILE",
      "in which order ranks take their micro-batches; FILE: a line a rank, such as F0 F1 B0 B1",
      [&](const std::string& given) { use_schedule(o, given); }, [&] { return schedule_name(o); });
  line.number("--vpp", o.vpp, 1, 1000, "model chunks on a rank", "1 with afab, 1f1b, zb-h1, else 2");
  line.choice("--pp-messages", o.pp_messages, pp_messages_names,
              "a stream for each kind and direction, or one for groups of a send and a receive");
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
