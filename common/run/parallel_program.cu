#include <cstdio>

#include "ranks/comm.h"
#include "ranks/mpi_wait.h"
#include "run/program.h"

namespace pentatron {

int run_program_on_ranks(int argc, char** argv, const std::function<void(World& world)>& program) {
  World world(&argc, &argv);
  // Usually all ranks find the same fault, and rank 0 prints it. A rank that finds one alone prints it
  // and ends the others.
  std::string complaint;
  int status_of_complaint = exit_bad_usage;
  const int status = run_program([&] {
    try {
      program(world);
    } catch (const UsageError& error) {
      complaint = error.what();
      if (const auto* const of_run = dynamic_cast<const RunError*>(&error))
        status_of_complaint = of_run->status;
    } catch (const HelpRequest& help) {
      if (world.rank() == 0) throw;
    }
  });
  if (complaint.empty()) return status;
  constexpr double patience = 3;  // seconds
  const bool all = world.all_arrive(patience);
  if (!all || world.rank() == 0) std::fprintf(stderr, "%s\n", complaint.c_str());
  if (!all) end_all_ranks(status_of_complaint);
  return status_of_complaint;
}

void configure(World& world, const CommunicationConfig& config) { world.configure(config); }

}  // namespace pentatron
