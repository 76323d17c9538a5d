// A step that takes much longer than others: the log names the rank for which the others waited.
#include <unistd.h>

#include <iostream>
#include <regex>
#include <sstream>

#include "model.h"
#include "mpi_tests.h"
#include "program/program.h"
#include "ranks/comm.h"

#if __has_include(<cuda_cpu.h>)

namespace pentatron {

// In each step the ranks add two numbers. Rank 1 comes late to one of the sums: on the modelled clock, by
// which the log finds slow steps, and by the wall clock, by which a rank notes how long it did not wait for
// others. That is its own work, less that of the rank with the least: here all work for 1 s, and then rank
// 1's stream does for 2 s, before the sum that was issued to it. A rank is named if it is more than half of a
// step.
TEST_CASE("02: the log names the rank that holds up the others", "[02]") {
  if (mpi_tests::ranks() % 2 != 0) return;  // 3 ranks would show no more than 2 and 4
  World world(nullptr, nullptr);
  Options options = test_options<Options>(1, 8, 1, 1, 8, 256, /*sequence=*/16, /*micro_batch=*/1, 1);
  options.data = PENTATRON_CORPUS;
  options.as_json = "{}";
  options.steps = 30;
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  Communicator ranks(world, world.all(), "data");
  StepTotals totals(compute);
  const Parameters parameters;
  std::ostringstream log;
  std::streambuf* const terminal = mpi_tests::rank() == 0 ? std::cout.rdbuf(log.rdbuf()) : nullptr;
  {
    Run run(options, data, parameters, totals, world);
    for (int64_t step = 0; step < options.steps; step = run.next_step(step)) {
      run.begin_step(step);
      totals.reset();
      const bool late = step == 25;  // the others wait in their sum
      if (world.rank() == 1 && late) advance_clock(now() + 100);
      double seconds = 1;
      const auto work = [&] {
        const double until = world.worked() + seconds;
        for (int looks = 0; looks < 1000 && world.worked() < until; ++looks) usleep(10'000);
      };
      if (late) work();
      if (late && world.rank() == 1) {
        mpi_tests::barrier();
        seconds = 2;
        const auto call = [](void* given) { (*static_cast<decltype(work)*>(given))(); };
        CUDA_CHECK(cudaLaunchHostFunc(compute, call, const_cast<void*>(static_cast<const void*>(&work))));
      }
      ranks.sum_scalars(totals.data(), StepTotals::size, compute);
      if (late && world.rank() != 1) mpi_tests::barrier();
      if (late) compute.synchronize();
      run.end_step();
    }
  }
  if (terminal == nullptr) return;
  std::cout.rdbuf(terminal);
  CAPTURE(log.str());
  const std::regex line(
      "step 26: a step time of 100 s; the median of the last 25 steps is a step time of "
      ".*; rank 1 held up the others for (1.[89]|2)[0-9.]* s\n");
  CHECK(std::regex_search(log.str(), line));
}

}  // namespace pentatron
#endif
