// What a user sees of an impossible request: 01_single_gpu itself is started, and must end with status 2 and
// one line on stderr that names the option, the value and what would be valid, before it has written
// anything.
#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>

#include "device/mapped_file.h"
#include "run_program.h"

using pentatron::tests::Outcome;
using pentatron::tests::read_file;
using pentatron::tests::run;
using pentatron::tests::TemporaryFolder;

namespace {

void check_refused(const TemporaryFolder& folder, const std::string& arguments, const std::string& begin) {
  const Outcome outcome = run(folder, arguments);
  INFO(arguments << "\n" << outcome.err);
  CHECK(outcome.status == 2);
  CHECK(outcome.out.empty());
  CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
  CHECK(outcome.err.ends_with('\n'));
  CHECK(outcome.err.starts_with(begin));
  CHECK(outcome.err.find("expected ") != std::string::npos);
}

}  // namespace

TEST_CASE("01: wrong options end with one line and status 2", "[01][bad-input]") {
  const TemporaryFolder folder;
  check_refused(folder, "--heads 7", "--heads: 7 is not valid; ");
  check_refused(folder, "--kv-heads 3", "--kv-heads: 3 is not valid; ");
  check_refused(folder, "--model gpt-9", "--model: gpt-9 is not valid; ");
  check_refused(folder, "--global-batch-size 10", "--global-batch-size: 10 is not valid; ");
  check_refused(folder, "--layers -3", "--layers: -3 is not valid; ");
  check_refused(folder, "--d-model 1000000000", "--d-model: 1000000000 is not valid; ");
  check_refused(folder, "--lr nan", "--lr: nan is not valid; ");
  check_refused(folder, "--heads 1 --kv-heads 1 --attention tensor-core",
                "--attention: tensor-core is not valid; ");
  check_refused(folder, "--loss-scale 4", "--loss-scale: given is not valid; ");
  check_refused(folder, "--no-such-option", "--no-such-option: unknown option; ");
  check_refused(folder, "--steps", "--steps: value missing; ");
  check_refused(folder, "--log-json /nowhere/log", "--log-json: /nowhere/log is not valid; ");
}

// What a launcher tells the processes of an MPI that is not theirs.
TEST_CASE("02: a process that is alone, and should not be, is refused", "[02][bad-input][mpirun]") {
  const TemporaryFolder folder;
  const std::string tests = std::filesystem::read_symlink("/proc/self/exe").filename().string();
  for (const std::string& program : {std::string("02_data_parallel"), "mpi_" + tests}) {
    for (const std::string before :
         {"PMI_SIZE=2 PMI_RANK=0 ", "MPI_LOCALNRANKS=8 MPI_LOCALRANKID=0 ",
          "OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_RANK=0 ", "SLURM_STEP_NUM_TASKS=4 SLURM_PROCID=0 "}) {
      const Outcome first = run(folder, "--steps 1", program, before);
      CAPTURE(program, before, first.out, first.err);
      CHECK(first.status == 2);
      CHECK(first.out.empty());
      CHECK(first.err.starts_with("mpirun: " + before.substr(before.find('=') + 1, 1) +
                                  " processes were started, and each is alone; expected "));
      CHECK(std::count(first.err.begin(), first.err.end(), '\n') == 1);
    }
    const Outcome other = run(folder, "--steps 1", program, "PMI_SIZE=2 PMI_RANK=1 ");
    CHECK(other.status == 2);
    CHECK((other.out + other.err).empty());  // the first one says it
  }
  CHECK(run(folder, "--steps 1 --layers 1", "02_data_parallel", "SLURM_STEP_NUM_TASKS=1 ").status == 0);
}

// Each rank may see one GPU, and it is another one for each, or the same. A rank needs 14 MiB in fp32, 28 in
// fp64.
TEST_CASE("02: ranks that share a GPU share its memory", "[02][bad-input][standin]") {
  const TemporaryFolder folder;
  const auto run_with = [&](const std::string& memory, const std::string& other) {
    const std::filesystem::path tests = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    const std::string program = (tests / "02_data_parallel").string(), options = "--steps 1 --layers 2";
    return run(folder, options + " : -n 1 -env CUDA_CPU_UUID " + other + " '" + program + "' " + options,
               "02_data_parallel", "CUDA_CPU_MEMORY=" + memory + " mpirun -n 1 -env CUDA_CPU_UUID A ");
  };
  const bool fits = run_with("20MiB", "B").status == 0;
  const std::string memory = fits ? "20MiB" : "40MiB";
  const Outcome apart = run_with(memory, "B"), together = run_with(memory, "A");
  INFO(apart.err << together.err);
  CHECK(apart.status == 0);
  CHECK(together.status == 2);
  CHECK(together.err.find(std::string("at most the ") + (fits ? "10.0" : "20.0") + " MiB of device memory") !=
        std::string::npos);
}

// The four ranks need 39, 30, 22 and 14 MiB in fp32, and twice as much in fp64.
TEST_CASE("05: a pipeline of which some ranks do not fit is refused with one line",
          "[05][bad-input][standin]") {
  const TemporaryFolder folder;
  const auto run_with = [&](const std::string& memory) {
    return run(folder, "--steps 1 --layers 8 --micro-batch-size 4", "05_pipeline_parallel",
               "CUDA_CPU_MEMORY=" + memory + " mpirun -n 4 ");
  };
  const bool in_fp32 = run_with("50MiB").status == 0;
  const Outcome outcome = run_with(in_fp32 ? "25MiB" : "50MiB");
  INFO(outcome.err);
  CHECK(outcome.status == 2);
  CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
  CHECK(outcome.err.starts_with("--model, --micro-batch-size, --seq-len: a run that needs "));
}

// Rank 0 writes, and all ranks end together: so mpirun says nothing of its own.
void check_full_disk(const std::string& program, const std::string& before) {
  const TemporaryFolder folder;
  const std::string log = folder.path() + "/log.json";
  for (const std::string option : {"--log-json", "--trace"}) {
    const std::string kept = option == "--trace" ? " --log-json " + log : "";
    const Outcome outcome = run(folder, "--steps 1 " + option + " /dev/full" + kept, program, before);
    INFO(outcome.err);
    CHECK(outcome.status == 1);
    CHECK(outcome.err == option + ": cannot write /dev/full; is the disk full?\n");
  }
  CHECK(read_file(log).find("\n{\"summary\":") != std::string::npos);
  for (const char* arguments : {"--steps 1", "--help"}) {
    const Outcome outcome = run(folder, arguments, program, before + R"(sh -c '"$0" "$@" > /dev/full' )");
    INFO(outcome.err);
    CHECK(outcome.status == 1);
    CHECK(outcome.err == "stdout: cannot write what was printed; is the disk full?\n");
  }
}

TEST_CASE("01: a full disk ends a run with one line and status 1", "[01][bad-input]") {
  check_full_disk("01_single_gpu", "");
}
TEST_CASE("02: a full disk ends a run of several ranks with one line and status 1", "[02][bad-input]") {
  check_full_disk("02_data_parallel", "mpirun -n 2 ");
}

// A limit on the size of a file stands for a disk that is full.
TEST_CASE("01: a checkpoint that can not be written loses nothing", "[01][bad-input][checkpoint]") {
  const TemporaryFolder folder;
  const std::string save = folder.path() + "/save",
                    sizes = " --layers 1 --micro-batch-size 2 --global-batch-size 2";
  REQUIRE(run(folder, "--steps 1 --save " + save + sizes).status == 0);
  const std::string before = read_file(save + "/step_000001/model.safetensors");
  // 400 KiB: enough for the weights, not for the optimizer's states.
  const Outcome full = run(folder, "--resume --steps 4 --save-every 2 --save " + save + sizes,
                           "01_single_gpu", "trap '' XFSZ; ulimit -f 800; ");
  INFO(full.out << full.err);
  CHECK(full.status == 1);
  CHECK(full.err.find("--save: " + save +
                      "/step_000002 can not be written: File too large; the run goes on\n") == 0);
  CHECK(full.err.find("\n--save: " + save + "/step_000004 can not be written: File too large\n") !=
        std::string::npos);
  CHECK(std::count(full.err.begin(), full.err.end(), '\n') == 2);
  CHECK(read_file(save + "/latest") == "step_000001\n");
  CHECK(read_file(save + "/step_000001/model.safetensors") == before);
  CHECK(!std::filesystem::exists(save + "/new.part"));
}

TEST_CASE("01: wrong requests of checkpoints end with one line and status 2", "[01][bad-input][checkpoint]") {
  const TemporaryFolder folder;
  const std::string save = folder.path() + "/save";
  REQUIRE(
      run(folder, "--steps 1 --layers 1 --micro-batch-size 2 --global-batch-size 2 --save " + save).status ==
      0);
  const std::string found = "--load: " + save + "/step_000001 is not valid; expected ";
  check_refused(folder, "--load /nowhere",
                "--load: /nowhere is not valid; expected a folder with trainer_state.json");
  check_refused(folder, "--load " + save + " --layers 2",
                found + "the same model; num_hidden_layers is 2, and was 1");
  check_refused(folder, "--load " + save + " --load-weights " + save,
                "--load-weights: " + save + " is not valid; ");
  check_refused(folder, "--load " + save + " --optimizer sgd", found + "--optimizer sgd; it was adamw");
  check_refused(folder, "--load " + save + " --dry-run", found + "none with --dry-run");
  check_refused(folder, "--save /proc/here",
                "--save: /proc/here is not valid; expected a folder that can be written");
  const std::string states = save + "/step_000001/optimizer.safetensors";
  for (const std::string& damaged : {states, save + "/step_000001/model.safetensors"}) {
    const std::string good = read_file(damaged);
    std::string content = good;
    content[content.size() - 100] ^= 1;
    std::ofstream(damaged) << content;
    const std::string name = damaged == states ? "lm_head.weight.moment2" : "lm_head.weight";
    check_refused(folder, "--load " + save,
                  "--load: " + damaged + " is not valid; expected " + name + " with the checksum ");
    if (damaged != states)
      check_refused(folder, "--load-weights " + save + "/step_000001", "--load-weights: " + damaged);
    std::ofstream(damaged) << good;
  }
  const std::string weights = save + "/step_000001/model.safetensors", all = read_file(weights);
  std::ofstream(weights) << all.substr(0, all.size() - 1);
  check_refused(folder, "--load " + save,
                "--load: " + weights + " is not valid; expected a safetensors file; ");
}

// A pipe that nobody writes into would wait for ever, and a device end never.
TEST_CASE("01: what is read is a regular file", "[01][bad-input][checkpoint]") {
  const TemporaryFolder folder;
  const std::string save = folder.path() + "/save", step = save + "/step_000001";
  REQUIRE(
      run(folder, "--steps 1 --layers 1 --micro-batch-size 2 --global-batch-size 2 --save " + save).status ==
      0);
  const auto check = [&](const std::string& options, const std::string& file) {
    const std::string option = options.substr(0, options.find(' '));
    check_refused(folder, options, option + ": " + file + " is not valid; expected ");
  };
  const std::string pipe = folder.path() + "/pipe";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  for (const std::string& file : {pipe, std::string("/dev/zero"), folder.path()}) {
    check("--data " + file, file);
    check("--gpu " + file, file);
  }
  check("--gpu " + std::string(300, 'x'), std::string(300, 'x'));  // too long for a file's name
  for (const std::string name : {"step_000001/model.safetensors", "step_000001/optimizer.safetensors",
                                 "step_000001/trainer_state.json", "step_000001/config.json", "latest"}) {
    const std::filesystem::path file = save + "/" + name, kept = folder.path() + "/kept";
    std::filesystem::rename(file, kept);
    REQUIRE(mkfifo(file.c_str(), 0600) == 0);
    check("--load " + save, file);
    std::filesystem::rename(kept, file);
  }
  std::filesystem::remove(step + "/model.safetensors");
  const std::string index = step + "/model.safetensors.index.json";
  REQUIRE(mkfifo(index.c_str(), 0600) == 0);
  check("--load-weights " + step, index);
}

TEST_CASE("01: a run whose steps are all done saves what it has loaded", "[01][checkpoint]") {
  const TemporaryFolder folder;
  const std::string save = folder.path() + "/save", other = folder.path() + "/other";
  const std::string sizes = " --layers 1 --micro-batch-size 2 --global-batch-size 2";
  REQUIRE(run(folder, "--steps 2 --save " + save + sizes).status == 0);
  const std::string path = folder.path() + "/log.json", to = " --save " + other + " --log-json " + path;
  CHECK(run(folder, "--steps 2 --load " + save + to).status == 0);
  for (const std::string file : {"model", "optimizer"}) {
    const std::string name = "/step_000002/" + file + ".safetensors";
    CHECK(read_file(other + name) == read_file(save + name));
  }
  CHECK(read_file(path).find("\"final_loss\":null") != std::string::npos);  // no step was computed
  const Outcome again = run(folder, "--steps 2 --resume --save " + other);
  CHECK(again.status == 0);
  CHECK(again.out.find(" is saved") == std::string::npos);  // it is there
  const std::string third = folder.path() + "/third";       // --resume finds nothing there
  CHECK(run(folder, "--steps 2 --resume --load " + save + " --save " + third).status == 0);
  CHECK(std::filesystem::exists(third + "/step_000002/model.safetensors"));
}

TEST_CASE("01: the steps of another run are not replaced", "[01][bad-input][checkpoint]") {
  const TemporaryFolder folder;
  const std::string save = folder.path() + "/save", step = save + "/step_000002/",
                    sizes = " --layers 1 --micro-batch-size 2 --global-batch-size 2 --save " + save;
  REQUIRE(run(folder, "--steps 2 --resume" + sizes).status == 0);
  const std::string before = read_file(step + "trainer_state.json");
  const std::string words =
      "--save: " + save + " is not valid; expected a folder without steps, or --resume; ";
  for (const std::string& load : {std::string(), "--load " + save, "--load-weights " + step})
    check_refused(folder, "--steps 1 " + load + sizes, words + "step_000002 is there\n");
  CHECK(read_file(save + "/latest") == "step_000002\n");
  CHECK(read_file(step + "trainer_state.json") == before);
  for (const char* const lost : {"", "step_000003"}) {
    folder.write("save/latest", lost);
    if (*lost == 0) std::filesystem::remove(save + "/latest");
    check_refused(
        folder, "--steps 4 --resume" + sizes,
        "--resume: " + save + " is not valid; expected a folder with trainer_state.json, or one of ");
  }
  std::filesystem::remove_all(step);  // a run that was killed before its first step was there
  CHECK(run(folder, "--steps 2 --resume" + sizes).status == 0);
  CHECK(read_file(step + "trainer_state.json") == before);
}

namespace {

double first_loss(const std::string& log) {
  const std::string key = "\"loss\":";
  return std::stod(log.substr(log.find(key) + key.size()));
}

}  // namespace

// What a head is without a tensor of its own says config.json; where that says nothing, it is no embedding.
TEST_CASE("01: a head that is lost is not the embedding", "[01][bad-input][checkpoint]") {
  const TemporaryFolder folder;
  const std::string sizes = " --layers 1 --micro-batch-size 2 --global-batch-size 2 ",
                    step = folder.path() + "/save/step_000001/";
  REQUIRE(run(folder, "--steps 1 --lr 0.1 --save " + folder.path() + "/save" + sizes).status == 0);
  const std::string config = read_file(step + "config.json"), weights = read_file(step + "model.safetensors");
  const std::string tied_to = "\"tie_word_embeddings\": ";
  const auto set_tied = [&](const std::string& value) {
    std::string content = config;
    const size_t at = content.find(tied_to + "false");
    content.replace(at, tied_to.size() + 5, value.empty() ? "\"nothing\": 0" : tied_to + value);
    folder.write("save/step_000001/config.json", content);
  };
  const std::string is_tied = "its head is the embedding, ",
                    has_head = "but its files have another head, lm_head.weight, which is used\n";
  const std::string load = "--steps 1 --load-weights " + step + sizes;
  const auto loss = [&](const std::string& remark, const std::string& more = "") {
    const std::string log = folder.path() + "/log";
    const Outcome outcome = run(folder, load + more + " --log-json " + log);
    CAPTURE(outcome.err, outcome.out);
    CHECK(outcome.status == 0);
    CHECK(outcome.out.find("\nmodel       " + remark) != std::string::npos);
    CHECK((outcome.out.find("\nmodel       " + is_tied) == std::string::npos) == remark.empty());
    return first_loss(read_file(log));
  };
  const double with_head = loss("");
  set_tied("true");
  CHECK(loss(has_head) == with_head);

  // The tensor has another name.
  std::string content = weights;
  const std::string head = "\"lm_head.weight\"";
  content.replace(content.rfind(head), head.size(), "\"no_head.weight\"");
  folder.write("save/step_000001/model.safetensors", content);
  const double with_embedding = loss(is_tied);
  CHECK(with_embedding != with_head);
  CHECK(loss(is_tied, "--model tiny --layers 1") == with_embedding);
  for (const std::string value : {"false", "null", ""}) {
    set_tied(value);
    check_refused(folder, load,
                  "--load-weights: " + step + "model.safetensors is not valid; expected a tensor lm_head");
  }
}

TEST_CASE("01: a run does not go on with a file that has changed", "[01][bad-input][checkpoint]") {
  const TemporaryFolder folder;
  const std::string save = folder.path() + "/save",
                    sizes = " --layers 1 --micro-batch-size 2 --global-batch-size 2 --data ";
  const std::string text(1000, 'a'), data = folder.write("text", text),
                                     other = folder.write("other", text + "b");
  REQUIRE(run(folder, "--steps 1 --save " + save + sizes + data).status == 0);
  CHECK(run(folder, "--steps 2 --load " + save).status == 0);
  folder.write("text", text.substr(1) + "b");
  for (const std::string& given : {std::string(), sizes + data}) {
    check_refused(folder, "--steps 2 --load " + save + given,
                  "--data: " + data + " is not valid; expected what " + save +
                      "/step_000001 was trained on, 1000 bytes with CRC-32 ");
  }
  const Outcome outcome = run(folder, "--steps 2 --load " + save + sizes + other);
  CHECK(outcome.status == 0);
  CHECK(outcome.out.find("; --data is " + other + " and was " + data) != std::string::npos);
}

// --model has another scaling than the folder, as it may have another rope_theta.
TEST_CASE("01: a checkpoint's rotary scaling is not lost", "[01][bad-input][checkpoint]") {
  const TemporaryFolder folder;
  const std::string save = folder.path() + "/save", sizes =
                                                        " --layers 1 --micro-batch-size 2 "
                                                        "--global-batch-size 2 ";
  REQUIRE(run(folder, "--steps 1 --save " + save + sizes).status == 0);
  std::string config = read_file(save + "/step_000001/config.json");
  const std::string none = "\"rope_scaling\": null";
  REQUIRE(config.find(none) != config.npos);
  config.replace(config.find(none), none.size(),
                 R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
                   "high_freq_factor": 4, "original_max_position_embeddings": 16})");
  std::ofstream(save + "/step_000001/config.json") << config;
  for (const std::string load : {"--load", "--load-weights"}) {
    const std::string from = load + " " + save + (load == "--load" ? "" : "/step_000001");
    check_refused(folder, from + " --model tiny" + sizes,
                  load + ": " + save +
                      "/step_000001 is not valid; expected the same model; "
                      "rope_scaling is null, and was {\"rope_type\":\"llama3\"");
    const std::string next = folder.path() + "/next" + load;
    REQUIRE(run(folder, from + sizes + "--steps 2 --save " + next).status == 0);
    CHECK(read_file(next + "/step_000002/config.json").find("\"factor\": 8.0") != std::string::npos);
  }
}

// Weights whose last number, one of the head, is NaN: 05's last rank finds it.
TEST_CASE("05: a loss that is NaN ends the run with one line", "[05][bad-input][mpirun]") {
  const TemporaryFolder folder;
  const std::string sizes = " --layers 2 --micro-batch-size 2 --global-batch-size 4 ",
                    save = folder.path() + "/save", weights = save + "/step_000001/model.safetensors";
  REQUIRE(run(folder, "--steps 1 --save " + save + sizes).status == 0);
  std::string content = read_file(weights);
  for (size_t at = 0; (at = content.find("crc32 ", at)) != content.npos;)
    content[at] = 'C';  // without checksums
  const size_t bytes = content.find("\"F64\"") != content.npos ? 8 : 4;
  content.replace(content.size() - bytes, bytes, std::string(bytes, '\xff'));
  std::ofstream(weights) << content;
  const std::string load = "--steps 3 --load-weights " + save + "/step_000001" + sizes;
  for (const Outcome& outcome :
       {run(folder, load), run(folder, load + "--timeout 20", "05_pipeline_parallel", "mpirun -n 2 ")}) {
    CAPTURE(outcome.out);
    CHECK(outcome.status == 1);
    CHECK(outcome.err == "step 1: the loss is nan, the gradient norm nan\n");
  }
}

// The update by a rate of 1000 makes numbers that are none, a few steps later.
TEST_CASE("01: a step with NaN is not saved", "[01][bad-input][checkpoint]") {
  const TemporaryFolder folder;
  const std::string save = folder.path() + "/save";
  const Outcome outcome =
      run(folder,
          "--lr 1000 --steps 20 --save-every 1 --micro-batch-size 2 --global-batch-size 2 --save " + save);
  INFO(outcome.err);
  REQUIRE(outcome.err.starts_with("step "));
  const int last = std::stoi(outcome.err.substr(5)) - 1;
  CHECK(std::stoi(read_file(save + "/latest").substr(5)) == last);
  CHECK(std::distance(std::filesystem::directory_iterator(save), {}) == last + 2);
}

// Another seed gives the second rank other weights, and all updates are the same.
TEST_CASE("02: ranks with other weights end the run with one line and status 1", "[02][bad-input][mpirun]") {
  const TemporaryFolder folder;
  const std::string program =
                        std::filesystem::read_symlink("/proc/self/exe").parent_path() / "02_data_parallel",
                    options = " --layers 2 --steps 2 --seed ";
  const auto with_seed = [&](const char* seed) {
    return run(folder, options + seed, "02_data_parallel",
               "mpirun -n 1 '" + program + "'" + options + "1 : ");
  };
  const Outcome same = with_seed("1"), other = with_seed("2");
  CAPTURE(same.err, other.err);
  CHECK(same.status == 0);
  CHECK(same.err.empty());
  CHECK(other.status == 1);
  CHECK(other.err.starts_with("step 2: lm_head.weight is not the same on all ranks; "));
  CHECK(std::count(other.err.begin(), other.err.end(), '\n') == 1);
}

// A host may have another file under the same name, and another run's checkpoint of the same step.
TEST_CASE("02: ranks with other data or checkpoints end with one line and status 2",
          "[02][bad-input][checkpoint][mpirun]") {
  const TemporaryFolder folder;
  const std::string program =
                        std::filesystem::read_symlink("/proc/self/exe").parent_path() / "02_data_parallel",
                    sizes = " --layers 1 --micro-batch-size 2 --global-batch-size 4 ";
  const auto both = [&](const std::string& mine, const std::string& of_rank_1) {
    return run(folder, sizes + of_rank_1, "02_data_parallel",
               "mpirun -n 1 '" + program + "'" + sizes + mine + " : -n 1 ");
  };
  const auto check = [&](const std::string& mine, const std::string& of_rank_1, const std::string& words) {
    const Outcome outcome = both(mine, of_rank_1);
    CAPTURE(mine, of_rank_1, outcome.err);
    CHECK(outcome.status == 2);
    CHECK(outcome.err.starts_with(words));
    CHECK(outcome.err.find(" on rank 0") != std::string::npos);
    CHECK(outcome.err.find(" on rank 1") != std::string::npos);
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
  };
  const std::string text(1000, 'a'), data = folder.write("text", text);
  for (const std::string& content : {text + "a", text.substr(1) + "b"}) {
    check("--data " + data, "--data " + folder.write("other", content),
          "--data: " + data + " is not the same on all ranks; 100");
  }
  CHECK(both("--steps 1 --data " + data, "--steps 1 --data " + folder.write("other", text)).status == 0);

  const std::string one = folder.path() + "/one", two = folder.path() + "/two";
  REQUIRE(run(folder, "--seed 1 --steps 1 --save " + one + sizes).status == 0);
  REQUIRE(run(folder, "--seed 2 --steps 1 --save " + two + sizes).status == 0);
  check("--load " + one, "--seed 1 --load " + two,
        "--load: " + one + "/step_000001 is not the same on all ranks; 1 steps, ");
  check("--load-weights " + one + "/step_000001", "--load-weights " + two + "/step_000001",
        "--load-weights: " + one + "/step_000001 is not the same on all ranks; 0 steps, ");
  check("--resume --save " + one, "--seed 1 --resume --save " + two,
        "--resume: " + one + " is not the same on all ranks; 1 steps, ");
}

TEST_CASE("a test that does not exist does not pass", "[01][bad-input]") {
  const TemporaryFolder folder;
  const std::string these_tests = std::filesystem::read_symlink("/proc/self/exe").filename().string();
  const Outcome outcome = run(folder, "'log: lines of a step'", these_tests);
  CHECK(outcome.status == 3);
  CHECK(outcome.out.find("0 passed, 0 failed") != std::string::npos);
  CHECK(outcome.out.find("no test here is called log: lines of a step; make test T=") != std::string::npos);
}

TEST_CASE("01: wrong data ends with one line and status 2", "[01][bad-input]") {
  const TemporaryFolder folder;
  const auto refused = [&](const std::string& path, const std::string& more = "") {
    check_refused(folder, "--data '" + path + "' " + more, "--data: " + path + " is not valid; ");
  };
  refused(folder.path() + "/missing");
  refused(folder.path());
  refused(folder.write("empty", ""));
  refused(folder.write("short", std::string(128, 'a')));
  refused(folder.write("truncated.bin", std::string(1001, '\1')));
  const std::string path = folder.write("text", std::string(1000, 'z'));
  const Outcome late = run(folder, "--vocab-size 122 --data " + path);  // when it reads the token
  CHECK(late.status == 2);
  CHECK(late.err.starts_with("--data: " + path +
                             " is not valid; expected token ids below --vocab-size (122); "));
}

// Its communicators must not wait for the others, which wait for it in a sum of the same step.
TEST_CASE("02: a rank that meets a wrong token alone ends all ranks", "[02][bad-input][mpirun]") {
  const TemporaryFolder folder;
  const std::string path = folder.write("text", std::string(4000, 'a') + "z" + std::string(4000, 'a'));
  const Outcome outcome = run(folder,
                              "--vocab-size 122 --seq-len 16 --layers 1 --micro-batch-size 1 "
                              "--global-batch-size 2 --steps 10000 --log-every 10000 --timeout 60 --data " +
                                  path,
                              "02_data_parallel", "mpirun -n 2 ");
  INFO(outcome.out << outcome.err);
  CHECK(outcome.status == 2);
  CHECK(outcome.err.find("--data: " + path + " is not valid; expected token ids below") == 0);
  CHECK(outcome.err.find("nothing has moved") == std::string::npos);  // the watchdog
}

TEST_CASE("01: a wrong profile of a GPU ends with one line and status 2", "[01][bad-input][standin]") {
  const TemporaryFolder folder;
  const std::string all = read_file(pentatron::in_tree("common/clock/profiles/h100.json"));
  const auto refused = [&](const std::string& gpu, const std::string& what) {
    check_refused(folder, "--gpu '" + gpu + "'", "--gpu: " + gpu + " is not valid; expected " + what);
  };
  const auto with = [&](const std::string& text, const std::string& other) {
    std::string changed = all;
    REQUIRE(changed.find(text) != std::string::npos);
    return folder.write("gpu.json", changed.replace(changed.find(text), text.size(), other));
  };
  refused("h99", "one of a100, ");
  CHECK(run(folder, "--gpu h99")
            .err.ends_with(", unit; or, like common/clock/profiles/rtx4090.json, a readable file "
                           "(No such file or directory)\n"));
  refused(folder.path(), "one of a100, ");
  refused(folder.write("text", "no JSON"), "numbers like those of common/clock/profiles/rtx4090.json");
  refused(with("\"link_latency\"", "\"latency\""), "the fields of ");
  refused(folder.write("gpu.json", "{}"), "a number \"value\" above 0 for \"memory_bytes\"");
  refused(with("3.35e+12", "-1"), "a number \"value\" above 0 for \"memory_bandwidth\"");
  refused(with("3.35e+12", "\"fast\""), "a number \"value\" above 0 for \"memory_bandwidth\"");
  refused(folder.write("gpu.json", R"({"as": "h100", "launch_seconds": {"value": "fast"}})"),
          "a number \"value\" of 0 or more for \"launch_seconds\"");
  refused(folder.write("gpu.json", R"({"as": "h100", "memory_bandwith": {"value": 1e12}})"),
          "the fields of common/clock/profiles/h100.json; there is no field \"memory_bandwith\"");
  refused(with("3.35e+12, \"unit\": \"B/s\"", "3350, \"unit\": \"GB/s\""),
          "a number \"value\" above 0 for \"memory_bandwidth\" in this file; its \"unit\", where there is "
          "one, is B/s");
  for (const char* const words : {R"({"as": 5})", R"({"as": "h100", "name": ""})"})
    refused(folder.write("gpu.json", words), "\"name\" and \"as\" to be words");
  refused(folder.write("gpu.json", R"({"as": "h100", "gpus_per_node": {"value": 0.5}})"),
          "a number \"value\" above 0, whole and at most 1048576, for \"gpus_per_node\"");
  check_refused(folder, "--gpu '" + folder.write("gpu.json", R"({"as": "h99"})") + "'", "--gpu: ");
  check_refused(folder, "--dry-run --sample 5", "--sample: 5 is not valid; ");
}

TEST_CASE("01: a dry run counts, and says what does not fit", "[01][bad-input][standin]") {
  const TemporaryFolder folder;
  const Outcome fits = run(folder, "--dry-run --model llama-3.2-1b --attention tiled --steps 1");
  CHECK(fits.status == 0);
  CHECK(fits.err.empty());
  CHECK(fits.out.find("\n       1        -          -   ") != std::string::npos);
  const Outcome too_large = run(folder, "--dry-run --model llama-3.1-8b");
  CHECK(too_large.status == 1);
  CHECK(std::count(too_large.err.begin(), too_large.err.end(), '\n') == 1);
  CHECK(too_large.err.find(", and CUDA and NCCL about 768.0 MiB; the modelled h100 has 79.1 GiB") !=
        std::string::npos);
}

TEST_CASE("01: more memory than there is ends with one line and status 2", "[01][bad-input]") {
  const TemporaryFolder folder;
  const Outcome outcome = run(folder, "--model llama-3.1-8b --layers 1000");
  INFO(outcome.err);
  CHECK(outcome.status == 2);
  CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
  CHECK(outcome.err.find("expected ") != std::string::npos);
}

TEST_CASE("01: a refused request leaves an earlier log alone", "[01][bad-input]") {
  const TemporaryFolder folder;
  const std::string log = folder.write("log.json", "an earlier run");
  const std::string fresh = folder.path() + "/fresh.json";
  check_refused(folder, "--log-json '" + log + "' --data /nowhere/text",
                "--data: /nowhere/text is not valid; ");
  CHECK(read_file(log) == "an earlier run");
  check_refused(folder, "--log-json '" + fresh + "' --data /nowhere/text",
                "--data: /nowhere/text is not valid; ");
  CHECK(!std::filesystem::exists(fresh));
}

TEST_CASE("01: help goes to stdout", "[01][bad-input]") {
  const TemporaryFolder folder;
  const Outcome outcome = run(folder, "--help");
  CHECK(outcome.status == 0);
  CHECK(outcome.err.empty());
  CHECK(outcome.out.find("--micro-batch-size") != std::string::npos);
}
