// What the scripts around the tests do on machines that are not this one: fake commands stand for them.
#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "catch.h"
#include "device/mapped_file.h"
#include "files.h"

using pentatron::tests::read_file;
using pentatron::tests::TemporaryFolder;

namespace {

const std::string tests_folder = pentatron::in_tree("tests");

void write_script(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << "#!/bin/bash\n" << text << "\n";
  std::filesystem::permissions(path, std::filesystem::perms::all);
}

}  // namespace

TEST_CASE("a test on GPUs starts no more ranks than there are, but with NCCL over MPI", "[scripts]") {
  const TemporaryFolder folder;
  const std::string bin = folder.path() + "/bin";
  write_script(bin + "/nvidia-smi", "echo GPU 0; echo GPU 1; echo GPU 2");
  write_script(bin + "/mpirun", "echo started $2 ranks of \"$@\"; echo 1 passed, 0 failed");
  const auto run = [&](const std::string& build) {
    for (const char* program : {"/tests-02", "/mpi_tests-02"})
      write_script(folder.path() + "/" + build + program, "echo given \"$@\"; echo 1 passed, 0 failed");
    const std::string command = "cd '" + folder.path() + "' && PATH='" + bin + "':$PATH '" + tests_folder +
                                "/run.sh' '[02]' " + build + " > out 2>&1";
    CHECK(std::system(command.c_str()) == 0);
    return read_file(folder.path() + "/out");
  };
  const std::string nccl = run("cuda-fp64"), over_mpi = run("cuda-fp64-mpi"), cpu = run("cpu-fp64");
  // A GPU leaves out the tests of the stand-ins, and where there are too few, those that start several ranks.
  CHECK(nccl.find("given [02]~[faults]~[.]~[standin]~[.]~[mpirun]\n") != std::string::npos);
  CHECK(over_mpi.find("given [02]~[faults]~[.]~[standin]~[.]\n") != std::string::npos);
  CHECK(cpu.find("given [02]~[faults]~[.]\n") != std::string::npos);
  CHECK(nccl.find("mpi_tests-02 [02]~[standin]~[.]\n") != std::string::npos);
  for (const std::string ranks : {"1", "2", "3"})
    CHECK(nccl.find("started " + ranks + " ranks") != std::string::npos);
  for (const std::string ranks : {"4", "8", "16"}) {
    CHECK(nccl.find("started " + ranks + " ranks") == std::string::npos);
    CHECK(nccl.find("left out: cuda-fp64 on " + ranks + " ranks; GPUs: 3") != std::string::npos);
    for (const std::string& all : {over_mpi, cpu})
      CHECK(all.find("started " + ranks + " ranks") != std::string::npos);
  }
}

TEST_CASE("a part of the tests that fails, crashes or hangs counts, and is named at the end", "[scripts]") {
  const TemporaryFolder folder;
  write_script(folder.path() + "/bin/mpirun",
               "case $2 in 2) exit 7 ;; esac; echo 1 passed, 0 failed; case $2 in 3) exit 9 ;; esac");
  write_script(folder.path() + "/cpu-fp64/tests-02",
               "case $1 in --list-tags) echo '[faults]' ;; *'[.]') echo 5 passed, 1 failed; exit 1 ;; "
               "*) exec sleep 1000 ;; esac");
  write_script(folder.path() + "/cpu-fp64/mpi_tests-02", "");
  const std::string command = "cd '" + folder.path() + "' && TEST_TIMEOUT=5 PATH='" + folder.path() +
                              "/bin':$PATH '" + tests_folder + "/run.sh' '[02]' cpu-fp64 > out 2>&1";
  CHECK(WEXITSTATUS(std::system(command.c_str())) == 1);
  const std::string out = read_file(folder.path() + "/out"), end = out.substr(out.find("== slowest"));
  INFO(out);
  CHECK(end.find("cpu-fp64, faults: not finished after 5 seconds\n") != std::string::npos);
  CHECK(end.find("cpu-fp64 on 2 ranks: ended with status 7: \n") != std::string::npos);
  CHECK(end.find("cpu-fp64 on 3 ranks: exit status 9\n") != std::string::npos);
  CHECK(end.find("\n10 passed, 4 failed\n") != std::string::npos);  // 1, 3, 4, 8 and 16 ranks pass one each
}

TEST_CASE("what there is to read has ceilings; a closure follows includes and definitions", "[scripts]") {
  const TemporaryFolder folder;
  const auto write = [&](const std::string& path, const std::string& text) {
    std::filesystem::create_directories(std::filesystem::path(folder.path() + "/" + path).parent_path());
    folder.write(path, text);
  };
  const auto size = [&](int status) {
    const std::string command =
        tests_folder + "/size.sh " + folder.path() + " > " + folder.path() + "/out 2>&1";
    CHECK(WEXITSTATUS(std::system(command.c_str())) == status);
    return read_file(folder.path() + "/out");
  };
  for (const std::string stage : {"01", "02", "03", "04", "05", "06", "07"})
    write(stage + "_stage/main.cu", "#include \"model/a.h\"\nint main() { return a(); }\n");
  write("common/model/a.h", "#include \"b.h\"\nint a(int b = c());\n");
  write("common/model/a_1.cu", "1\n2\n3\n4\n");  // main.cu, a.h, a_1.cu: 8 lines, then b.h
  write("common/model/b.h", std::string(1000, '\n'));
  write("common/run/d.cu", "#include \"model/a.h\"\nint a(int b) {\n  return b;\n}\n");
  write("common/cpu/e.cc", "1\n2\n");
  write("tests/f.cc", "1\n2\n3\n");
  const std::string small = size(0);
  INFO(small);
  const auto has = [](const std::string& out, const std::string& row, const std::string& numbers) {
    const size_t at = out.find("\n" + row + " ");
    std::istringstream line(out.substr(at == std::string::npos ? out.size() : at + 1));
    std::string name, lines, ceiling, by_definitions;
    line >> name >> lines >> ceiling >> by_definitions;
    return lines + " " + by_definitions == numbers;
  };
  CHECK(has(small, "closure-01", "1008 1012"));
  CHECK(has(small, "closure-07", "1008 1012"));
  CHECK(has(small, "closure-01-path", "1008 1008"));
  CHECK(small.find("\n11 passed, 0 failed\n") != std::string::npos);
  write("common/model/b.h", std::string(20000, '\n'));
  const std::string large = size(1);
  for (const std::string name : {"closure-01", "closure-01-path", "closure-07", "product"})
    CHECK(large.find("FAILED: " + name + " is above its ceiling\n") != std::string::npos);
  CHECK(large.find("FAILED: stand-ins") == std::string::npos);
  CHECK(large.find("\n2 passed, 9 failed\n") != std::string::npos);
}

TEST_CASE("make installs what is missing, but not with -n and for help, which start nothing", "[scripts]") {
  const TemporaryFolder folder;
  // In a tree of its own, without build/: with this mpirun, make would write another into build/packages/bin.
  const std::string tree = folder.path() + "/tree";
  CHECK(std::system(
            ("mkdir '" + tree + "' && ln -s '" + tests_folder + "/..'/[!b]* '" + tree + "'").c_str()) == 0);
  for (const std::string name : {"apt-get", "sudo", "python3", "mpirun"})
    write_script(folder.path() + "/bin/" + name,
                 "echo " + name + " \"$@\" >> '" + folder.path() + "/started'");
  const auto started = [&](const std::string& goals) {
    std::filesystem::remove(folder.path() + "/started");
    const std::string command =
        "PATH='" + folder.path() +
        "/bin':$PATH CXX=not-there env -u MAKEFLAGS -u MAKELEVEL -u INSTALLED make -C '" + tree +
        "' BACKEND=cpu " + goals + " > '" + folder.path() + "/out' 2>&1";
    CHECK(std::system(command.c_str()) == 0);
    return read_file(folder.path() + "/started");
  };
  for (const std::string goals :
       {"help", "-n help", "-n setup", "-n run", "-n test", "-n test-05", "-n test T=a", "-n mutants",
        "-n mutants-by-chance", "-n sanitize", "-n tour"}) {
    INFO(goals);
    CHECK(started(goals) == "");
  }
  const std::string setup = started("setup");
  INFO(setup);
  CHECK(setup.find(" install ") != std::string::npos);
  CHECK(setup.find(" g++") != std::string::npos);
}

TEST_CASE("a group's hour on a node: what is refused costs a line, and what has run is not run again",
          "[scripts]") {
  const TemporaryFolder folder;
  write_script(folder.path() + "/bin/mpirun",
               "echo \"$*\" >> '" + folder.path() +
                   "/started'\ncase \"$*\" in *'--tp 3'*) echo refused >&2; exit 2 ;; esac\n"
                   "echo '    5  as it should'; echo '{}' > \"${@: -1}\"");
  const auto run = [&](const std::string& layouts, const std::string& before) {
    const std::string command = "cd '" + folder.path() + "' && " + before + " PATH='" + folder.path() +
                                "/bin':$PATH '" + tests_folder + "/tools/hour.sh' a '" +
                                folder.write("layouts", layouts) + "' program 8 --dry-run > out 2>&1";
    const int status = std::system(command.c_str());
    return std::pair{WEXITSTATUS(status), read_file(folder.path() + "/out")};
  };
  const std::string layouts = "# comment\nall --layers 4\nbad --tp 3\ngood --tp 2\n";
  const auto [none, out_of_time] = run(layouts, "HOUR_SECONDS=0");
  CHECK(none == 1);
  CHECK(out_of_time == "bad: no time is left\ngood: no time is left\n0 of 2 layouts have run\n");
  for (int turn = 0; turn < 2; ++turn) {
    const auto [status, out] = run(layouts, "");
    CHECK(status == 0);
    CHECK(out == std::string("bad: refused\ngood: ") + (turn == 0 ? "    5  as it should" : "has run") +
                     "\n1 of 2 layouts have run\n");
  }
  const std::string started = read_file(folder.path() + "/started");
  CHECK(std::count(started.begin(), started.end(), '\n') == 3);  // bad twice
  CHECK(started.find("-n 8 program --layers 4 --tp 2 --steps 5") != std::string::npos);
  CHECK(std::filesystem::exists(folder.path() + "/a/good-modelled.jsonl"));
  CHECK(!std::filesystem::exists(folder.path() + "/a/bad-modelled.jsonl"));
  CHECK(!std::filesystem::exists(folder.path() + "/a/part.jsonl"));
  const auto [invalid, line] = run("../b --tp 2\n", "");
  CHECK(invalid == 2);
  CHECK(std::count(line.begin(), line.end(), '\n') == 1);
}

TEST_CASE("make diff-NN shows what calls NCCL behind a seam, against the nearest main.cu",
          "[scripts][program]") {
  const TemporaryFolder folder;
  const auto printed = [&](const std::string& command, int status) {
    const std::string file = folder.path() + "/out";
    CHECK(WEXITSTATUS(std::system(
              ("cd '" + tests_folder + "/..' && " + command + " > " + file + " 2>&1").c_str())) == status);
    return read_file(file);
  };
  const std::vector<std::vector<std::string>> shown = {
      {"data_.all_reduce(gradients, gradients, size);"},
      {"shard_ranks_.all_gather(units_", "shard_ranks_.reduce_scatter(all, own",
       "replicate_ranks_.all_reduce(own, own"},
      {"Tensor gather(Tensor ", "Tensor begin_sum(Tensor ", "return x; }",
       "tensor_.all_reduce(sum_and_target"},
      {"pipeline.run("},
      {"context_.all_gather(", "context_.receive(", "context_.all_to_all_v(packed"},
      {"expert_ranks_.all_to_all_v(of_permuted", "virtual FeedForwardGradients allocate_gradients"}};
  for (int stage = 2; stage <= 7; ++stage) {
    const std::string name = "0" + std::to_string(stage), main = name + "_*/main.cu";
    const std::string out = printed("python3 tests/diff.py " + name, 0);
    INFO(out);
    CHECK(out.find(", against 01_single_gpu/main.cu: ") != std::string::npos);
    for (const std::string& line : shown[stage - 2]) CHECK(out.find(line) != std::string::npos);
    // 01 is as near as 02, by lines that are added or removed. (Two are the header that all but 01 include.)
    const auto lines = [&](const std::string& base) {
      return std::stoi(
          printed("diff " + base + "_*/main.cu " + main + " | grep '^[<>]' | grep -vc 'run/.*program.h'", 0));
    };
    if (stage > 2) CHECK(lines("01") <= lines("02"));
  }
  const std::string two = printed("python3 tests/diff.py 02 experts", 0);
  CHECK(two.starts_with("== 07_combined_5d/experts.cu, against 02_data_parallel/main.cu: "));
  CHECK(printed("python3 tests/diff.py 08", 2) ==
        "diff: 08 is not valid; expected one of 02 03 04 05 06 07\n");
}

// The library's stand-in: a word's token is its length, and "a" and "b" are all that the vocabulary has.
TEST_CASE("make tokens takes the whole text, and has one line for what is wrong", "[scripts]") {
  const TemporaryFolder folder;
  folder.write("tokenizers.py", R"(import json, types
decoders = models = pre_tokenizers = trainers = None
class Tokenizer:
    def from_file(path):
        tokenizer = Tokenizer()
        tokenizer.most, tokenizer.least = json.load(open(path))
        return tokenizer
    def no_truncation(self): self.most = None
    def no_padding(self): self.least = 0
    def encode(self, text, add_special_tokens):
        if "unknown" in text: raise Exception("no such word")
        ids = [len(word) for word in text.split()][: self.most]
        return types.SimpleNamespace(ids=ids + [0] * (self.least - len(ids)))
    def decode(self, tokens): return "ab"[tokens[0]]
    def get_vocab(self): return {"a": 0, "b": 1}
    def to_str(self, pretty): return "{}"
)");
  const std::string at = folder.path() + "/", pipe = at + "pipe",
                    tokenizer = folder.write("both", "[8, 4096]");
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  const auto run = [&](const std::string& arguments, const std::string& input = "") {
    const std::string command = "printf '" + input + "' | PYTHONDONTWRITEBYTECODE=1 PYTHONPATH='" + at +
                                "' timeout 30 python3 '" + tests_folder + "/../common/tokens.py' " +
                                arguments + " > '" + at + "out' 2>&1";
    const int status = WEXITSTATUS(std::system(command.c_str()));
    return std::to_string(status) + " " + read_file(at + "out");
  };
  const auto tokens = [&](const std::string& text, const std::string& with,
                          const std::string& vocabulary = "9", std::string to = "") {
    return run("'" + text + "' " + vocabulary + " '" + with + "' " + (to.empty() ? at : to));
  };
  std::string words;
  for (int i = 0; i < 1000; ++i) words += "word ";
  CHECK(
      tokens(folder.write("words", words), tokenizer).starts_with("0 " + at + "tokens.bin: 1,000 tokens, "));
  CHECK(std::filesystem::file_size(at + "tokens.bin") == 2000);
  const std::string three = folder.write("three", "one or two");
  CHECK(tokens(three, tokenizer).starts_with("0 " + at + "tokens.bin: 3 tokens, "));
  CHECK(run("--text " + tokenizer, "losses\\n1 0\\n") == "0 b\n");

  const auto is_line = [](const std::string& out, const std::string& begin) {
    INFO(out);
    CHECK(out.starts_with("2 " + begin));
    CHECK(out.find("expected ") != out.npos);
    CHECK(std::count(out.begin(), out.end(), '\n') == 1);
  };
  is_line(tokens(three, "", "²"), "VOCAB: ² is not valid; ");
  is_line(tokens(three, tokenizer, "9", "/proc"), "TO: /proc is not valid; ");
  is_line(tokens(three, pipe), "TOKENIZER: " + pipe + " is not valid; ");
  is_line(tokens(three, three), "TOKENIZER: " + three + " is not valid; ");
  for (const std::string& text :
       {pipe, std::string("/dev/zero"), folder.path(), folder.write("bytes", "\xff")})
    is_line(tokens(text, tokenizer), "TEXT: " + text + " is not valid; ");
  is_line(tokens(folder.write("empty", ""), tokenizer), "TEXT: " + at + "empty has 0 tokens; ");
  is_line(tokens(folder.write("other", "unknown"), tokenizer), "TOKENIZER: " + tokenizer + " is not valid; ");
  is_line(run("--text " + tokenizer, "1 99999999999999999999"), "text: 99999999999999999999 is no token of ");
  is_line(run("--text " + tokenizer, "1 ²"), "text: the last line has no tokens; ");
}

TEST_CASE("the container of an editor in a browser gets what make setup installs", "[scripts]") {
  const auto container =
      nlohmann::json::parse(read_file(tests_folder + "/../.devcontainer/devcontainer.json"));
  CHECK(container.at("image") == "debian:12");
  CHECK(container.at("postCreateCommand").get<std::string>().ends_with("make setup"));
}

TEST_CASE("a run's memory is that of its fullest rank, and its time that of its later steps", "[scripts]") {
  const pentatron::tests::TemporaryFolder folder;
  const auto rank = [](const std::string& weights, const std::string& gradients, const char* libraries) {
    return "{\"measured\": {\"weights\": " + weights + ", \"gradients\": " + gradients +
           ", \"optimizer\": 0, \"activations\": 0, \"communication\": 0}, \"libraries\": {\"estimated\": " +
           libraries + "}}";
  };
  const std::string log =
      folder.write("log.json",
                   "{\"options\": {\"gpu\": \"h100\"}}\n{\"step\": 1, \"seconds\": 9}\n"
                   "{\"step\": 2, \"seconds\": 2}\n{\"step\": 3, \"seconds\": 4}\n"
                   "{\"summary\": {\"modelled\": null, \"memory\": [" +
                       rank("84e9", "0", "0.5e9") + ", " + rank("1e9", "81e9", "2e9") + "]}}\n");
  const auto holds = [&](const std::string& python) {
    return WEXITSTATUS(std::system(("PYTHONPATH='" + tests_folder +
                                    "/../common/report' python3 -c 'import sys, lessons, "
                                    "runs; run = runs.Run(sys.argv[1]); sys.exit(not (" +
                                    python + "))' " + log)
                                       .c_str())) == 0;
  };
  CHECK(
      holds("lessons.value(\"memory\", run) == 84e9"));  // not the 165e9 of the largest weights and gradients
  CHECK(holds("run.memory(\"measured\")[\"gradients\"] == 0"));
  CHECK(holds("lessons.fits(run, \"h100\")"));  // each rank does; the largest of both would not
  CHECK(holds("run.step_seconds == 3"));
  // Two streams may wait at once, 0.9 of 4 seconds, which is no sum.
  CHECK(
      holds("lessons.value(\"waits\", type(\"\", (), {\"modelled\": {\"seconds\": 5, \"compute_seconds\": 3, "
            "\"communication_seconds\": 4, \"hidden\": 0.1}})) == 2"));
}

TEST_CASE("where nothing can be built, make says why in one line", "[scripts]") {
  const TemporaryFolder folder;
  const auto said = [&](const std::string& command) {
    const std::string whole = "PATH='" + folder.path() + "/bin':$PATH env -u MAKEFLAGS -u MAKELEVEL " +
                              command + " 2> '" + folder.path() + "/out'";
    CHECK(WEXITSTATUS(std::system(whole.c_str())) == 2);
    const std::string out = read_file(folder.path() + "/out");
    CHECK(std::count(out.begin(), out.end(), '\n') == 1);
    return out;
  };
  const std::string spaced = folder.path() + "/a b";
  std::filesystem::create_directories(spaced);
  for (const char* part : {"Makefile", "common", "tests"})
    std::filesystem::create_symlink(tests_folder + "/../" + part, spaced + "/" + part);
  CHECK(said("make -C '" + spaced + "' help").find(spaced + ": this path has a space; ") !=
        std::string::npos);
  write_script(folder.path() + "/bin/uname", "echo Darwin");
  CHECK(said("make -C '" + tests_folder + "/..' help").find("builds on Linux; ") != std::string::npos);
}

TEST_CASE("make help has 25 lines of 80 columns, and names all that can be made", "[scripts]") {
  const TemporaryFolder folder;
  const std::string at = "' > '" + folder.path() + "/out'",
                    make = "env -u MAKEFLAGS -u MAKELEVEL make -s -C '" + tests_folder + "/..' help W='";
  REQUIRE(std::system((make + at).c_str()) == 0);
  std::istringstream help(read_file(folder.path() + "/out"));
  std::string all;
  int lines = 0;
  for (std::string line; std::getline(help, line); ++lines) {
    CHECK(line.size() <= 80);
    all += line + " ";
  }
  CHECK(lines <= 25);
  REQUIRE(std::system((make + "all" + at).c_str()) == 0);  // all lines
  std::istringstream whole(read_file(folder.path() + "/out"));
  int targets = 0;
  for (std::string word, name; whole >> word;) {
    if (word != "make" || !(whole >> name) || whole.get() != ' ' || whole.get() != ' ') continue;
    INFO(name);
    CHECK(all.find(" " + name + " ") != std::string::npos);
    ++targets;
  }
  CHECK(targets > 40);
}

TEST_CASE("a table is whole in a pipe, and as wide as a terminal", "[scripts]") {
  const TemporaryFolder folder;
  folder.write("table.py", R"(import lessons
lessons.print_table([["tp2", "2", "", *6 * ["1 GiB"], 30 * "what it shows, "]])
)");
  const auto longest = [&](const std::string& program, const std::string& end) {
    const std::string command = "PYTHONPATH='" + tests_folder + "/../common/report' COLUMNS=80 " + program +
                                "python3 " + folder.path() + "/table.py" + end + " > " + folder.path() +
                                "/out";
    REQUIRE(std::system(command.c_str()) == 0);
    std::istringstream out(read_file(folder.path() + "/out"));
    size_t columns = 0;
    for (std::string line; std::getline(out, line);)
      columns = std::max(columns, line.find_last_not_of("\r ") + 1);
    return columns;
  };
  CHECK(longest("", "") > 400);
  CHECK(longest("script -qc '", "' /dev/null") <= 80);
}

TEST_CASE("a run is compared with one that trains alike", "[scripts]") {
  // The number of the run that one with these options is compared with: 0, another one; 1, itself.
  const auto compared = [](const std::string& options) {
    const std::string command =
        "PYTHONPATH='" + tests_folder +
        "/../common/report' python3 -c 'import json, sys, types, runs; run = lambda words: "
        "types.SimpleNamespace("
        "summary={\"parameters\": 9}, steps=[0], is_dry=False, options=json.loads(words)); "
        "all = [run(words) for words in sys.argv[1:]]; sys.exit(2 + all.index(runs.Run.reference(all[1], "
        "all)))' "
        "'{\"lr\": 0.1, \"tp\": 1}' '" +
        options + "'";
    return WEXITSTATUS(std::system(command.c_str())) - 2;  // a script that fails ends with 1
  };
  CHECK(compared("{\"lr\": 0.1, \"tp\": 2}") == 0);
  CHECK(compared("{\"lr\": 0.2, \"tp\": 1}") == 1);
  CHECK(compared("{\"lr\": 0.1, \"tp\": 1, \"seed\": 5}") == 1);
}

TEST_CASE("make test-questions finds numbers of a note that another command printed", "[scripts]") {
  // Three commands, of which two are turns of a loop, below what the reader sees.
  const auto wrong = [](const std::string& block, const std::string& shown = "echo build/a …") {
    const std::string command =
        "PYTHONPATH='" + tests_folder +
        "' python3 -c 'import questions, sys; sys.exit(2 * bool(questions.unproven(*sys.argv[1:], [], "
        "False)))' "
        "'$ echo build/a 1.2046 s, 1 GiB\n$ for n in 55.6 55.7; do echo $n MiB, 300 ms; done' '" +
        block + "' '\n\n    " + shown + "\n\n'";
    return WEXITSTATUS(std::system(command.c_str()));  // a script that fails ends with 1
  };
  CHECK(wrong("| | 1.205 s |\n| a | 1 GiB | 55.6 | 300 |\n| b | 55.7 | 0.30 |") == 0);
  CHECK(wrong("It takes 1.205 s; then 55.6 MiB and 55.7 MiB, in 300 ms each.") == 0);
  CHECK(wrong("It takes 1.206 s; then 55.6 MiB and 55.7 MiB.") == 2);   // another number
  CHECK(wrong("It takes 1.205 ms; then 55.6 MiB and 55.7 MiB.") == 2);  // another unit
  CHECK(wrong("It takes 1.205 s; then 55.6 MiB and 55.6 MiB.") == 2);   // of the turn before
  CHECK(wrong("It takes 1.205 s; then 55.7 MiB and 55.6 MiB.") == 2);   // in another order
  CHECK(wrong("It takes 1.205 s; then 55.6 MiB.") == 2);                // a command for nothing
  CHECK(wrong("It takes 1.205 s; then 55.6 MiB and 55.7 MiB.", "echo build/b …") == 2);  // seen: another
}
