// The command line: defaults, presets, and a line for every value that makes no sense.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include "../07_combined_5d/options.h"
#include "catch.h"
#include "files.h"
#include "run/parse_options.h"

using namespace pentatron;
using pentatron::tests::TemporaryFolder;

namespace {

template <class ProgramOptions = Options>
ProgramOptions parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "program");
  return pentatron::parse_options<ProgramOptions>(static_cast<int>(arguments.size()), arguments.data(),
                                                  "A description.");
}

// The options of a technique alone.
template <class TechniqueOptions>
TechniqueOptions technique(const std::vector<const char*>& arguments) {
  return parse<OptionsWith<TechniqueOptions>>(arguments).technique;
}

// What is said about the arguments, or "" if they are accepted.
std::string complaint(const std::vector<const char*>& arguments) {
  try {
    parse(arguments);
  } catch (const pentatron::UsageError& error) {
    return error.what();
  }
  return "";
}

template <class ProgramOptions = Options>
std::string help_of(const char* option = "--help") {
  try {
    parse<ProgramOptions>({option});
  } catch (const pentatron::HelpRequest& request) {
    return request.what();
  }
  return "";
}

}  // namespace

TEST_CASE("options: the defaults are the tiny model", "[options]") {
  const Options options = parse({});
  CHECK(options.model.name == "tiny");
  CHECK(options.model.layers == 8);
  CHECK(options.model.d_model == 64);
  CHECK(options.model.heads == 8);
  CHECK(options.model.kv_heads == 8);
  CHECK(options.model.head_size() == 8);
  CHECK(options.model.d_ff == 192);
  CHECK(options.model.vocab_size == 256);
  CHECK(options.sequence_length == 128);
  CHECK(std::filesystem::path(options.data).is_absolute());
  CHECK(std::filesystem::path(options.data).filename() == "corpus.txt");
  CHECK(options.recompute == pentatron::Recompute::none);
  CHECK(options.optimizer == pentatron::OptimizerKind::adamw);
}

TEST_CASE("options: presets have the published number of parameters", "[options]") {
  // Embedding and norms, and a head of its own, which smollm-* and llama-3.2-1b as published share with the
  // embedding.
  const auto parameters = [](const char* name) {
    const pentatron::ModelConfig m = parse({"--model", name}).model;
    const int64_t d = m.d_model, attention = 2 * d * d + 2 * d * m.kv_heads * m.head_size();
    return 2 * int64_t{m.vocab_size} * d + m.layers * (attention + 3 * d * m.d_ff + 2 * d) + d;
  };
  CHECK(parameters("smollm-135m") == 134'515'008 + 49152 * 576);
  CHECK(parameters("smollm-1.7b") == 1'711'376'384 + 49152 * 2048);
  CHECK(parameters("llama-3.2-1b") == 1'235'814'400 + 128256 * 2048);
  CHECK(parameters("llama-2-7b") == 6'738'415'616);
  CHECK(parameters("llama-3.1-8b") == 8'030'261'248);
  CHECK(parameters("llama-3.1-70b") == 70'553'706'496);
  CHECK(parameters("llama-3.1-405b") == 405'853'388'800);
}

TEST_CASE("options: Llama 3.1 and 3.2 have their published rotary scaling", "[options]") {
  CHECK(parse({"--model", "llama-2-7b"}).model.rope_scaling == pentatron::RopeScaling{});
  CHECK(parse({"--model", "llama-3.2-1b"}).model.rope_scaling == pentatron::RopeScaling{32, 1, 4, 8192});
  for (const char* name : {"llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"})
    CHECK(parse({"--model", name}).model.rope_scaling == pentatron::RopeScaling{8, 1, 4, 8192});
}

TEST_CASE("options: a size overrides the preset's, wherever it stands", "[options]") {
  for (const Options& options :
       {parse({"--model", "llama-2-7b", "--layers", "4"}), parse({"--layers=4", "--model=llama-2-7b"})}) {
    CHECK(options.model.layers == 4);
    CHECK(options.model.d_model == 4096);
  }
}

TEST_CASE("options: every value arrives", "[options]") {
  const Options options = parse({"--data",
                                 "d",
                                 "--seq-len",
                                 "9",
                                 "--micro-batch-size",
                                 "2",
                                 "--global-batch-size",
                                 "6",
                                 "--steps",
                                 "7",
                                 "--seed",
                                 "18446744073709551615",
                                 "--optimizer",
                                 "sgd",
                                 "--lr",
                                 "0.5",
                                 "--warmup-steps",
                                 "3",
                                 "--beta1",
                                 "0.8",
                                 "--beta2",
                                 "0.7",
                                 "--weight-decay",
                                 "0.3",
                                 "--grad-clip",
                                 "0",
                                 "--recompute",
                                 "selective",
                                 "--attention",
                                 "tiled",
                                 "--log-json",
                                 "/dev/null",
                                 "--trace",
                                 "/dev/full",
                                 "--log-every",
                                 "5",
                                 "--sample",
                                 "11"});
  CHECK(options.data == "d");
  CHECK(options.sequence_length == 9);
  CHECK(options.micro_batch_size == 2);
  CHECK(options.global_batch_size == 6);
  CHECK(options.steps == 7);
  CHECK(options.seed == UINT64_MAX);
  CHECK(options.optimizer == pentatron::OptimizerKind::sgd);
  CHECK(options.lr == 0.5);
  CHECK(options.warmup_steps == 3);
  CHECK(options.beta1 == 0.8);
  CHECK(options.beta2 == 0.7);
  CHECK(options.weight_decay == 0.3);
  CHECK(options.grad_clip == 0);
  CHECK(options.recompute == pentatron::Recompute::selective);
  CHECK(options.attention == pentatron::Attention::tiled);
  CHECK(options.log_json == "/dev/null");
  CHECK(options.trace == "/dev/full");
  CHECK(options.log_every == 5);
  CHECK(options.sample == 11);
  CHECK(parse({"--steps", "5", "--steps", "6"}).steps == 6);
}

// --help shows the value that a run takes where nothing is given, so both can only be wrong together. Here
// they stand once more. Empty: an option has no default, or other words for it.
TEST_CASE("options: the default of each, which --help prints, is what a run takes", "[options]") {
  const auto expected = nlohmann::ordered_json::parse(R"({
    "save": "", "save-every": 0, "resume": false, "load": "", "load-weights": "",
    "model": "tiny", "layers": 8, "d-model": 64, "heads": 8, "kv-heads": 8, "d-ff": 192, "vocab-size": 256,
    "data": "", "seq-len": 128, "micro-batch-size": 4, "global-batch-size": 32, "steps": 200, "seed": 1,
    "optimizer": "adamw", "lr": 0.003, "warmup-steps": 10, "beta1": 0.9, "beta2": 0.95, "weight-decay": 0.1,
    "grad-clip": 1.0, "loss-scale": 65536.0, "recompute": "none", "attention": "naive",
    "log-json": "", "trace": "", "profile": false, "log-every": 10, "sample": 0, "gpu": "", "dry-run": false})");
  auto taken = nlohmann::ordered_json::parse(parse({}).as_json);
  taken["data"] = "", taken["gpu"] = "";
  CHECK(taken.dump(1) == expected.dump(1));
  const std::string text = help_of();
  for (const auto& [name, value] : expected.items()) {
    CAPTURE(name);
    const size_t begin = text.find("  --" + name + " "), next = text.find("\n  --", begin + 1);
    REQUIRE(begin != text.npos);
    const std::string lines = text.substr(begin, next - begin);
    const size_t bracket = lines.rfind('[');
    if (value.is_boolean() || value == "") continue;
    REQUIRE(bracket != lines.npos);
    const std::string shown = lines.substr(bracket + 1, lines.find(']', bracket) - bracket - 1);
    CHECK((value.is_string() ? value == shown : value == nlohmann::ordered_json::parse(shown)));
  }
}

TEST_CASE("options: --load and --resume restore what a run trained with; what is given wins", "[options]") {
  // What was saved, and what is given later.
  const std::vector<std::array<std::string, 3>> restored = {
      {"data", "saved.txt", "given.txt"}, {"seq-len", "32", "64"},     {"micro-batch-size", "2", "8"},
      {"global-batch-size", "16", "48"},  {"steps", "7", "9"},         {"seed", "5", "6"},
      {"optimizer", "sgd", "adamw"},      {"lr", "0.25", "0.5"},       {"warmup-steps", "3", "4"},
      {"beta1", "0.25", "0.5"},           {"beta2", "0.25", "0.5"},    {"weight-decay", "0.25", "0.5"},
      {"grad-clip", "2.5", "3.5"},        {"aux-loss", "0.25", "0.5"}, {"balance", "none", "bias"}};
  const auto text_of = [](const nlohmann::json& value) {  // 2, also of 2.0
    if (value.is_number()) return text(value.get<double>());
    return value.is_string() ? value.get<std::string>() : value.dump();
  };
  const auto options_of = [](const std::vector<const char*>& arguments) {
    return nlohmann::json::parse(parse<CombinedOptions>(arguments).as_json);
  };
  const TemporaryFolder folder;
  const nlohmann::json plain = options_of({});
  nlohmann::json options = plain;  // then each is another than the default
  for (auto& [name, value] : options.items()) {
    if (value.is_boolean())
      value = !value.get<bool>();
    else if (value.is_number())
      value = value.get<double>() + 1;
    else
      value = "another";
  }
  for (const auto& [name, saved, given] : restored) {
    REQUIRE(text_of(plain.at(name)) != saved);
    options[name] = saved;
  }
  const nlohmann::json state = {
      {"step", 1}, {"precision", "fp32"}, {"optimizer", "sgd"}, {"options", options}};
  const std::string step = folder.path() + "/step_000001";
  std::filesystem::create_directory(step);
  folder.write("step_000001/trainer_state.json", state.dump());
  folder.write("step_000001/config.json", model_config_text(parse({}).model, 128, "float32"));
  folder.write("latest", "step_000001\n");
  for (const std::vector<const char*>& load : {std::vector<const char*>{"--load", folder.path().c_str()},
                                               {"--resume", "--save", folder.path().c_str()}}) {
    nlohmann::json expected = plain;  // what does not change the training is not restored
    for (const char* name : {"load", "save"}) expected[name] = folder.path();
    expected["model"] = step;
    expected["resume"] = load.size() == 3;
    if (load.size() == 2) expected["save"] = "";
    const auto check = [&](std::vector<const char*> arguments, const std::string& changed) {
      CAPTURE(changed);
      arguments.insert(arguments.begin(), load.begin(), load.end());
      const nlohmann::json taken = options_of(arguments);
      for (const auto& [name, value] : expected.items()) {
        CAPTURE(name);
        CHECK(text_of(taken.at(name)) == text_of(value));
      }
      CHECK(parse<CombinedOptions>(arguments).changed == changed);
    };
    for (const auto& [name, saved, given] : restored) expected[name] = saved;
    check({}, "");
    for (const auto& [name, saved, given] : restored) {
      expected[name] = given;
      check({("--" + name).c_str(), given.c_str()}, "; --" + name + " is " + given + " and was " + saved);
      expected[name] = saved;
    }
  }
}

TEST_CASE("options: as JSON, with the values that follow from others", "[options]") {
  const auto json = nlohmann::json::parse(
      parse({"--model", "smollm-135m", "--layers", "3", "--recompute", "full", "--dry-run"}).as_json);
  CHECK(json["model"] == "smollm-135m");
  CHECK(json["layers"] == 3);
  CHECK(json["d-model"] == 576);
  CHECK(json["lr"].get<double>() == 3e-4);
  CHECK(json["recompute"] == "full");
  CHECK(json["dry-run"] == true);
  CHECK(json["profile"] == false);
  CHECK(json["trace"] == "");
  CHECK(!json.contains("zero-stage"));
}

TEST_CASE("options: values that make no sense", "[options]") {
  const std::string layers = " is not valid; expected a whole number from 1 to 1000";
  CHECK(complaint({"--layers", "-3"}) == "--layers: -3" + layers);
  CHECK(complaint({"--layers", "0"}) == "--layers: 0" + layers);
  CHECK(complaint({"--layers", "1001"}) == "--layers: 1001" + layers);
  CHECK(complaint({"--layers", "99999999999999999999"}) == "--layers: 99999999999999999999" + layers);
  CHECK(complaint({"--layers", "3x"}) == "--layers: 3x" + layers);
  CHECK(complaint({"--layers", "3.0"}) == "--layers: 3.0" + layers);
  CHECK(complaint({"--layers", "--steps", "5"}) == "--layers: --steps" + layers);
  CHECK(complaint({"--layers", "a\nb"}) == "--layers: a?b" + layers);

  const std::string lr = " is not valid; expected a number from 0 to 1000";
  for (const char* value : {"-1e-3", "nan", "inf", "1e400", "fast", "0.1.2"}) {
    CHECK(complaint({"--lr", value}) == std::string("--lr: ") + value + lr);
  }
  CHECK(complaint({"--seed", "-1"}) ==
        "--seed: -1 is not valid; expected a whole number from 0 to 18446744073709551615");
  CHECK(complaint({"--model", "gpt-9"}) ==
        "--model: gpt-9 is not valid; expected one of tiny, smollm-135m, smollm-1.7b, llama-3.2-1b, "
        "llama-2-7b, "
        "llama-3.1-8b, llama-3.1-70b, llama-3.1-405b");
  CHECK(complaint({"--recompute", "some"}) ==
        "--recompute: some is not valid; expected one of none, selective, full");
  CHECK(complaint({"--attention", "some"}) ==
        "--attention: some is not valid; expected one of naive, tiled, tensor-core");
  CHECK(complaint({"--optimizer", ""}) == "--optimizer: \"\" is not valid; expected one of adamw, sgd");
}

TEST_CASE("options: arguments that are no options", "[options]") {
  const std::string unknown = ": unknown option; expected one of those that --help lists";
  CHECK(complaint({"--layer", "3"}) == "--layer" + unknown);
  CHECK(complaint({"corpus.txt"}) == "corpus.txt" + unknown);
  CHECK(complaint({"-l", "3"}) == "-l" + unknown);
  CHECK(complaint({"--layers", "3", "4"}) == "4" + unknown);
  CHECK(complaint({"--steps"}) == "--steps: value missing; expected one after it");
  CHECK(complaint({"--dry-run=false"}) == "--dry-run: false is not valid; expected no value");
  CHECK(complaint({"--dry-run", "--dry-run"}) == "");
}

TEST_CASE("options: values that do not go together", "[options]") {
  CHECK(complaint({"--heads", "6"}) == "--heads: 6 is not valid; expected a divisor of --d-model (64)");
  CHECK(complaint({"--heads", "64"}) ==
        "--heads: 64 is not valid; expected an even head size; --d-model / --heads is 1");
  // Our kernels on tensor cores have two sizes; a dry run that models others' has all.
  std::vector<const char*> of_96 = {"--d-model",   "768",         "--heads",  "8",
                                    "--attention", "tensor-core", "--dry-run"};
  CHECK(complaint(of_96).ends_with("where --d-model / --heads (96) is neither 64 nor 128"));
  of_96.insert(of_96.end(), {"--gpu", "h100-flash"});
  CHECK(complaint(of_96).empty());
  CHECK(complaint({"--kv-heads", "3"}) == "--kv-heads: 3 is not valid; expected a divisor of --heads (8)");
  CHECK(complaint({"--heads", "4"}) == "--kv-heads: 8 is not valid; expected a divisor of --heads (4)");
  const std::vector<const char*> large_head = {"--d-model", "516", "--heads", "2", "--kv-heads", "1"};
  std::vector<const char*> tiled = large_head;
  tiled.insert(tiled.end(), {"--attention", "tiled"});
  CHECK(complaint(large_head) == "");
  CHECK(complaint(tiled) ==
        "--attention: tiled is not valid; expected naive where --d-model / --heads (258) is more than 256");
  CHECK(complaint({"--attention", "tensor-core"}) ==
        "--attention: tensor-core is not valid; expected naive or tiled where --d-model / --heads (8) is "
        "neither "
        "64 nor 128");
  CHECK(complaint({"--heads", "1", "--kv-heads", "1", "--attention", "tensor-core"}) == "");
  CHECK(complaint({"--global-batch-size", "10"}) ==
        "--global-batch-size: 10 is not valid; expected a multiple of --micro-batch-size (4)");
  CHECK(complaint({"--micro-batch-size", "17", "--global-batch-size", "17", "--seq-len", "1048576"}) ==
        "--micro-batch-size: 17 is not valid; expected at most 16 with --seq-len 1048576");
}

TEST_CASE("options: output files are checked, and left alone", "[options]") {
  const TemporaryFolder folder;
  const std::string log = folder.write("log.json", "an earlier run"), fresh = folder.path() + "/fresh";
  const std::string not_writable = " is not valid; expected a file that can be written";
  for (const char* option : {"--log-json", "--trace"}) {
    const std::string missing = folder.path() + "/none/file", inside_file = log + "/file";
    for (const std::string& path : {missing, inside_file, folder.path()}) {
      CHECK(complaint({option, path.c_str()}) == option + (": " + path) + not_writable);
    }
    CHECK(complaint({option, log.c_str(), "--data", log.c_str()}) ==
          option + (": " + log) + " is not valid; expected another file than that of --data");
    CHECK(complaint({option, log.c_str()}) == "");
    CHECK(complaint({option, fresh.c_str()}) == "");
  }
  const std::string roundabout = folder.path() + "/./fresh";
  CHECK(complaint({"--log-json", fresh.c_str(), "--trace", roundabout.c_str()}) ==
        "--trace: " + roundabout + " is not valid; expected another file than that of --log-json");
  const std::string link = folder.path() + "/another name";
  std::filesystem::create_hard_link(log, link);
  CHECK(complaint({"--log-json", link.c_str(), "--data", log.c_str()}) ==
        "--log-json: " + link + " is not valid; expected another file than that of --data");
  CHECK(pentatron::tests::read_file(log) == "an earlier run");
  CHECK(!std::filesystem::exists(fresh));
}

TEST_CASE("options: a pipe that nobody reads is refused, and one with a reader goes on", "[options]") {
  const TemporaryFolder folder;
  const std::string pipe = folder.path() + "/pipe";
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(complaint({"--log-json", pipe.c_str()}) ==
        "--log-json: " + pipe + " is not valid; expected a file that can be written");
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  CHECK(complaint({"--log-json", pipe.c_str()}) == "");
  char byte = 0;
  CHECK(read(reader, &byte, 1) == -1);  // it waits for what will come: 0 would be the end
  close(reader);
}

TEST_CASE("options: an option that would do nothing is refused", "[options]") {
  for (const char* option :
       {"--data", "--save", "--load", "--load-weights", "--log-json", "--trace", "--gpu"})
    CHECK(complaint({option, ""}).starts_with(option + std::string(": \"\" is not valid; expected ")));
  CHECK(complaint({"--save-every", "5"}) == "--save-every: 5 is not valid; expected 0 without --save");
  CHECK(complaint({"--save-every", "5", "--save", "folder"}) == "");
}

TEST_CASE("options: a program takes the options of its techniques only", "[options]") {
  CHECK(complaint({"--zero-stage", "2"}) ==
        "--zero-stage: unknown option; expected one of those that --help lists");
  CHECK(technique<ZeroOptions>({"--zero-stage", "2"}).zero_stage == 2);
  CHECK_THROWS_WITH(technique<ZeroOptions>({"--zero-stage", "4"}),
                    "--zero-stage: 4 is not valid; expected a whole number from 0 to 3");
  CHECK(!technique<TensorParallelOptions>({}).sequence_parallel);
  CHECK(technique<TensorParallelOptions>({"--sequence-parallel"}).sequence_parallel);
  const auto options =
      parse<OptionsWith<DataParallelOptions>>({"--dp-sync", "overlap", "--bucket-mb", "0.5", "--timeout", "9",
                                               "--link", "5us,50GB/s", "--ranks-per-node", "4"});
  CHECK(options.technique.dp_sync == DpSync::overlap);
  CHECK(options.technique.bucket_mb == 0.5);
  CHECK(technique<DataParallelOptions>({}).bucket_mb ==
        Approx(1.01 * 4e-6 * 459'840 / 8));  // of the gradients of tiny, an eighth
  CHECK(technique<DataParallelOptions>({"--model", "smollm-135m"}).bucket_mb == 25);
  CHECK(options.timeout == 9);
  CHECK(options.link == "5us,50GB/s");
  CHECK(options.ranks_per_node == 4);
  CHECK(technique<TensorParallelOptions>({}).tp_overlap == 1);
  CHECK(technique<TensorParallelOptions>({"--tp-overlap", "4"}).tp_overlap == 4);
  CHECK_THROWS_WITH(technique<DataParallelOptions>({"--dp-sync", "late"}),
                    "--dp-sync: late is not valid; expected one of naive, overlap, bucket");
}

TEST_CASE("options: layouts of a context", "[options]") {
  using pentatron::CpExchange, pentatron::CpLayout;
  const auto context = technique<ContextParallelOptions>;
  CHECK(context({}).cp_layout == CpLayout::zigzag);
  CHECK(context({}).cp_exchange == CpExchange::ring);
  CHECK(context({"--cp-layout", "contiguous"}).cp_layout == CpLayout::contiguous);
  CHECK(context({"--cp-layout", "zigzag"}).cp_layout == CpLayout::zigzag);
  CHECK(context({"--cp-exchange", "all-gather"}).cp_exchange == CpExchange::all_gather);
  CHECK(context({"--cp-exchange", "ulysses"}).cp_exchange == CpExchange::ulysses);
}

TEST_CASE("options: schedules of a pipeline", "[options]") {
  using pentatron::PpSchedule;
  const auto pipeline = technique<PipelineOptions>;
  CHECK(pipeline({}).pp_schedule == PpSchedule::one_f_one_b);
  CHECK(pipeline({}).vpp == 1);
  CHECK(pipeline({}).pp == 0);
  CHECK(!pipeline({}).show_schedule);
  CHECK(pipeline({"--pp-schedule", "interleaved"}).vpp == 2);
  CHECK(pipeline({"--pp-schedule", "interleaved", "--vpp", "1"}).vpp == 1);
  for (const char* name : {"afab", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"}) {
    CHECK(to_string(pipeline({"--pp-schedule", name}).pp_schedule) == name);
  }
  const PipelineOptions options =
      pipeline({"--vpp", "3", "--pp-schedule", "interleaved", "--pp", "4", "--show-schedule"});
  CHECK(options.vpp == 3);
  CHECK(options.pp == 4);
  CHECK(options.show_schedule);
  CHECK_THROWS_WITH(pipeline({"--pp-schedule", "gpipe"}),
                    "--pp-schedule: gpipe is not valid; expected one of afab, 1f1b, interleaved, zb-h1, "
                    "zb-v, dualpipe, dualpipe-v, or a "
                    "readable file (No such file or directory)");
  CHECK_THROWS_WITH(pipeline({"--vpp", "0"}),
                    "--vpp: 0 is not valid; expected a whole number from 1 to 1000");
  CHECK_THROWS_WITH(pipeline({"--vpp", "2"}),
                    "--vpp: 2 is not valid; expected 1 with --pp-schedule 1f1b; only interleaved can have "
                    "another number of chunks");

  const TemporaryFolder folder;
  const std::string path = folder.write("schedule.txt", "F0 B0\n");
  const PipelineOptions from_file = pipeline({"--pp-schedule", path.c_str()});
  CHECK(from_file.pp_schedule == PpSchedule::from_file);
  CHECK(from_file.pp_schedule_file == path);
  CHECK(from_file.pp_schedule_text == "F0 B0\n");
  CHECK(from_file.vpp == 1);
  CHECK(parse<OptionsWith<PipelineOptions>>({"--pp-schedule", path.c_str()})
            .as_json.find("\"pp-schedule\":\"" + path + "\"") != std::string::npos);
  CHECK_THROWS_WITH(
      pipeline({"--pp-schedule", folder.path().c_str()}),
      "--pp-schedule: " + folder.path() +
          " is not valid; expected one of afab, 1f1b, interleaved, zb-h1, zb-v, dualpipe, dualpipe-v, or "
          "a regular file");
  CHECK_THROWS_WITH(pipeline({"--pp-schedule", path.c_str(), "--vpp", "2"}),
                    "--vpp: 2 is not valid; expected 1 with --pp-schedule " + path +
                        "; only interleaved can have another number of chunks");
  CHECK_THROWS_WITH(
      pipeline({"--pp-schedule", path.c_str(), "--log-json", path.c_str()}),
      "--log-json: " + path + " is not valid; expected another file than that of --pp-schedule");
}

TEST_CASE("options: experts", "[experts][options]") {
  const auto experts = parse<CombinedOptions>;
  CHECK(experts({}).model.experts == 0);
  CHECK(experts({"--ep", "1", "--top-k", "9"}).experts.ep == 1);  // without experts nothing matters
  const CombinedOptions options = experts(
      {"--experts", "12", "--top-k", "3", "--ep", "6", "--aux-loss", "0.5", "--expert-buffer", "1.5"});
  CHECK(options.model.experts == 12);
  CHECK(options.model.top_k == 3);
  CHECK(options.experts.ep == 6);
  CHECK(options.experts.aux_loss == 0.5);
  CHECK(options.experts.expert_buffer == 1.5);
  CHECK(options.model.balance == Balance::loss);
  CHECK(experts({"--balance", "bias"}).model.balance == Balance::bias);
  CHECK_THROWS_WITH(experts({"--balance", "x"}),
                    "--balance: x is not valid; expected one of loss, bias, none");
  CHECK(experts({"--experts", "4", "--shared-experts", "2"}).model.shared_experts == 2);
  CHECK_THROWS_WITH(experts({"--shared-experts", "2"}),
                    "--shared-experts: 2 is not valid; expected 0 without --experts");
  CHECK_THROWS_WITH(experts({"--ep", "2"}), "--ep: 2 is not valid; expected 1 without --experts");
  CHECK_THROWS_WITH(experts({"--experts", "8", "--top-k", "9"}),
                    "--top-k: 9 is not valid; expected at most --experts (8)");
  CHECK_THROWS_WITH(experts({"--experts", "8", "--ep", "3"}),
                    "--ep: 3 is not valid; expected a divisor of --experts (8)");
  CHECK_THROWS_WITH(experts({"--experts", "8", "--expert-buffer", "0.5"}),
                    "--expert-buffer: 0.5 is not valid; expected 0, or 1 or more");
}

TEST_CASE("options: parameters of a model with experts", "[experts][options]") {
  // tiny: width 64, MLP 192; a layer's attention 4 * 64^2, its norms 2 * 64, an MLP 3 * 64 * 192
  Options options = parse({});
  const int64_t mlp = 3 * 64 * 192, router = 8 * 64;
  const int64_t rest = 8 * (4 * 64 * 64 + 2 * 64) + 64 + 2 * 64 * 256;
  CHECK(parameter_count(options.model) == rest + 8 * mlp);
  CHECK(active_parameter_count(options.model) == rest + 8 * mlp);
  options.model.experts = 8;
  options.model.top_k = 2;
  CHECK(parameter_count(options.model) == rest + 8 * (8 * mlp + router));
  CHECK(active_parameter_count(options.model) == rest + 8 * (2 * mlp + router));
  options.model.balance = Balance::bias;
  CHECK(parameter_count(options.model) == rest + 8 * (8 * mlp + router + 8));
  options.model.shared_experts = 3;
  CHECK(parameter_count(options.model) == rest + 8 * (11 * mlp + router + 8));
  CHECK(active_parameter_count(options.model) == rest + 8 * (5 * mlp + router + 8));
}

TEST_CASE("options: a program's own default of --attention", "[options]") {
  using pentatron::Attention;
  const auto attention = [](std::vector<const char*> arguments) {
    arguments.insert(arguments.begin(), "program");
    return pentatron::parse_options<Options>(static_cast<int>(arguments.size()), arguments.data(), "",
                                             Attention::tiled)
        .attention;
  };
  CHECK(attention({}) == Attention::tiled);
  CHECK(attention({"--attention", "naive"}) == Attention::naive);
}

TEST_CASE("options: help lists groups, defaults and presets", "[options]") {
  const std::string text = help_of();
  for (const char* part : {"A description.", "Model:", "--kv-heads N", "[adamw]",
                           "--recompute none|selective|full", "[0.003]", "llama-3.1-8b", "14336"}) {
    INFO(part);
    CHECK(text.find(part) != std::string::npos);
  }
  size_t longest = 0, start = 0;
  for (size_t end; (end = text.find('\n', start)) != std::string::npos; start = end + 1) {
    longest = std::max(longest, end - start);
  }
  CHECK(longest <= 100);
}

TEST_CASE("options: every number has its bounds", "[options]") {
  const std::vector<std::pair<const char*, std::string>> bounds = {
      {"--save-every", "0 to 1000000000"},
      {"--layers", "1 to 1000"},
      {"--d-model", "2 to 65536"},
      {"--heads", "1 to 1024"},
      {"--kv-heads", "1 to 1024"},
      {"--d-ff", "1 to 1000000"},
      {"--vocab-size", "2 to 1000000"},
      {"--seq-len", "1 to 1048576"},
      {"--micro-batch-size", "1 to 65536"},
      {"--global-batch-size", "1 to 1048576"},
      {"--steps", "1 to 1000000000"},
      {"--seed", "0 to 18446744073709551615"},
      {"--lr", "0 to 1000"},
      {"--warmup-steps", "0 to 1000000000"},
      {"--beta1", "0 to 0.999999"},
      {"--beta2", "0 to 0.999999"},
      {"--weight-decay", "0 to 1000"},
      {"--grad-clip", "0 to 1e+09"},
      {"--loss-scale", "1 to 1.09951e+12"},
      {"--log-every", "1 to 1000000000"},
      {"--sample", "0 to 1000000"},
      {"--timeout", "0.1 to 1e+06"},
      {"--ranks-per-node", "0 to 1048576"},
      {"--bucket-mb", "1e-06 to 1e+06"},
      {"--zero-stage", "0 to 3"},
      {"--shard-ranks", "0 to 1048576"},
      {"--tp-overlap", "1 to 64"},
      {"--vpp", "1 to 1000"},
      {"--pp", "0 to 1048576"},
      {"--ulysses", "2 to 1048576"},
      {"--experts", "0 to 1024"},
      {"--top-k", "1 to 1024"},
      {"--shared-experts", "0 to 1024"},
      {"--aux-loss", "0 to 1000"},
      {"--expert-buffer", "0 to 1e+06"},
      {"--tp", "1 to 1048576"},
      {"--cp", "1 to 1048576"},
      {"--dp", "0 to 1048576"},
      {"--ep", "1 to 1048576"},
      {"--ranks", "0 to 1048576"},
  };
  for (const auto& [option, from_to] : bounds) {
    std::string words;
    try {
      parse<pentatron::CombinedOptions>({option, "x"});
    } catch (const pentatron::UsageError& error) {
      words = error.what();
    }
    INFO(words);
    CHECK(words.ends_with(" number from " + from_to));
  }
  const std::string help = help_of<pentatron::CombinedOptions>();
  size_t numbers = 0;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream columns(line);
    std::string option, placeholder;
    columns >> option >> placeholder;
    numbers += option.starts_with("--") && (placeholder == "N" || placeholder == "X");
  }
  CHECK(numbers == bounds.size());
}

TEST_CASE("options: --version says a number and the commit, and -h is --help", "[options]") {
  CHECK(std::regex_match(help_of("--version"), std::regex("pentatron [0-9.]+, commit [-0-9a-z]+\n")));
  CHECK(help_of("-h") == help_of());
  CHECK(help_of().find(" h100, ") != std::string::npos);  // among the GPUs
}

TEST_CASE("options: --help has each option below the heading of its group", "[options]") {
  std::istringstream lines(help_of<pentatron::CombinedOptions>());
  std::string groups;
  for (std::string line; std::getline(lines, line);) {
    std::string first;
    std::istringstream(line) >> first;
    if (!line.empty() && line[0] != ' ' && line.ends_with(":")) groups += "\n" + line;
    if (first.starts_with("--")) groups += " " + first;
  }
  CHECK(groups == R"(
Help: --version
Checkpoints: --save --save-every --resume --load --load-weights
Model: --model --layers --d-model --heads --kv-heads --d-ff --vocab-size
Data and batches: --data --seq-len --micro-batch-size --global-batch-size --steps --seed
Optimizer: --optimizer --lr --warmup-steps --beta1 --beta2 --weight-decay --grad-clip --loss-scale
Memory: --recompute --attention
Output: --log-json --trace --profile --log-every --sample
Modelled GPU (CPU build): --gpu --dry-run
Mesh: --tp --cp --dp --ep --ranks --show-mesh
Data parallelism: --dp-sync --bucket-mb
ZeRO: --zero-stage --shard-ranks
Tensor parallelism: --sequence-parallel --tp-overlap
Pipeline parallelism: --pp-schedule --vpp --pp --show-schedule
Context parallelism: --cp-layout --cp-exchange --ulysses
Experts: --experts --top-k --shared-experts --balance --aux-loss --expert-buffer
Communication: --timeout --link --ranks-per-node
Models:
GPUs (--gpu, common/clock/profiles):)");
}
