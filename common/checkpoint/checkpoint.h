// Checkpoints: folders in Hugging Face's format. A run writes them between steps; any layout can read them.
//
//   DIR/step_000200/model.safetensors      weights, under the names that declare_transformer gives them
//                   config.json            the model's sizes
//                   optimizer.safetensors  the optimizer's states: NAME.moment1, NAME.moment2, NAME.master
//                   trainer_state.json     the step, and the options of the run
//   DIR/latest                             the name of the newest complete checkpoint
//
// The declarations say where each element of each tensor lies in a file. So every rank writes the elements
// that its optimizer updates, and nothing is gathered; and every rank reads those that it needs, whoever has
// written them. A checksum of each tensor is in its file's header; it is made of the ranks' parts.
//
// Training waits while a checkpoint is saved. It is written into DIR/new.part, and renamed when all of it is
// on the disk. So a run may be killed at any moment: what has another name is complete.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/shared_file.h"
#include "model/optimizer.h"
#include "model/parameters.h"
#include "options/options.h"
#include "ranks/peers.h"

namespace pentatron {

constexpr size_t checkpoint_buffer = 16 << 20;  // bytes of a rank's pinned memory, for copies

// Element i of an array of numbers of some type. Exact: a double holds the numbers of all types.
double number_at(NumberType type, const std::byte* array, uint64_t i);

// Compares checksums of the weights that several ranks hold: hardly a loss shows a wrong bit. Throws RunError
// where they differ; on rank 0 it names a parameter, and who has what. All ranks call this.
void compare_weights(const Parameters& parameters, int64_t steps);

class Checkpoint {
 public:
  // Loads what --load, --resume or --load-weights names into the weights, which have their initial values,
  // and into the optimizer's states. With --save, makes the folder. Throws UsageError on all ranks if one can
  // not use what it finds. All ranks construct it, and call each function, at the same steps. `data`: the
  // checksum of --data, which all ranks must have, and what is loaded, if --data is the same file.
  Checkpoint(const Options& options, Parameters& parameters, Optimizer& optimizer, cudaStream_t compute,
             const std::string& data = {});

  int64_t first_step() const { return first_step_; }  // of this run
  // Whether a checkpoint of this step is one of --save-every.
  bool is_due(int64_t step) const { return options_.save_every > 0 && (step + 1) % options_.save_every == 0; }
  // After the optimizer's step: saves, if it is due. A failure is a line. Throws RunError if ranks should
  // hold the same weights and do not.
  void after_update(int64_t step);
  // Saves the last step, also where a signal has ended the run. Throws RunError if that fails, or likewise.
  void finish();

 private:
  struct File {
    std::string name;
    std::vector<StoredTensor> tensors;                  // equally many of each parameter
    std::vector<std::vector<const void*>> arrays = {};  // [shards, this number], on the device
    std::vector<uint32_t> checksums = {};               // [tensors]
  };
  struct Loaded {
    std::string checksums;  // of the files that were read
    std::string report;     // for the terminal
  };
  Loaded load();
  TrainerState load_trainer_state();
  template <class T>
  void load_shard(const SafetensorsFolder& folder, const std::string& state, const Shard& shard, T* to);
  void make_folder();

  std::string save();  // returns what went wrong, or nothing
  std::vector<File> files() const;
  void write(const std::string& part, std::vector<File>& files);
  void write_range(const ParameterRange& range, const void* shard, const StoredTensor& tensor,
                   uint32_t& checksum, SharedFile& file);
  void complete(const std::string& part, std::vector<File>& files);
  const std::byte* to_host(const void* from, size_t bytes);

  const Options& options_;
  Parameters& parameters_;
  Optimizer& optimizer_;
  cudaStream_t compute_;
  const std::string data_;
  const Peers& ranks_ = peers();
  int64_t first_step_ = 0, done_ = 0, saved_ = 0;  // steps
  std::unique_ptr<SharedFile> lock_;               // of --save, on rank 0
  PinnedArray<std::byte> buffer_;
};

}  // namespace pentatron
