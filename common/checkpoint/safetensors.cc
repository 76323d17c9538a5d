#include "checkpoint/safetensors.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "device/errors.h"

namespace pentatron {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* metadata_name = "__metadata__";
const std::string checksum_key = "crc32 ";
constexpr uint64_t size_field = 8;  // bytes

// Name and bytes of a NumberType.
constexpr std::pair<std::string_view, size_t> types[] = {{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}};

// One entry of a header. Throws std::string: what is wrong with it.
StoredTensor read_entry(const std::string& name, const Json& entry, uint64_t data_begin) {
  StoredTensor tensor{name, NumberType::fp32, {}};
  std::string type;
  std::array<uint64_t, 2> offsets;
  try {
    for (const char* const key : {"shape", "data_offsets"}) {
      for (const Json& number : entry.at(key))
        if (!number.is_number_unsigned()) throw name + " has the " + key + " " + entry[key].dump();
    }
    entry.at("dtype").get_to(type);
    entry.at("shape").get_to(tensor.shape);
    if (entry["data_offsets"].size() != 2)
      throw name + " has the data_offsets " + entry["data_offsets"].dump();
    entry.at("data_offsets").get_to(offsets);
  } catch (const Json::exception&) {
    throw name + " has no dtype, shape and data_offsets";
  }
  const auto* const known = std::ranges::find(types, type, [](const auto& entry) { return entry.first; });
  if (known == std::end(types)) throw name + " has the type " + type;
  tensor.type = static_cast<NumberType>(known - types);
  const auto [begin, end] = offsets;
  bool fits = begin <= end;
  uint64_t bytes = known->second;
  for (const int64_t size : tensor.shape) fits &= !__builtin_mul_overflow(bytes, size, &bytes);
  if (!fits || end - begin != bytes) throw name + " has other data_offsets than its shape asks for";
  tensor.begin = data_begin + begin;
  return tensor;
}

// Throws std::string.
std::vector<StoredTensor> read_header(std::string_view file) {
  if (file.size() < size_field) throw std::string("it has fewer than 8 bytes");
  uint64_t size = 0;
  std::memcpy(&size, file.data(), size_field);
  if (size > file.size() - size_field) throw std::string("it is cut off, or it is none");
  const Json header = Json::parse(file.substr(size_field, size), nullptr, false);
  if (!header.is_object()) throw std::string("its header is no JSON object");
  uint64_t end = size_field + size;
  const Json metadata = header.value(metadata_name, Json::object());
  std::vector<StoredTensor> tensors;
  for (const auto& [name, entry] : header.items()) {
    if (name == metadata_name) continue;
    tensors.push_back(read_entry(name, entry, size_field + size));
    const std::string key = checksum_key + name;
    if (metadata.contains(key) && metadata[key].is_string()) tensors.back().checksum = metadata[key];
  }
  std::ranges::sort(tensors, {}, [](const StoredTensor& t) { return std::pair(t.begin, t.bytes()); });
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin != end) throw tensor.name + " does not begin where the tensor before it ends";
    end += tensor.bytes();
  }
  if (end != file.size()) throw text("it has ", file.size(), " bytes, and its tensors end at ", end);
  return tensors;
}

}  // namespace

size_t bytes_of(NumberType type) { return types[static_cast<int>(type)].second; }

uint64_t StoredTensor::elements() const {
  return std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies());
}

std::string safetensors_header(std::vector<StoredTensor>& tensors) {
  Json header = {{metadata_name, {{"format", "pt"}}}};  // transformers asks for it
  uint64_t begin = 0;
  for (StoredTensor& tensor : tensors) {
    header[metadata_name][checksum_key + tensor.name] = tensor.checksum;
    tensor.begin = begin;
    header[tensor.name] = {{"dtype", types[static_cast<int>(tensor.type)].first},
                           {"shape", tensor.shape},
                           {"data_offsets", {begin, begin + tensor.bytes()}}};
    begin += tensor.bytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that tensors are aligned
  const uint64_t size = text.size();
  for (StoredTensor& tensor : tensors) tensor.begin += size_field + size;
  return std::string(reinterpret_cast<const char*>(&size), size_field) + text;
}

std::string checksum_text(uint32_t checksum) {
  return text(std::hex, std::setfill('0'), std::setw(8), checksum);
}

uint32_t crc32_of(const std::byte* data, size_t bytes) {
  return static_cast<uint32_t>(crc32_z(0, reinterpret_cast<const Bytef*>(data), bytes));
}

// crc32_combine moves its first argument by the bytes after it; the second is combined by exclusive or.
uint32_t checksum_part(const StoredTensor& tensor, uint64_t offset, const std::byte* data, size_t bytes) {
  const uint64_t after = tensor.bytes() - offset - bytes;
  return static_cast<uint32_t>(crc32_combine(crc32_of(data, bytes), 0, static_cast<z_off_t>(after)));
}

SafetensorsFolder::SafetensorsFolder(const std::string& option, const std::string& folder,
                                     const std::string& stem)
    : option_(option), path_((std::filesystem::path(folder) / (stem + ".safetensors")).string()) {
  const std::string index_path = path_ + ".index.json";
  std::set<std::string> names = {stem + ".safetensors"};
  std::error_code ignored;
  if (!std::filesystem::exists(path_, ignored) && std::filesystem::exists(index_path, ignored)) {
    const Json index = Json::parse(MappedFile(option, index_path).text(), nullptr, false);
    const Json map = index.is_object() ? index.value("weight_map", Json()) : Json();
    names.clear();
    for (const auto& [tensor, name] : map.items()) {
      if (name.is_string() && name.get<std::string>().find('/') == std::string::npos) names.insert(name);
    }
    if (names.empty()) throw UsageError(option, index_path, "a weight_map that names files");
  }
  for (const std::string& name : names) {
    const std::string path = (std::filesystem::path(folder) / name).string();
    const MappedFile& file = files_.emplace_back(option, path);
    try {
      for (const StoredTensor& tensor : read_header(file.text())) {
        const FoundTensor found = {tensor, &file.bytes()[tensor.begin]};
        if (!tensors_.try_emplace(tensor.name, found).second) throw tensor.name + " is in another file, too";
      }
    } catch (const std::string& fault) {
      throw UsageError(option, path, "a safetensors file; " + fault);
    }
  }
}

std::string SafetensorsFolder::checksum() const {
  std::string all;
  for (const MappedFile& file : files_) all += ", " + file.checksum();
  return all;
}

void SafetensorsFolder::check(int rank, int ranks) const {
  int number = 0;
  for (const auto& [name, tensor] : tensors_) {
    const std::string& expected = tensor.description.checksum;
    if (number++ % ranks != rank || expected.empty()) continue;
    const std::string found = checksum_text(crc32_of(tensor.data, tensor.description.bytes()));
    require(found == expected, option_, path_, name, " with the checksum ", expected, "; it has ", found,
            " (the file is damaged)");
  }
}

const FoundTensor& SafetensorsFolder::find(const std::string& name, const std::vector<int64_t>& shape) const {
  const auto found = tensors_.find(name);
  require(found != tensors_.end(), option_, path_, "a tensor ", name);
  const std::vector<int64_t>& there = found->second.description.shape;
  require(there == shape, option_, path_, name, " of shape ", Json(shape).dump(), "; it has ",
          Json(there).dump());
  return found->second;
}

}  // namespace pentatron
