// Checkpoints: folders in Hugging Face's format, which a run writes while it trains and any layout can read.
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
// A checkpoint is written beside, as DIR/step_000200.part, and renamed when all of it is on the disk. The
// weights and states change in the optimizer's step alone. So a thread may copy and write them through all of
// the next step's forward and backward, and needs a small buffer only; the optimizer waits until the last
// copy is made.
#pragma once

#include <cstdint>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "model/optimizer.h"
#include "model/parameters.h"
#include "model/safetensors.h"
#include "program/options.h"
#include "ranks/peers.h"
#include "ranks/shared_file.h"

namespace pentatron {

// Pinned memory of a rank that is saving: two buffers of at most so many bytes.
constexpr size_t checkpoint_buffer = 16 << 20;

// Sets the weights of this rank's shards: initial values, or what --load or --load-weights reads. Throws
// UsageError if the checkpoint has not what the model needs.
void load_or_initialise(const Options& options, Parameters& parameters, cudaStream_t stream);

class Checkpoints {
 public:
  // With --load, sets the optimizer's states. With --save, makes the folder. Throws UsageError. All ranks
  // construct it, and call each function, at the same steps.
  Checkpoints(const Options& options, Parameters& parameters, Optimizer& optimizer, cudaStream_t compute,
              const Peers& ranks = peers());
  Checkpoints(const Checkpoints&) = delete;
  Checkpoints& operator=(const Checkpoints&) = delete;

  int64_t first_step() const { return first_step_; }  // of this run

  // Before the optimizer's step: waits until the save that is under way has copied what it changes.
  void before_update();
  // After the optimizer's step: begins to save, if this step is one of --save-every or the last. Waits first
  // until the save before is complete.
  void after_update(int64_t step);
  // Saves what has not been saved, if a signal ended the run, and waits for the last save. Throws RunError if
  // it failed; one before it only prints a line.
  void finish();

 private:
  // Elements of this rank that follow each other in its memory and, block by block, in a file.
  struct Piece {
    const std::byte* data;  // on the device
    size_t bytes;
    std::vector<FileBlock> blocks;
  };
  struct File {
    std::string name;
    std::vector<StoredTensor> tensors;
    std::vector<Piece> pieces;             // in the order of the file
    uint64_t bytes = 0;                    // of the pieces
    std::vector<uint32_t> checksums = {};  // of this rank's pieces, one a tensor
  };
  struct Round {  // a buffer full of a file
    File* file;
    uint64_t begin, bytes;  // of the bytes of this rank's pieces
  };
  // tensors: a number of each parameter. arrays: [shards, this number].
  using Arrays = std::vector<std::vector<const void*>>;
  void add_file(const std::string& name, std::vector<StoredTensor> tensors, const Arrays& arrays);
  void load_states();
  void load_masters();

  void begin_save(int64_t steps, bool last);
  // Of the thread that writes. They return what went wrong, or nothing.
  std::string save(int64_t steps, bool last);
  std::string write(const std::string& path, int64_t steps);
  std::string begin(const std::string& part);
  std::string write_tensors(const std::string& part);
  void agree_on_checksums();
  std::string complete(const std::string& part, int64_t steps);
  void fill(const Round& round, int buffer);

  const Options& options_;
  Parameters& parameters_;
  Optimizer& optimizer_;
  cudaStream_t compute_;
  int rank_;
  int64_t first_step_ = 0, done_ = 0, saved_ = 0;  // steps
  std::vector<File> files_;
  std::unique_ptr<Agreement> agreement_;
  FolderLock lock_;               // of --save, on rank 0
  std::optional<Stream> stream_;  // of the copies
  PinnedArray<std::byte> buffers_[2];
  Event filled_[2];
  PinnedArray<LossScale> loss_scale_{1};
  Event updated_, copied_;  // the state may be copied; all of it is copied
  std::promise<void> copies_;
  std::future<void> copies_issued_;  // copied_ is recorded
  // What went wrong in a save. The last member: the end of this waits for a save first.
  std::future<std::string> saving_;
};

}  // namespace pentatron
