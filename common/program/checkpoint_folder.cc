#include "program/checkpoint_folder.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "model/mapped_file.h"
#include "program/command_line.h"
#include "ranks/shared_file.h"

namespace pentatron {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// Puts a file or folder at a path, at once. A folder that was there is at `part` then.
std::string replace(const std::string& part, const std::string& path) {
  std::error_code ignored;
  const bool exchanges = fs::is_directory(path, ignored);
  const int status =
      renameat2(AT_FDCWD, part.c_str(), AT_FDCWD, path.c_str(), exchanges ? RENAME_EXCHANGE : 0);
  return status == 0 ? "" : std::strerror(errno);
}

// The values of a file, which is a JSON object; every complaint names option and file.
class JsonFile {
 public:
  JsonFile(const std::string& option, const fs::path& path) : option_(option), path_(path.string()) {
    const MappedFile file(option, path_);
    const char* const begin = reinterpret_cast<const char*>(file.bytes().data());
    json_ = Json::parse(begin, begin + file.bytes().size(), nullptr, false);
    check(json_.is_object(), "a JSON object");
  }
  JsonFile(const JsonFile& of, const Json& part) : option_(of.option_), path_(of.path_), json_(part) {}

  template <class... Expected>
  void check(bool good, const Expected&... expected) const {
    require(good, option_, path_, expected...);
  }
  const Json& json() const { return json_; }
  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }
  // A part, which is an object; empty if there is none.
  JsonFile part(const char* key) const {
    if (!has(key)) return {*this, Json::object()};
    check(json_[key].is_object(), key, " to be an object");
    return {*this, json_[key]};
  }
  int whole(const char* key, int lowest, int highest) const {
    check(has(key), "a value of ", key);
    const Json& value = json_[key];
    check(value.is_number_integer() && value >= lowest && value <= highest, key,
          " to be a whole number from ", lowest, " to ", highest, "; it is ", value.dump());
    return value;
  }
  double number(const char* key, double preset) const {
    if (!has(key)) return preset;
    check(json_[key].is_number() && json_[key] > 0, key, " to be a number above 0");
    return json_[key];
  }
  // Refuses every value but `expected`. What is missing has it.
  void only(const char* key, const Json& expected) const {
    const Json& value = has(key) ? json_[key] : expected;
    check(value == expected, key, " to be ", expected.dump(), "; it is ", value.dump());
  }

 private:
  std::string option_, path_;
  Json json_;
};

// "llama3", or none. Transformers 5 writes rope_parameters, and rope_theta into it.
void read_rope(const JsonFile& config, ModelConfig& model) {
  const JsonFile rope = config.part(config.has("rope_parameters") ? "rope_parameters" : "rope_scaling");
  model.rope_theta = rope.number("rope_theta", config.number("rope_theta", 1e4));
  const char* const key = rope.has("rope_type") ? "rope_type" : "type";
  model.rope_scaling = {};
  if (!rope.has("factor")) return rope.only(key, "default");
  rope.only(key, "llama3");
  model.rope_scaling = {rope.number("factor", 1), rope.number("low_freq_factor", 1),
                        rope.number("high_freq_factor", 4),
                        rope.whole("original_max_position_embeddings", 1, 1 << 30)};
  rope.check(model.rope_scaling.low_freq_factor < model.rope_scaling.high_freq_factor,
             "low_freq_factor to be below high_freq_factor");
}

}  // namespace

std::string checkpoint_name(int64_t steps) {
  char name[32];
  std::snprintf(name, sizeof name, "step_%06lld", static_cast<long long>(steps));
  return name;
}

int64_t steps_of_name(const std::string& name) {
  constexpr std::string_view prefix = "step_";
  const bool good = name.starts_with(prefix) && name.size() > prefix.size() && name.size() < 20 &&
                    name.find_first_not_of("0123456789", prefix.size()) == name.npos;
  return good ? std::stoll(name.substr(prefix.size())) : -1;
}

std::string find_checkpoint(const std::string& option, const std::string& folder, const std::string& file) {
  std::error_code ignored;
  if (fs::exists(fs::path(folder) / file, ignored)) return folder;
  std::string name;
  std::getline(std::ifstream(fs::path(folder) / "latest"), name);
  const std::string newest = (fs::path(folder) / name).string();
  if (steps_of_name(name) >= 0 && fs::exists(fs::path(newest) / file, ignored)) return newest;
  const std::vector<std::string> parts = cut_off_checkpoints(folder);
  throw UsageError(option, folder,
                   "a folder with " + file + ", or one of --save that has a complete checkpoint" +
                       (parts.empty() ? "" : "; " + parts.front() + " was cut off"));
}

bool has_checkpoint(const std::string& folder) {
  std::error_code ignored;
  return fs::exists(fs::path(folder) / "latest", ignored);
}

std::vector<std::string> cut_off_checkpoints(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path path = entry->path();
    if (path.extension() == ".part" && steps_of_name(path.stem().string()) >= 0)
      paths.push_back(path.string());
  }
  return paths;
}

std::string publish_checkpoint(const std::string& part, int64_t steps) {
  const fs::path folder = fs::path(part).parent_path();
  const std::string name = checkpoint_name(steps);
  std::string error = flush_to_disk(part);
  if (error.empty()) error = replace(part, (folder / name).string());
  if (error.empty()) error = flush_to_disk(folder.string());
  if (error.empty()) error = write_file((folder / "latest.part").string(), name + "\n");
  if (error.empty()) error = replace((folder / "latest.part").string(), (folder / "latest").string());
  if (error.empty()) error = flush_to_disk(folder.string());
  std::error_code ignored;
  if (error.empty()) fs::remove_all(part, ignored);
  return error;
}

void remove_old_checkpoints(const std::string& folder, int64_t steps, int keep) {
  std::vector<int64_t> all;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const int64_t its_steps = steps_of_name(entry->path().filename().string());
    if (its_steps >= 0 && its_steps <= steps) all.push_back(its_steps);
  }
  std::sort(all.rbegin(), all.rend());
  for (size_t i = keep; i < all.size(); ++i)
    fs::remove_all(fs::path(folder) / checkpoint_name(all[i]), error);
}

std::string trainer_state_text(int64_t steps, const std::string& precision, const std::string& optimizer,
                               const std::string& options_as_json, const std::vector<double>& loss_scale) {
  Json state = {{"format", 1},
                {"step", steps},
                {"precision", precision},
                {"optimizer", optimizer},
                {"options", Json::parse(options_as_json)}};
  if (!loss_scale.empty()) state["loss_scale"] = loss_scale;
  return state.dump(2) + "\n";
}

TrainerState read_trainer_state(const std::string& option, const std::string& checkpoint) {
  const fs::path folder = fs::path(checkpoint).lexically_normal();
  const JsonFile file(option, folder / "trainer_state.json");
  const Json& state = file.json();
  file.check(state.contains("format") && state["format"] == 1, "format 1");
  file.check(
      state.contains("step") && state["step"].is_number_unsigned() && state["step"] < uint64_t{1} << 40,
      "a number of steps");
  for (const char* const key : {"precision", "optimizer"})
    file.check(state.contains(key) && state[key].is_string(), "a text for ", key);
  file.check(state.contains("options") && state["options"].is_object(), "options");
  TrainerState result{state["step"], state["precision"], state["optimizer"], {}, {}};
  if (state.contains("loss_scale")) {
    const Json& scale = state["loss_scale"];
    const auto is_number = [](const Json& x) { return x.is_number() && x.get<double>() >= 0; };
    file.check(scale.is_array() && scale.size() == 3 && std::all_of(scale.begin(), scale.end(), is_number) &&
                   scale[0].get<double>() > 0,
               "a loss scale of three numbers");
    result.loss_scale = scale.get<std::vector<double>>();
  }
  for (const auto& [name, value] : state["options"].items())
    result.options[name] = value.is_string() ? value.get<std::string>() : value.dump();
  const int64_t named =
      steps_of_name((folder.has_filename() ? folder : folder.parent_path()).filename().string());
  file.check(named < 0 || named == result.steps, "the steps of its folder's name; it says ", result.steps);
  return result;
}

void read_model_config(const std::string& option, const std::string& folder, ModelConfig& model) {
  const JsonFile config(option,
                        fs::is_directory(folder) ? fs::path(folder) / "config.json" : fs::path(folder));
  model.name = folder;
  model.layers = config.whole("num_hidden_layers", 1, 1000);
  model.d_model = config.whole("hidden_size", 2, 65536);
  model.heads = config.whole("num_attention_heads", 1, 1024);
  model.kv_heads =
      config.has("num_key_value_heads") ? config.whole("num_key_value_heads", 1, 1024) : model.heads;
  model.d_ff = config.whole("intermediate_size", 1, 1'000'000);
  model.vocab_size = config.whole("vocab_size", 2, 1'000'000);
  model.norm_epsilon = config.number("rms_norm_eps", 1e-6);
  read_rope(config, model);
  const JsonFile experts = config.part("pentatron_experts");
  model.experts = experts.has("experts") ? experts.whole("experts", 1, 1024) : 0;
  if (model.experts > 0) {
    model.top_k = experts.whole("top_k", 1, 1024);
    if (experts.has("shared_experts")) model.shared_experts = experts.whole("shared_experts", 0, 1024);
    if (experts.has("balance_bias")) model.balance = Balance::bias;
  }
  config.only("model_type", model.experts > 0 ? "pentatron_experts" : "llama");
  config.only("hidden_act", "silu");
  config.only("attention_bias", false);
  config.only("mlp_bias", false);
  config.only("sliding_window", nullptr);
  config.only("quantization_config", nullptr);
  config.only("head_dim", model.d_model / model.heads);
}

std::string model_config_text(const ModelConfig& m, int sequence_length, const std::string& type) {
  Json config = {{"architectures", {"LlamaForCausalLM"}},
                 {"model_type", "llama"},
                 {"hidden_size", m.d_model},
                 {"intermediate_size", m.d_ff},
                 {"num_hidden_layers", m.layers},
                 {"num_attention_heads", m.heads},
                 {"num_key_value_heads", m.kv_heads},
                 {"vocab_size", m.vocab_size},
                 {"max_position_embeddings", sequence_length},
                 {"hidden_act", "silu"},
                 {"attention_bias", false},
                 {"mlp_bias", false},
                 {"rms_norm_eps", m.norm_epsilon},
                 {"rope_theta", m.rope_theta},
                 {"tie_word_embeddings", false},
                 {"bos_token_id", nullptr},
                 {"eos_token_id", nullptr},
                 {"torch_dtype", type}};
  const RopeScaling& rope = m.rope_scaling;
  if (rope.factor != 1) {
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", rope.factor},
                              {"low_freq_factor", rope.low_freq_factor},
                              {"high_freq_factor", rope.high_freq_factor},
                              {"original_max_position_embeddings", rope.original_positions}};
    config["max_position_embeddings"] = std::max(sequence_length, rope.original_positions);
  }
  if (m.experts > 0) {  // transformers has no such model
    config["architectures"] = {"PentatronExperts"};
    config["model_type"] = "pentatron_experts";
    config["pentatron_experts"] = {{"experts", m.experts}, {"top_k", m.top_k}};
    if (m.shared_experts > 0) config["pentatron_experts"]["shared_experts"] = m.shared_experts;
    if (m.has_balance_bias()) config["pentatron_experts"]["balance_bias"] = true;
  }
  return config.dump(2) + "\n";
}

std::string model_difference(const ModelConfig& m, const ModelConfig& s) {
  const std::tuple<const char*, double, double> sizes[] = {
      {"--layers", m.layers, s.layers},
      {"--d-model", m.d_model, s.d_model},
      {"--heads", m.heads, s.heads},
      {"--kv-heads", m.kv_heads, s.kv_heads},
      {"--d-ff", m.d_ff, s.d_ff},
      {"--vocab-size", m.vocab_size, s.vocab_size},
      {"--model's rope_theta", m.rope_theta, s.rope_theta},
      {"--model's rms_norm_eps", m.norm_epsilon, s.norm_epsilon},
      {"--experts", m.experts, s.experts},
      {"--top-k", m.experts > 0 ? m.top_k : 0, s.experts > 0 ? s.top_k : 0},
      {"--shared-experts", m.shared_experts, s.shared_experts},
      {"--balance bias", m.has_balance_bias(), s.has_balance_bias()}};
  for (const auto& [name, here, there] : sizes) {
    if (here != there) return text(name, " is ", here, ", and was ", there);
  }
  return {};
}

}  // namespace pentatron
