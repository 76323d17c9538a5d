// What other frameworks do in another way, as far as it decides how long a step takes. So the planner can be
// held against steps that were measured elsewhere. The numbers describe a framework, not a run: none depends
// on the model or the layout.
#pragma once

#include <string>

#include "device/device_profile.h"
#include "device/errors.h"

namespace pentatron {

struct Style {
  bool overlaps_sharded_sums = true;  // with ZeRO, gradients and weights travel beside computation
  bool all_reduces = false;           // with ZeRO-1, gradients are all-reduced, not reduce-scattered
  double message_seconds = 0;         // that both ends of a pipeline message wait in addition
  double moved = 1;                   // bytes that all but products move: kernels that are not fused
  double launched = 1;                // operations that the host issues
  double launch_seconds = 0;          // that each takes; 0: as the profile says
  double product_share = 1;           // of the rate of a product that runs alone
  double network_share = 1;           // of the network's bandwidth, of collectives that span nodes
  double kept = 1;                    // activations
};

inline Style style_of(const std::string& name) {
  if (name == "pentatron") return {};
  // PyTorch, eager: a Python line for each kernel. ZeRO-1 all-reduces all gradients in fp32 when backward is
  // done (trainer.py, optim/zero.py); without ZeRO, DDP overlaps.
  if (name == "nanotron") {
    return {.overlaps_sharded_sums = false,
            .all_reduces = true,
            .message_seconds = 1e-3,
            .moved = 2,
            .launched = 1.6,
            .launch_seconds = 9e-6,
            .product_share = 0.8,
            .network_share = 0.65,
            .kept = 1.7};
  }
  // Fused kernels, dropout, and a softmax of its own (Korthikanti et al., 2022); pipeline messages are not
  // hidden.
  if (name == "megatron") {
    return {.overlaps_sharded_sums = false, .moved = 1.8, .launched = 1.3, .launch_seconds = 5e-6};
  }
  throw UsageError("--style", name, "one of pentatron, nanotron, megatron");
}

// The GPU as a framework of this style uses it.
inline DeviceProfile used_by(const Style& style, DeviceProfile gpu) {
  gpu.memory_achievable /= style.moved;
  gpu.product_achievable *= style.product_share;
  gpu.network_bandwidth *= style.network_share;
  if (style.launch_seconds > 0) gpu.launch_seconds = style.launch_seconds;
  gpu.launch_seconds *= style.launched;
  return gpu;
}

}  // namespace pentatron
