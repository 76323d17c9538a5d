// The programs themselves, started as a user starts them: in fp64, the loss and the gradient norm of every
// step of 02 to 07 are those of 01, and so are the weights that each saves after the last one. The tests of
// parity look closer, but build their own training loop; this one sees what is wrong in a main.cu.
// precisions: fp64
#include "device/mapped_file.h"
#include "device/precision.h"
#if PRECISION == 64

#include <cuda_runtime.h>
#if __has_include(<nccl.h>)  // without it there is only 01
#include <nccl.h>            // or the one over MPI, which says so
#endif

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "catch.h"
#include "checkpoint/safetensors.h"
#include "clock/timeline.h"
#include "device/cuda.h"
#include "files.h"
#include "model.h"

namespace {

using pentatron::in_tree;
using pentatron::tests::read_file;
using pentatron::tests::TemporaryFolder;

constexpr int kSteps = 5;
constexpr double kTolerance = 1e-11;  // relative

struct Step {
  double loss, norm;
};
using SavedWeights = std::map<std::string, std::vector<double>>;
struct Trained {
  std::vector<Step> steps;
  SavedWeights weights;  // after the last step
};

// Three micro-batches for each of two ranks, or one for each of six; clipping active. A tensor rank takes
// all. Of 3990 elements in a layer no six ranks have the same number.
const std::string settings =
    " --layers 2 --d-model 30 --heads 3 --kv-heads 1 --d-ff 17 --seq-len 16 --micro-batch-size 2"
    " --global-batch-size 12 --optimizer sgd --lr 0.5 --grad-clip 0.5 --steps " +
    std::to_string(kSteps);

// A program's name, the settings of all, then its own options, which may change them.
std::string with_settings(const std::string& program) {
  const size_t end = std::min(program.find(' '), program.size());
  return program.substr(0, end) + settings + program.substr(end);
}

struct Outcome {
  std::vector<nlohmann::json> log;  // an object a line
  std::string out;
};

// Of `program` with its own options, which lies beside the tests.
Outcome outcome_of(const std::string& launcher, const std::string& program) {
  const TemporaryFolder folder;
  const std::string builds = std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
  const std::string log = folder.path() + "/log", out = folder.path() + "/out";
  const std::string command = launcher + " '" + builds + "'/" + with_settings(program) + " --log-json '" +
                              log + "' >'" + out + "' 2>&1";
  const int status = std::system(command.c_str());
  INFO(command << "\n" << read_file(out));
  REQUIRE(status == 0);
  Outcome outcome = {{}, read_file(out)};
  std::ifstream lines(log);
  for (std::string line; std::getline(lines, line);) outcome.log.push_back(nlohmann::json::parse(line));
  return outcome;
}

// What the only checkpoint in this folder has.
SavedWeights saved_weights(const std::string& folder) {
  const std::string step = "/step_00000" + std::to_string(kSteps);
  SavedWeights weights;
  const pentatron::SafetensorsFolder file("--load", folder + step, "model");
  for (const auto& [name, tensor] : file.tensors()) {
    REQUIRE(tensor.description.type == pentatron::NumberType::fp64);
    std::vector<double>& numbers = weights[name];
    numbers.resize(tensor.description.elements());
    std::memcpy(numbers.data(), tensor.data, tensor.description.bytes());
  }
  return weights;
}

// Every rank's memory must be what it predicted.
Trained run(const std::string& launcher, const std::string& program) {
  std::vector<Step> steps;
  const TemporaryFolder folder;
  const auto log = outcome_of(launcher, program + " --save '" + folder.path() + "'").log;
  for (const nlohmann::json& json : log) {
    if (json.contains("step")) steps.push_back({json["loss"], json["grad_norm"]});
  }
  REQUIRE(steps.size() == kSteps);
  for (const nlohmann::json& rank : log.back()["summary"]["memory"]) {
    INFO(launcher << " " << program << ": " << rank);
    CHECK(rank["predicted"] == rank["measured"]);
  }
  return {steps, saved_weights(folder.path())};
}

bool enough_gpus([[maybe_unused]] int ranks) {
#ifdef NCCL_OVER_MPI
  return true;
#else
  int devices = 0;
  return cudaGetDeviceCount(&devices) == cudaSuccess && devices >= ranks;
#endif
}

void check_like(const std::string& reference, const std::string& program, const std::string& sizes,
                const std::vector<int>& on_ranks) {
  if (!std::any_of(on_ranks.begin(), on_ranks.end(), enough_gpus)) return;
  static std::map<std::string, Trained> references;  // each is run once
  if (!references.contains(reference + sizes)) references[reference + sizes] = run("", reference + sizes);
  const auto& [expected, expected_weights] = references.at(reference + sizes);
  for (const int ranks : on_ranks) {
    if (!enough_gpus(ranks)) continue;
    const auto [steps, weights] = run("mpirun -n " + std::to_string(ranks), program + sizes);
    for (int i = 0; i < kSteps; ++i) {
      INFO(program << " on " << ranks << " ranks, step " << i + 1);
      CHECK(steps[i].loss == Approx(expected[i].loss).epsilon(kTolerance));
      CHECK(steps[i].norm == Approx(expected[i].norm).epsilon(kTolerance));
      CHECK(steps[i].norm > 0.5);
    }
    REQUIRE(weights.size() == expected_weights.size());
    for (const auto& [name, numbers] : expected_weights) {
      INFO(program << " on " << ranks << " ranks, " << name);
      CHECK(pentatron::relative_error(weights.at(name), numbers) < kTolerance);
    }
  }
}

// One way of a program is tried on these, its others on 3.
const std::vector<int> numbers_of_ranks = {1, 2, 6};

void check_like_01(const std::string& program, const std::string& sizes = "",
                   const std::vector<int>& on_ranks = {3}) {
  check_like("01_single_gpu", program, sizes, on_ranks);
}

}  // namespace

TEST_CASE("every program obeys --attention: its memory says so", "[program]") {
  const auto activations = [](const std::string& program, const char* which) -> int64_t {
    const std::string launcher = program[1] == '1' ? "" : "mpirun -n 1";
    return outcome_of(launcher, program).log.back()["summary"]["memory"][0][which]["activations"];
  };
  for (const std::string program : {"01_single_gpu", "02_data_parallel", "03_zero", "04_tensor_parallel",
                                    "05_pipeline_parallel", "06_context_parallel", "07_combined_5d"}) {
    CAPTURE(program);
    const int64_t tiled = activations(program + " --attention tiled", "measured");
    CHECK(tiled < activations(program + " --attention naive", "measured"));
    CHECK(tiled == activations(program + " --attention tiled", "predicted"));
  }
}

#if __has_include(<cuda_cpu.h>)

TEST_CASE("modelled time depends neither on the machine's load nor on what is computed", "[program]") {
  const std::string sizes =
      " --d-model 24 --heads 6 --kv-heads 6 --d-ff 24 --vocab-size 258 --seq-len 24 --layers 6 --steps 2";
  // Modelled figures and losses of each step.
  const auto steps = [&](const std::string& launcher, const std::string& program) {
    std::vector<std::pair<nlohmann::json, nlohmann::json>> steps;
    for (const nlohmann::json& json : outcome_of(launcher, program + sizes).log) {
      if (json.contains("step")) steps.push_back({json["modelled"], json["loss"]});
    }
    REQUIRE(steps.size() == 2);
    CHECK(steps[0].first["seconds"] > 0);
    return steps;
  };
  const std::string busy =
      "busy=; for i in 1 2 3 4; do while :; do :; done & busy=\"$busy $!\"; done; trap 'kill $busy' "
      "EXIT; ";
  for (const std::string words :
       {"|01_single_gpu", "mpirun -n 6|02_data_parallel", "mpirun -n 6|03_zero --zero-stage 3",
        "mpirun -n 6|04_tensor_parallel --sequence-parallel", "mpirun -n 3|05_pipeline_parallel",
        "mpirun -n 3|06_context_parallel", "mpirun -n 6|07_combined_5d --tp 2 --pp 3",
        "mpirun -n 4|07_combined_5d --tp 2 --experts 4 --ep 2"}) {
    CAPTURE(words);
    const size_t bar = words.find('|');
    const std::string launcher = words.substr(0, bar), program = words.substr(bar + 1);
    const auto idle = steps(launcher, program);
    const bool has_experts = program.find("experts") != program.npos;
    if (has_experts || program.starts_with("03")) CHECK(steps(busy + launcher, program) == idle);
    if (has_experts) continue;  // whose rows a dry run shares out evenly
    const auto dry = steps(launcher, program + " --dry-run");
    for (int i = 0; i < 2; ++i) {
      CHECK(dry[i].first == idle[i].first);
      CHECK(dry[i].second.is_null());
    }
  }
}

TEST_CASE("01: steps that the host issues slowly take equally long", "[01][program]") {
  std::vector<double> seconds;
  for (const nlohmann::json& json : outcome_of("", "01_single_gpu --dry-run --steps 5").log) {
    if (json.contains("step")) seconds.push_back(json["modelled"]["seconds"]);
  }
  REQUIRE(seconds.size() == 5);
  for (int i = 2; i < 5; ++i) CHECK(seconds[i] == Approx(seconds[1]).epsilon(0.01));
}

TEST_CASE("03: a mean leaves out the first step, which waits for no weights", "[03][program]") {
  std::vector<double> seconds;
  const std::string sizes = " --d-model 1024 --heads 16 --kv-heads 16 --d-ff 4096 --seq-len 1024";
  const Outcome outcome =
      outcome_of("mpirun -n 2", "03_zero --zero-stage 1 --dry-run --steps 3 --link 5us,10GB/s" + sizes);
  for (const nlohmann::json& json : outcome.log) {
    if (json.contains("step")) seconds.push_back(json["modelled"]["seconds"]);
  }
  REQUIRE(seconds.size() == 3);
  CHECK(seconds[1] > 1.05 * seconds[0]);
  CHECK(outcome.log.back()["summary"]["modelled"]["seconds"].get<double>() ==
        Approx((seconds[1] + seconds[2]) / 2).epsilon(1e-12));
}

TEST_CASE("01: a step begins when the one before ends", "[01][program]") {
  // So large that the host issues a step in less time than the device takes for it.
  const std::string sizes =
      " --dry-run --layers 4 --d-model 1024 --heads 16 --kv-heads 16 --d-ff 4096 --seq-len 1024";
  const std::vector<nlohmann::json> log = outcome_of("", "01_single_gpu" + sizes).log;
  for (const nlohmann::json& json : log) {
    if (!json.contains("step") || json["step"] == 1) continue;
    CHECK(json["modelled"]["seconds"].get<double>() ==
          Approx(json["modelled"]["compute_seconds"].get<double>()).epsilon(1e-12));
  }
}

#endif

TEST_CASE("01: each step is logged with its own loss, the last one, too", "[01][program]") {
  const std::vector<Step> steps = run("", "01_single_gpu").steps;
  for (int last = 1; last < kSteps; ++last) {
    const auto log = outcome_of("", "01_single_gpu --steps " + std::to_string(last)).log;
    const auto of_last =
        std::find_if(log.rbegin(), log.rend(), [](const auto& json) { return json.contains("step"); });
    CHECK((*of_last)["step"] == last);
    CHECK((*of_last)["loss"] == steps[last - 1].loss);
    CHECK((*of_last)["grad_norm"] == steps[last - 1].norm);
    CHECK(steps[last].loss != steps[last - 1].loss);
  }
}

TEST_CASE("01: a trace is about the last step", "[01][program]") {
  const TemporaryFolder folder;
  const std::string trace = folder.path() + "/trace.json";
  const auto operations = [&](int steps) {
    outcome_of("", "01_single_gpu --trace " + trace + " --steps " + std::to_string(steps));
    std::map<std::string, int> calls;
    const auto json = nlohmann::json::parse(read_file(trace));
    for (const auto& e : json["traceEvents"]) {
      if (e["ph"] == "X") ++calls[e["name"]];
    }
    return calls;
  };
  const std::map<std::string, int> of_one = operations(1);
  CHECK(of_one.at("step_factors_kernel") == 1);
  CHECK(operations(3) == of_one);
}

// What the table says is in test_log.cc.
TEST_CASE("01: a profile has the kernels of the last step, and the share of the products", "[01][program]") {
  const std::string out = outcome_of("", "01_single_gpu --profile").out;
  CHECK(out.find("\nTime by kernel, in the last step ") != std::string::npos);
  CHECK(out.find("\ngemm_forward") != std::string::npos);
  const std::string share = "\nShare of the products (cuBLAS): ";
  const size_t at = out.find(share);
  REQUIRE(at != std::string::npos);
  CHECK(std::stod(out.substr(at + share.size())) > 10);
}

TEST_CASE("02: the program's steps are those of 01", "[02][program]") {
  check_like_01("02_data_parallel --dp-sync bucket --bucket-mb 0.02", "", numbers_of_ranks);
  for (const char* sync : {"naive", "overlap"})
    check_like_01(std::string("02_data_parallel --dp-sync ") + sync);
}

TEST_CASE("03: the program's steps are those of 01", "[03][program]") {
  check_like_01("03_zero --zero-stage 3", "", numbers_of_ranks);
  check_like_01("03_zero --zero-stage 2 --shard-ranks 2", "", {6});
  for (const char* stage : {"0", "1", "2"}) check_like_01(std::string("03_zero --zero-stage ") + stage);
  check_like_01("03_zero --zero-stage 3", " --optimizer adamw --lr 0.01");
}

TEST_CASE("04: the program's steps are those of 01", "[04][program]") {
  const std::string divisible =
      " --d-model 24 --heads 12 --kv-heads 6 --d-ff 24 --vocab-size 258 --seq-len 18";
  check_like_01("04_tensor_parallel", divisible);
  check_like_01("04_tensor_parallel --sequence-parallel", divisible, numbers_of_ranks);
}

#if __has_include(<cuda_cpu.h>)

TEST_CASE("01: a modelled GPU has room for what a run needs, and with a byte less it has not",
          "[01][program]") {
  const TemporaryFolder folder;
  const std::string gpu = folder.path() + "/gpu.json", options = "01_single_gpu --dry-run --layers 1";
  const nlohmann::json memory = outcome_of("", options).log.back()["summary"]["memory"][0];
  double needed = memory["libraries"]["estimated"];
  for (const double bytes : memory["predicted"]) needed += bytes;
  nlohmann::json profile = nlohmann::json::parse(read_file(in_tree("common/clock/profiles/h100.json")));
  const auto builds = std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
  for (const int lack : {0, 1}) {
    profile["memory_bytes"]["value"] = needed - lack;
    std::ofstream(gpu) << profile;
    const std::string program = with_settings(options) + " --gpu " + gpu;
    const int status = std::system(("'" + builds + "'/" + program + " >'" + gpu + ".out' 2>&1").c_str());
    CHECK(WEXITSTATUS(status) == lack);
  }
}

// On an H100 whose doubles are as small and as fast as bf16, so that this build can model bf16.
TEST_CASE("04: chunks hide two fifths of forward's communication on a node", "[04][program]") {
  const TemporaryFolder folder;
  const std::string gpu = folder.path() + "/gpu.json", trace = folder.path() + "/trace.json";
  nlohmann::json profile = nlohmann::json::parse(read_file(in_tree("common/clock/profiles/h100.json")));
  constexpr double times_as_large = sizeof(double) / 2;
  for (const char* name : {"memory_bandwidth", "link_bandwidth"})
    profile[name]["value"] = profile[name]["value"].get<double>() * times_as_large;
  profile["flops_fp64"] = profile["flops_bf16"];
  profile["memory_bytes"]["value"] = 1e12;
  std::ofstream(gpu) << profile;

  const auto hidden = [&](const std::string& options) {
    outcome_of("mpirun -n 8", "04_tensor_parallel --dry-run --gpu " + gpu + " --trace " + trace +
                                  " --layers 4 --d-model 4096 --heads 32 --kv-heads 32 --d-ff 11008 "
                                  "--vocab-size 32000 --micro-batch-size 8 --global-batch-size 8"
                                  " --seq-len 1024 --attention tiled --steps 1 --sequence-parallel" +
                                  options);
    std::map<int, std::string> streams;
    std::vector<pentatron::trace::Interval> forward;
    const auto events = nlohmann::json::parse(read_file(trace));
    for (const auto& e : events["traceEvents"]) {
      if (e["pid"] == 0 && e["name"] == "thread_name") streams[e["tid"]] = e["args"]["name"];
    }
    double end = 0;
    for (const auto& e : events["traceEvents"]) {
      if (e["pid"] != 0 || e["ph"] != "X" || e["args"]["pass"] != "f") continue;
      const double begin = e["ts"].get<double>() * 1e-6;
      end = std::max(end, begin + e["dur"].get<double>() * 1e-6);
      forward.push_back({{}, "", streams[e["tid"]], begin, begin + e["dur"].get<double>() * 1e-6});
    }
    const auto all = pentatron::trace::overlap_of(forward, 0, end).all_communication();
    REQUIRE(all.seconds > 0);
    return all.hidden / all.seconds;
  };
  CHECK(hidden("") < 0.01);
  CHECK(hidden(" --tp-overlap 2") > 0.3);
  CHECK(hidden(" --tp-overlap 4") > 0.4);
}

#endif

TEST_CASE("05: the program's steps are those of 01", "[05][program]") {
  check_like_01("05_pipeline_parallel --pp-schedule interleaved", " --layers 13", numbers_of_ranks);
  for (const char* schedule : {"afab", "1f1b", "zb-h1", "zb-v", "dualpipe-v"}) {
    check_like_01(std::string("05_pipeline_parallel --pp-schedule ") + schedule, " --layers 13");
  }
  check_like_01("05_pipeline_parallel --pp-schedule dualpipe", " --layers 13", {2});
}

namespace {

// Micro-batch 0 is not the first to come, nor the last one the last to leave.
const std::string odd_order =
    "F1 F0 F2 B0 W0 F3 B1 B3 W1 W3 B2 W2  # rank 0\n"
    "F1 F0 B0 F2 W0 B1 F3 B3 W3 W1 B2 W2  # rank 1\n";

}  // namespace

TEST_CASE("05: steps and sample with a schedule from a file are those of 01", "[05][program]") {
  const TemporaryFolder folder;
  const std::string file = folder.write("schedule.txt", odd_order);
  const std::string from_file = "05_pipeline_parallel --pp-schedule '" + file + "'";
  const std::string sizes = " --layers 4 --micro-batch-size 2 --global-batch-size 8";
  check_like_01(from_file, sizes, {2});
  if (!enough_gpus(2)) return;
  const auto written = [&](const std::string& launcher, const std::string& program) {
    const std::string out = outcome_of(launcher, program + sizes + " --sample 40").out;
    return out.substr(out.find("The model writes:"));
  };
  const std::string alone = written("", "01_single_gpu");
  CHECK(written("mpirun -n 2", from_file) == alone);
  CHECK(written("mpirun -n 2", "05_pipeline_parallel --pp-schedule dualpipe") == alone);
}

TEST_CASE("05: a schedule that waits for ever ends with one line and status 2", "[05][program]") {
  const TemporaryFolder folder;
  const std::string file = folder.write("schedule.txt", "F0 B0 F1 B1\nF0 F1 B0 B1\n"),
                    err = folder.path() + "/err";
  const std::string program =
      std::filesystem::read_symlink("/proc/self/exe").parent_path() / "05_pipeline_parallel";
  const int status =
      std::system(("'" + program + "' --pp 2 --micro-batch-size 16 --show-schedule --pp-schedule '" + file +
                   "' 2>'" + err + "'")
                      .c_str());
  CHECK(WEXITSTATUS(status) == 2);
  const std::string line = read_file(err);
  CHECK(line.starts_with("--pp-schedule: " + file + ": deadlock: rank 0, "));
  CHECK(std::count(line.begin(), line.end(), '\n') == 1);
}

TEST_CASE("06: the program's steps are those of 01", "[06][program]") {
  for (const std::string layout : {"contiguous", "zigzag"}) {
    const std::string program = "06_context_parallel --cp-layout " + layout + " --cp-exchange ";
    check_like_01(program + "ring", " --seq-len 24", numbers_of_ranks);
    check_like_01(program + "all-gather", " --seq-len 24");
    check_like_01(program + "ulysses", " --seq-len 24 --d-model 24 --heads 6 --kv-heads 6");
  }
}

// More text than a sequence is long: with context ranks its newest token lies on each in turn, then on the
// last.
TEST_CASE("the trained model writes what that of 01 writes", "[program]") {
  if (!enough_gpus(4)) return;
  const auto written = [](const std::string& launcher, const std::string& program) {
    const std::string out =
        outcome_of(
            launcher,
            program + " --layers 4 --d-model 24 --heads 6 --kv-heads 6 --d-ff 24 --seq-len 24 --sample 40")
            .out;
    const size_t begin = out.find("The model writes:");
    REQUIRE(begin != std::string::npos);
    return out.substr(begin);
  };
  const std::string expected = written("", "01_single_gpu");
  for (const char* program :
       {"mpirun -n 2|02_data_parallel", "mpirun -n 2|03_zero --zero-stage 3",
        "mpirun -n 2|04_tensor_parallel", "mpirun -n 2|05_pipeline_parallel --pp-schedule interleaved",
        "mpirun -n 3|06_context_parallel --cp-layout contiguous", "mpirun -n 3|06_context_parallel",
        "mpirun -n 4|07_combined_5d --tp 2 --cp 2", "mpirun -n 4|07_combined_5d --pp 2 --dp 2"}) {
    const std::string words = program;
    const size_t bar = words.find('|');
    CHECK(written(words.substr(0, bar), words.substr(bar + 1)) == expected);
  }
}

TEST_CASE("07: the program's steps are those of 01", "[07][program]") {
  const std::string sizes =
      " --d-model 24 --heads 6 --kv-heads 6 --d-ff 24 --vocab-size 258 --seq-len 24 --layers 6";
  check_like_01("07_combined_5d", sizes, {1});
  for (const char* mesh : {"--tp 2 --pp 3 --sequence-parallel", "--cp 3 --dp 2 --zero-stage 2",
                           "--cp 2 --pp 3 --zero-stage 3 --pp-schedule interleaved",
                           "--tp 3 --dp 2 --zero-stage 0 --dp-sync naive"}) {
    check_like_01(std::string("07_combined_5d ") + mesh, sizes, {6});
  }
}

// Data ranks sum a unit's gradients after the micro-batch that the schedule computes last.
TEST_CASE("07: steps with a schedule from a file are those of 01", "[07][program]") {
  const TemporaryFolder folder;
  const std::string program =
      "07_combined_5d --pp 2 --dp 2 --pp-schedule '" + folder.write("schedule.txt", odd_order);
  for (const char* zero : {"' --zero-stage 0 --dp-sync overlap", "' --zero-stage 2", "' --zero-stage 3"})
    check_like_01(program + zero, " --layers 4 --micro-batch-size 2 --global-batch-size 16", {4});
}

TEST_CASE("07: the program's steps with experts are those of one rank", "[07][program]") {
  const std::string sizes =
      " --experts 6 --aux-loss 0.1 --layers 4 --d-model 24 --heads 6 --kv-heads 6 --d-ff 24";
  check_like("07_combined_5d", "07_combined_5d --ep 3 --dp 3 --pp 2", sizes, {6});
}

TEST_CASE("07: the steps of the experts' program are those of one rank", "[07][program]") {
  for (const char* sync : {"naive", "bucket --bucket-mb 0.02"}) {
    check_like("07_combined_5d --attention naive", std::string("experts --dp-sync ") + sync,
               " --experts 6 --aux-loss 0.1 --layers 2", {1, 3});
  }
}

#endif
