// A GPU in some thirty numbers, and how long an operation would take on it. profiles/ has one JSON file for
// each GPU; each number there names its source. No CUDA here.
#pragma once

#include <string>

#include "clock/cost.h"

namespace pentatron {

struct DeviceProfile {
  std::string name;
  double memory_bytes;
  double memory_bandwidth;                               // bytes/s
  double memory_achievable;                              // share of it that a good kernel reaches
  double flops_fp64, flops_fp32, flops_bf16, flops_fp8;  // FLOP/s of dense products
  double product_achievable;                             // share of them that a large product reaches
  double product_achievable_fp8;                         // likewise in fp8, with its scales; 0: as the others
  double tile_rows, tile_columns;                        // of the result, on which one multiprocessor works
  double multiprocessors;
  // As product_achievable, of attention's kernels: tiled; on tensor cores, for heads of 64 and of 128; and of
  // FlashAttention-2's, which others use (07's planner; common/report/published.py).
  double tiled_attention;
  double attention_64_forward, attention_64_backward, attention_128_forward, attention_128_backward;
  double flash_forward, flash_backward;
  double flash_attention;               // 1: these two are the rates, for heads of any size; 0: ours are
  double attention_blocks;              // of threads that fill the GPU, on tensor cores; 0: not counted
  double kernel_seconds;                // the shortest kernel, with the gap before it
  double launch_seconds;                // of the host, for each operation
  double collective_seconds;            // more for a collective; 0 unless a framework's host is slow
  double host_bandwidth;                // bytes/s of a copy from or to pinned memory
  double link_latency, link_bandwidth;  // s, bytes/s each way, of a GPU within its node
  double network_latency, network_bandwidth;  // likewise between nodes
  double gpus_per_node;
  double ll_bandwidth;  // bytes/s of NCCL's protocol LL in a node, at most; 0: links are used as they are
  double layer_product_seconds;  // added to each product of a layer; 0 but in `unit`
  // What a framework does otherwise than our programs; 0: as ours. 07's planner reads these; the clock of a
  // dry run reads the first one.
  double elementwise_passes;  // times over memory, where a kernel of ours goes once
  double unfused_attention;   // 1: attention's scores are in memory
  double mlp_matrices;        // 2: a GELU is between two matrices
  double equal_stages;        // 1: layers are shared out by number, whatever they and the head cost
  double gradient_bytes;      // of an element that is kept and summed
  double exposed_sums;        // 1: sums over tensor and data ranks hide behind nothing
  double split_messages;      // 1: ranks with the same rows send a part of them each
  double message_seconds;     // s that both ranks wait for a message, beside its transfer
  double loss_bytes;          // moved for each logit
  // Ranks on many nodes hold each other up: tensor ranks on n nodes wait n^contention times as long, and a
  // ring over n nodes has its bandwidth divided by (n / 2)^contention.
  double contention;

  double flops(int element_bytes) const;  // peak of products of such elements
  double seconds(const Cost& cost) const;
  double copy_seconds(double bytes) const { return kernel_seconds + bytes / host_bandwidth; }
};

// `gpu`: a shipped profile's name (empty: h100), or a file; its path. UsageError if it is unknown.
std::string profile_path(const std::string& gpu);
// It may say "as": a shipped profile, whose numbers it takes where it has none. UsageError if it is unknown,
// lacks a number that is valid, or has a field that no profile has.
DeviceProfile load_profile(const std::string& gpu);

}  // namespace pentatron
