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
#include "device/device_profile.h"
#include "device/errors.h"
#include "program/log.h"

namespace pentatron {

struct Style {
  // How it does a step. 1: yes, 0: no.
  double overlaps_sharded_sums = 1;  // with ZeRO, gradients and weights travel beside computation
  double all_reduces = 0;            // with ZeRO-1, gradients are all-reduced, not reduce-scattered
  double bucket_bytes = 0;           // of gradients that are summed together without ZeRO; 0: --bucket-mb
  // The device: shares of what its profile says.
  double memory_share = 1;   // bandwidth of all but products: kernels that are not fused move more
  double product_share = 1;  // rate of products
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

  // Measured over predicted seconds, by kind of layout (kind_of): the 10th and the 90th percentile.
  std::map<std::string, std::array<double, 2>> ranges;
};

inline const Style own_style;  // this project's

// The numbers of a style file by their names.
inline constexpr std::pair<const char*, double Style::*> style_fields[] = {
    {"overlaps_sharded_sums", &Style::overlaps_sharded_sums},
    {"all_reduces", &Style::all_reduces},
    {"bucket_bytes", &Style::bucket_bytes},
    {"memory_share", &Style::memory_share},
    {"product_share", &Style::product_share},
    {"link_share", &Style::link_share},
    {"network_share", &Style::network_share},
    {"crossing_seconds", &Style::crossing_seconds},
    {"operation_seconds", &Style::operation_seconds},
    {"collective_seconds", &Style::collective_seconds},
    {"pipelined_seconds", &Style::pipelined_seconds},
    {"weights", &Style::weights},
    {"activations", &Style::activations},
    {"logits_bytes", &Style::logits_bytes},
    {"full_memory", &Style::full_memory},
    {"retry_seconds", &Style::retry_seconds}};

// `name`: of a file in styles/, or its path. What it does not say is as in Style. Throws UsageError.
inline Style style_of(const std::string& name) {
  const auto expect = [&](bool valid, const std::string& expected) {
    if (!valid) throw UsageError("--style", name, expected);
  };
  const std::string shipped = std::string(PENTATRON_STYLES) + "/" + name + ".json";
  const bool is_name = name.find('/') == name.npos && std::filesystem::exists(shipped);
  expect(is_name || std::filesystem::is_regular_file(name),
         "pentatron, nanotron, megatron, or a file of a style");
  std::ifstream file(is_name ? shipped : name);
  const auto json = nlohmann::json::parse(file, nullptr, /*allow_exceptions=*/false);
  expect(json.is_object(), "a file with a JSON object");
  Style style;
  for (const auto& [key, value] : json.items()) {
    if (key == "about") continue;
    if (key == "ranges") {
      for (const auto& [kind, range] : value.items()) {
        expect(range.is_array() && range.size() == 2 && range[0].is_number() && range[1].is_number(),
               "two numbers for each kind of layout in \"ranges\"");
        style.ranges[kind] = {range[0], range[1]};
      }
      continue;
    }
    const auto field =
        std::ranges::find(style_fields, key, [](const auto& f) { return std::string(f.first); });
    expect(field != std::end(style_fields), "no \"" + printable(key) + "\" in this file");
    const bool is_share = key.ends_with("_share") || key == "full_memory";
    expect(value.is_number() && (is_share ? value > 0 : value >= 0),
           std::string("a number ") + (is_share ? "above 0" : "of 0 or more") + " for \"" + key +
               "\" in this file");
    style.*field->second = value;
  }
  return style;
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
  gpu.link_bandwidth *= style.link_share;
  gpu.network_bandwidth *= style.network_share;
  if (style.operation_seconds > 0) gpu.launch_seconds = style.operation_seconds;
  return gpu;
}

}  // namespace pentatron
