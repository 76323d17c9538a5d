// The options of experts, and of all techniques at once.
#pragma once

#include "../02_data_parallel/options.h"
#include "../03_zero/options.h"
#include "../04_tensor_parallel/options.h"
#include "../05_pipeline_parallel/options.h"
#include "../06_context_parallel/options.h"

namespace pentatron {

inline const Names<Balance> balance_names = {
    {"loss", Balance::loss}, {"bias", Balance::bias}, {"none", Balance::none}};
inline std::string_view to_string(Balance balance) { return name_of(balance_names, balance); }

// Beside what the model has of them.
struct ExpertOptions : virtual Options {
  int ep = 1;                // ranks that share out the experts
  double aux_loss = 0.01;    // weight of the loss that balances the experts
  double expert_buffer = 0;  // rows of an expert rank's buffer, over its even share; 0: for all cases
};

inline void declare_options(CommandLine& line, ExpertOptions& o) {
  line.group("Experts");
  line.whole("--experts", o.model.experts, 0, 1024,
             "MLPs of a layer, of which a token takes some, 0: one MLP");
  line.whole("--top-k", o.model.top_k, 1, 1024, "experts that a token is sent to");
  line.whole("--shared-experts", o.model.shared_experts, 0, 1024,
             "experts that get all tokens, beside those");
  line.choice("--balance", o.model.balance, balance_names,
              "experts by a loss, by a bias of the choice, or not");
  line.number("--aux-loss", o.aux_loss, 0, 1000, "weight of this loss");
  line.number("--expert-buffer", o.expert_buffer, 0, 1e6,
              "room for so many even shares of rows, more rows end the run, 0: for the worst case");
  line.of_training({"aux-loss", "balance"});
}

// Throws UsageError.
inline void check_experts(const ExpertOptions& o) {
  const ModelConfig& model = o.model;
  const auto check = [](bool valid, const char* option, int value, const std::string& expected) {
    if (!valid) throw UsageError(option, std::to_string(value), expected);
  };
  if (model.experts == 0) {
    check(model.shared_experts == 0, "--shared-experts", model.shared_experts, "0 without --experts");
    return check(o.ep == 1, "--ep", o.ep, "1 without --experts");
  }
  const std::string experts = "--experts (" + std::to_string(model.experts) + ")";
  check(model.top_k <= model.experts, "--top-k", model.top_k, "at most " + experts);
  check(model.experts % o.ep == 0, "--ep", o.ep, "a divisor of " + experts);
  if (o.expert_buffer > 0 && o.expert_buffer < 1)
    throw UsageError("--expert-buffer", text(o.expert_buffer), "0, or 1 or more");
  // A sample does not need all rows of a micro-batch. The others are alike, and would all choose the
  // same experts.
  check(o.expert_buffer == 0 || o.sample == 0, "--sample", o.sample, "0 with --expert-buffer");
}

// The data-parallel ranks of experts.cu.
struct ExpertProgramOptions : DataParallelOptions, ExpertOptions {};

inline void declare_options(CommandLine& line, ExpertProgramOptions& o) {
  declare_options(line, static_cast<DataParallelOptions&>(o));
  declare_options(line, static_cast<ExpertOptions&>(o));
}
inline void complete_options(ExpertProgramOptions& o, const CommandLine& line) {
  complete_options(static_cast<DataParallelOptions&>(o), line);
  check_experts(o);
}

struct CombinedOptions : DataParallelOptions,
                         ZeroOptions,
                         TensorParallelOptions,
                         PipelineOptions,
                         ContextParallelOptions,
                         ExpertOptions {
  int tp = 1, cp = 1;      // tensor and context ranks
  int dp = 0;              // data ranks; 0: what the other axes leave
  int ranks = 0;           // of the world, in a dry run that is folded (fold.h); 0: those that are there
  bool show_mesh = false;  // print each rank's place, and train nothing
};

inline void declare_options(CommandLine& line, CombinedOptions& o) {
  line.group("Mesh");
  line.whole("--tp", o.tp, 1, 1 << 20, "tensor ranks");
  line.whole("--cp", o.cp, 1, 1 << 20, "context ranks");
  line.whole("--dp", o.dp, 0, 1 << 20, "data ranks, 0: what the other axes leave");
  line.whole("--ep", o.ep, 1, 1 << 20, "ranks that share out the experts");
  line.whole("--ranks", o.ranks, 0, 1 << 20,
             "of the world, in a dry run: processes for those that differ, 0: one for each");
  line.flag("--show-mesh", o.show_mesh, "print who is who, train nothing");
  declare_options(line, static_cast<DataParallelOptions&>(o));
  declare_options(line, static_cast<ZeroOptions&>(o));
  declare_options(line, static_cast<TensorParallelOptions&>(o));
  declare_options(line, static_cast<PipelineOptions&>(o));
  declare_options(line, static_cast<ContextParallelOptions&>(o));
  declare_options(line, static_cast<ExpertOptions&>(o));
}
inline void complete_options(CombinedOptions& o, const CommandLine& line) {
  complete_options(static_cast<DataParallelOptions&>(o), line);
  complete_options(static_cast<PipelineOptions&>(o), line);
  check_experts(o);
  if (o.ranks > 0 && !o.dry_run)
    throw UsageError("--ranks", std::to_string(o.ranks), "none without --dry-run");
}

}  // namespace pentatron
