#include "clock/device_profile.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "device/errors.h"
#include "device/mapped_file.h"

namespace pentatron {
namespace {

struct Field {
  const char* name;
  double DeviceProfile::*value;
  const char* unit;
  bool may_be_none = false;  // 0, or not in the file
  int whole_up_to = 0;       // a whole number, at most this
  bool must_be_positive() const { return std::string_view(unit) != "s" && !may_be_none; }  // a divisor
};
constexpr Field fields[] = {
    {"memory_bytes", &DeviceProfile::memory_bytes, "B"},
    {"memory_bandwidth", &DeviceProfile::memory_bandwidth, "B/s"},
    {"memory_achievable", &DeviceProfile::memory_achievable, "share"},
    {"flops_fp64", &DeviceProfile::flops_fp64, "FLOP/s"},
    {"flops_fp32", &DeviceProfile::flops_fp32, "FLOP/s"},
    {"flops_bf16", &DeviceProfile::flops_bf16, "FLOP/s"},
    {"flops_fp8", &DeviceProfile::flops_fp8, "FLOP/s"},
    {"product_achievable", &DeviceProfile::product_achievable, "share"},
    {"product_achievable_fp8", &DeviceProfile::product_achievable_fp8, "share", true},
    {"tile_rows", &DeviceProfile::tile_rows, "elements"},
    {"tile_columns", &DeviceProfile::tile_columns, "elements"},
    {"multiprocessors", &DeviceProfile::multiprocessors, "number"},
    {"tiled_attention", &DeviceProfile::tiled_attention, "share"},
    {"attention_64_forward", &DeviceProfile::attention_64_forward, "share"},
    {"attention_64_backward", &DeviceProfile::attention_64_backward, "share"},
    {"attention_128_forward", &DeviceProfile::attention_128_forward, "share"},
    {"attention_128_backward", &DeviceProfile::attention_128_backward, "share"},
    {"flash_forward", &DeviceProfile::flash_forward, "share"},
    {"flash_backward", &DeviceProfile::flash_backward, "share"},
    {"flash_attention", &DeviceProfile::flash_attention, "number", true, 1},
    {"attention_blocks", &DeviceProfile::attention_blocks, "number", true},
    {"kernel_seconds", &DeviceProfile::kernel_seconds, "s"},
    {"launch_seconds", &DeviceProfile::launch_seconds, "s"},
    {"collective_seconds", &DeviceProfile::collective_seconds, "s", true},
    {"host_bandwidth", &DeviceProfile::host_bandwidth, "B/s"},
    {"link_latency", &DeviceProfile::link_latency, "s"},
    {"link_bandwidth", &DeviceProfile::link_bandwidth, "B/s"},
    {"network_latency", &DeviceProfile::network_latency, "s"},
    {"network_bandwidth", &DeviceProfile::network_bandwidth, "B/s"},
    {"gpus_per_node", &DeviceProfile::gpus_per_node, "number", false, 1 << 20},
    {"ll_bandwidth", &DeviceProfile::ll_bandwidth, "B/s", true},
    {"layer_product_seconds", &DeviceProfile::layer_product_seconds, "s", true},
    {"elementwise_passes", &DeviceProfile::elementwise_passes, "number", true},
    {"unfused_attention", &DeviceProfile::unfused_attention, "number", true, 1},
    {"mlp_matrices", &DeviceProfile::mlp_matrices, "number", true, 2},
    {"equal_stages", &DeviceProfile::equal_stages, "number", true, 1},
    {"gradient_bytes", &DeviceProfile::gradient_bytes, "B", true, 4},
    {"exposed_sums", &DeviceProfile::exposed_sums, "number", true, 1},
    {"split_messages", &DeviceProfile::split_messages, "number", true, 1},
    {"message_seconds", &DeviceProfile::message_seconds, "s", true},
    {"loss_bytes", &DeviceProfile::loss_bytes, "B", true},
    {"contention", &DeviceProfile::contention, "number", true},
};

const std::string profiles = "common/clock/profiles", example = profiles + "/rtx4090.json";
constexpr std::string_view other_fields[] = {"name", "as", "description", "ranges"};  // of the planner

// A text of the file, which may have line breaks, as JSON has it.
std::string in_a_line(const std::string& text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

// The multiprocessors take tiles of the result by turns. Where there are fewer tiles than multiprocessors, a
// long sum is split into parts. A library chooses tile size and parts, so the best of some choices counts.
// The result is written when the sums are complete; no computing is left that could hide the writing.
double product_seconds(const DeviceProfile& p, const Cost& c) {
  struct Tile {
    double size, efficiency;  // of the profile's tile; a small one uses less of the inputs it has loaded
  };
  const double in_fp8 = c.element_bytes == 1 ? p.product_achievable_fp8 : 0,
               achievable = in_fp8 > 0 ? in_fp8 : p.product_achievable;
  double best = std::numeric_limits<double>::infinity();
  for (const Tile tile : {Tile{1, 1}, Tile{0.5, 0.85}, Tile{0.25, 0.6}}) {
    const double rows = p.tile_rows * tile.size, columns = p.tile_columns * tile.size;
    const double tiles = std::ceil(c.m / rows) * std::ceil(c.n / columns) * c.batch;
    for (const double parts : {1.0, 2.0, 4.0, 8.0}) {
      if (parts > 1 && (tiles * parts > p.multiprocessors || c.k / parts < 512)) break;
      const double waves = std::ceil(tiles * parts / p.multiprocessors);
      const double flops = waves * p.multiprocessors * 2 * rows * columns * c.k / parts;
      const double rate = p.flops(c.element_bytes) * achievable * tile.efficiency;
      const double partial_sums = parts > 1 ? 2 * sizeof(float) * parts * c.m * c.n * c.batch : 0;
      best = std::min(best, flops / rate + partial_sums / (p.memory_bandwidth * p.memory_achievable));
    }
  }
  return best + c.result_bytes / (p.memory_bandwidth * p.memory_achievable);
}

}  // namespace

double DeviceProfile::flops(int element_bytes) const {
  if (element_bytes == 8) return flops_fp64;
  if (element_bytes == 4) return flops_fp32;
  return element_bytes == 2 ? flops_bf16 : flops_fp8;
}

double DeviceProfile::seconds(const Cost& cost) const {
  const double moving = cost.bytes / (memory_bandwidth * memory_achievable);
  double computing = 0;
  if (cost.batch > 0) {
    computing = product_seconds(*this, cost);
  } else if (cost.unit == Cost::Unit::tensor_cores) {  // attention
    double forward = cost.head_size == 128 ? attention_128_forward : attention_64_forward,
           backward = cost.head_size == 128 ? attention_128_backward : attention_64_backward;
    if (flash_attention > 0) forward = flash_forward, backward = flash_backward;
    const double blocks = flash_attention > 0 ? 0 : attention_blocks;  // those of others are not counted
    computing = cost.flops / (flops_bf16 * (cost.backward ? backward : forward)) *
                std::max(1.0, blocks / cost.blocks);  // few blocks do not fill the GPU
  } else {
    computing = cost.flops / (flops_fp32 * tiled_attention);
  }
  const bool only_moves = cost.batch == 0 && cost.flops == 0 && elementwise_passes > 0;
  return kernel_seconds + std::max(moving * (only_moves ? elementwise_passes : 1), computing) +
         (cost.layer_product ? layer_product_seconds : 0);
}

std::string profile_path(const std::string& gpu) {
  const std::string shipped = in_tree(profiles + "/" + gpu + ".json");
  std::error_code ignored;
  return gpu.find('/') == gpu.npos && std::filesystem::exists(shipped, ignored) ? shipped : gpu;
}

DeviceProfile load_profile(const std::string& gpu) {
  const std::string path = profile_path(gpu.empty() ? "h100" : gpu), shipped = names_in_tree(profiles);
  const std::string names =
      shipped.empty() ? "a name, where the program is in its tree" : "one of " + shipped;
  const MappedFile file("--gpu", path, names + "; or, like " + example + ", ");
  const auto json = nlohmann::json::parse(file.text(), nullptr, /*allow_exceptions=*/false);
  require(json.is_object(), "--gpu", gpu, "numbers like those of ", example);
  const auto is_word = [&](const char* field) {
    const auto word = json.find(field);
    return word == json.end() ||
           (word->is_string() && !word->get<std::string>().empty() &&
            std::ranges::none_of(word->get<std::string>(), [](unsigned char c) { return c < 32; }));
  };
  require(is_word("name") && is_word("as"), "--gpu", gpu, "\"name\" and \"as\" to be words");
  const bool has_base = json.contains("as");
  for (const auto& [name, value] : json.items())
    require(std::ranges::count(fields, name, &Field::name) + std::ranges::count(other_fields, name) > 0,
            "--gpu", gpu, "the fields of common/clock/profiles/h100.json; there is no field ",
            in_a_line(name));
  DeviceProfile profile = {};
  if (has_base) {
    const std::string base = json["as"];
    require(base.find('/') == base.npos, "--gpu", gpu, "\"as\" to be ", names, ", not ", in_a_line(base));
    profile = load_profile(in_tree(profiles + "/" + base + ".json"));
  }
  profile.name = path != gpu ? gpu : json.value("name", std::filesystem::path(gpu).stem().string());
  for (const Field& field : fields) {
    const auto found = json.find(field.name);
    if (found == json.end() && (field.may_be_none || has_base)) continue;
    const bool is_number = found != json.end() && found->is_object() && found->contains("value") &&
                           (*found)["value"].is_number() &&
                           (!found->contains("unit") || (*found)["unit"] == field.unit);
    const double value = is_number ? (*found)["value"].get<double>() : -1;
    const bool is_whole = value <= field.whole_up_to && value == std::floor(value);
    require(is_number && value >= 0 && (value > 0 || !field.must_be_positive()) &&
                (field.whole_up_to == 0 || is_whole),
            "--gpu", gpu, "a number \"value\" ", field.must_be_positive() ? "above 0" : "of 0 or more",
            field.whole_up_to > 0 ? text(", whole and at most ", field.whole_up_to, ",") : "", " for \"",
            field.name, "\" in this file; its \"unit\", where there is one, is ", field.unit);
    profile.*field.value = value;
  }
  return profile;
}

}  // namespace pentatron
