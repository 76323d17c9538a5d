#include <cstdio>
#include <optional>

#include "ranks/comm.h"
#include "ranks/mpi_wait.h"
#include "run/program.h"

namespace pentatron {

int run_program_on_ranks(int argc, char** argv, const std::function<void(World& world)>& program) {
  World world(&argc, &argv);
  // Usually all ranks find the same fault, and rank 0 prints it. A rank that finds one alone prints it
  // and ends the others.
  std::optional<UsageError> complaint;
  const int status = run_program([&] {
    try {
      program(world);
    } catch (const UsageError& error) {
      complaint = error;
    } catch (const HelpRequest& help) {
      if (world.rank() == 0) throw;
    }
  });
  if (!complaint) return status;
  constexpr double patience = 3;  // seconds
  const bool all = world.all_arrive(patience);
  if (!all || world.rank() == 0) std::fprintf(stderr, "%s\n", complaint->what());
  if (!all) end_all_ranks(complaint->status);
  return complaint->status;
}

void configure(World& world, const CommunicationConfig& config) { world.configure(config); }

}  // namespace pentatron
