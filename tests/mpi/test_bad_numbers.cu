// A loss or a gradient norm that is NaN or infinite ends the run on all ranks, in one line. In fp16 the loss
// scale skips the step, and the run goes on.
// precisions: fp64 fp16
#include <iostream>
#include <sstream>

#include "device/mapped_file.h"
#include "model.h"
#include "mpi_tests.h"
#include "ranks/comm.h"
#include "run/program.h"

namespace pentatron {

// Runs four steps, of which `spoil` is given the second one's totals. Returns with which line the run ended.
template <class Spoil>
std::string end_of_run(const Spoil& spoil) {
  World world(nullptr, nullptr);
  Options options = test_options<Options>(1, 8, 1, 1, 8, 256, /*sequence=*/16, /*micro_batch=*/1, 1);
  options.data = in_tree("common/corpus.txt"), options.as_json = "{}";
  options.steps = 4;
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  Parameters parameters;
  Optimizer optimizer(options, parameters, compute);
  StepTotals totals(compute);
  std::ostringstream log;
  std::streambuf* const terminal = std::cout.rdbuf(log.rdbuf());
  std::string line;
  try {
    Checkpoint checkpoint(options, parameters, optimizer, compute);
    Run run(options, data, parameters, totals, checkpoint);
    while (run.next_step()) {
      if (run.step() == 1) spoil(totals, compute);
    }
  } catch (const RunError& error) {
    line = error.what();
  }
  std::cout.rdbuf(terminal);
  return line;
}

constexpr int nan_bytes = 0xff;

TEST_CASE("02: a norm that is NaN on all ranks ends the run in one line", "[02]") {
  const std::string line = end_of_run([](const StepTotals& totals, cudaStream_t stream) {
    CUDA_CHECK(cudaMemsetAsync(totals.norm_squared(), nan_bytes, sizeof(double), stream));
  });
  CHECK(line == (has_loss_scale ? "" : "step 2: the loss is 0, the gradient norm nan"));
}

TEST_CASE("02: a norm that is infinite ends the run, too", "[02]") {
  const std::string line = end_of_run([](const StepTotals& totals, cudaStream_t stream) {
    to_device({INFINITY}, totals.norm_squared(), stream);
  });
  CHECK(line == (has_loss_scale ? "" : "step 2: the loss is 0, the gradient norm inf"));
}

TEST_CASE("02: a loss that is NaN on one rank ends the run on all, and names the rank", "[02]") {
  if (mpi_tests::ranks() < 2) return;
  const std::string line = end_of_run([](const StepTotals& totals, cudaStream_t stream) {
    if (mpi_tests::rank() == 1) CUDA_CHECK(cudaMemsetAsync(totals.data(), nan_bytes, sizeof(double), stream));
  });
  if (has_loss_scale) CHECK(line.empty());
  if (!has_loss_scale) CHECK(line.starts_with("step 2: the loss is "));
  if (mpi_tests::rank() == 0 && !has_loss_scale)
    CHECK(line == "step 2: the loss is nan, the gradient norm 0, on rank 1 alone");
}

}  // namespace pentatron
