// The options of all programs: which model, which data, how the batch is cut, how it is optimised, what is
// written. Each stage adds its own (its options.h): a struct that derives from Options, a function that
// declares them on the command line, and one that checks and completes them when all are known.
#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "model/config.h"
#include "ranks/peers.h"
#include "run/command_line.h"

namespace pentatron {

inline const Names<Recompute> recompute_names = {
    {"none", Recompute::none}, {"selective", Recompute::selective}, {"full", Recompute::full}};
inline const Names<Attention> attention_names = {
    {"naive", Attention::naive}, {"tiled", Attention::tiled}, {"tensor-core", Attention::tensor_core}};
inline const Names<OptimizerKind> optimizer_names = {{"adamw", OptimizerKind::adamw},
                                                     {"sgd", OptimizerKind::sgd}};
inline std::string_view to_string(Recompute recompute) { return name_of(recompute_names, recompute); }
inline std::string_view to_string(Attention attention) { return name_of(attention_names, attention); }
inline std::string_view to_string(OptimizerKind optimizer) { return name_of(optimizer_names, optimizer); }

// Defaults that depend on the model (its sizes, sequence_length, lr) or on another option are set by
// parse_options.
struct Options : TrainingConfig, CommunicationConfig {
  // Copied, never moved: the options of several stages share one of these (a virtual base), and each would
  // move it.
  Options() = default;
  Options(const Options&) = default;
  Options& operator=(const Options&) = default;

  std::string data;  // path; common/corpus.txt unless given

  // Checkpoints (checkpoint.h). Paths; empty: none.
  std::string save, load, load_weights;
  bool resume = false;      // load what `save` has, if it has something: then `load` is `save`
  std::string load_folder;  // of the checkpoint, or of the weights
  int save_every = 0;       // steps between two checkpoints; 0: only at the end
  const char* load_option() const {
    return load.empty() ? "--load-weights" : resume && load == save ? "--resume" : "--load";
  }

  std::string log_json;  // path; empty: no log
  std::string trace;     // of the last step: path; empty: no trace
  bool profile = false;  // print the time of each kernel in the last step
  int log_every = 10;    // steps between two printed lines
  int sample = 0;        // tokens of text that the trained model writes at the end

  std::string as_json;                // all options of the program with their values, as a JSON object
  std::vector<std::string> training;  // names of those that --load takes from a checkpoint
};

struct TrainerState;  // checkpoint_folder.h
// What --load continues with other options of the training: "; --lr is 0.1 and was 0.2", or nothing.
std::string changed_options(const Options& options, const TrainerState& state);

// The default of --attention (program.cu). In a CPU build it is `on_cpu`. On a GPU it is tensor-core, if
// build, GPU and head size can; but where a small block computed both ways differs, one line says so. Else
// tiled.
Attention default_attention(const ModelConfig& model, Attention on_cpu);

// What all programs take of the GPU, and those of several ranks of their communication.
void declare_device(CommandLine& line, DeviceConfig& config);
void declare_communication(CommandLine& line, CommunicationConfig& config);

// What a stage adds. A program of one rank adds nothing.
inline void declare_options(CommandLine&, Options&) {}
inline void complete_options(Options&, const CommandLine&) {}
// Completes and checks what depends on the number of ranks. Throws UsageError.
inline void fit_to_ranks(Options&, [[maybe_unused]] int ranks) {}

// Reads the arguments into `options`. `declare`: a stage's options, `complete`: checks and completes them.
// Throws UsageError or HelpRequest. `attention`: the default for --attention in a CPU build.
void parse_options(int argc, const char* const* argv, std::string_view description, Options& options,
                   Attention attention, const std::function<void(CommandLine&)>& declare,
                   const std::function<void(const CommandLine&)>& complete);

// The same for the options of a program (a stage's options.h). All but those of one rank communicate.
template <std::derived_from<Options> ProgramOptions>
ProgramOptions parse_options(int argc, const char* const* argv, std::string_view description,
                             Attention attention = Attention::naive) {
  ProgramOptions options;
  parse_options(
      argc, argv, description, options, attention,
      [&](CommandLine& line) {
        declare_options(line, options);
        if constexpr (!std::same_as<ProgramOptions, Options>) declare_communication(line, options);
      },
      [&](const CommandLine& line) { complete_options(options, line); });
  return options;
}

}  // namespace pentatron
