// ThreadSanitizer reports each case of tsan_cases.cc and nccl_tsan_cases.cc that breaks a rule, naming the
// kernel, and no other. "make test" builds the former twice, with blocks of one thread and of four; the
// latter runs on two ranks.
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "../catch.h"

namespace {

const std::string one_thread = "cpu-fp32-thread/tsan_cases";
const std::string four_threads = "cpu-fp32-block4-thread/tsan_cases";
const std::string nccl_cases = "cpu-fp32-thread/nccl_tsan_cases";
constexpr int kReported = 66;  // exit status

struct Outcome {
  int status;
  std::string output;
};

Outcome run_case(const std::string& program, const std::string& name) {
  const auto builds = std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path();
  const std::string options = "TSAN_OPTIONS=atexit_sleep_ms=0:exitcode=" + std::to_string(kReported);
  // MPI's transport, unless told so, replaces functions that ThreadSanitizer has replaced, and crashes.
  const std::string launcher = program == nccl_cases ? " UCX_MEM_EVENTS=n mpirun -n 2" : "";
  const std::string command = options + launcher + " '" + (builds / program).string() + "' " + name + " 2>&1";
  FILE* const pipe = popen(command.c_str(), "r");
  REQUIRE(pipe != nullptr);
  std::string output;
  std::array<char, 4096> chunk;
  while (const size_t bytes = fread(chunk.data(), 1, chunk.size(), pipe)) output.append(chunk.data(), bytes);
  const int status = pclose(pipe);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, output};
}

void require_silent(const std::string& program, const std::string& name) {
  const Outcome outcome = run_case(program, name);
  INFO(program << " " << name << "\n" << outcome.output);
  REQUIRE(outcome.status == 0);
}

void require_report(const std::string& program, const std::string& name,
                    const std::vector<std::string>& kernels) {
  const Outcome outcome = run_case(program, name);
  INFO(program << " " << name << "\n" << outcome.output);
  REQUIRE(outcome.status == kReported);
  REQUIRE(outcome.output.find("data race") != std::string::npos);
  for (const std::string& kernel : kernels) REQUIRE(outcome.output.find(kernel) != std::string::npos);
}

}  // namespace

TEST_CASE("a missing event between two streams is reported, with the kernels' names", "[standin]") {
  const std::string program = GENERATE(one_thread, four_threads);
  require_report(program, "missing-event", {"write_values", "read_values"});
  require_report(program, "missing-event-idle", {"write_values"});
  require_report(program, "early-event", {"write_values"});
  require_report(program, "reuse-missing-event", {"read_values"});
  require_report(program, "bookkeeping-missing-event", {"write_values"});
  require_report(program, "query-not-done", {"write_values", "read_values"});
}

TEST_CASE("a missing wait before the host reads is reported", "[standin]") {
  require_report(one_thread, "copy-missing-wait", {"cudaMemcpy2DAsync", "copy_to_host"});
}

TEST_CASE("a missing event before a product is reported", "[standin]") {
  require_report(one_thread, "product-missing-event", {"write_values", "run_product"});
}

TEST_CASE("correct programs are silent", "[standin]") {
  const std::string program = GENERATE(one_thread, four_threads);
  for (const char* name : {"with-event", "with-event-idle", "reuse-with-event", "bookkeeping-with-event",
                           "copy-with-wait", "polling", "query-done", "product-with-event",
                           "product-between-columns", "block-with-barrier", "blocks-apart"}) {
    require_silent(program, name);
  }
}

TEST_CASE("races inside a block and between blocks are reported in the test mode", "[standin]") {
  require_report(four_threads, "block-missing-barrier", {"exchange_without_barrier"});
  require_report(four_threads, "blocks-racing", {"add_to_neighbours"});
}

// Little and much data (floats a rank) take different ways through NCCL over MPI.
TEST_CASE("a missing event between compute and communication is reported", "[standin]") {
  for (const std::string operation :
       {"all-reduce", "all-gather", "reduce-scatter", "broadcast", "exchange"}) {
    for (const std::string size : {":1000", ":5000"}) {
      require_report(nccl_cases, operation + "-missing-event-before" + size, {"write_values"});
      require_report(nccl_cases, operation + "-missing-event-after" + size, {"read_values"});
    }
    require_report(nccl_cases, operation + "-missing-event-at-reuse", {"write_values"});
  }
  require_report(nccl_cases, "in-place-missing-event-before", {"write_values"});
}

TEST_CASE("what the host, MPI and other communicators do orders no streams", "[standin]") {
  require_report(nccl_cases, "two-communicators-missing-event", {"write_values"});
  require_report(nccl_cases, "bookkeeping-missing-event", {"read_values"});
  require_report(nccl_cases, "host-uses-mpi-missing-event", {"read_values"});
}

TEST_CASE("communication that is ordered by events is silent", "[standin]") {
  std::string names =
      "two-communicators-with-event bookkeeping-with-event host-uses-mpi-with-event:100000 "
      "steps-with-events";
  for (const std::string operation :
       {"all-reduce", "all-gather", "reduce-scatter", "broadcast", "exchange"}) {
    for (const std::string moment : {"-before", "-after", "-at-reuse", "-after:5000"}) {
      names += " " + operation + "-with-event" + moment;
    }
  }
  require_silent(nccl_cases, names);
}
