#include "program/model_config.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

#include "device/errors.h"
#include "model/mapped_file.h"

namespace pentatron {
namespace {

using Json = nlohmann::ordered_json;

std::string text(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

// The values of one config.json; every complaint names them.
class Config {
 public:
  Config(const std::string& option, const std::string& folder)
      : option_(option), path_((std::filesystem::path(folder) / "config.json").string()) {
    const MappedFile file(option, path_);
    const char* const begin = reinterpret_cast<const char*>(file.bytes().data());
    json_ = Json::parse(begin, begin + file.bytes().size(), nullptr, false);
    if (!json_.is_object()) refuse("a JSON object");
  }
  Config(const Config& of, const Json& part) : option_(of.option_), path_(of.path_), json_(part) {}

  [[noreturn]] void refuse(const std::string& expected) const { throw UsageError(option_, path_, expected); }
  bool has(const char* key) const { return json_.contains(key) && !json_[key].is_null(); }
  // A part, which is an object; empty if there is none.
  Config part(const char* key) const {
    if (!has(key)) return {*this, Json::object()};
    if (!json_[key].is_object()) refuse(std::string(key) + " to be an object");
    return {*this, json_[key]};
  }
  int whole(const char* key, int lowest, int highest) const {
    if (!has(key)) refuse(std::string("a value of ") + key);
    const Json& value = json_[key];
    if (!value.is_number_integer() || value < lowest || value > highest)
      refuse(std::string(key) + " to be a whole number from " + std::to_string(lowest) + " to " +
             std::to_string(highest) + "; it is " + value.dump());
    return value;
  }
  double number(const char* key, double preset) const {
    if (!has(key)) return preset;
    if (!json_[key].is_number() || !(json_[key] > 0)) refuse(std::string(key) + " to be a number above 0");
    return json_[key];
  }
  // Refuses every value but `expected`. What is missing has it.
  void only(const char* key, const Json& expected) const {
    if (has(key) && json_[key] != expected)
      refuse(std::string(key) + " to be " + expected.dump() + "; it is " + json_[key].dump());
  }

 private:
  std::string option_, path_;
  Json json_;
};

// "llama3", or none. Transformers 5 writes rope_parameters, and rope_theta into it.
void read_rope(const Config& config, ModelConfig& model) {
  const Config rope = config.part(config.has("rope_parameters") ? "rope_parameters" : "rope_scaling");
  model.rope_theta = rope.number("rope_theta", config.number("rope_theta", 1e4));
  const char* const key = rope.has("rope_type") ? "rope_type" : "type";
  model.rope_scaling = {};
  if (!rope.has("factor")) return rope.only(key, "default");
  rope.only(key, "llama3");
  model.rope_scaling = {rope.number("factor", 1), rope.number("low_freq_factor", 1),
                        rope.number("high_freq_factor", 4),
                        rope.whole("original_max_position_embeddings", 1, 1 << 30)};
  if (model.rope_scaling.low_freq_factor >= model.rope_scaling.high_freq_factor)
    rope.refuse("low_freq_factor to be below high_freq_factor");
}

}  // namespace

void read_model_config(const std::string& option, const std::string& folder, ModelConfig& model) {
  const Config config(option, folder);
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
  const Config experts = config.part("pentatron_experts");
  model.experts = experts.has("experts") ? experts.whole("experts", 1, 1024) : 0;
  if (model.experts > 0) {
    model.top_k = experts.whole("top_k", 1, 1024);
    model.moe_every = experts.whole("moe_every", 1, 1000);
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
    config["pentatron_experts"] = {{"experts", m.experts}, {"top_k", m.top_k}, {"moe_every", m.moe_every}};
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
      {"--moe-every", m.experts > 0 ? m.moe_every : 0, s.experts > 0 ? s.moe_every : 0},
      {"--shared-experts", m.shared_experts, s.shared_experts},
      {"--balance bias", m.has_balance_bias(), s.has_balance_bias()}};
  for (const auto& [name, here, there] : sizes) {
    if (here != there) return std::string(name) + " is " + text(here) + ", and was " + text(there);
  }
  return {};
}

}  // namespace pentatron
