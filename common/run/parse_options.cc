#include "run/parse_options.h"

#include "checkpoint/checkpoint_folder.h"

namespace pentatron {

void read_options(int argc, const char* const* argv, CommandLine& line, Options& options) {
  line.parse(argc, argv);
  use_checkpoint(line, options);
  if (!line.given("--attention")) options.attention = default_attention(options.model, options.attention);
  check_sizes(options);
  line.check();
  options.as_json = line.as_json();
}

}  // namespace pentatron
