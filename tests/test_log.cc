// The step line, the memory table, and the JSON log, which is read back with a JSON parser.
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "catch.h"
#include "files.h"
#include "options/options.h"
#include "run/log.h"

using pentatron::RunLog;
using pentatron::StepRecord;
using pentatron::Summary;
using pentatron::tests::TemporaryFolder;

namespace {

constexpr double third = 1.0 / 3;
constexpr size_t mebibyte = 1 << 20;

StepRecord record(int64_t step) {
  return {.step = step,
          .loss = 5 + third,
          .grad_norm = third,
          .lr = 3e-3,
          .tokens = 4096,
          .seconds = 0.1,
          .memory_peak = 12 * mebibyte,
          .comm_bytes = 1000};
}

Summary two_ranks() {
  return {.layout = {{"dp", 2}, {"tp", 1}},
          .parameters = 459328,
          .final_loss = third,
          .seconds = 12.5,
          .ranks = {{{{{90, 190, 300, 400, 500}, {10, 10, 0, 0, 0}}, {101, 201, 301, 401, 501}, 600, 601},
                     {{"all_reduce", {3, 300}}, {"all_gather", {1, 7}}}},
                    {{{{110, 190, 300, 400, 500}, {}}, {111, 191, 301, 401, 501}}, {}, {}, 1}}};
}

nlohmann::json by_purpose(const std::vector<int>& bytes) {
  return {{"weights", bytes[0]},
          {"gradients", bytes[1]},
          {"optimizer", bytes[2]},
          {"activations", bytes[3]},
          {"communication", bytes[4]}};
}

std::vector<nlohmann::json> parsed_lines(const std::string& path) {
  std::vector<nlohmann::json> lines;
  std::istringstream text(pentatron::tests::read_file(path));
  for (std::string line; std::getline(text, line);) lines.push_back(nlohmann::json::parse(line));
  return lines;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

TEST_CASE("log: each step is a JSON object with every digit", "[log]") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/log.json";
  std::ostringstream out;
  RunLog log(out, {path, 100, 10, 1, 0, 1});
  log.step(record(1));
  log.step(record(2));
  const std::vector<nlohmann::json> lines =
      parsed_lines(path);  // while the log is open: each line is flushed
  REQUIRE(lines.size() == 2);
  CHECK(lines[0].size() == 7);
  CHECK(lines[0]["step"] == 1);
  CHECK(lines[1]["step"] == 2);
  CHECK(lines[0]["loss"].get<double>() == 5 + third);
  CHECK(lines[0]["grad_norm"].get<double>() == third);
  CHECK(lines[0]["lr"].get<double>() == 3e-3);
  CHECK(lines[0]["tokens"] == 4096);
  CHECK(lines[0]["seconds"].get<double>() == 0.1);
  CHECK(lines[0]["comm_bytes"] == 1000);
  CHECK(pentatron::tests::read_file(path).find("\"loss\":5.333333333333333") != std::string::npos);
  CHECK(pentatron::tests::read_file(path).find("\"grad_norm\":0.3333333333333333") != std::string::npos);
}

TEST_CASE("log: the first line has the options", "[log]") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/log.json";
  std::ostringstream out;
  RunLog(out, {path, 1, 1, 1, 0, 8}).begin(R"({"lr": 0.003, "gpu": "h100"})", "bf16");
  const nlohmann::json options = {{"lr", 0.003}, {"gpu", "h100"}};
  const nlohmann::json expected = {{"options", options}, {"precision", "bf16"}, {"ranks", 8}};
  CHECK(parsed_lines(path) == std::vector{expected});
  CHECK(out.str().empty());
}

TEST_CASE("log: a loss that is not a number is still JSON", "[log]") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/log.json";
  std::ostringstream out;
  RunLog log(out, {path, 1, 1, 1, 0, 1});
  StepRecord diverged = record(1);
  diverged.loss = std::numeric_limits<double>::quiet_NaN();
  diverged.grad_norm = std::numeric_limits<double>::infinity();
  log.step(diverged);
  CHECK(parsed_lines(path).at(0)["loss"].is_null());
  CHECK(parsed_lines(path).at(0)["grad_norm"].is_null());
}

TEST_CASE("log: the last line is the summary", "[log]") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/log.json";
  std::ostringstream out;
  RunLog log(out, {path, 1, 1, 1, 0, 1});
  log.summary(two_ranks());
  const nlohmann::json expected = {{"ranks", 2},
                                   {"layout", {{"dp", 2}, {"tp", 1}}},
                                   {"parameters", 459328},
                                   {"final_loss", third},
                                   {"seconds", 12.5},
                                   {"modelled", nullptr},
                                   {"streams", nlohmann::json::object()},
                                   {"memory",
                                    {{{"rank", 0},
                                      {"predicted", by_purpose({100, 200, 300, 400, 500})},
                                      {"libraries", {{"estimated", 600}, {"measured", 601}}},
                                      {"of_which_unit_buffers", by_purpose({10, 10, 0, 0, 0})},
                                      {"measured", by_purpose({101, 201, 301, 401, 501})}},
                                     {{"rank", 1},
                                      {"predicted", by_purpose({110, 190, 300, 400, 500})},
                                      {"libraries", {{"estimated", 0}, {"measured", 0}}},
                                      {"of_which_unit_buffers", by_purpose({0, 0, 0, 0, 0})},
                                      {"measured", by_purpose({111, 191, 301, 401, 501})}}}},
                                   {"communication",
                                    {{{"rank", 0},
                                      {"all_reduce", {{"calls", 3}, {"elements", 300}}},
                                      {"all_gather", {{"calls", 1}, {"elements", 7}}}},
                                     {{"rank", 1}}}}};
  const std::vector<nlohmann::json> lines = parsed_lines(path);
  REQUIRE(lines.size() == 1);
  CHECK(lines[0].size() == 1);
  CHECK(lines[0]["summary"] == expected);
}

TEST_CASE("log: an earlier log is replaced, and one that cannot be written is refused", "[log]") {
  const TemporaryFolder folder;
  const std::string path = folder.write("log.json", "an earlier run\n");
  std::ostringstream out;
  RunLog(out, {path, 1, 1, 1, 0, 1}).step(record(1));
  CHECK(parsed_lines(path).size() == 1);
  CHECK_THROWS_AS(RunLog(out, {folder.path(), 1, 1, 1, 0, 1}), pentatron::UsageError);
}

TEST_CASE("log: step lines", "[log]") {
  std::ostringstream out;
  RunLog log(out, {"", 25, 10, 1e6, 5e11, 2});
  for (int step = 1; step <= 25; ++step) {
    StepRecord slow = record(step);
    slow.seconds = step == 7 ? 10.0 : 0.01;
    log.step(slow);
  }
  const std::vector<std::string> lines = split(out.str());
  REQUIRE(lines.size() == 5);  // the columns' names, the first step, every tenth, and the last
  CHECK(lines[0] ==
        "    step     loss  grad norm         lr  step time  tokens/s/GPU      MFU      memory       sent");
  CHECK(lines[1] ==
        "       1   5.3333     0.3333   3.00e-03      10 ms        204.8k   41.0 %    12.0 MiB     1000 B");
  // 9 steps since the first took 10.08 s, the slow one included
  CHECK(lines[2] ==
        "      10   5.3333     0.3333   3.00e-03     1.12 s         1.83k    0.4 %    12.0 MiB     1000 B");
  CHECK(lines[3].substr(0, 8) == "      20");
  CHECK(lines[4].substr(0, 8) == "      25");
}

TEST_CASE("log: a run that diverges keeps its columns apart, and a line says so", "[log]") {
  std::ostringstream out;
  RunLog log(out, {"", 2, 1, 1e6, 0, 1});
  log.step(record(1));
  StepRecord last = record(2);
  last.loss = 28832.8095;
  last.grad_norm = 25535365336.5373;
  log.step(last);
  CHECK(split(out.str())[2] ==
        "       2  2.9e+04    2.6e+10   3.00e-03     100 ms         41.0k        -    12.0 MiB     1000 B");
  Summary summary = two_ranks();
  const std::string words = "\nThe run has diverged: its loss was 5.333 in the first step and ";
  for (const double loss : {10.6, 28832.8095}) {
    summary.final_loss = loss;
    out.str("");
    log.summary(summary);
    CHECK((out.str().find(words) != std::string::npos) == (loss > 2 * 5.34));
  }
  CHECK(out.str().ends_with(words + "2.883e+04 in the last. A smaller --lr may help.\n"));
}

TEST_CASE("log: without a known peak there is no MFU", "[log]") {
  std::ostringstream out;
  RunLog(out, {"", 1, 1, 1e6, 0, 1}).step(record(1));
  CHECK(split(out.str())[1] ==
        "       1   5.3333     0.3333   3.00e-03     100 ms         41.0k        -    12.0 MiB     1000 B");
}

TEST_CASE("log: modelled time", "[log]") {
  const TemporaryFolder folder;
  const std::string path = folder.path() + "/log.json";
  std::ostringstream out;
  RunLog log(out, {path, 2, 1, 1e6, 4096e6, 2});
  StepRecord modelled = record(1);
  modelled.modelled = pentatron::trace::Overlap{2, 1, {{"data", {0.5, 0.25}}, {"tensor", {0.5, 0.5}}}};
  log.step(modelled);
  Summary summary = two_ranks();  // whose reports leave out the first step where there are more
  summary.ranks[0].overlap = {4, 3, {{"data", {2, 1}}}};
  summary.ranks[1].overlap = {4, 1, {{"data", {2, 2}}}};
  std::ostringstream one;
  RunLog log_of_one(one, {"", 1, 1, 1e6, 4096e6, 2});
  log_of_one.step(modelled);
  log_of_one.summary(summary);
  CHECK(one.str().find(R"(
Modelled time of the first step, 4 s, a mean of 2 ranks;
a later one may also wait for what it leaves running (--steps 2)
)") != std::string::npos);
  CHECK(one.str().find("\nOn this machine the steps took 12.5 s, 328 tokens/s.\n") != std::string::npos);
  const nlohmann::json json = parsed_lines(path).at(0);
  CHECK(json["seconds"].get<double>() == 0.1);  // on the wall
  CHECK(json["modelled"]["seconds"].get<double>() == 2);
  CHECK(json["modelled"]["compute_seconds"].get<double>() == 1);
  CHECK(json["modelled"]["communication_seconds"].get<double>() == 1);
  CHECK(json["modelled"]["hidden"].get<double>() == 0.75);
  CHECK(json["modelled"]["mfu"].get<double>() == 0.25);
  StepRecord dry = modelled;
  dry.step = 2;
  dry.computed = false;
  log.step(dry);
  const std::vector<std::string> lines = split(out.str());
  CHECK(lines[1] ==
        "       1   5.3333     0.3333   3.00e-03        2 s         1.02k   25.0 %    12.0 MiB     1000 B");
  CHECK(lines[2] ==
        "       2        -          -   3.00e-03        2 s         1.02k   25.0 %    12.0 MiB     1000 B");

  out.str("");
  log.summary(summary);
  CHECK(out.str().find(R"(
Modelled time of a step from the second on, 4 s, a mean of 2 ranks
                          time   of the step        hidden
         compute           2 s        50.0 %              
    compute idle           2 s        50.0 %              
            data           2 s        50.0 %        75.0 %
)") != std::string::npos);
  CHECK(out.str().find("On this machine") == std::string::npos);  // it computed nothing
  const nlohmann::json last = parsed_lines(path).at(2)["summary"];
  CHECK(last["modelled"]["seconds"] == 4);
  CHECK(last["modelled"]["mfu"].get<double>() == 0.125);
  CHECK(last["modelled"]["hidden"].get<double>() == 0.75);
  CHECK(last["streams"]["data"] == nlohmann::json{{"seconds", 2}, {"hidden", 0.75}});
}

TEST_CASE("log: communication that is hidden, and a picture of it", "[log]") {
  using pentatron::trace::Interval;
  const auto at = [](const char* stream, double begin, double end, char pass = 'f') {
    Interval i{{}, "", stream, begin, end};
    i.pass = pass;
    return i;
  };
  const auto share = [](const std::vector<Interval>& intervals) {
    const auto all = pentatron::trace::overlap_of(intervals, 0, 10).all_communication();
    return all.seconds > 0 ? all.hidden / all.seconds : 0;
  };
  CHECK(share({}) == 0);
  CHECK(share({at("compute", 0, 1), at("data", 1, 2)}) == 0);
  CHECK(share({at("compute", 0, 1), at("data", 0.5, 1.5)}) == Approx(0.5));
  CHECK(share({at("compute", 0, 3), at("data", 1, 2)}) == Approx(1));
  CHECK(share({at("compute", 0, 1), at("compute", 2, 3), at("data", 0, 4)}) == Approx(0.5));
  CHECK(share({at("data", 0, 4), at("data", 1, 2), at("compute", 0, 1)}) == Approx(0.25));
  // Only what lies in the step counts.
  CHECK(pentatron::trace::overlap_of({at("data", 8, 12)}, 0, 10).all_communication().seconds == Approx(2));

  // Compute is first, whatever the other streams are called.
  CHECK(
      pentatron::trace::draw_timeline({at("compute", 0, 3), at("compute", 3, 6, 'b'),
                                       at("compute", 6, 8, 'w'), at("data", 4, 10), at("activations", 0, 2)},
                                      0, 10, 10) ==
      "compute           fffbbbww..\nactivations       ##........\ndata              ....######\n");

  const auto names = [](int stands_for) {
    return nlohmann::json::parse(pentatron::trace::chrome_events({}, 8, stands_for)).back()["args"]["name"];
  };
  CHECK(names(1) == "rank 8");
  CHECK(names(3) == "rank 8 and 2 like it");  // of a folded world
}

TEST_CASE("log: a table of kernels says their shares, and that of products", "[log]") {
  std::ostringstream out;
  pentatron::trace::print_profile(out, {{{}, "gemm 64", "compute", 1, 4},
                                        {{}, "norm", "compute", 4, 4.75},
                                        {{}, "gemm 8", "compute", 5, 5.25},
                                        {{}, "gemm 64", "compute", 6, 7}});
  CHECK(out.str() == R"(
Time by kernel, in the last step         calls      all, ms    each, us   share
gemm 64                                      2     4000.00  2000000.00    80.0 %
norm                                         1      750.00   750000.00    15.0 %
gemm 8                                       1      250.00   250000.00     5.0 %
Share of the products (cuBLAS): 85.0 %
)");
}

TEST_CASE("log: the memory table", "[log]") {
  std::ostringstream one;
  pentatron::print_memory_table(one, {{{{{2 * mebibyte, 4 * mebibyte, 8 * mebibyte, 1000 * mebibyte, 0}, {}},
                                        {2 * mebibyte, 4 * mebibyte, 8 * mebibyte, 1010 * mebibyte, 0},
                                        512 * mebibyte},
                                       {}}});
  CHECK(one.str() == R"(
Device memory at the peak
                     predicted      measured    difference
         weights      2.00 MiB      2.00 MiB       +0.00 %
       gradients      4.00 MiB      4.00 MiB       +0.00 %
       optimizer      8.00 MiB      8.00 MiB       +0.00 %
     activations    1000.0 MiB    1010.0 MiB       +1.00 %
   communication           0 B           0 B             -
             sum    1014.0 MiB      1.00 GiB       +0.99 %
      CUDA, NCCL     512.0 MiB             -             -
)");

  std::ostringstream two;
  Summary summary = two_ranks();
  summary.ranks[1].stands_for = 3;            // of a folded world
  summary.ranks[1].memory.measured[0] = 112;  // the fullest, though rank 0 has more gradients
  pentatron::print_memory_table(two, summary.ranks);
  const std::vector<std::string> lines = split(two.str());
  CHECK(lines[1] == "Device memory at the peak of rank 1, the fullest of 4 ranks");
  CHECK(lines[3] == "         weights         110 B         112 B       +1.82 %");
  CHECK(lines[4] == "       gradients         190 B         191 B       +0.53 %");
  CHECK(lines[8] == "             sum      1.46 KiB      1.47 KiB       +0.40 %");
  CHECK(lines.size() == 9);  // it has no libraries
}

TEST_CASE("log: a text for a terminal", "[log]") {
  CHECK(pentatron::printable("a \xc3\xa9\n\tb") == "a \xc3\xa9\n\tb");
  CHECK(pentatron::printable("a\x1b[31m\x7f\r" + std::string(1, '\0')) == "a?[31m???");
  CHECK(pentatron::printable("a\xc3"
                             "b\xff") ==
        "a\xef\xbf\xbd"
        "b\xef\xbf\xbd");
}

TEST_CASE("log: quantities for people", "[log]") {
  CHECK(pentatron::human_bytes(0) == "0 B");
  CHECK(pentatron::human_bytes(1023) == "1023 B");
  CHECK(pentatron::human_bytes(1024) == "1.00 KiB");
  CHECK(pentatron::human_bytes(1536) == "1.50 KiB");
  CHECK(pentatron::human_bytes(123.4 * 1024 * 1024) == "123.4 MiB");
  CHECK(pentatron::human_bytes(80.0 * 1024 * 1024 * 1024) == "80.0 GiB");
  CHECK(pentatron::human_count(999) == "999");
  CHECK(pentatron::human_count(41234) == "41.2k");
  CHECK(pentatron::human_count(999'960) == "1.00M");
  CHECK(pentatron::human_count(2.5e12) == "2.50T");
}
