// The options of experts, and of all techniques at once.
#pragma once

#include "../02_data_parallel/options.h"
#include "../03_zero/options.h"
#include "../04_tensor_parallel/options.h"
#include "../05_pipeline_parallel/options.h"
#include "../06_context_parallel/options.h"
#include "options/parallel_options.h"

namespace pentatron {

inline const Names<Balance> balance_names = {
    {"loss", Balance::loss}, {"bias", Balance::bias}, {"none", Balance::none}};
inline std::string to_string(Balance balance) { return name_of(balance_names, balance); }

// Beside what the model has of them.
struct ExpertOptions {
  int ep = 1;                // ranks that share out the experts
  double aux_loss = 0.01;    // weight of the loss that balances the experts
  double expert_buffer = 0;  // rows of an expert rank's buffer, over its even share; 0: for all cases
};

// Throws UsageError.
inline void check_experts(const Options& options, const ExpertOptions& o) {
  const ModelConfig& model = options.model;
  const int experts = model.experts;
  if (experts == 0) {
    require(model.shared_experts == 0, "--shared-experts", model.shared_experts, "0 without --experts");
    return require(o.ep == 1, "--ep", o.ep, "1 without --experts");
  }
  require(model.top_k <= experts, "--top-k", model.top_k, "at most --experts (", experts, ")");
  require(experts % o.ep == 0, "--ep", o.ep, "a divisor of --experts (", experts, ")");
  require(o.expert_buffer == 0 || o.expert_buffer >= 1, "--expert-buffer", o.expert_buffer,
          "0, or 1 or more");
  // The rows that a sample does not need are alike, and would all choose the same experts.
  require(o.expert_buffer == 0 || options.sample == 0, "--sample", options.sample, "0 with --expert-buffer");
}

inline void declare(CommandLine& line, Options& options, ExpertOptions& o) {
  ModelConfig& model = options.model;
  line.group("Experts");
  line.number("--experts", model.experts, 0, 1024,
              "MLPs of a layer, of which a token takes some, 0: one MLP");
  line.number("--top-k", model.top_k, 1, 1024, "experts that a token is sent to");
  line.number("--shared-experts", model.shared_experts, 0, 1024, "experts that get all tokens, beside those");
  line.choice("--balance", model.balance, balance_names,
              "experts by a loss, by a bias of the choice, or not");
  line.number("--aux-loss", o.aux_loss, 0, 1000, "weight of this loss");
  line.number("--expert-buffer", o.expert_buffer, 0, 1e6,
              "room for so many even shares of rows, more rows end the run, 0: for the worst case");
  line.afterwards([&] { check_experts(options, o); });
}

struct CombinedOptions : Options, CommunicationConfig {
  int tp = 1, cp = 1;      // tensor and context ranks
  int dp = 0;              // data ranks; 0: what the other axes leave
  int ranks = 0;           // of the world, in a dry run that is folded (fold.h); 0: those that are there
  bool show_mesh = false;  // print each rank's coordinates, and train nothing
  DataParallelOptions data_parallel;
  ZeroOptions zero;
  TensorParallelOptions tensor;
  PipelineOptions pipeline;
  ContextParallelOptions context;
  ExpertOptions experts;
};
inline void declare(CommandLine& line, CombinedOptions& o) {
  line.group("Mesh");
  line.number("--tp", o.tp, 1, 1 << 20, "tensor ranks");
  line.number("--cp", o.cp, 1, 1 << 20, "context ranks");
  line.number("--dp", o.dp, 0, 1 << 20, "data ranks, 0: what the other axes leave");
  line.number("--ep", o.experts.ep, 1, 1 << 20, "ranks that share out the experts");
  line.number("--ranks", o.ranks, 0, 1 << 20,
              "of the world, in a dry run: processes for those that differ, 0: one for each");
  line.flag("--show-mesh", o.show_mesh, "print who is who, train nothing");
  declare(line, o, o.data_parallel);
  declare(line, o, o.zero);
  declare(line, o, o.tensor);
  declare(line, o, o.pipeline);
  declare(line, o, o.context);
  declare(line, o, o.experts);
  line.afterwards([&] { require(o.ranks == 0 || o.dry_run, "--ranks", o.ranks, "none without --dry-run"); });
}

}  // namespace pentatron
