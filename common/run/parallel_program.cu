#include <cstdio>

#include "ranks/comm.h"
#include "ranks/mpi_wait.h"
#include "run/program.h"

namespace pentatron {

int run_program_on_ranks(int argc, char** argv, const std::function<void(World& world)>& program) {
  World world(&argc, &argv);
  try {
    run_to_the_end([&] { program(world); });
  } catch (const UsageError& error) {
    // Usually all ranks find the same fault, and rank 0 prints it. A rank that finds one alone prints it
    // and ends the others.
    constexpr double patience = 3;  // seconds
    const bool all = world.all_arrive(patience);
    if (!all || world.rank() == 0) std::fprintf(stderr, "%s\n", error.what());
    if (!all) end_all_ranks(error.status);
    return error.status;
  }
  return 0;
}

void configure(World& world, const CommunicationConfig& config) { world.configure(config); }

}  // namespace pentatron
