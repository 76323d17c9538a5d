// How a program of several ranks starts (program.h has the rest).
#pragma once

#include "options/parallel_options.h"
#include "ranks/comm.h"
#include "run/program.h"

namespace pentatron {

// As run_program, on all ranks that mpirun has started.
inline int run_program_on_ranks(int argc, char** argv, const std::function<void(World& world)>& program) {
  World world(&argc, &argv);
  return run_program([&] { program(world); });
}

// main() of a stage: reads the options that `train` takes, and calls it. `attention`: the default of
// --attention in a CPU build.
template <class ProgramOptions>
int run_program(int argc, char** argv, std::string_view description,
                void (*train)(const ProgramOptions&, World&), Attention attention = Attention::naive) {
  return run_program_on_ranks(argc, argv, [&](World& world) {
    auto options = parse_options<ProgramOptions>(argc, argv, description, attention);
    fit_to_ranks(options, world.ranks());
    configure_device(options);
    world.configure(options);
    train(options, world);
  });
}

}  // namespace pentatron
