// What programs of several ranks add to options.h: the options of communication, and those of a technique.
// Its stage has them in its own options.h: a struct, and a `declare` that puts them on the command line.
#pragma once

#include "options/options.h"
#include "ranks/communication_config.h"

namespace pentatron {

// The options of a program: those of all programs, of communication, and of its technique.
template <class TechniqueOptions>
struct OptionsWith : Options, CommunicationConfig {
  TechniqueOptions technique;
};

void declare_communication(CommandLine& line, CommunicationConfig& config);
// What a stage adds: its options.h has a `declare` of its technique.
template <class TechniqueOptions>
void declare(CommandLine& line, OptionsWith<TechniqueOptions>& o) {
  declare(line, o, o.technique);
}

// Completes and checks what depends on the number of ranks. Throws UsageError.
template <class TechniqueOptions>
void fit_to_ranks(OptionsWith<TechniqueOptions>& o, int ranks) {
  fit_to_ranks(o, o.technique, ranks);
}

}  // namespace pentatron
