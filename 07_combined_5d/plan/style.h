// What other frameworks do in another way, as far as it decides how long a step takes. So the planner can be
// held against steps that were measured elsewhere. A style is a file (styles/). Its numbers describe a
// framework on its machines, not a run: none depends on the model or the layout. calibrate.py fits them to
// measured steps.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "../mesh.h"
#include "clock/device_profile.h"
#include "device/errors.h"
#include "run/log.h"

namespace pentatron {

struct Style {
  // The device: shares of what its profile says.
  double memory_share = 1;       // bandwidth of all but products: kernels that are not fused move more
  double product_share = 1;      // rate of products
  bool flash_attention = false;  // FlashAttention-2 in place of our attention on tensor cores
  double link_share = 1, network_share = 1;  // bandwidth inside a node; between nodes
  double crossing_seconds = 0;  // that a collective of tensor ranks on n nodes takes more, for each node
  // The host. It holds up the device if it takes longer than the device.
  double operation_seconds = 0;   // for an operation of ours; 0: as the profile says
  double collective_seconds = 0;  // more for a collective
  double pipelined_seconds = 0;   // more for one of n tensor ranks whose pipeline crosses nodes, for each
  // Memory.
  double weights = 0;       // copies beside ours, such as gradients in bf16 before they are added
  double activations = 1;   // times ours
  double logits_bytes = 0;  // beside ours, for each logit
  double full_memory = 1;   // share of the device's memory from which the allocator gives back and asks again
  double retry_seconds = 0;  // that this takes in a micro-batch, for each tenth of the memory above it

  std::string about;
  // Measured over predicted seconds, by kind of layout (kind_of): the 10th and the 90th percentile.
  std::map<std::string, std::array<double, 2>> ranges;
};

inline const Style own_style;  // this project's

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Style, about, memory_share, product_share, flash_attention,
                                                link_share, network_share, crossing_seconds,
                                                operation_seconds, collective_seconds, pipelined_seconds,
                                                weights, activations, logits_bytes, full_memory,
                                                retry_seconds, ranges)

// `name`: of a file in styles/, or its path. What it does not say is as in Style. Throws UsageError.
inline Style style_of(const std::string& name) {
  const std::string shipped = std::string(PENTATRON_STYLES) + "/" + name + ".json";
  const bool is_name = name.find('/') == name.npos && std::filesystem::exists(shipped);
  require(is_name || std::filesystem::is_regular_file(name), "--style", name,
          "pentatron, flash, nanotron, megatron, or a file of a style");
  std::ifstream file(is_name ? shipped : name);
  const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  require(json.is_object(), "--style", name, "a file with a JSON object");
  const nlohmann::json known = Style();
  for (const auto& [key, value] : json.items()) {
    require(known.contains(key), "--style", name, "no \"", printable(key), "\" in this file");
    const bool is_share = key.ends_with("_share") || key == "full_memory";
    require(!value.is_number() || value > 0 || (!is_share && value == 0), "--style", name, "a number ",
            is_share ? "above 0" : "of 0 or more", " for \"", key, "\" in this file");
  }
  try {
    return json;
  } catch (const nlohmann::json::exception& error) {
    throw UsageError("--style", name, error.what());
  }
}

// Seconds of a micro-batch in which the allocator gives memory back and asks for it again. `share`: of the
// device's memory that a layout needs.
inline double retries(const Style& style, double share) {
  return style.retry_seconds * std::clamp(10 * (share - style.full_memory), 0.0, 2.0);
}

// Layouts of a kind are mispredicted alike. `full`: share of the device's memory that this one needs.
inline std::string kind_of(const Style& style, const MeshShape& shape, const DeviceProfile& gpu,
                           double full) {
  if (full > style.full_memory) return "almost full";
  if (shape.tp > gpu.gpus_per_node) return "tensor over nodes";
  const bool pipeline = shape.pp > 1, tensor = shape.tp > 1;
  if (pipeline && tensor)
    return shape.ranks() > gpu.gpus_per_node ? "tensor and pipeline over nodes" : "tensor and pipeline";
  return pipeline ? "pipeline" : tensor ? "tensor" : "data";
}

// The GPU as a framework of this style uses it.
inline DeviceProfile used_by(const Style& style, DeviceProfile gpu) {
  gpu.memory_achievable *= style.memory_share;
  gpu.product_achievable *= style.product_share;
  if (style.flash_attention) {
    gpu.attention_64_forward = gpu.attention_128_forward = gpu.flash_forward;
    gpu.attention_64_backward = gpu.attention_128_backward = gpu.flash_backward;
  }
  gpu.link_bandwidth *= style.link_share;
  gpu.network_bandwidth *= style.network_share;
  if (style.operation_seconds > 0) gpu.launch_seconds = style.operation_seconds;
  return gpu;
}

}  // namespace pentatron
