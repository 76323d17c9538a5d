// A run of the combined program that saves, or continues what another one has saved.
#pragma once

#include <algorithm>
#include <filesystem>
#include <random>

#include "checkpoint/checkpoint.h"
#include "combined_model.h"
#include "files.h"
#include "gather.h"
#include "parity.h"

namespace pentatron {

// One folder for all ranks.
class SharedFolder {
 public:
  explicit SharedFolder(const World& world) : world_(world) {
    const double number = world.largest({world.rank() == 0 ? double(std::random_device()()) : 0.0})[0];
    const std::filesystem::path memory = "/dev/shm";  // a disk takes its time for each fsync
    const bool has_memory = std::filesystem::is_directory(memory);
    path_ = ((has_memory ? memory : std::filesystem::temp_directory_path()) /
             ("pentatron-" + std::to_string(int64_t(number))))
                .string();
  }
  ~SharedFolder() {
    world_.largest({0});
    if (world_.rank() == 0) std::filesystem::remove_all(path_);
  }
  const std::string& path() const { return path_; }

 private:
  const World& world_;
  std::string path_;
};

struct Trained {
  Tensors weights;
  std::vector<double> losses;
  std::string model, optimizer;  // the files of the last checkpoint, on rank 0
};

// Saves after every step.
inline Trained train(const CombinedCase& c, World& world, const std::string& save,
                     const std::string& load = "") {
  CombinedCase with = c;
  with.options.save = save;
  with.options.save_every = 1;
  with.options.load = with.options.load_folder = load;
  with.options.as_json = "{}";
  CombinedModel model(with, world);
  Checkpoint checkpoint(model.options, model.parameters, model.optimizer, model.compute);
  for (UnitHooks* hooks : model.seams.hooks) hooks->weights_changed();
  Trained result;
  for (int64_t step = checkpoint.first_step(); step < c.options.steps; ++step) {
    model.accumulate(batches_of_step(c.options, static_cast<int>(step)));
    model.optimizer.step(step, model.totals.norm_squared());
    for (UnitHooks* hooks : model.seams.hooks) hooks->weights_changed();
    checkpoint.after_update(step);  // before the host has waited for the update
    model.totals.wait();
    result.losses.push_back(model.totals.host_loss());
  }
  checkpoint.finish();
  result.weights = gather_parameters(world, model.parameters, Content::weights, model.compute);
  const std::filesystem::path last =
      std::filesystem::path(save) / ("step_00000" + std::to_string(c.options.steps));
  if (world.rank() == 0) {
    result.model = tests::read_file(last / "model.safetensors");
    result.optimizer = tests::read_file(last / "optimizer.safetensors");
  }
  return result;
}

inline double largest_difference(const Tensors& a, const Tensors& b) {
  double largest = 0;
  for (size_t id = 0; id < a.size(); ++id)
    for (size_t i = 0; i < a[id].size(); ++i) largest = std::max(largest, std::abs(a[id][i] - b[id][i]));
  return largest;
}

}  // namespace pentatron
