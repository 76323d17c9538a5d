// The format of the weights: what a file must look like, and that a damaged one is refused.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <random>

#include "catch.h"
#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/preemption.h"
#include "checkpoint/safetensors.h"
#include "device/errors.h"
#include "files.h"

using namespace pentatron;
using pentatron::tests::read_file;
using pentatron::tests::TemporaryFolder;

namespace {

std::string file_of(std::string header, size_t data_bytes) {
  const uint64_t size = header.size();
  return std::string(reinterpret_cast<const char*>(&size), 8) + header + std::string(data_bytes, '\0');
}

// What reading says, or "".
template <class Read>
std::string complaint_of_file(const Read& read) {
  try {
    read();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("safetensors: the header says where each tensor lies", "[01][checkpoint]") {
  std::vector<StoredTensor> tensors = {{"a", NumberType::fp32, {2, 3}}, {"b", NumberType::bf16, {5}}};
  const std::string header = safetensors_header(tensors);
  CHECK(header.size() % 8 == 0);
  CHECK(tensors[0].begin == header.size());
  CHECK(tensors[1].begin == header.size() + 24);
  CHECK(header.find(R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]})") != header.npos);
  CHECK(header.find(R"("b":{"dtype":"BF16","shape":[5],"data_offsets":[24,34]})") != header.npos);

  const TemporaryFolder folder;
  folder.write("x.safetensors", header + std::string(34, '\1'));
  const SafetensorsFolder file("--load", folder.path(), "x");
  CHECK(file.tensors().size() == 2);
  CHECK(file.find("b", {5}).description.begin == tensors[1].begin);
  CHECK(file.find("b", {5}).data[9] == std::byte{1});
}

TEST_CASE("safetensors: damaged headers", "[01][checkpoint]") {
  const TemporaryFolder folder;
  const auto check = [&](const std::string& content, const std::string& fault) {
    const std::string path = folder.write("x.safetensors", content);
    CHECK(complaint_of_file([&] { SafetensorsFolder("--load", folder.path(), "x"); }) ==
          "--load: " + path + " is not valid; expected a safetensors file; " + fault);
  };
  const std::string a = R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  folder.write("good.safetensors", file_of("{" + a + "}", 8));
  CHECK(complaint_of_file([&] { SafetensorsFolder("--load", folder.path(), "good"); }) == "");
  check("short", "it has fewer than 8 bytes");
  check(file_of("{" + a + "}", 8).substr(0, 20), "it is cut off, or it is none");
  check(std::string(16, '\xff'), "it is cut off, or it is none");
  check(file_of("[1]", 0), "its header is no JSON object");
  check(file_of("{" + a, 8), "its header is no JSON object");
  check(file_of("{" + a + "}", 7), "it has 69 bytes, and its tensors end at 70");
  check(file_of("{" + a + "}", 9), "it has 71 bytes, and its tensors end at 70");
  check(file_of(R"({"a":{"shape":[2],"data_offsets":[0,8]}})", 8), "a has no dtype, shape and data_offsets");
  check(file_of(R"({"a":{"dtype":"I8","shape":[2],"data_offsets":[0,8]}})", 8), "a has the type I8");
  const auto check_a = [&](const std::string& shape, const std::string& offsets, const std::string& fault) {
    check(file_of(R"({"a":{"dtype":"F32","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}", 8),
          "a has " + fault);
  };
  check_a("[-2]", "[0,8]", "the shape [-2]");
  check_a("[2.0]", "[0,8]", "the shape [2.0]");
  check_a("[2]", "[0,8.5]", "the data_offsets [0,8.5]");
  check_a("[2]", "[0,8,9]", "the data_offsets [0,8,9]");
  for (const char* const shape : {"[3]", "[4294967296,4294967296]", "[4611686018427387906]"})
    check_a(shape, "[0,8]", "other data_offsets than its shape asks for");
  check_a("[2]", "[8,0]", "other data_offsets than its shape asks for");
  // A file has the bytes of all its tensors, each once, in any order.
  const auto two = [](int a, int b) {
    const auto entry = [](const std::string& name, int begin) {
      return '"' + name + R"(":{"dtype":"F32","shape":[1],"data_offsets":[)" + text(begin, ",", begin + 4) +
             "]}";
    };
    return "{" + entry("a", a) + "," + entry("b", b) + "}";
  };
  folder.write("good.safetensors", file_of(two(4, 0), 8));
  CHECK(complaint_of_file([&] { SafetensorsFolder("--load", folder.path(), "good"); }) == "");
  check(file_of(two(0, 2), 8), "b does not begin where the tensor before it ends");
  check(file_of(two(0, 0), 8), "b does not begin where the tensor before it ends");
  check(file_of(two(0, 8), 12), "b does not begin where the tensor before it ends");
  check(file_of(two(4, 8), 12), "a does not begin where the tensor before it ends");
}

TEST_CASE("checksum: the parts of several ranks make that of the whole", "[01][checkpoint]") {
  const auto bytes = [](const std::string& text) { return reinterpret_cast<const std::byte*>(text.data()); };
  CHECK(crc32_of(bytes("123456789"), 9) == 0xcbf43926);  // as everywhere
  CHECK(crc32_of(nullptr, 0) == 0);
  std::mt19937 random(1);
  for (int i = 0; i < 100; ++i) {
    std::string text(2 * (random() % 1000), ' ');
    for (char& c : text) c = static_cast<char>(random());
    const StoredTensor tensor{"a", NumberType::bf16, {std::ssize(text) / 2}};
    uint32_t parts[3] = {};
    for (size_t at = 0, run = 0; at < text.size(); at += run) {  // each run belongs to a rank
      run = std::min<size_t>(1 + random() % 300, text.size() - at);
      parts[random() % 3] ^= checksum_part(tensor, at, bytes(text) + at, run);
    }
    CHECK((parts[0] ^ parts[1] ^ parts[2]) == crc32_of(bytes(text), text.size()));
  }
}

TEST_CASE("checksum: of a file of any size, of a large one in parts", "[01][checkpoint]") {
  const TemporaryFolder folder;
  const auto of = [](const std::string& path) { return MappedFile("--data", path).checksum(); };
  CHECK(of(folder.write("x", "123456789")) == "9 bytes with CRC-32 cbf43926");  // as other programs have it
  const std::string path = folder.write("y", "1");
  constexpr size_t mib = 1 << 20;
  for (const size_t size : {64 * mib, 128 * mib}) {
    std::filesystem::resize_file(path, size);
    const std::string before = of(path);
    CHECK(before.starts_with(std::to_string(size) + " bytes with CRC-32 "));
    for (const size_t at : {size_t{0}, mib, 2 * mib - 1, 2 * mib, size - 2 * mib, size - 1}) {
      CAPTURE(size, at);
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(at).put('2').flush();
      CHECK((of(path) != before) == (size == 64 * mib || at % (2 * mib) < mib));
      file.seekp(at).put(at == 0 ? '1' : '\0');
    }
    CHECK(of(path) == before);
  }
}

// A flipped bit is noticed, or changes nothing that is read. Files of others have no checksums.
TEST_CASE("safetensors: no flipped bit is read without a word", "[01][checkpoint]") {
  const TemporaryFolder folder;
  std::vector<StoredTensor> tensors = {{"a", NumberType::fp32, {2, 3}}, {"b", NumberType::bf16, {5}}};
  safetensors_header(tensors);
  std::string data(34, ' ');
  for (char& c : data) c = static_cast<char>(17 * (&c - data.data()));
  const auto* const bytes = reinterpret_cast<const std::byte*>(data.data());
  tensors[0].checksum = checksum_text(crc32_of(bytes, 24));
  tensors[1].checksum = checksum_text(crc32_of(bytes + 24, 10));
  const std::string good = safetensors_header(tensors) + data;
  const auto check = [&](const std::string& content) {
    folder.write("model.safetensors", content);
    const SafetensorsFolder found("--load", folder.path(), "model");
    for (const int rank : {0, 1}) found.check(rank, 2);
    const FoundTensor &a = found.find("a", {2, 3}), &b = found.find("b", {5});
    if (a.description.type != NumberType::fp32 || b.description.type != NumberType::bf16 ||
        std::memcmp(a.data, data.data(), 24) != 0 || std::memcmp(b.data, data.data() + 24, 10) != 0) {
      throw std::runtime_error("read, and it is another one");
    }
  };
  check(good);
  int refused = 0;
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    std::string content = good;
    content[bit / 8] ^= 1 << bit % 8;
    CAPTURE(bit);
    std::string words;
    CHECK_NOTHROW(words = complaint_of_file([&] { check(content); }));
    refused += !words.empty();
    if (bit / 8 < good.size() - data.size()) continue;
    CHECK(words.find(bit / 8 < good.size() - 10 ? "expected a with the checksum "
                                                : "expected b with the checksum ") != words.npos);
    CHECK(words.ends_with("(the file is damaged)"));
  }
  CHECK(refused > 1500);
}

TEST_CASE("safetensors: tensors of several files", "[01][checkpoint]") {
  const TemporaryFolder folder;
  folder.write("one", file_of(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8));
  folder.write("two", file_of(R"({"b":{"dtype":"F16","shape":[2,1],"data_offsets":[0,4]}})", 4));
  folder.write("model.safetensors.index.json", R"({"weight_map": {"a": "one", "b": "two"}})");
  const SafetensorsFolder tensors("--load-weights", folder.path(), "model");
  CHECK(tensors.tensors().size() == 2);
  CHECK(tensors.find("b", {2, 1}).description.type == NumberType::fp16);
  const std::string path = folder.path() + "/model.safetensors";
  CHECK(complaint_of_file([&] { tensors.find("c", {1}); }) ==
        "--load-weights: " + path + " is not valid; expected a tensor c");
  CHECK(complaint_of_file([&] { tensors.find("b", {2}); }) ==
        "--load-weights: " + path + " is not valid; expected b of shape [2]; it has [2,1]");
  folder.write("two", file_of(R"({"a":{"dtype":"F16","shape":[2,1],"data_offsets":[0,4]}})", 4));
  CHECK(complaint_of_file([&] { SafetensorsFolder("--load-weights", folder.path(), "model"); }) ==
        "--load-weights: " + folder.path() +
            "/two is not valid; expected a safetensors file; a is in another file, too");
  folder.write("model.safetensors.index.json", R"({"weight_map": {"a": "../one"}})");
  CHECK(complaint_of_file([&] {
          SafetensorsFolder("--load-weights", folder.path(), "model");
        }).find("weight_map") != std::string::npos);
}

// Whatever is damaged, reading ends with one line, or gives what the file says; it never crashes.
TEST_CASE("safetensors: 1000 random damages of a checkpoint's files", "[01][checkpoint]") {
  const TemporaryFolder folder;
  std::vector<StoredTensor> tensors = {{"model.norm.weight", NumberType::fp32, {4}},
                                       {"lm_head.weight", NumberType::fp32, {2, 4}}};
  const std::string model = safetensors_header(tensors) + std::string(48, '\2');
  const ModelConfig sizes = {"x", 2, 8, 2, 1, 24, 256, 1e4, 1e-5};
  Options options;
  options.as_json = R"({"lr": 0.1, "data": "text"})";
  const std::string config = model_config_text(sizes, 128, "float32"),
                    state = trainer_state_text(7, "fp32", options),
                    index = R"({"weight_map": {"model.norm.weight": "model-1.safetensors"}})";
  folder.write("model-1.safetensors", model);
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 1000; ++i) {
    const int which = i % 4;
    std::string content = std::vector{model, config, state, index}[which];
    for (int damages = 1 + random() % 3; damages > 0; --damages) {
      const size_t at = random() % content.size();
      switch (random() % 4) {
        case 0:
          content[at] ^= 1 << random() % 8;
          break;
        case 1:
          content.resize(at + 1);
          break;
        case 2:
          content.insert(at, std::string(1 + random() % 9, "0-[]{}\",9"[random() % 9]));
          break;
        default:
          content.erase(at, 1 + random() % 5);
          if (content.empty()) content = "x";
      }
    }
    const std::string words = complaint_of_file([&] {
      const char* const names[] = {"model.safetensors", "config.json", "trainer_state.json",
                                   "model.safetensors.index.json"};
      std::filesystem::remove(folder.path() + "/model.safetensors");
      folder.write(names[which], content);
      ModelConfig read;
      if (which == 1) return read_model_config("--load", folder.path(), read);
      if (which == 2) return (void)read_trainer_state("--load", folder.path());
      const SafetensorsFolder found("--load", folder.path(), "model");
      const FoundTensor& tensor = found.find("lm_head.weight", {2, 4});
      (void)crc32_of(tensor.data, tensor.description.bytes());  // reads all of it
    });
    refused += !words.empty();
    CHECK(std::count(words.begin(), words.end(), '\n') == 0);
  }
  CHECK(refused > 500);
}

TEST_CASE("checkpoint: the newest complete one is found", "[01][checkpoint]") {
  const TemporaryFolder folder;
  const auto find = [&] { return find_checkpoint("--load", folder.path(), "trainer_state.json"); };
  const auto make = [&](const std::string& name, int steps) {
    std::filesystem::create_directory(folder.path() + "/" + name);
    Options options;
    options.as_json = "{}";
    folder.write(name + "/trainer_state.json", trainer_state_text(steps, "fp32", options));
  };
  const std::string none = "or one of --save whose file `latest` names such a folder";
  CHECK(complaint_of_file(find).ends_with(none));
  const std::string part = folder.path() + "/new.part";
  CHECK_THROWS(publish_checkpoint(part, 3));  // as if it were killed before it renames the folder
  CHECK(read_file(folder.path() + "/latest") == "step_000003\n");
  make("new.part", 3);
  CHECK(complaint_of_file(find).ends_with(none));
  publish_checkpoint(part, 3);
  CHECK(find() == folder.path() + "/step_000003");
  CHECK(!std::filesystem::exists(part));
  make("step_000012", 12);  // was renamed, but did not become the newest
  CHECK(find() == folder.path() + "/step_000003");
  CHECK(find_checkpoint("--load", find(), "trainer_state.json") == find());
  make("new.part", 3);  // the same step once more
  folder.write("new.part/new", "x");
  publish_checkpoint(part, 3);
  CHECK(std::filesystem::exists(folder.path() + "/step_000003/new"));
  CHECK(!std::filesystem::exists(part + "/new"));
}

// ---- Preemption -------------------------------------------------------------------------------------------

TEST_CASE("preemption: a second signal ends the process, unless it comes at once", "[01][checkpoint]") {
  // How a process ends that gets two signals, the first one so many seconds ago: by the signal, or not.
  const auto ended_by = [](int seconds) {
    const pid_t child = fork();
    if (child == 0) {
      listen_for_preemption();
      std::raise(SIGUSR1);
      preempted_at -= seconds;
      std::raise(SIGTERM);
      _exit(is_preempted() ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : -WEXITSTATUS(status);
  };
  CHECK(ended_by(0) == 0);
  CHECK(ended_by(2) == SIGTERM);
}

// ---- config.json ------------------------------------------------------------------------------------------

TEST_CASE("checkpoint: a model's config is read as it was written", "[01][checkpoint]") {
  const TemporaryFolder folder;
  ModelConfig model = {"x", 3, 24, 4, 2, 40, 300, 5e5, 1e-6, {8, 1, 4, 64}};
  model.experts = 6, model.top_k = 3;
  folder.write("config.json", model_config_text(model, 128, "float32"));
  ModelConfig read;
  read_model_config("--load", folder.path(), read);
  CHECK(model_difference(read, model) == "");
  CHECK(read.rope_scaling == model.rope_scaling);
  const std::string scaling = R"({"rope_type":"llama3","factor":8.0,"low_freq_factor":1.0,)"
                              R"("high_freq_factor":4.0,"original_max_position_embeddings":64})";
  read.rope_scaling = {};
  CHECK(model_difference(model, read) == "rope_scaling is " + scaling + ", and was null");
  CHECK(model_difference(read, model) == "rope_scaling is null, and was " + scaling);
  read.rope_scaling = model.rope_scaling;
  CHECK(read.remarks.empty());
  model.d_ff = 41;
  CHECK(model_difference(model, read) == "intermediate_size is 41, and was 40");
  model.d_ff = 40, model.balance = Balance::bias;
  CHECK(model_difference(model, read).starts_with("pentatron_experts is {"));
  folder.write("config.json", model_config_text(model, 128, "float32"));
  read_model_config("--load", folder.path(), read);
  CHECK(read.balance == Balance::bias);
}

TEST_CASE("checkpoint: what would change the result is refused by name", "[01][checkpoint]") {
  const TemporaryFolder folder;
  const std::string plain =
      R"("model_type": "llama", "hidden_size": 8, "intermediate_size": 24, "vocab_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2)";
  const auto words = [&](const std::string& more) {
    folder.write("config.json", "{" + plain + more + "}");
    ModelConfig model;
    return complaint_of_file([&] { read_model_config("--load-weights", folder.path(), model); });
  };
  CHECK(words("") == "");
  CHECK(words(R"(, "sliding_window": null, "head_dim": 4, "hidden_act": "silu")") == "");
  CHECK(words(R"(, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"})") == "");
  for (const std::string more :
       {R"("attention_bias": true)", R"("mlp_bias": true)", R"("sliding_window": 4096)",
        R"("hidden_act": "gelu")", R"("head_dim": 16)", R"("model_type": "qwen2")",
        R"("quantization_config": {})", R"("architectures": ["LlamaForTokenClassification"])",
        R"("rope_interleaved": true)", R"("partial_rotary_factor": 0.5)", R"("attention_multiplier": 0.1)",
        R"("embedding_multiplier": 12)", R"("residual_multiplier": 0.2)", R"("logits_scaling": 8)"}) {
    INFO(more);
    CHECK(words(", " + more).find(more.substr(1, more.find('"', 1) - 1) + " to be ") != std::string::npos);
  }
  folder.write("config.json", R"({"model_type": "gpt2", "n_layer": 12})");  // before what is missing
  CHECK(complaint_of_file([&] {
          ModelConfig model;
          read_model_config("--load-weights", folder.path(), model);
        }) == "--load-weights: " + folder.path() +
                  "/config.json is not valid; expected model_type to be \"llama\"; it is \"gpt2\"");
  CHECK(words(R"(, "num_attention_heads": 3)")
            .ends_with("config.json is not valid; expected hidden_size (8) to be a multiple of twice "
                       "num_attention_heads (3), and that one of num_key_value_heads (3)"));
  CHECK(words(R"(, "num_key_value_heads": 4)").ends_with(", and that one of num_key_value_heads (4)"));
  CHECK(words(R"(, "rope_parameters": {"full_attention": {"rope_theta": 1e6}})")
            .ends_with("expected rope_parameters that are those of all layers; they have full_attention"));
  const std::string llama3[] = {R"("factor": 8)", R"("low_freq_factor": 1)", R"("high_freq_factor": 4)",
                                R"("original_max_position_embeddings": 64)"};
  for (const std::string& missing : llama3) {
    std::string scaling = R"(, "rope_scaling": {"rope_type": "llama3")";
    for (const std::string& one : llama3) scaling += missing == one ? "" : ", " + one;
    INFO(scaling);
    CHECK(words(scaling + ", " + missing + "}") == "");
    CHECK(words(scaling + "}").find(missing.substr(1, missing.find('"', 1) - 1)) != std::string::npos);
  }
  CHECK(words(R"(, "rope_scaling": {"type": "yarn", "factor": 4})")
            .ends_with("type to be \"llama3\"; it is \"yarn\""));
  CHECK(words(R"(, "rope_scaling": {"factor": 4})").ends_with("expected a rope_type beside factor"));
  CHECK(words(R"(, "rope_parameters": {"partial_rotary_factor": 0.5})")
            .ends_with("partial_rotary_factor to be 1; it is 0.5"));
  CHECK(words(R"(, "rope_parameters": {}, "rope_scaling": {"rope_type": "default"})")
            .ends_with("expected rope_parameters or rope_scaling, and not both"));
  CHECK(words(R"(, "architectures": ["LlamaForCausalLM"], "rope_interleaved": false,
                 "rope_scaling": null, "partial_rotary_factor": 1.0)") == "");
  CHECK(words(R"(, "num_key_value_heads": -1)").find("num_key_value_heads to be a whole number") !=
        std::string::npos);
}

TEST_CASE("checkpoint: a config's sizes have bounds, and those are sizes", "[01][checkpoint]") {
  const TemporaryFolder folder;
  const nlohmann::json smallest = {
      {"model_type", "llama"},  {"hidden_size", 2},         {"intermediate_size", 1},  {"vocab_size", 2},
      {"num_hidden_layers", 1}, {"num_attention_heads", 1}, {"num_key_value_heads", 1}};
  const nlohmann::json largest = {{"model_type", "llama"},          {"hidden_size", 65536},
                                  {"intermediate_size", 1'000'000}, {"vocab_size", 1'000'000},
                                  {"num_hidden_layers", 1000},      {"num_attention_heads", 1024},
                                  {"num_key_value_heads", 1024}};
  const auto words = [&](const nlohmann::json& config) {
    folder.write("config.json", config.dump());
    ModelConfig model;
    return complaint_of_file([&] { read_model_config("--load-weights", folder.path(), model); });
  };
  CHECK(words(smallest) == "");
  CHECK(words(largest) == "");
  for (const auto& [key, size] : smallest.items()) {
    if (!size.is_number()) continue;
    nlohmann::json below = smallest, above = largest;
    below[key] = size.get<int>() - 1;
    above[key] = largest[key].get<int>() + 1;
    CHECK(words(below).find(key + " to be a whole number from " + size.dump()) != std::string::npos);
    CHECK(words(above).find(key + " to be a whole number from " + size.dump()) != std::string::npos);
  }
}

// Transformers 5 writes rope_theta into rope_parameters. A file that has both is of one that reads the inner
// one.
TEST_CASE("checkpoint: of two values of rope_theta the inner one wins, and no preset's", "[01][checkpoint]") {
  const TemporaryFolder folder;
  const auto theta = [&](const std::string& more) {
    folder.write("config.json", R"({"model_type": "llama", "hidden_size": 8, "intermediate_size": 24,
      "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2)" +
                                    more + "}");
    ModelConfig model;
    model.rope_theta = 5e5;  // of --model
    read_model_config("--load-weights", folder.path(), model);
    return model.rope_theta;
  };
  const std::string outer = R"(, "rope_theta": 2e4)",
                    inner = R"(, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4})";
  CHECK(theta("") == 1e4);  // of LlamaConfig
  CHECK(theta(outer) == 2e4);
  CHECK(theta(inner) == 3e4);
  CHECK(theta(outer + inner) == 3e4);
  CHECK(theta(outer + R"(, "rope_parameters": {"rope_type": "default"})") == 2e4);
}

TEST_CASE("checkpoint: what changes training alone is a remark", "[01][checkpoint]") {
  const TemporaryFolder folder;
  folder.write("config.json", R"({"model_type": "llama", "hidden_size": 8, "intermediate_size": 24,
    "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": true,
    "attention_dropout": 0.1})");
  ModelConfig model;
  read_model_config("--load-weights", folder.path(), model);
  CHECK(parameter_count(model) == 2728);
  CHECK(model.tied_head);
  CHECK(model.remarks ==
        "its head is the embedding, which makes 2.22k parameters; here it is a matrix of its own: 2.73k\n"
        "its attention_dropout is above 0; here nothing is dropped\n");
}
