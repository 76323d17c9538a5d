#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "kernels/kernels.h"
#include "program/checkpoint.h"
#include "program/checkpoint_folder.h"
#include "program/tokenizer.h"

namespace pentatron {
namespace {

namespace fs = std::filesystem;

template <class T>
constexpr NumberType number_type = std::is_same_v<T, double>   ? NumberType::fp64
                                   : std::is_same_v<T, float>  ? NumberType::fp32
                                   : std::is_same_v<T, __half> ? NumberType::fp16
                                                               : NumberType::bf16;

constexpr const char* torch_names[] = {"float64", "float32", "float16", "bfloat16"};  // of a NumberType

// A parameter, or one of its states, as a file has it. A norm's weight is a vector.
StoredTensor stored(const Parameter& p, NumberType type, const std::string& state) {
  StoredTensor tensor{state.empty() ? p.name : p.name + "." + state, type, {p.rows, p.columns}};
  if (p.tensor_split == TensorSplit::held_outside) tensor.shape = {p.columns};
  return tensor;
}

// All parameters, or these states of them.
std::vector<StoredTensor> stored(const Parameters& parameters, NumberType type,
                                 const std::vector<std::string>& states = {""}) {
  std::vector<StoredTensor> tensors;
  for (const Parameter& p : parameters.all()) {
    for (const std::string& state : states) tensors.push_back(stored(p, type, state));
  }
  return tensors;
}

constexpr const char* master_name = "master";  // of a state
constexpr const char *head_name = "lm_head.weight", *embedding_name = "model.embed_tokens.weight";

// ---- Loading

// Copies the elements of `range` from a stored tensor to the device, where `to` is the first one's place.
template <class T>
void load_range(const FoundTensor& from, const ParameterRange& range, T* to, cudaStream_t stream) {
  const PinnedArray<T> host(std::min(range.size, checkpoint_buffer / sizeof(T)));
  size_t filled = 0;
  const auto send = [&] {
    CUDA_CHECK(cudaMemcpyAsync(to, host.data(), filled * sizeof(T), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    to += filled;
    filled = 0;
  };
  const NumberType type = from.description.type;
  for (const GlobalRuns& runs : global_runs(range)) {
    for (int64_t i = 0; i < runs.count * runs.length; ++i) {
      const int64_t at = runs.first + i / runs.length * runs.stride + i % runs.length;
      host[filled++] = static_cast<T>(static_cast<accum>(number_at(type, from.data, at)));
      if (filled == host.size()) send();
    }
  }
  if (filled > 0) send();
}

// Fills a shard of the weights, or of a state of them, at `to`.
template <class T>
void load_shard(const SafetensorsFolder& folder, const std::vector<ParameterRange>& ranges,
                const std::string& state, T* to, cudaStream_t stream) {
  for (const ParameterRange& range : ranges) {
    StoredTensor tensor = stored(*range.parameter, number_type<T>, state);
    // A head that is tied to the embedding is not stored.
    if (tensor.name == head_name && !folder.has(head_name)) tensor.name = embedding_name;
    load_range(folder.find(tensor.name, tensor.shape), range, to + range.begin_in_shard, stream);
  }
}

// A checkpoint of this project's has these tensors, and no other ones. Their types are those of the precision
// that wrote it.
void check_tensors(const SafetensorsFolder& found, const std::vector<StoredTensor>& expected) {
  for (const StoredTensor& tensor : expected) (void)found.find(tensor.name, tensor.shape);
  require(found.size() == expected.size(), found.option(), found.path(), expected.size(), " tensors; it has ",
          found.size());
}

bool has_masters(const SafetensorsFolder& optimizer) {
  return optimizer.has(std::string(embedding_name) + "." + master_name);
}

}  // namespace

void load_or_initialise(const Options& options, Parameters& parameters, cudaStream_t stream) {
  if (options.load_folder.empty()) return parameters.initialise(options.seed, stream);
  const SafetensorsFolder folder(options.load_option(), options.load_folder, "model");
  if (!options.load.empty()) check_tensors(folder, stored(parameters, number_type<real>));
  std::optional<SafetensorsFolder> masters;  // of another precision, whose weights may be rounded more
  if (!options.load.empty() &&
      read_trainer_state(options.load_option(), options.load_folder).precision != precision_name) {
    masters.emplace(options.load_option(), options.load_folder, "optimizer");
    if (!has_masters(*masters)) masters.reset();
  }
  for (const Shard& shard : parameters.shards()) {
    fill_constant(shard.weights, shard.size(), 0, stream);  // so that the padding is zero
    load_shard(masters ? *masters : folder, parameters.ranges(shard), masters ? master_name : "",
               shard.weights, stream);
  }
}

Checkpoints::Checkpoints(const Options& options, Parameters& parameters, Optimizer& optimizer,
                         cudaStream_t compute, const Peers& ranks)
    : options_(options),
      parameters_(parameters),
      optimizer_(optimizer),
      compute_(compute),
      rank_(ranks.rank()) {
  if (!options.save.empty() || !options.load_folder.empty()) {
    agreement_ = ranks.agreement();
    std::string damage;  // a host may not see the folder of the others
    for (const char* name : {"model", "optimizer"}) {
      const bool is_read = name == std::string_view("model") || !options.load.empty();
      if (options.load_folder.empty() || !is_read || !damage.empty()) continue;
      const SafetensorsFolder folder(options.load_option(), options.load_folder, name);
      damage = folder.damage(rank_, ranks.ranks());
      if (!damage.empty()) damage = folder.path() + " is not valid; expected " + damage;
    }
    damage = agreement_->first(damage);
    if (!damage.empty()) throw UsageError(options.load_option() + (": " + damage));
  }
  if (!options.load.empty()) load_states();
  if (!options.load_weights.empty() && has_master_weights) load_masters();
  if (!options.save.empty() || !options.load.empty()) {  // a host may not see the folder of the others
    const double first = static_cast<double>(first_step_);
    const std::vector<double> most = ranks.largest({first, -first});
    require(most[0] == -most[1], options.resume ? "--resume" : "--load",
            options.resume ? options.save : options.load_folder,
            "the same checkpoint on all ranks; they have from ", -most[1], " to ", most[0], " steps");
  }
  if (!options.load_weights.empty() && rank_ == 0) {
    const bool tied = !SafetensorsFolder("--load-weights", options.load_folder, "model").has(head_name);
    std::printf("weights     %s%s\n", options.load_folder.c_str(),
                tied ? ": its head is tied to the embedding; here it is a copy, and learns by itself" : "");
  }
  if (options.save.empty()) return;
  std::string error;
  if (rank_ == 0) {
    std::error_code made;
    fs::create_directories(options.save, made);
    if (made || access(options.save.c_str(), W_OK | X_OK) != 0)
      error = std::strerror(made ? made.value() : errno);
  }
  error = agreement_->first(error);
  require(error.empty(), "--save", options.save, "a folder that can be written (", error, ")");
  const std::string other = agreement_->first(rank_ == 0 ? lock_.take(options.save) : "");
  require(other.empty(), "--save", options.save, "a folder that no other run saves in (", other, " does)");

  const std::vector<Shard> shards = parameters.shards();
  Arrays weights, states;
  for (size_t i = 0; i < shards.size(); ++i) {
    weights.push_back({shards[i].weights});
    std::vector<const void*>& of_shard = states.emplace_back();
    for (const AccumTensor& state : optimizer.states(i)) of_shard.push_back(state.data);
  }
  add_file("model.safetensors", stored(parameters, number_type<real>), weights);
  add_file("optimizer.safetensors", stored(parameters, number_type<accum>, optimizer.state_names()), states);
  uint64_t most = 0;
  for (const File& file : files_) most = std::max(most, file.bytes);
  for (auto& buffer : buffers_) buffer = PinnedArray<std::byte>(std::min<uint64_t>(most, checkpoint_buffer));
  stream_.emplace("checkpoint");
}

void Checkpoints::load_states() {
  const char* const option = options_.load_option();
  const TrainerState state = read_trainer_state(option, options_.load_folder);
  const auto check = [&](const char* what, const std::string& there, std::string_view here) {
    require(there == here, option, options_.load_folder, what, " ", here, "; it was ", there);
  };
  check("--optimizer", state.optimizer, to_string(options_.optimizer));
  first_step_ = state.steps;
  if (const std::vector<double>& scale = state.loss_scale; has_loss_scale && !scale.empty()) {
    const auto number = [&](int i) { return static_cast<accum>(scale[i]); };
    optimizer_.set_loss_scale({number(0), number(1), number(2)});
  }
  const SafetensorsFolder folder(option, options_.load_folder, "optimizer");
  const std::vector<std::string> names = optimizer_.state_names();
  std::vector<std::string> names_there = names;
  std::erase(names_there, master_name);
  if (has_masters(folder)) names_there.emplace_back(master_name);
  check_tensors(folder, stored(parameters_, number_type<accum>, names_there));
  const std::vector<Shard> shards = parameters_.shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    const std::vector<AccumTensor> states = optimizer_.states(i);
    for (size_t k = 0; k < states.size(); ++k) {
      if (names[k] != master_name || has_masters(folder))
        load_shard(folder, parameters_.ranges(shards[i]), names[k], states[k].data, compute_);
    }
  }
  if (has_master_weights && !has_masters(folder)) load_masters();
  if (rank_ > 0) return;
  for (const std::string& path : cut_off_checkpoints(options_.load))
    std::printf("checkpoint  %s was cut off, and is ignored\n", path.c_str());
  std::string changed = changed_options(options_, state);
  if (state.precision != precision_name)
    changed = "; PRECISION is " + std::string(precision_name) + " and was " + state.precision + changed;
  std::printf("checkpoint  %s: %lld steps are done%s\n", options_.load_folder.c_str(),
              static_cast<long long>(first_step_), changed.c_str());
}

// Weights may have more digits than `real`: the master weights keep them. These come last among the states.
void Checkpoints::load_masters() {
  const SafetensorsFolder folder(options_.load_option(), options_.load_folder, "model");
  const std::vector<Shard> shards = parameters_.shards();
  for (size_t i = 0; i < shards.size(); ++i)
    load_shard(folder, parameters_.ranges(shards[i]), "", optimizer_.states(i).back().data, compute_);
}

void Checkpoints::add_file(const std::string& name, std::vector<StoredTensor> tensors, const Arrays& arrays) {
  safetensors_header(tensors);  // says where each lies
  File file{name, std::move(tensors), {}};
  const std::vector<Shard> shards = parameters_.shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const ParameterRange& range : parameters_.counted_ranges(shards[i])) {
      const size_t number = range.parameter - parameters_.all().data();
      for (size_t k = 0; k < arrays[i].size(); ++k) {
        const StoredTensor& tensor = file.tensors[number * arrays[i].size() + k];
        const size_t element = bytes_of(tensor.type);
        Piece piece{static_cast<const std::byte*>(arrays[i][k]) + range.begin_in_shard * element,
                    range.size * element,
                    {}};
        for (const GlobalRuns& runs : global_runs(range)) {
          piece.blocks.push_back({tensor.begin + runs.first * element, runs.length * element,
                                  static_cast<uint64_t>(runs.count), runs.stride * element});
        }
        file.bytes += piece.bytes;
        file.pieces.push_back(std::move(piece));
      }
    }
  }
  std::sort(file.pieces.begin(), file.pieces.end(),
            [](const Piece& a, const Piece& b) { return a.blocks[0].begin < b.blocks[0].begin; });
  files_.push_back(std::move(file));
}

// ---- Saving: the thread of the training

void Checkpoints::before_update() {
  if (!copies_issued_.valid()) return;
  copies_issued_.get();
  wait_event(compute_, copied_);
}

void Checkpoints::after_update(int64_t step) {
  done_ = step + 1;
  const bool due = options_.save_every > 0 && done_ % options_.save_every == 0,
             last = done_ == options_.steps;
  if (due || last) begin_save(done_, last);
}

void Checkpoints::begin_save(int64_t steps, bool last) {
  if (options_.save.empty()) return;
  saved_ = steps;
  if (saving_.valid()) saving_.get();
  updated_.record(compute_);
  copies_ = std::promise<void>();
  copies_issued_ = copies_.get_future();
  int device = 0;
  CUDA_CHECK(cudaGetDevice(&device));
  saving_ = std::async(std::launch::async, [this, steps, last, device]() noexcept {
    CUDA_CHECK(cudaSetDevice(device));
    return save(steps, last);
  });
}

void Checkpoints::finish() {
  if (done_ > saved_) begin_save(done_, true);
  const std::string error = saving_.valid() ? saving_.get() : "";
  if (!error.empty()) throw RunError(error);
}

// ---- Saving: the thread that writes

std::string Checkpoints::save(int64_t steps, bool last) {
  const std::string path = (fs::path(options_.save) / checkpoint_name(steps)).string();
  std::string error = write(path, steps);
  if (!error.empty()) error = "--save: " + path + " can not be written: " + error;
  if (rank_ == 0 && error.empty()) {
    std::printf("checkpoint  %s is saved\n", path.c_str());
    std::fflush(stdout);
  } else if (rank_ == 0 && !last) {
    std::fprintf(stderr, "%s; the run goes on\n", error.c_str());
  }
  return error;
}

std::string Checkpoints::write(const std::string& path, int64_t steps) {
  const std::string part = path + ".part";
  std::string error = agreement_->first(rank_ == 0 ? begin(part) : "");
  if (!error.empty()) copies_.set_value();  // nothing is copied
  if (error.empty()) error = agreement_->first(write_tensors(part));
  if (error.empty()) agree_on_checksums();
  if (error.empty() && rank_ == 0) error = complete(part, steps);
  error = agreement_->first(error);
  std::error_code ignored;
  if (!error.empty() && rank_ == 0) fs::remove_all(part, ignored);
  return error;
}

// Makes the folder, and in it the beginnings of the files.
std::string Checkpoints::begin(const std::string& part) {
  std::error_code error;
  for (const std::string& old : cut_off_checkpoints(options_.save)) fs::remove_all(old, error);
  if (!fs::create_directory(part, error)) return error.message();
  for (File& file : files_) {
    const std::string words = write_file(fs::path(part) / file.name, safetensors_header(file.tensors));
    if (!words.empty()) return words;
  }
  return {};
}

// While a buffer is written, the next one is filled.
std::string Checkpoints::write_tensors(const std::string& part) {
  std::vector<Round> rounds;
  for (File& file : files_) {
    for (uint64_t begin = 0; begin < file.bytes; begin += checkpoint_buffer)
      rounds.push_back({&file, begin, std::min<uint64_t>(checkpoint_buffer, file.bytes - begin)});
  }
  wait_event(*stream_, updated_);
  if (optimizer_.loss_scale() != nullptr) {
    CUDA_CHECK(cudaMemcpyAsync(loss_scale_.data(), optimizer_.loss_scale(), sizeof(LossScale),
                               cudaMemcpyDeviceToHost, *stream_));
  }
  const auto fill_round = [&](size_t i) {
    if (i < rounds.size()) fill(rounds[i], static_cast<int>(i % 2));
    if (i + 1 != std::max<size_t>(rounds.size(), 1)) return;
    copied_.record(*stream_);
    copies_.set_value();
  };
  std::string error;
  std::optional<SharedFile> on_disk;
  std::optional<FilePlaces> places;
  std::optional<TensorChecksums> checksums;
  for (File& file : files_)
    file.checksums = TensorChecksums(file.tensors).parts();  // of a rank with no piece
  fill_round(0);
  for (size_t i = 0; i < rounds.size(); ++i) {
    fill_round(i + 1);
    filled_[i % 2].synchronize();
    const Round& round = rounds[i];
    if (i == 0 || round.file != rounds[i - 1].file) {
      std::vector<FileBlock> blocks;
      for (const Piece& piece : round.file->pieces)
        blocks.insert(blocks.end(), piece.blocks.begin(), piece.blocks.end());
      on_disk.emplace(fs::path(part) / round.file->name, blocks);
      places.emplace(blocks);
      checksums.emplace(round.file->tensors);
    }
    const std::byte* const data = buffers_[i % 2].data();
    const auto summed = std::async(std::launch::async, [&] {  // beside the disk
      places->next(data, round.bytes, [&](const std::byte* run, size_t bytes, uint64_t place) {
        checksums->add(run, bytes, place);
        return true;
      });
    });
    on_disk->write(data, round.bytes);
    summed.wait();
    const bool last = i + 1 == rounds.size() || rounds[i + 1].file != round.file;
    if (!last) continue;
    round.file->checksums = checksums->parts();
    if (const std::string words = on_disk->finish(); error.empty()) error = words;
  }
  return error;
}

// Copies bytes of this rank's pieces to a buffer.
void Checkpoints::fill(const Round& round, int buffer) {
  uint64_t at = 0;  // of a piece, among the bytes of all pieces
  std::byte* to = buffers_[buffer].data();
  for (const Piece& piece : round.file->pieces) {
    const uint64_t begin = std::max(at, round.begin),
                   end = std::min(at + piece.bytes, round.begin + round.bytes);
    if (begin < end) {
      CUDA_CHECK(
          cudaMemcpyAsync(to, piece.data + (begin - at), end - begin, cudaMemcpyDeviceToHost, *stream_));
      to += end - begin;
    }
    at += piece.bytes;
  }
  filled_[buffer].record(*stream_);
}

void Checkpoints::agree_on_checksums() {
  for (File& file : files_) {
    const std::vector<uint32_t> parts = agreement_->exclusive_or(file.checksums);
    for (size_t i = 0; i < parts.size(); ++i)
      file.tensors[i].checksum = crc32_of(parts[i], file.tensors[i].bytes());
  }
}

// Makes a checkpoint of what all ranks have written.
std::string Checkpoints::complete(const std::string& part, int64_t steps) {
  const fs::path folder = part;
  for (File& file : files_) {
    const std::string words = overwrite(folder / file.name, safetensors_header(file.tensors));
    if (!words.empty()) return words;
  }
  std::vector<double> scale;
  if (has_loss_scale) scale = {loss_scale_[0].factor, loss_scale_[0].good_steps, loss_scale_[0].skipped};
  const std::string state = trainer_state_text(
      steps, precision_name, std::string(to_string(options_.optimizer)), options_.as_json, scale);
  std::string error =
      write_file(folder / "config.json", model_config_text(options_.model, options_.sequence_length,
                                                           torch_names[static_cast<int>(number_type<real>)]));
  if (error.empty()) error = write_file(folder / "trainer_state.json", state);
  const fs::path tokenizer = tokenizer_beside(options_.data);
  for (const char* const name : {"tokenizer.json", "tokenizer_config.json"}) {
    const fs::path from = tokenizer.parent_path() / name;
    std::error_code failed;
    if (tokenizer.empty() || !error.empty() || !fs::exists(from, failed)) continue;
    if (!fs::copy_file(from, folder / name, failed)) error = failed.message();
    if (error.empty()) error = flush_to_disk(folder / name);
  }
  if (error.empty()) error = publish_checkpoint(part, steps);
  if (error.empty()) remove_old_checkpoints(options_.save, steps, options_.keep);
  return error;
}

}  // namespace pentatron
