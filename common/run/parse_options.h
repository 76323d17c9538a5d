// The options of a program, from the command line and from the checkpoint that it names.
#pragma once

#include <concepts>
#include <string_view>

#include "checkpoint/checkpoint_folder.h"
#include "options/options.h"

namespace pentatron {

// The options of a program. What --load and --load-weights name is read after the arguments; then options
// are completed and checked. Throws UsageError or HelpRequest. `attention`: its default in a CPU build.
template <std::derived_from<Options> ProgramOptions>
ProgramOptions parse_options(int argc, const char* const* argv, std::string_view description,
                             Attention attention = Attention::naive) {
  ProgramOptions options;
  options.attention = attention;
  CommandLine line(description);
  declare_common(line, options);
  if constexpr (!std::same_as<ProgramOptions, Options>) {  // 01 has no technique
    declare(line, options);
    declare_communication(line, options);
  }
  line.parse(argc, argv);
  use_checkpoint(line, options);
  if (!line.given("--attention"))
    options.attention = default_attention(options.model.head_size(), options.attention);
  check_sizes(options);
  line.check();
  options.as_json = line.as_json();
  return options;
}

}  // namespace pentatron
