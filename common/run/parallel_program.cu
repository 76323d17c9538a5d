#include "ranks/comm.h"
#include "run/program.h"

namespace pentatron {

int run_program_on_ranks(int argc, char** argv, const std::function<void(World& world)>& program) {
  World world(&argc, &argv);
  return run_program([&] { program(world); });
}

void configure(World& world, const CommunicationConfig& config) { world.configure(config); }

}  // namespace pentatron
