// What a user sees when a rank dies, hangs or is given nonsense: 03_zero itself is started on four ranks, and
// must end within a time limit, with a message and a status. Nothing may be left running.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "files.h"

using pentatron::tests::read_file;
using pentatron::tests::TemporaryFolder;

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kRanks = 4;
constexpr double kSoon = 60;                         // s: to start on a busy machine
constexpr const char* kPatient = "HANG_TIMEOUT=60";  // for what must not hang (mpi/test_hangs.cu)

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

bool within(double seconds, const std::function<bool()>& condition) {
  for (const auto begin = Clock::now(); seconds_since(begin) < seconds;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return condition();
}

// mpirun and its ranks. Each rank writes its number and its process into a file, so that a test looks at no
// process but its own.
class Job {
 public:
  Job(const TemporaryFolder& folder, const std::string& arguments, const std::string& name = "03_zero",
      const std::string& environment = "", const std::string& shell = "")
      : out_(folder.path() + "/out"),
        err_(folder.path() + "/err"),
        ranks_(folder.path() + "/ranks"),
        program_(beside_the_tests(name)) {
    REQUIRE(std::filesystem::exists(program_));
    std::filesystem::remove(ranks_);  // of a job before, in the same folder
    const std::string note_rank = R"(sh -c 'echo $PMI_RANK $$ >>)" + ranks_ + R"(; exec "$0" "$@"')";
    // MPI leaks at its end, which AddressSanitizer would report.
    const std::string command = "exec env ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=0 " + environment +
                                " mpirun -n " + std::to_string(kRanks) + " " + shell + " " + note_rank +
                                " '" + program_ + "' " + arguments + " >'" + out_ + "' 2>'" + err_ +
                                "' </dev/null";
    child_ = fork();
    REQUIRE(child_ >= 0);
    if (child_ == 0) {
      setpgid(0, 0);
      execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      _exit(127);
    }
  }
  ~Job() {
    for (const pid_t rank : ranks()) kill(rank, SIGKILL);
    if (!ended_) {
      kill(child_, SIGKILL);
      waitpid(child_, nullptr, 0);
    }
  }
  Job(const Job&) = delete;

  // Whether it ended in time; then `status` is what mpirun returned, -1 after a signal.
  bool ends_within(double seconds) {
    return within(seconds, [&] {
      int status = 0;
      if (!ended_ && waitpid(child_, &status, WNOHANG) == child_) {
        ended_ = true;
        status_ = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
      }
      return ended_;
    });
  }
  int status() const { return status_; }
  bool signal_all(int signal) const { return kill(child_, signal) == 0; }  // mpirun passes it on
  std::string out() const { return read_file(out_); }
  std::string err() const { return read_file(err_); }

  // Until the first step has been printed.
  bool trains_soon() const {
    return within(kSoon, [&] { return out().find("\n       1 ") != std::string::npos; });
  }

  // The same for a job in which the process `stopped` takes no signal but SIGKILL. Launchers differ in
  // whether they send that; so it is sent here when the watchdog has said its last line.
  bool ends_after_accusing(pid_t stopped) {
    const bool accused =
        within(kSoon, [&] { return err().find(" holds up the others") != std::string::npos; });
    if (runs(stopped)) kill(stopped, SIGKILL);
    return accused && ends_within(kSoon);
  }

  // The processes of the ranks that are there.
  std::vector<pid_t> ranks() const {
    std::vector<pid_t> found;
    for (int number = 0; number < kRanks; ++number) {
      if (const pid_t process = rank(number); process > 0 && runs(process)) found.push_back(process);
    }
    return found;
  }
  // Whether none of these runs any more; the file of a process that waits to be buried cannot be read.
  bool ended(const std::vector<pid_t>& processes) const {
    return std::none_of(processes.begin(), processes.end(), [&](pid_t process) { return runs(process); });
  }
  // The process of one rank, as MPI numbers it; -1 if it has not begun.
  pid_t rank(int number) const {
    std::ifstream ranks(ranks_);
    for (pid_t rank = -1, process = -1; ranks >> rank >> process;) {
      if (rank == number) return process;
    }
    return -1;
  }

 private:
  // make test-05 builds tests-05 and mpi_tests-05.
  static std::string beside_the_tests(const std::string& program) {
    const std::filesystem::path tests = std::filesystem::read_symlink("/proc/self/exe");
    const std::string suffix = tests.filename().string().substr(std::string("tests").size());
    return (tests.parent_path() / (program == "mpi_tests" ? program + suffix : program)).string();
  }

  bool runs(pid_t process) const {
    std::error_code gone;
    const auto file = std::filesystem::read_symlink("/proc/" + std::to_string(process) + "/exe", gone);
    return !gone && file == program_;
  }

  std::string out_, err_, ranks_, program_;
  pid_t child_ = -1;
  bool ended_ = false;
  int status_ = -1;
};

// This rank, and no other, holds up the others.
void check_accused(const std::string& report, int rank) {
  const std::string holds_up = " holds up the others";
  const size_t first = report.find(holds_up);
  REQUIRE(first != std::string::npos);
  CHECK(first == report.rfind(holds_up));
  const std::string words = "rank " + std::to_string(rank);
  CHECK(report.substr(first - words.size(), words.size()) == words);
}

constexpr const char* kLongRun =
    "--steps 100000 --log-every 1 --micro-batch-size 1 --global-batch-size 4 --layers 2";

}  // namespace

TEST_CASE("03: a killed rank ends the others", "[03][faults]") {
  const TemporaryFolder folder;
  Job job(folder, std::string(kLongRun) + " --timeout 600");
  REQUIRE(job.trains_soon());
  const std::vector<pid_t> ranks = job.ranks();
  REQUIRE(ranks.size() == kRanks);
  const pid_t victim = job.rank(2);
  REQUIRE(victim > 0);  // to kill -1 is to kill all
  REQUIRE(kill(victim, SIGKILL) == 0);
  REQUIRE(job.ends_within(kSoon));
  INFO(job.out() << job.err());
  CHECK(job.status() != 0);
  CHECK((job.out() + job.err()).find("BAD TERMINATION") != std::string::npos);  // mpirun's words
  CHECK(within(kSoon, [&] { return job.ended(ranks); }));
}

static void check_that_a_stopped_rank_is_named(const std::string& program, const std::string& arguments) {
  const TemporaryFolder folder;
  Job job(folder, std::string(kLongRun) + " --timeout 6 " + arguments, program);
  REQUIRE(job.trains_soon());
  const std::vector<pid_t> ranks = job.ranks();
  const pid_t victim = job.rank(2);
  REQUIRE(victim > 0);
  REQUIRE(kill(victim, SIGSTOP) == 0);
  const bool ended = job.ends_after_accusing(victim);
  const std::string err = job.err();
  INFO(err);
  REQUIRE(ended);
  CHECK(job.status() != 0);
  CHECK(err.find("nothing has moved for 6 s") != std::string::npos);
  CHECK(err.find("rank 2: does not answer") != std::string::npos);
  check_accused(err, 2);
  for (const int other : {0, 1, 3}) {
    CHECK(err.find("rank " + std::to_string(other) + ": ") != std::string::npos);
    CHECK(err.find("rank " + std::to_string(other) + ": does not answer") == std::string::npos);
  }
  CHECK(err.find("watchdog of rank") == err.rfind("watchdog of rank"));  // said once
  CHECK(within(kSoon, [&] { return job.ended(ranks); }));
}

// In 03 all collectives are of all ranks. In 07 ranks wait in groups of two, and for messages of others.
TEST_CASE("03: a rank that is stopped is named by the watchdog, alone", "[03][faults]") {
  check_that_a_stopped_rank_is_named("03_zero", "--zero-stage 3");
}
TEST_CASE("07: a rank that is stopped is named by the watchdog, alone", "[07][faults]") {
  check_that_a_stopped_rank_is_named("07_combined_5d", "--tp 2 --pp 2");
}

TEST_CASE("03: a signal to mpirun or to one rank saves, and ends all ranks with status 75", "[03][faults]") {
  for (const bool to_all : {true, false}) {
    const TemporaryFolder folder;
    const std::string save = folder.path() + "/save", statuses = folder.path() + "/statuses", run = kLongRun;
    // Each rank's own status: when mpirun passes a signal on, it may lose them all and return 0. (Before
    // MPICH 4.1: github.com/pmodels/mpich/pull/5930.)
    Job job(folder, run + (" --timeout 30 --save " + save), "03_zero", "",
            R"(sh -c 'trap "" TERM; "$0" "$@"; status=$?; echo $status >>)" + statuses + "; exit $status'");
    REQUIRE(job.trains_soon());
    const pid_t one = job.rank(2);
    REQUIRE(one > 0);
    REQUIRE((to_all ? job.signal_all(SIGTERM) : kill(one, SIGUSR1) == 0));
    const bool ended = job.ends_within(kSoon);
    CAPTURE(job.out(), job.err());
    REQUIRE(ended);
    CHECK(read_file(statuses) == "75\n75\n75\n75\n");
    if (!to_all) CHECK(job.status() == 75);
    const std::string steps = std::to_string(std::stoi(read_file(save + "/latest").substr(5)));
    CHECK(job.err() == "a signal ended the run after step " + steps + " of 100000; with --save " + save +
                           " --resume it goes on\n");
    CHECK(job.out().find("\n" + std::string(8 - steps.size(), ' ') + steps + " ") != std::string::npos);
  }
}

TEST_CASE("the watchdog names a rank that stops calling", "[02][03][faults]") {
  const TemporaryFolder folder;
  Job job(folder, "[.hang-host]", "mpi_tests");
  REQUIRE(job.ends_within(kSoon));
  INFO(job.err());
  CHECK(job.status() != 0);
  CHECK(job.err().find(": nothing has moved for 1 s. The last operations") != std::string::npos);
  check_accused(job.err(), 1);
  CHECK(job.err().find("#1 all_reduce on data, 2 elements: waiting since") != std::string::npos);
}

TEST_CASE("after a failed call the watchdog names the rank that does not answer", "[02][03][faults]") {
  const TemporaryFolder folder;
  Job job(folder, "[.fail-stopped]", "mpi_tests");
  REQUIRE(within(kSoon, [&] { return !job.err().empty(); }));  // all ranks are there
  const pid_t victim = job.rank(1);
  REQUIRE(victim > 0);
  const bool ended = job.ends_after_accusing(victim);
  INFO(job.err());
  REQUIRE(ended);
  CHECK(job.status() != 0);
  CHECK(job.err().starts_with("rank 0: a call failed: an error ("));
  CHECK(job.err().find("watchdog of rank 0: a call has failed. ") != std::string::npos);
  CHECK(job.err().find("rank 1: does not answer") != std::string::npos);
  check_accused(job.err(), 1);
}

TEST_CASE("the watchdog ends ranks whose stream waits for ever", "[02][03][faults]") {
  const TemporaryFolder folder;
  Job job(folder, "[.hang-stream]", "mpi_tests");
  REQUIRE(job.ends_within(kSoon));
  INFO(job.err());
  CHECK(job.status() != 0);
  CHECK(job.err().find("#1 all_reduce on data, 2 elements: waiting since") != std::string::npos);
  check_accused(job.err(), 1);
}

TEST_CASE("the watchdog ends ranks whose host waits for ever", "[02][03][faults]") {
  const TemporaryFolder folder;
  Job job(folder, "[.hang-call]", "mpi_tests");
  REQUIRE(job.ends_within(kSoon));
  INFO(job.err());
  CHECK(job.status() != 0);
  CHECK(job.err().find("the host has been in ncclCommInitRank for") != std::string::npos);
  check_accused(job.err(), 1);
}

TEST_CASE("the watchdog shows two ranks that send to each other, ungrouped", "[02][03][faults]") {
  const TemporaryFolder folder;
  Job job(folder, "[.hang-send]", "mpi_tests");
  REQUIRE(job.ends_within(kSoon));
  INFO(job.err());
  CHECK(job.status() != 0);
  CHECK(job.err().find("send on data, 1 elements, peer rank 1: waiting since") != std::string::npos);
  CHECK(job.err().find("send on data, 1 elements, peer rank 0: waiting since") != std::string::npos);
  CHECK(job.err().find("they wait for each other\n") != std::string::npos);

  Job grouped(folder, "[.hang-not]", "mpi_tests", kPatient);
  REQUIRE(grouped.ends_within(kSoon));
  INFO(grouped.err());
  CHECK(grouped.status() == 0);
  CHECK(grouped.err().empty());
}

// As where NCCL was built with a CUDA before 12.3.
TEST_CASE("05: if operations are started one after the other, messages deadlock", "[05][faults]") {
  const std::string model = "--steps 2 --layers 4 --global-batch-size 16 --micro-batch-size 1 --pp-schedule ";
  const TemporaryFolder folders[2];
  const auto start = [&](int i, const std::string& arguments) {
    return std::make_unique<Job>(folders[i], model + arguments, "05_pipeline_parallel",
                                 "NCCL_CPU_SERIAL_LAUNCHES=1");
  };
  const std::unique_ptr<Job> deadlocks[] = {start(0, "1f1b --timeout 6"), start(1, "zb-h1 --timeout 6")};
  for (const auto& job : deadlocks) {
    REQUIRE(job->ends_within(kSoon));
    INFO(job->err());
    CHECK(job->status() != 0);
    CHECK(job->err().find("they wait for each other\nmessages on several communicators need an NCCL that was "
                          "built with CUDA 12.3 or later\n") != std::string::npos);
  }
}

TEST_CASE("streams that share a work queue deadlock, and a program refuses it", "[05][faults]") {
  const TemporaryFolder folder;
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1", 1);
  Job shared(folder, "[.hang-queue]", "mpi_tests");
  const bool ended = shared.ends_within(kSoon);
  INFO(shared.err());
  const TemporaryFolder other_folder;
  Job refused(other_folder, std::string(kLongRun) + " --layers 4", "05_pipeline_parallel");
  const bool refused_ended = refused.ends_within(kSoon);
  unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
  REQUIRE(ended);
  CHECK(shared.status() != 0);
  CHECK(shared.err().find("nothing has moved for 1 s") != std::string::npos);
  REQUIRE(refused_ended);
  INFO(refused.err());
  CHECK(refused.status() == 2);
  CHECK(refused.err() ==
        "CUDA_DEVICE_MAX_CONNECTIONS: 1 is not valid; expected at least 6, one for each "
        "stream of this program\n");

  Job apart(folder, "[.hang-queue]", "mpi_tests", kPatient);  // with what the programs set
  REQUIRE(apart.ends_within(kSoon));
  INFO(apart.err());
  CHECK(apart.status() == 0);
}

TEST_CASE("rows that experts have no room for end every rank", "[07][faults]") {
  const TemporaryFolder folder;
  Job job(folder, "--experts 4 --ep 4 --expert-buffer 1", "07_combined_5d");
  REQUIRE(job.ends_within(kSoon));
  INFO(job.err());
  CHECK(job.status() != 0);
  CHECK(job.err().find("--expert-buffer failed: ") != std::string::npos);
  CHECK(job.err().find(" rows for the experts of a rank, room for ") != std::string::npos);
  CHECK(job.err().find("watchdog") == std::string::npos);  // all ranks answer
}

static void check_run_is_refused(const std::string& program, const std::string& arguments,
                                 const std::string& begin) {
  const TemporaryFolder folder;
  Job job(folder, arguments, program);
  REQUIRE(job.ends_within(kSoon));
  INFO(arguments << "\n" << job.out() << job.err());
  CHECK(job.status() == 2);
  CHECK(job.out().empty());
  CHECK(job.err().starts_with(begin));
  const std::string err = job.err();
  CHECK(std::count(err.begin(), err.end(), '\n') == 1);
}

TEST_CASE("03: bad input on several ranks ends with one line and status 2", "[03][faults][bad-input]") {
  const auto refused = [](const std::string& arguments, const std::string& begin) {
    check_run_is_refused("03_zero", arguments, begin);
  };
  refused("--zero-stage 4", "--zero-stage: 4 is not valid; expected ");
  refused("--shard-ranks 3",
          "--shard-ranks: 3 is not valid; expected a divisor of the ranks with the same weights, 4");
  refused("--zero-stage 0 --shard-ranks 2", "--shard-ranks: 2 is not valid; expected 0 with --zero-stage 0");
  refused("--global-batch-size 6 --micro-batch-size 1", "--global-batch-size: 6 is not valid; expected ");
  refused("--data /nowhere/text", "--data: /nowhere/text is not valid; expected ");
  refused("--no-such-option", "--no-such-option: unknown option; ");
  for (const char* link :
       {"5", "5us", "5us,", "5,50GB/s", "-5us,50GB/s", "5us,0GB/s", "5us,50Gb/s", "nanus,1GB/s"}) {
    refused(std::string("--link ") + link, "--link: " + std::string(link) + " is not valid; expected ");
  }
  refused("--log-json /nowhere/log", "--log-json: /nowhere/log is not valid; expected ");
}

// Each rank reads its part of the tensors. The first one of the file is the embedding, which rank 1 reads.
TEST_CASE("03: what one rank finds damaged, all ranks refuse with one line", "[03][faults][bad-input]") {
  const TemporaryFolder folder;
  const std::string save = folder.path() + "/save", weights = save + "/step_000001/model.safetensors";
  Job job(folder, "--steps 1 --save " + save);
  REQUIRE(job.ends_within(kSoon));
  REQUIRE(job.status() == 0);
  std::string content = read_file(weights);
  uint64_t header = 0;
  std::memcpy(&header, content.data(), sizeof header);
  content[sizeof header + header + 3] ^= 1;
  folder.write("save/step_000001/model.safetensors", content);
  check_run_is_refused(
      "03_zero", "--load " + save + " --steps 2",
      "--load: " + weights + " is not valid; expected model.embed_tokens.weight with the checksum ");
}

TEST_CASE("04: sizes that the ranks don't divide end with one line and status 2", "[04][faults][bad-input]") {
  const auto refused = [](const std::string& arguments, const std::string& begin) {
    check_run_is_refused("04_tensor_parallel", arguments,
                         begin + " is not valid; expected a multiple of the tensor ranks (4)");
  };
  refused("--heads 2 --kv-heads 2", "--heads: 2");
  refused("--kv-heads 2", "--kv-heads: 2");
  refused("--d-ff 190", "--d-ff: 190");
  refused("--vocab-size 257", "--vocab-size: 257");
  refused("--sequence-parallel --micro-batch-size 2 --seq-len 9", "--micro-batch-size x --seq-len: 18");
}

TEST_CASE("05: schedules that don't fit the ranks end with one line and status 2",
          "[05][faults][bad-input]") {
  const auto refused = [](const std::string& arguments, const std::string& begin) {
    check_run_is_refused("05_pipeline_parallel", arguments, begin);
  };
  refused("--layers 3", "--layers: 3 is not valid; expected at least 4, one a stage");
  refused("--pp 8", "--pp: 8 is not valid; expected the number of ranks, 4");
  refused(
      "--pp-schedule interleaved --global-batch-size 12 --micro-batch-size 2",
      "--pp-schedule: interleaved is not valid; expected 1f1b, or micro-batches in multiples of the 4 ranks");
  refused("--vpp 2", "--vpp: 2 is not valid; expected 1 with");
  refused("--pp-schedule zb-h1 --recompute full",
          "--recompute: full is not valid; expected none or selective");
}

TEST_CASE("06: sequences that the ranks don't divide end with one line and status 2",
          "[06][faults][bad-input]") {
  const auto refused = [](const std::string& arguments, const std::string& begin) {
    check_run_is_refused("06_context_parallel", arguments, begin);
  };
  refused("--cp-layout contiguous --seq-len 126",
          "--seq-len: 126 is not valid; expected a multiple of the context ranks (4)\n");
  refused("--cp-layout zigzag --seq-len 124",
          "--seq-len: 124 is not valid; expected a multiple of twice the context ranks (2 x 4) with "
          "--cp-layout zigzag\n");
  refused("--cp-layout striped", "--cp-layout: striped is not valid; expected one of contiguous, zigzag\n");
  refused("--cp-exchange none",
          "--cp-exchange: none is not valid; expected one of ring, all-gather, ulysses, ulysses-ring\n");
  refused("--kv-heads 2 --cp-exchange ulysses",
          "--kv-heads: 2 is not valid; expected a multiple of the context ranks (4) with --cp-exchange "
          "ulysses\n");
  refused("--global-batch-size 6", "--global-batch-size: 6 is not valid; expected ");
}
TEST_CASE("07: meshes that can't be end with one line, with the arithmetic, and status 2",
          "[07][faults][bad-input]") {
  const auto refused = [](const std::string& arguments, const std::string& begin) {
    check_run_is_refused("07_combined_5d", arguments, begin);
  };
  refused("--tp 2 --dp 1",
          "--tp x --cp x --dp x --pp: 2 x 1 x 1 x 1 = 2 is not valid; expected the number of ranks, 4");
  refused("--tp 2 --cp 3",
          "--tp x --cp x --pp: 2 x 3 x 1 = 6 is not valid; expected a divisor of the number of ranks, 4");
  refused(
      "--show-mesh --dp 1048576 --cp 4096",
      "--tp x --cp x --dp x --pp: 1 x 4096 x 1048576 x 1 = 4294967296 is not valid; expected at most 4096 "
      "ranks in a picture");
  refused("--experts 6 --cp 2 --ep 3", "--ep: 3 is not valid; expected a divisor of --dp x --cp, 2 x 2 = 4");
  refused("--experts 6 --ep 4", "--ep: 4 is not valid; expected a divisor of --experts (6)");
  refused("--experts 4 --ep 4 --shard-ranks 2",
          "--shard-ranks: 2 is not valid; expected a multiple of --ep, 4");
  refused("--ep 2", "--ep: 2 is not valid; expected 1 without --experts");
  refused("--tp 4 --kv-heads 2", "--kv-heads: 2 is not valid; expected a multiple of the tensor ranks (4)");
  refused("--cp 4 --seq-len 36",
          "--seq-len: 36 is not valid; expected a multiple of twice the context ranks");
  refused("--tp 2 --cp 2 --kv-heads 2 --cp-exchange ulysses",
          "--kv-heads: 2 is not valid; expected a multiple of tensor ranks x context ranks (2 x 2) with "
          "--cp-exchange ulysses\n");
  refused(
      "--cp 4 --cp-exchange ulysses-ring --ulysses 3",
      "--ulysses: 3 is not valid; expected a divisor of the context ranks (4) that leaves a ring of two or "
      "more\n");
  refused("--pp 4 --layers 3", "--layers: 3 is not valid; expected at least 4, one a stage");
  refused("--tp 8 --ranks 8", "--ranks: 8 is not valid; expected none without --dry-run\n");
  refused("--tp 8 --ranks 12 --dry-run",
          "--tp x --cp x --pp: 8 x 1 x 1 = 8 is not valid; expected a divisor of the number of ranks, 12");
  refused("--tp 8 --ranks 8 --dry-run",
          "mpirun -n: 4 is not valid; expected 1, the ranks that differ of 8\n");
}
