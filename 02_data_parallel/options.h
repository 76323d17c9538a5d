// The options of data parallelism.
#pragma once

#include <algorithm>

#include "device/precision.h"
#include "options/options.h"

namespace pentatron {

// When ranks sum their gradients: after backward, unit by unit during it, or in buckets of equal size.
enum class DpSync { naive, overlap, bucket };
inline const Names<DpSync> dp_sync_names = {
    {"naive", DpSync::naive}, {"overlap", DpSync::overlap}, {"bucket", DpSync::bucket}};
inline std::string to_string(DpSync sync) { return name_of(dp_sync_names, sync); }

struct DataParallelOptions {
  DpSync dp_sync = DpSync::bucket;
  double bucket_mb = 25;  // megabytes (10^6 bytes) of a bucket
};

// 25, or an eighth of all gradients if that is less; with 1 % more, units' padding needs no ninth bucket.
inline double default_bucket_mb(const ModelConfig& model) {
  return std::min(25.0, 1.01e-6 * static_cast<double>(parameter_count(model) * gradient_bytes()) / 8);
}

inline void declare(CommandLine& line, const Options& all, DataParallelOptions& o) {
  line.group("Data parallelism");
  line.choice("--dp-sync", o.dp_sync, dp_sync_names, "when gradients are summed over the ranks");
  line.number("--bucket-mb", o.bucket_mb, 1e-6, 1e6, "megabytes of gradients that are summed at once",
              "25, or an eighth of all where that is less");
  line.afterwards([&] {
    if (!line.given("--bucket-mb")) o.bucket_mb = default_bucket_mb(all.model);
  });
}

inline void fit_to_ranks(const Options&, const DataParallelOptions&, int) {}  // any number will do

}  // namespace pentatron
