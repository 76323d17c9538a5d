// The host issues a step while the device still works on the one before. Here a stream is held until two
// steps have been issued; each must keep its own tokens and its own loss.
// precisions: fp64 fp32 bf16
#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "catch.h"
#include "device.h"
#include "device/mapped_file.h"
#include "files.h"
#include "model.h"
#include "run/program.h"
#include "run/totals.h"

namespace pentatron {
namespace {

// What a stream waits for until it is opened.
class Gate {
 public:
  explicit Gate(cudaStream_t stream) {
    const auto wait = [](void* open) {
      while (!static_cast<std::atomic<bool>*>(open)->load()) {
      }
    };
    CUDA_CHECK(cudaLaunchHostFunc(stream, wait, &open_));
  }
  ~Gate() { open(); }
  void open() { open_ = true; }

 private:
  std::atomic<bool> open_ = false;
};

}  // namespace

TEST_CASE("a batch that is loaded early leaves the one before alone", "[01]") {
  Device device;
  const Options options = test_options(1, 8, 1, 1, 8, 256, /*sequence=*/16, /*micro_batch=*/2,
                                       /*global_batch=*/4);
  const TokenData data(in_tree("common/corpus.txt"), 256, options.sequence_length);
  BatchLoader loader(data, options);
  const int64_t rows = options.micro_batch_size * options.sequence_length;
  const PinnedArray<int32_t> seen(2 * options.global_batch_size * options.sequence_length);
  Gate gate(device.stream);
  int32_t* at = seen.data();
  for (int64_t step = 0; step < 2; ++step) {
    for (const Batch& batch : loader.load(step, device.stream)) {
      CUDA_CHECK(
          cudaMemcpyAsync(at, batch.tokens, rows * sizeof(int32_t), cudaMemcpyDeviceToHost, device.stream));
      at += rows;
    }
  }
  gate.open();
  device.stream.synchronize();

  std::vector<int32_t> tokens(seen.size() / 2), targets(tokens);
  for (int64_t step = 0; step < 2; ++step) {
    fill_sequences(data, options.seed, step, 0, options.sequence_length, tokens, targets);
    CHECK(std::equal(tokens.begin(), tokens.end(), seen.data() + step * tokens.size()));
  }
}

TEST_CASE("a loss that is read late is that of its step", "[01]") {
  Device device;
  StepTotals totals(device.stream);
  const AccumTensor first = device.upload<accum>(HostMatrix(1, 1, 3)),
                    next = device.upload<accum>(HostMatrix(1, 1, 2));
  Gate gate(device.stream);
  for (const AccumTensor loss : {first, next}) {
    totals.reset();
    totals.add_loss(loss);
    totals.send();
  }
  const std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    gate.open();
  });
  totals.receive();
  CHECK(totals.host_loss() == 3);
  totals.receive();
  CHECK(totals.host_loss() == 2);
}

// The host logs the first step when it has issued the second one, and here it takes its time to do so.
TEST_CASE("a step's time ends where the device ended it, not where the host looks", "[01]") {
  Device device;
  const tests::TemporaryFolder folder;
  Options options = test_options(1, 8, 1, 1, 8, 256, /*sequence=*/16, /*micro_batch=*/1, 1);
  options.data = in_tree("common/corpus.txt"), options.as_json = "{}",
  options.log_json = folder.path() + "/log";
  options.steps = 2;
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  Parameters parameters;
  Optimizer optimizer(options, parameters, device.stream);
  StepTotals totals(device.stream);
  const auto begin = std::chrono::steady_clock::now();
  double first = 0;
  {
    Checkpoint checkpoint(options, parameters, optimizer, device.stream);
    Run run(options, data, parameters, totals, checkpoint);
    while (run.next_step()) {
      if (run.step() == 0) continue;
      device.stream.synchronize();
      first = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
  std::ifstream log(folder.path() + "/log");
  nlohmann::json line;
  while (log >> line && !line.contains("step")) {
  }
  CHECK(line["step"] == 1);
  CHECK(line["seconds"] <= first);
}

TEST_CASE("parameters side by side that decay alike are one launch of the optimizer", "[01]") {
  Device device;
  const Options options = test_options(1, 8, 1, 1, 8, 256, /*sequence=*/16, /*micro_batch=*/1, 1);
  Parameters parameters;
  for (const bool decays : {false, true, true, true, false, true})
    parameters.declare({.name = "matrix",
                        .unit = 0,
                        .rows = 16,
                        .columns = 16,
                        .tensor_split = TensorSplit::replicated_outside,
                        .decays = decays});
  parameters.allocate();
  Optimizer optimizer(options, parameters, device.stream);
  const AccumTensor zeros = device.upload<accum>(HostMatrix(1, 2, 0));
  trace::start();
  optimizer.step(0, reinterpret_cast<double*>(zeros.data));
  device.stream.synchronize();
  trace::stop();
  int launches = 0;
  for (const trace::Interval& i : trace::take()) launches += i.name.starts_with("adamw_step_kernel");
  CHECK(launches == 4);
}

}  // namespace pentatron
