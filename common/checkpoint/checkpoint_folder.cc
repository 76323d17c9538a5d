#include "checkpoint/checkpoint_folder.h"

#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <iomanip>
#include <nlohmann/json.hpp>

#include "checkpoint/safetensors.h"
#include "checkpoint/shared_file.h"
#include "device/mapped_file.h"
#include "options/command_line.h"
#include "options/readable.h"

namespace pentatron {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// The values of a file, which is a JSON object; every complaint names option and file.
class JsonFile {
 public:
  JsonFile(const std::string& option, const fs::path& path, const std::string& content = {})
      : option_(option), path_(path.string()) {
    json_ = Json::parse(content.empty() ? MappedFile(option, path_).text() : content, nullptr, false);
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
  double number(const char* key, double preset = 0) const {  // 0: it has to be there
    if (!has(key) && preset > 0) return preset;
    check(has(key) && json_[key].is_number() && json_[key] > 0, key, " to be a number above 0");
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

// "llama3", or none. Transformers 5 writes rope_parameters, and rope_theta into it. Models whose layers turn
// differently have an object of each kind in it.
void read_rope(const JsonFile& config, ModelConfig& model) {
  config.check(!config.has("rope_parameters") || !config.has("rope_scaling"),
               "rope_parameters or rope_scaling, and not both");
  const JsonFile rope = config.part(config.has("rope_parameters") ? "rope_parameters" : "rope_scaling");
  for (const auto& [kind, value] : rope.json().items())
    rope.check(!value.is_object(), "rope_parameters that are those of all layers; they have ", kind);
  model.rope_theta = rope.number("rope_theta", config.number("rope_theta", 1e4));
  const char* const key = rope.has("rope_type") ? "rope_type" : "type";
  model.rope_scaling = {};
  rope.only("partial_rotary_factor", 1);
  if (!rope.has("factor") && (!rope.has(key) || rope.json()[key] == "default")) return;
  rope.check(rope.has(key), "a rope_type beside factor");
  rope.only(key, "llama3");
  model.rope_scaling = {rope.number("factor"), rope.number("low_freq_factor"),
                        rope.number("high_freq_factor"),
                        rope.whole("original_max_position_embeddings", 1, 1 << 30)};
  rope.check(model.rope_scaling.low_freq_factor < model.rope_scaling.high_freq_factor,
             "low_freq_factor to be below high_freq_factor");
}

// Of the values of an object.
std::map<std::string, std::string> texts_of(const Json& object) {
  std::map<std::string, std::string> texts;
  for (const auto& [name, value] : object.items())
    texts[name] = value.is_string() ? value.get<std::string>() : value.dump();
  return texts;
}

// The options that --load takes from the checkpoint, unless they are given.
const std::vector<std::string> training_options = {
    "data",      "seq-len",      "micro-batch-size", "global-batch-size",
    "steps",     "seed",  // of the batches
    "optimizer", "lr",           "warmup-steps",     "beta1",
    "beta2",     "weight-decay", "grad-clip",  // of the optimizer
    "aux-loss",  "balance"};

// The last step by name that a folder has, whether `latest` names it or not; empty: none, or no folder.
std::string last_step_in(const std::string& folder) {
  std::string last;
  std::error_code ignored;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, ignored)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("step_")) last = std::max(last, name);
  }
  return last;
}

}  // namespace

std::string checkpoint_name(int64_t steps) { return text("step_", std::setfill('0'), std::setw(6), steps); }

std::string find_checkpoint(const std::string& option, const std::string& folder, const std::string& file) {
  std::string newest;
  std::error_code ignored;
  if (const fs::path latest = fs::path(folder) / "latest"; fs::exists(latest, ignored))
    std::getline(std::istringstream(std::string(MappedFile(option, latest).text())), newest);
  for (const fs::path& path : {fs::path(folder), fs::path(folder) / newest}) {
    if (fs::exists(path / file, ignored)) return path.string();
  }
  throw UsageError(option, folder,
                   "a folder with " + file + ", or one of --save whose file `latest` names such a folder");
}

void publish_checkpoint(const std::string& part, int64_t steps) {
  const fs::path folder = fs::path(part).parent_path(), path = folder / checkpoint_name(steps);
  const auto set_latest = [&] {
    fs::remove(folder / "latest.part");  // of a run that was killed
    write_text(folder / "latest.part", checkpoint_name(steps) + "\n");
    fs::rename(folder / "latest.part", folder / "latest");
  };
  // The first one comes before its step: so where a step is, `latest` is missing only if it was lost.
  if (!fs::exists(folder / "latest")) set_latest();
  if (fs::exists(path))
    check_errno(renameat2(AT_FDCWD, part.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0);
  else
    fs::rename(part, path);
  set_latest();
}

std::string trainer_state_text(int64_t steps, const std::string& precision, const Options& options,
                               const std::vector<double>& loss_scale, const std::string& data) {
  Json state = {{"step", steps},
                {"precision", precision},
                {"optimizer", to_string(options.optimizer)},
                {"data", data},
                {"options", Json::parse(options.as_json)}};
  if (!loss_scale.empty()) state["loss_scale"] = loss_scale;
  return state.dump(2) + "\n";
}

TrainerState read_trainer_state(const std::string& option, const std::string& checkpoint) {
  const JsonFile file(option, fs::path(checkpoint) / "trainer_state.json");
  TrainerState result;
  result.steps = file.whole("step", 0, 1'000'000'000);
  result.options = texts_of(file.part("options").json());
  try {
    file.json().at("precision").get_to(result.precision);
    file.json().at("optimizer").get_to(result.optimizer);
    result.data = file.json().value("data", "");
    result.loss_scale = file.json().value("loss_scale", std::vector<double>());
  } catch (const Json::exception& error) {
    file.check(false, "what a run has saved (", error.what(), ")");
  }
  file.check(result.loss_scale.empty() || result.loss_scale.size() == 3, "a loss scale of three numbers");
  return result;
}

void read_model_config(const std::string& option, const std::string& folder, ModelConfig& model,
                       const std::string& content) {
  const JsonFile config(
      option, fs::is_directory(folder) ? fs::path(folder) / "config.json" : fs::path(folder), content);
  const JsonFile experts = config.part("pentatron_experts");
  model.experts = experts.has("experts") ? experts.whole("experts", 1, 1024) : 0;
  config.only("model_type", model.experts > 0 ? "pentatron_experts" : "llama");
  config.only("architectures", {model.experts > 0 ? "PentatronExperts" : "LlamaForCausalLM"});
  model.name = folder;
  model.layers = config.whole("num_hidden_layers", 1, 1000);
  model.d_model = config.whole("hidden_size", 2, 65536);
  model.heads = config.whole("num_attention_heads", 1, 1024);
  model.kv_heads =
      config.has("num_key_value_heads") ? config.whole("num_key_value_heads", 1, 1024) : model.heads;
  model.d_ff = config.whole("intermediate_size", 1, 1'000'000);
  model.vocab_size = config.whole("vocab_size", 2, 1'000'000);
  model.norm_epsilon = config.number("rms_norm_eps", 1e-6);
  config.check(model.d_model % (2 * model.heads) == 0 && model.heads % model.kv_heads == 0, "hidden_size (",
               model.d_model, ") to be a multiple of twice num_attention_heads (", model.heads,
               "), and that one of num_key_value_heads (", model.kv_heads, ")");
  read_rope(config, model);
  if (model.experts > 0) {
    model.top_k = experts.whole("top_k", 1, 1024);
    if (experts.has("shared_experts")) model.shared_experts = experts.whole("shared_experts", 0, 1024);
    if (experts.has("balance_bias")) model.balance = Balance::bias;
  }
  const std::pair<const char*, Json> all_that_is_here[] = {{"hidden_act", "silu"},
                                                           {"head_dim", model.d_model / model.heads},
                                                           {"attention_bias", false},
                                                           {"mlp_bias", false},
                                                           {"sliding_window", nullptr},
                                                           {"quantization_config", nullptr},
                                                           {"rope_interleaved", false},
                                                           {"partial_rotary_factor", 1},
                                                           {"attention_multiplier", nullptr},
                                                           {"embedding_multiplier", 1},
                                                           {"residual_multiplier", 1},
                                                           {"logits_scaling", 1}};
  for (const auto& [key, value] : all_that_is_here) config.only(key, value);
  model.remarks.clear();
  model.tied_head = config.has("tie_word_embeddings") && config.json()["tie_word_embeddings"] != false;
  if (model.tied_head) {
    const int64_t here = parameter_count(model), there = here - int64_t{model.vocab_size} * model.d_model;
    model.remarks = text("its head is the embedding, which makes ", human_count(there),
                         " parameters; here it is a matrix of its own: ", human_count(here), "\n");
  }
  if (config.has("attention_dropout") && config.json()["attention_dropout"] != 0)
    model.remarks += "its attention_dropout is above 0; here nothing is dropped\n";
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
                 {"rope_scaling", nullptr},
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

std::string model_difference(const ModelConfig& model, const ModelConfig& saved) {
  const Json here = Json::parse(model_config_text(model, 0, "")),
             there = Json::parse(model_config_text(saved, 0, ""));
  for (const auto& [name, value] : here.items()) {
    const Json was = there.value(name, Json());
    if (value != was) return text(name, " is ", value.dump(), ", and was ", was.dump());
  }
  return {};
}

void use_checkpoint(CommandLine& line, Options& options) {
  const bool loads = line.given("--load"), loads_weights = line.given("--load-weights");
  require(!options.resume || !options.save.empty(), "--resume", "given",
          "--save, the folder from which the run goes on");
  const std::string last = last_step_in(options.save);
  require(last.empty() || options.resume, "--save", options.save, "a folder without steps, or --resume; ",
          last, " is there");
  const bool resumes = options.resume && !last.empty();  // newer than what others name
  require(resumes || !loads || !loads_weights, "--load-weights", options.load_weights,
          "one of --load and --load-weights");
  if (!resumes && !loads && !loads_weights) return;
  std::string option = "--load-weights", folder = options.load_weights;
  if (loads) {
    option = "--load";
    folder = options.load;
  }
  if (resumes) {
    option = "--resume";
    folder = options.save;
  }
  const bool continues = option != "--load-weights";
  options.load_folder = find_checkpoint(option, folder, continues ? "trainer_state.json" : "config.json");
  read_model_config(option, options.load_folder, options.model);
  if (options.model.tied_head &&
      SafetensorsFolder(option, options.load_folder, "model").has("lm_head.weight")) {
    options.model.tied_head = false;
    options.model.remarks += "but its files have another head, lm_head.weight, which is used\n";
  }
  const ModelConfig saved = options.model;
  const TrainerState state = continues ? read_trainer_state(option, options.load_folder) : TrainerState();
  for (const std::string& name : training_options) {
    if (state.options.contains(name)) line.assign(name, state.options.at(name));
  }
  auto before = texts_of(Json::parse(line.as_json()));
  line.assign_given();
  auto now = texts_of(Json::parse(line.as_json()));
  const std::string difference = model_difference(options.model, saved);
  require(difference.empty(), option, options.load_folder, "the same model; ", difference);
  options.model.tied_head = saved.tied_head;
  options.model.remarks = saved.remarks;
  for (const std::string& name : training_options) {
    if (continues && now[name] != before[name])
      options.changed += text("; --", name, " is ", now[name], " and was ", before[name]);
  }
  if (!resumes) return;
  options.load = folder;
  options.load_weights.clear();
}

}  // namespace pentatron
