// The options of all programs: which model, which data, how the batch is cut, how it is optimised, what is
// written. What programs of several ranks add is in parallel_options.h.
#pragma once

#include <string>

#include "device/device_config.h"
#include "device/mapped_file.h"
#include "model/config.h"
#include "options/command_line.h"

namespace pentatron {

inline const Names<Recompute> recompute_names = {
    {"none", Recompute::none}, {"selective", Recompute::selective}, {"full", Recompute::full}};
inline const Names<Attention> attention_names = {
    {"naive", Attention::naive}, {"tiled", Attention::tiled}, {"tensor-core", Attention::tensor_core}};
inline const Names<OptimizerKind> optimizer_names = {{"adamw", OptimizerKind::adamw},
                                                     {"sgd", OptimizerKind::sgd}};
inline std::string to_string(Recompute recompute) { return name_of(recompute_names, recompute); }
inline std::string to_string(Attention attention) { return name_of(attention_names, attention); }
inline std::string to_string(OptimizerKind optimizer) { return name_of(optimizer_names, optimizer); }

struct Options : TrainingConfig, DeviceConfig {
  std::string data = in_tree("common/corpus.txt");  // path

  // Checkpoints (checkpoint.h). Paths; empty: none.
  std::string save, load, load_weights;
  bool resume = false;      // load what `save` has, if it has something: then `load` is `save`
  std::string load_folder;  // of the checkpoint, or of the weights
  int save_every = 0;       // steps between two checkpoints; 0: only at the end
  const char* load_option() const {
    if (load.empty()) return "--load-weights";
    return resume && load == save ? "--resume" : "--load";
  }

  std::string log_json;  // path; empty: no log
  std::string trace;     // of the last step: path; empty: no trace
  bool profile = false;  // print the time of each kernel in the last step
  int log_every = 10;    // steps between two printed lines
  int sample = 0;        // tokens of text that the trained model writes at the end

  std::string as_json;  // all options of the program with their values, as a JSON object
  std::string changed;  // which of them --load continues with other values: "; --lr is 0.1 and was 0.2"
};

// Those of all programs; and of them those of the modelled GPU, which tools take, too.
void declare_common(CommandLine& line, Options& options);
void declare_device(CommandLine& line, DeviceConfig& config);
std::string models_and_gpus();  // that options may name, for --help

// Throws UsageError if sizes do not fit together.
void check_sizes(const Options& options);

}  // namespace pentatron
