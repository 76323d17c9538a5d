#include "program/checkpoint_folder.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "device/errors.h"
#include "model/mapped_file.h"
#include "ranks/shared_file.h"

namespace pentatron {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

// Puts a file or folder at a path, at once. A folder that was there is at `part` then.
std::string replace(const std::string& part, const std::string& path) {
  std::error_code ignored;
  const bool exchanges = fs::is_directory(path, ignored);
  const int status =
      renameat2(AT_FDCWD, part.c_str(), AT_FDCWD, path.c_str(), exchanges ? RENAME_EXCHANGE : 0);
  return status == 0 ? "" : std::strerror(errno);
}

}  // namespace

std::string checkpoint_name(int64_t steps) {
  char name[32];
  std::snprintf(name, sizeof name, "step_%06lld", static_cast<long long>(steps));
  return name;
}

int64_t steps_of_name(const std::string& name) {
  constexpr std::string_view prefix = "step_";
  const bool good = name.starts_with(prefix) && name.size() > prefix.size() && name.size() < 20 &&
                    name.find_first_not_of("0123456789", prefix.size()) == name.npos;
  return good ? std::stoll(name.substr(prefix.size())) : -1;
}

std::string find_checkpoint(const std::string& option, const std::string& folder, const std::string& file) {
  std::error_code ignored;
  if (fs::exists(fs::path(folder) / file, ignored)) return folder;
  std::string name;
  std::getline(std::ifstream(fs::path(folder) / "latest"), name);
  const std::string newest = (fs::path(folder) / name).string();
  if (steps_of_name(name) >= 0 && fs::exists(fs::path(newest) / file, ignored)) return newest;
  const std::vector<std::string> parts = cut_off_checkpoints(folder);
  throw UsageError(option, folder,
                   "a folder with " + file + ", or one of --save that has a complete checkpoint" +
                       (parts.empty() ? "" : "; " + parts.front() + " was cut off"));
}

std::vector<std::string> cut_off_checkpoints(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const fs::path path = entry->path();
    if (path.extension() == ".part" && steps_of_name(path.stem().string()) >= 0)
      paths.push_back(path.string());
  }
  return paths;
}

std::string publish_checkpoint(const std::string& part, int64_t steps) {
  const fs::path folder = fs::path(part).parent_path();
  const std::string name = checkpoint_name(steps);
  std::string error = flush_to_disk(part);
  if (error.empty()) error = replace(part, (folder / name).string());
  if (error.empty()) error = flush_to_disk(folder.string());
  if (error.empty()) error = write_file((folder / "latest.part").string(), name + "\n");
  if (error.empty()) error = replace((folder / "latest.part").string(), (folder / "latest").string());
  if (error.empty()) error = flush_to_disk(folder.string());
  std::error_code ignored;
  if (error.empty()) fs::remove_all(part, ignored);
  return error;
}

void remove_old_checkpoints(const std::string& folder, int64_t steps, int keep) {
  std::vector<int64_t> all;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const int64_t its_steps = steps_of_name(entry->path().filename().string());
    if (its_steps >= 0 && its_steps <= steps) all.push_back(its_steps);
  }
  std::sort(all.rbegin(), all.rend());
  for (size_t i = keep; i < all.size(); ++i)
    fs::remove_all(fs::path(folder) / checkpoint_name(all[i]), error);
}

std::string trainer_state_text(int64_t steps, const std::string& precision, const std::string& optimizer,
                               const std::string& options_as_json, const std::vector<double>& loss_scale) {
  Json state = {{"format", 1},
                {"step", steps},
                {"precision", precision},
                {"optimizer", optimizer},
                {"options", Json::parse(options_as_json)}};
  if (!loss_scale.empty()) state["loss_scale"] = loss_scale;
  return state.dump(2) + "\n";
}

TrainerState read_trainer_state(const std::string& option, const std::string& checkpoint) {
  const fs::path folder = fs::path(checkpoint).lexically_normal();
  const std::string path = (folder / "trainer_state.json").string();
  const MappedFile file(option, path);
  const char* const text = reinterpret_cast<const char*>(file.bytes().data());
  const Json state = Json::parse(text, text + file.bytes().size(), nullptr, false);
  const auto check = [&](bool good, const std::string& expected) {
    if (!good) throw UsageError(option, path, expected);
  };
  check(state.is_object(), "a JSON object");
  check(state.contains("format") && state["format"] == 1, "format 1");
  check(state.contains("step") && state["step"].is_number_unsigned() && state["step"] < uint64_t{1} << 40,
        "a number of steps");
  for (const char* const key : {"precision", "optimizer"})
    check(state.contains(key) && state[key].is_string(), std::string("a text for ") + key);
  check(state.contains("options") && state["options"].is_object(), "options");
  TrainerState result{state["step"], state["precision"], state["optimizer"], {}, {}};
  if (state.contains("loss_scale")) {
    const Json& scale = state["loss_scale"];
    const auto is_number = [](const Json& x) { return x.is_number() && x.get<double>() >= 0; };
    check(scale.is_array() && scale.size() == 3 && std::all_of(scale.begin(), scale.end(), is_number) &&
              scale[0].get<double>() > 0,
          "a loss scale of three numbers");
    result.loss_scale = scale.get<std::vector<double>>();
  }
  for (const auto& [name, value] : state["options"].items())
    result.options[name] = value.is_string() ? value.get<std::string>() : value.dump();
  const int64_t named =
      steps_of_name((folder.has_filename() ? folder : folder.parent_path()).filename().string());
  check(named < 0 || named == result.steps,
        "the steps of its folder's name; it says " + std::to_string(result.steps));
  return result;
}

}  // namespace pentatron
