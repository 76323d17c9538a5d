// The folder of a run's checkpoints: names, which one is the newest, and what is in it beside tensors:
// trainer_state.json, and config.json, which says to which model the weights belong, as Hugging Face's
// transformers writes and reads it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "options/options.h"

namespace pentatron {

// The checkpoint with `steps` steps done: "step_000200".
std::string checkpoint_name(int64_t steps);

// The folder that --load means: itself, or the one that its file `latest` names. Throws UsageError, naming
// `option`. `file`: what a checkpoint must have.
std::string find_checkpoint(const std::string& option, const std::string& folder, const std::string& file);

// Makes the folder `part` the newest checkpoint of its folder. One that had the same number of steps is moved
// to `part`. It happens wholly or not at all, whenever the process is killed. Throws std::system_error.
void publish_checkpoint(const std::string& part, int64_t steps);

struct TrainerState {
  int64_t steps = 0;
  std::string precision, optimizer, data;
  std::map<std::string, std::string> options;  // of the run that wrote it, without dashes
  std::vector<double> loss_scale;              // [3]: what LossScale (kernels/loss.h) has; empty: none
};
std::string trainer_state_text(int64_t steps, const std::string& precision, const Options& options,
                               const std::vector<double>& loss_scale = {}, const std::string& data = {});
TrainerState read_trainer_state(const std::string& option, const std::string& checkpoint);

// Takes the model's sizes and its experts from FOLDER/config.json, or from a file that is given instead of a
// folder. Throws UsageError, naming `option`, if the file can't be read, or if it asks for something that
// would change the result and that is not here. What changes training alone becomes a remark. `content`, if
// not empty, is read in place of the file's.
void read_model_config(const std::string& option, const std::string& folder, ModelConfig& model,
                       const std::string& content = {});

// --load, --resume and --load-weights: the model is that of the folder. With the first two, options of the
// training are those of the run that saved it. What is given on the command line counts, but another model is
// refused. Throws UsageError.
void use_checkpoint(CommandLine& line, Options& options);

// The text of config.json. sequence_length: what the model was trained on; type: of the weights, in PyTorch's
// words, such as "float32".
std::string model_config_text(const ModelConfig& model, int sequence_length, const std::string& type);

// The first entry of config.json in which two models differ, as "num_hidden_layers is 8, and was 4", if any.
std::string model_difference(const ModelConfig& model, const ModelConfig& saved);

}  // namespace pentatron
