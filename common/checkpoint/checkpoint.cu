#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <sstream>
#include <system_error>

#include "checkpoint/checkpoint.h"
#include "kernels/loss.h"

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
  if (p.tensor_split == TensorSplit::replicated_outside) tensor.shape = {p.columns};
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

// ---- Where elements lie

// A range in parts of `most` elements, for copies; the last one may have fewer.
std::vector<ParameterRange> parts_of(const ParameterRange& range, size_t most) {
  std::vector<ParameterRange> parts;
  for (size_t done = 0; done < range.size; done += most) {
    parts.push_back({range.parameter, range.begin_in_parameter + done, range.begin_in_shard + done,
                     std::min(most, range.size - done)});
  }
  return parts;
}

struct GlobalRun {
  size_t first, length;  // consecutive elements of a parameter's global matrix
};

// Where the elements of a range lie in the global matrix, in the order of the range. Where this rank holds
// some of the columns, a run ends with each row of its slice.
std::vector<GlobalRun> runs_of(const ParameterRange& range) {
  const Parameter& p = *range.parameter;
  const size_t width = p.local_columns, end = range.begin_in_parameter + range.size;
  std::vector<GlobalRun> runs;
  for (size_t at = range.begin_in_parameter; at < end; at += runs.back().length) {
    const size_t row = p.first_row + at / width, column = p.first_column + at % width;
    const size_t rest = p.local_columns == p.columns ? end - at : std::min(width - at % width, end - at);
    runs.push_back({row * p.columns + column, rest});
  }
  return runs;
}

// ---- All ranks together

// What has gone wrong in `work` on the first rank where something has, or nothing. Rank 0 prints it.
std::string failure(const std::function<void()>& work) {
  std::string words;
  try {
    work();
  } catch (const UsageError& error) {
    words = error.what();
  } catch (const std::system_error& error) {
    words = error.code().message();
  }
  return peers().first_fault(words);
}

void refuse_if_failed(const std::function<void()>& work) {
  if (const std::string words = failure(work); !words.empty()) throw UsageError(words);
}

// All ranks have the same content of a thing, which they may call otherwise.
void require_same(const std::string& thing, const std::string& content) {
  if (const std::string words = peers().difference("\t\t" + content + '\n'); !words.empty())
    throw UsageError(thing + words);
}

// ---- Loading

// Copies the elements of `range` from a stored tensor to the device, where the first one goes to `to`.
template <class T>
void load_range(const FoundTensor& from, const ParameterRange& range, T* to, cudaStream_t stream) {
  const PinnedArray<T> host(std::min(range.size, checkpoint_buffer / sizeof(T)));
  const NumberType type = from.description.type;
  for (const ParameterRange& part : parts_of(range, host.size())) {
    size_t filled = 0;
    for (const auto& [first, length] : runs_of(part)) {
      for (size_t i = first; i < first + length; ++i)
        host[filled++] = static_cast<T>(static_cast<accum>(number_at(type, from.data, i)));
    }
    CUDA_CHECK(cudaMemcpyAsync(to, host.data(), filled * sizeof(T), cudaMemcpyHostToDevice, stream));
    CUDA_CHECK(cudaStreamSynchronize(stream));
    to += filled;
  }
}

// A checkpoint of this project's has these tensors alone, in types of the precision that wrote it.
void check_tensors(const SafetensorsFolder& found, const std::vector<StoredTensor>& expected) {
  for (const StoredTensor& tensor : expected) (void)found.find(tensor.name, tensor.shape);
  require(found.tensors().size() == expected.size(), found.option(), found.path(), expected.size(),
          " tensors; it has ", found.tensors().size());
}

}  // namespace

double number_at(NumberType type, const std::byte* array, uint64_t i) {
  const auto read = [&](auto number) {
    std::memcpy(&number, array + i * sizeof number, sizeof number);  // it may lie at any byte
    return number;
  };
  if (type == NumberType::fp64) return read(double());
  if (type == NumberType::fp32) return read(float());
  return type == NumberType::fp16 ? float(read(__half())) : float(read(__nv_bfloat16()));
}

Checkpoint::Checkpoint(const Options& options, Parameters& parameters, Optimizer& optimizer,
                       cudaStream_t compute, const std::string& data)
    : options_(options), parameters_(parameters), optimizer_(optimizer), compute_(compute), data_(data) {
  require_same("--data: " + options.data, data);  // another host may have another file, or another checkpoint
  if (options.save.empty() && options.load_folder.empty()) return;
  Loaded loaded;
  refuse_if_failed([&] {
    if (!options.load_folder.empty()) loaded = load();
  });
  require_same(
      options.resume ? "--resume: " + options.save : options.load_option() + (": " + options.load_folder),
      text(first_step_, " steps", loaded.checksums));
  if (!options.save.empty()) make_folder();
  if (ranks_.rank() == 0) std::printf("%s", loaded.report.c_str());
}

// Sets the weights; with --load and --resume, also the optimizer's states and the step.
Checkpoint::Loaded Checkpoint::load() {
  const char* const option = options_.load_option();
  const bool continues = !options_.load.empty();
  const TrainerState state = continues ? load_trainer_state() : TrainerState();
  const SafetensorsFolder weights(option, options_.load_folder, "model");
  const SafetensorsFolder states(option, options_.load_folder, continues ? "optimizer" : "model");
  const std::vector<std::string> names = optimizer_.state_names();
  const bool has_masters = states.has(std::string(embedding_name) + "." + master_name);
  if (continues) {
    std::vector<std::string> names_there = names;
    std::erase(names_there, master_name);
    if (has_masters) names_there.emplace_back(master_name);
    check_tensors(weights, stored(parameters_, number_type<real>));
    check_tensors(states, stored(parameters_, number_type<accum>, names_there));
  }
  // This rank's part of the tensors that are read must have their checksums.
  weights.check(ranks_.rank(), ranks_.ranks());
  if (continues) states.check(ranks_.rank(), ranks_.ranks());
  // If another precision has written the weights, master weights have more digits. If there are none, weights
  // may have more digits than `real`: the masters here keep them.
  const auto load_weights = [&](const Shard& shard, auto* to) {
    load_shard(has_masters ? states : weights, has_masters ? master_name : "", shard, to);
  };
  const std::vector<Shard> shards = parameters_.shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    load_weights(shards[i], shards[i].weights);
    for (size_t k = 0; k < names.size(); ++k) {
      accum* const state = optimizer_.states(i)[k].data;
      if (names[k] == master_name)
        load_weights(shards[i], state);
      else if (continues)
        load_shard(states, names[k], shards[i], state);
    }
  }
  if (!continues) return {weights.checksum(), ""};
  std::string changed = options_.changed;
  if (state.precision != precision_name)
    changed = text("; PRECISION is ", precision_name, " and was ", state.precision, changed);
  return {weights.checksum() + states.checksum(),
          text("checkpoint  ", options_.load_folder, ": ", first_step_, " steps are done", changed, "\n")};
}

// Sets the step and the loss scale.
TrainerState Checkpoint::load_trainer_state() {
  const char* const option = options_.load_option();
  TrainerState state = read_trainer_state(option, options_.load_folder);
  const std::string optimizer = to_string(options_.optimizer);
  require(state.optimizer == optimizer, option, options_.load_folder, "--optimizer ", optimizer, "; it was ",
          state.optimizer);
  require(state.data.empty() || state.data == data_ || state.options["data"] != options_.data, "--data",
          options_.data, "what ", options_.load_folder, " was trained on, ", state.data, "; it has ", data_);
  first_step_ = done_ = state.steps;
  if (options_.load_folder == fs::path(options_.save) / checkpoint_name(done_))
    saved_ = done_;  // it is there
  if (const std::vector<double>& scale = state.loss_scale; has_loss_scale && !scale.empty()) {
    const auto number = [&](int i) { return static_cast<accum>(scale[i]); };
    optimizer_.set_loss_scale({number(0), number(1), number(2)});
  }
  return state;
}

// Fills a shard of the weights, or of a state of them, at `to`. Its padding is zero already.
template <class T>
void Checkpoint::load_shard(const SafetensorsFolder& folder, const std::string& state, const Shard& shard,
                            T* to) {
  for (const ParameterRange& range : parameters_.ranges(shard)) {
    StoredTensor tensor = stored(*range.parameter, number_type<T>, state);
    if (options_.model.tied_head && tensor.name == head_name) tensor.name = embedding_name;
    load_range(folder.find(tensor.name, tensor.shape), range, to + range.begin_in_shard, compute_);
  }
}

// ---- Saving

// Rank 0 makes the folder of --save, and locks it.
void Checkpoint::make_folder() {
  refuse_if_failed([&] {
    if (ranks_.rank() > 0) return;
    std::error_code error;
    fs::create_directories(options_.save, error);
    if (!error && access(options_.save.c_str(), W_OK | X_OK) != 0)
      error.assign(errno, std::generic_category());
    require(!error, "--save", options_.save, "a folder that can be written (", error.message(), ")");
    const std::string other = lock_folder(options_.save, lock_);
    require(other.empty(), "--save", options_.save, "a folder that no other run saves in (", other, " does)");
  });
  buffer_ = PinnedArray<std::byte>(checkpoint_buffer);
}

void compare_weights(const Parameters& parameters, int64_t steps) {
  if (is_dry_run() || peers().ranks() == 1) return;
  CUDA_CHECK(cudaDeviceSynchronize());  // weights may be on their way
  const PinnedArray<real> host(1 << 17);
  std::ostringstream mine;  // a line for each part of a parameter
  for (const Shard& shard : parameters.held()) {
    for (const ParameterRange& range : parameters.ranges(shard)) {
      uint32_t checksum = 0;
      for (const ParameterRange& part : parts_of(range, host.size())) {
        const real* const from = shard.weights + part.begin_in_shard;
        const size_t bytes = part.size * sizeof(real);
        CUDA_CHECK(cudaMemcpy(host.data(), from, bytes, cudaMemcpyDeviceToHost));
        checksum ^= crc32_of(reinterpret_cast<const std::byte*>(host.data()), bytes);
      }
      mine << "step " << steps << ": " << range.parameter->name << '\t' << runs_of(range).front().first << '+'
           << range.size << '\t' << checksum_text(checksum) << '\n';
    }
  }
  if (const std::string words = peers().difference(mine.str()); !words.empty()) throw RunError(words);
}

void Checkpoint::after_update(int64_t step) {
  done_ = step + 1;
  if (!is_due(step) || done_ == options_.steps) return;  // finish() saves the last one
  const std::string error = save();
  if (!error.empty() && ranks_.rank() == 0) std::fprintf(stderr, "%s; the run goes on\n", error.c_str());
}

void Checkpoint::finish() {
  if (done_ == saved_) return;
  if (const std::string error = save(); !error.empty()) throw RunError(error);
}

std::string Checkpoint::save() {
  if (options_.save.empty()) return {};
  compare_weights(parameters_, done_);
  const bool is_first = ranks_.rank() == 0;
  const std::string path = (fs::path(options_.save) / checkpoint_name(done_)).string();
  const std::string part = (fs::path(options_.save) / "new.part").string();
  std::vector<File> all = files();
  std::string error = failure([&] {
    if (!is_first) return;
    fs::remove_all(part);  // of a run that was killed
    fs::create_directory(part);
  });
  if (error.empty()) error = failure([&] { write(part, all); });
  if (error.empty()) error = failure([&] { complete(part, all); });
  std::error_code ignored;
  if (is_first) fs::remove_all(part, ignored);  // what has failed, or what was replaced
  if (!error.empty()) return "--save: " + path + " can not be written: " + error;
  saved_ = done_;
  if (is_first) std::printf("checkpoint  %s is saved\n", path.c_str());
  std::fflush(stdout);
  return {};
}

std::vector<Checkpoint::File> Checkpoint::files() const {
  File weights{"model.safetensors", stored(parameters_, number_type<real>)};
  File states{"optimizer.safetensors", stored(parameters_, number_type<accum>, optimizer_.state_names())};
  const std::vector<Shard> shards = parameters_.shards();
  for (size_t i = 0; i < shards.size(); ++i) {
    weights.arrays.push_back({shards[i].weights});
    states.arrays.emplace_back();
    for (const AccumTensor& state : optimizer_.states(i)) states.arrays[i].push_back(state.data);
  }
  std::vector<File> all = {weights, states};
  for (File& file : all) {
    for (StoredTensor& tensor : file.tensors) tensor.checksum = checksum_text(0);  // it has its size
    safetensors_header(file.tensors);                                              // says where each lies
    file.checksums.resize(file.tensors.size());
  }
  return all;
}

// Writes the elements that this rank counts, each to its offset in the file.
void Checkpoint::write(const std::string& part, std::vector<File>& files) {
  const std::vector<Shard> shards = parameters_.shards();
  for (File& file : files) {
    SharedFile on_disk(part + "/" + file.name);
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::vector<const void*>& arrays = file.arrays[i];
      for (const ParameterRange& range : parameters_.counted_ranges(shards[i])) {
        const size_t first = (range.parameter - parameters_.all().data()) * arrays.size();
        for (size_t k = 0; k < arrays.size(); ++k)
          write_range(range, arrays[k], file.tensors[first + k], file.checksums[first + k], on_disk);
      }
    }
    on_disk.flush();
  }
}

void Checkpoint::write_range(const ParameterRange& range, const void* shard, const StoredTensor& tensor,
                             uint32_t& checksum, SharedFile& file) {
  const size_t element = bytes_of(tensor.type);
  const auto* const from = static_cast<const std::byte*>(shard);
  for (const ParameterRange& part : parts_of(range, checkpoint_buffer / element)) {
    const std::byte* data = to_host(from + part.begin_in_shard * element, part.size * element);
    for (const auto& [first, length] : runs_of(part)) {
      file.write(data, length * element, tensor.begin + first * element);
      checksum ^= checksum_part(tensor, first * element, data, length * element);
      data += length * element;
    }
  }
}

// Copies some of what the optimizer has updated, and waits.
const std::byte* Checkpoint::to_host(const void* from, size_t bytes) {
  CUDA_CHECK(cudaMemcpyAsync(buffer_.data(), from, bytes, cudaMemcpyDeviceToHost, compute_));
  CUDA_CHECK(cudaStreamSynchronize(compute_));
  return buffer_.data();
}

// Rank 0 makes a checkpoint of what all ranks have written.
void Checkpoint::complete(const std::string& part, std::vector<File>& files) {
  for (File& file : files) file.checksums = ranks_.exclusive_or(file.checksums);
  if (ranks_.rank() > 0) return;
  const fs::path folder = part;
  for (File& file : files) {
    for (size_t i = 0; i < file.tensors.size(); ++i)
      file.tensors[i].checksum = checksum_text(file.checksums[i]);
    write_text(folder / file.name, safetensors_header(file.tensors));
  }
  std::vector<double> scale;
  if (has_loss_scale) {
    LossScale now;
    std::memcpy(&now, to_host(optimizer_.loss_scale(), sizeof now), sizeof now);
    scale = {now.factor, now.good_steps, now.skipped};
  }
  write_text(folder / "config.json", model_config_text(options_.model, options_.sequence_length,
                                                       torch_names[static_cast<int>(number_type<real>)]));
  write_text(folder / "trainer_state.json",
             trainer_state_text(done_, precision_name, options_, scale, data_));
  for (const char* const name : {"tokenizer.json", "tokenizer_config.json"}) {
    const fs::path from = fs::path(options_.data).parent_path() / name;  // make tokens
    if (!options_.data.ends_with(".bin") || !fs::is_regular_file(from)) continue;
    fs::copy_file(from, folder / name);
  }
  publish_checkpoint(part, done_);
}

}  // namespace pentatron
