// The folder of a run's checkpoints: names, which one is the newest, and trainer_state.json.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace pentatron {

// The checkpoint with `steps` steps done: "step_000200".
std::string checkpoint_name(int64_t steps);
int64_t steps_of_name(const std::string& name);  // -1: it is no such name

// The folder that --load means: itself, or the one that its file `latest` names. Throws UsageError, naming
// `option`. `file`: what a checkpoint must have.
std::string find_checkpoint(const std::string& option, const std::string& folder, const std::string& file);

// The checkpoints in a folder that were not completed, as paths.
std::vector<std::string> cut_off_checkpoints(const std::string& folder);

// The next two return what went wrong, or nothing. Both are complete or have no effect, whatever happens.
//
// Makes the folder `part` the newest checkpoint of its folder. An old one with the same number of steps goes.
std::string publish_checkpoint(const std::string& part, int64_t steps);
// Removes all but the newest `keep` of the checkpoints with up to `steps` steps.
void remove_old_checkpoints(const std::string& folder, int64_t steps, int keep);

struct TrainerState {
  int64_t steps = 0;
  std::string precision, optimizer;
  std::map<std::string, std::string> options;  // of the run that wrote it, without dashes
  std::vector<double> loss_scale;              // [3]: what LossScale (kernels.h) has; empty: none
};
std::string trainer_state_text(int64_t steps, const std::string& precision, const std::string& optimizer,
                               const std::string& options_as_json,
                               const std::vector<double>& loss_scale = {});
TrainerState read_trainer_state(const std::string& option, const std::string& checkpoint);

}  // namespace pentatron
