#include "model/safetensors.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "device/errors.h"

namespace pentatron {
namespace {

using Json = nlohmann::ordered_json;

constexpr const char* metadata_name = "__metadata__";
constexpr std::string_view checksum_key = "crc32 ";
constexpr uint64_t size_field = 8;              // bytes
constexpr uint64_t most_header = 100'000'000;   // bytes, the format's own limit
constexpr uint64_t most_elements = 1ull << 56;  // so that no product overflows

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "[" : ", ") + std::to_string(size);
  return text.empty() ? "[]" : text + "]";
}

template <class T>
T load_as(const std::byte* array, uint64_t i) {
  T value;
  std::memcpy(&value, array + i * sizeof value, sizeof value);
  return value;
}

// IEEE 754's binary16: a sign, 5 bits of exponent, 10 of fraction.
double load_fp16(const std::byte* array, uint64_t i) {
  const auto bits = load_as<uint16_t>(array, i);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double value = std::ldexp(exponent == 0 ? fraction : 1024 + fraction, std::max(exponent, 1) - 25);
  if (exponent == 31) value = fraction == 0 ? INFINITY : NAN;
  return bits >> 15 ? -value : value;
}

double load_bf16(const std::byte* array, uint64_t i) {  // the upper half of an fp32
  return std::bit_cast<float>(uint32_t{load_as<uint16_t>(array, i)} << 16);
}

struct TypeEntry {
  const char* name;
  size_t bytes;
  double (*load)(const std::byte* array, uint64_t i);
};
constexpr TypeEntry types[] = {  // in the order of NumberType
    {"F64", 8, load_as<double>},
    {"F32", 4, [](const std::byte* array, uint64_t i) -> double { return load_as<float>(array, i); }},
    {"F16", 2, load_fp16},
    {"BF16", 2, load_bf16}};
const TypeEntry& entry_of(NumberType type) { return types[static_cast<int>(type)]; }

// One entry of a header. Throws std::string: what is wrong with it.
StoredTensor read_entry(const std::string& name, const Json& entry, uint64_t data_begin,
                        uint64_t data_bytes) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets") || !entry["dtype"].is_string() || !entry["shape"].is_array() ||
      !entry["data_offsets"].is_array() || entry["data_offsets"].size() != 2) {
    throw name + " has no dtype, shape and data_offsets";
  }
  StoredTensor tensor{name, NumberType::fp32, {}, 0};
  const std::string type = entry["dtype"];
  const auto known = std::ranges::find(types, type, &TypeEntry::name);
  if (known == std::end(types)) throw name + " has the type " + type;
  tensor.type = static_cast<NumberType>(known - types);
  uint64_t elements = 1;
  for (const Json& size : entry["shape"]) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > most_elements) throw name + " has a wrong shape";
    tensor.shape.push_back(size.get<int64_t>());
    if (__builtin_mul_overflow(elements, size.get<uint64_t>(), &elements) || elements > most_elements)
      throw name + " has a shape that is too large";
  }
  const Json &begin = entry["data_offsets"][0], &end = entry["data_offsets"][1];
  if (!begin.is_number_unsigned() || !end.is_number_unsigned() || end.get<uint64_t>() > data_bytes ||
      begin.get<uint64_t>() > end.get<uint64_t>()) {
    throw name + " lies outside the file's " + std::to_string(data_bytes) + " bytes of tensors";
  }
  tensor.begin = data_begin + begin.get<uint64_t>();
  if (end.get<uint64_t>() - begin.get<uint64_t>() != tensor.bytes())
    throw name + " has " + std::to_string(end.get<uint64_t>() - begin.get<uint64_t>()) +
        " bytes, not those of " + tensor.form();
  return tensor;
}

std::string text_of_checksum(uint32_t checksum) {
  char digits[9];
  std::snprintf(digits, sizeof digits, "%08x", checksum);
  return digits;
}

// Of the tensors that have one. Throws std::string.
std::map<std::string, uint32_t> read_checksums(const Json& metadata) {
  std::map<std::string, uint32_t> checksums;
  for (const auto& [key, value] : metadata.items()) {
    if (!key.starts_with(checksum_key)) continue;
    const std::string digits = value.is_string() ? value.get<std::string>() : "";
    uint32_t checksum = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), checksum, 16);
    if (error != std::errc() || text_of_checksum(checksum) != digits) throw key + " has no eight digits";
    checksums[key.substr(checksum_key.size())] = checksum;
  }
  return checksums;
}

// Throws std::string.
std::vector<StoredTensor> read_header(std::span<const std::byte> file) {
  if (file.size() < size_field) throw std::string("it has fewer than 8 bytes");
  const uint64_t size = load_as<uint64_t>(file.data(), 0);
  if (size > most_header || size > file.size() - size_field)
    throw std::string("it is cut off, or it is none");
  const char* const text = reinterpret_cast<const char*>(file.data()) + size_field;
  const Json header = Json::parse(text, text + size, nullptr, false);
  if (!header.is_object()) throw std::string("its header is no JSON object");
  const uint64_t begin = size_field + size;
  std::vector<StoredTensor> tensors;
  std::map<std::string, uint32_t> checksums;
  for (const auto& [name, entry] : header.items()) {
    if (name != metadata_name)
      tensors.push_back(read_entry(name, entry, begin, file.size() - begin));
    else
      checksums = read_checksums(entry);
  }
  for (StoredTensor& tensor : tensors) {
    if (checksums.empty()) break;
    const auto found = checksums.find(tensor.name);
    if (found == checksums.end()) throw "no checksum is there of " + tensor.name;
    tensor.checksum = found->second;
  }
  std::ranges::stable_sort(tensors, {}, [](const auto& t) { return std::pair(t.begin, t.bytes()); });
  uint64_t end = begin;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin < end) throw tensor.name + " overlaps the tensor before it";
    if (tensor.begin > end) throw "a gap is before " + tensor.name;
    end += tensor.bytes();
  }
  if (end != file.size()) throw std::to_string(file.size() - end) + " bytes belong to no tensor";
  return tensors;
}

}  // namespace

size_t bytes_of(NumberType type) { return entry_of(type).bytes; }
std::string_view to_string(NumberType type) { return entry_of(type).name; }

uint64_t StoredTensor::elements() const {
  return std::accumulate(shape.begin(), shape.end(), uint64_t{1}, std::multiplies());
}

std::string StoredTensor::form() const { return std::string(to_string(type)) + " " + text_of(shape); }

std::string safetensors_header(std::vector<StoredTensor>& tensors) {
  Json header = {{metadata_name, {{"format", "pt"}}}};  // transformers asks for it
  uint64_t begin = 0;
  for (const StoredTensor& tensor : tensors) {
    header[metadata_name][std::string(checksum_key) + tensor.name] =
        text_of_checksum(tensor.checksum.value_or(0));
  }
  for (const StoredTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", to_string(tensor.type)},
                           {"shape", tensor.shape},
                           {"data_offsets", {begin, begin + tensor.bytes()}}};
    begin += tensor.bytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that tensors are aligned
  const uint64_t size = text.size();
  uint64_t at = size_field + size;
  for (StoredTensor& tensor : tensors) {
    tensor.begin = at;
    at += tensor.bytes();
  }
  return std::string(reinterpret_cast<const char*>(&size), size_field) + text;
}

double number_at(NumberType type, const std::byte* array, uint64_t i) {
  return entry_of(type).load(array, i);
}

void TensorChecksums::add(const std::byte* data, size_t bytes, uint64_t place) {
  while (place >= tensors_[tensor_].begin + tensors_[tensor_].bytes()) ++tensor_;
  parts_[tensor_].add(data, bytes, place - tensors_[tensor_].begin);
}

std::vector<uint32_t> TensorChecksums::parts() {
  std::vector<uint32_t> all;
  for (size_t i = 0; i < tensors_.size(); ++i) all.push_back(parts_[i].up_to(tensors_[i].bytes()));
  return all;
}

SafetensorsFile::SafetensorsFile(const std::string& option, const std::string& path) : file_(option, path) {
  try {
    tensors_ = read_header(file_.bytes());
  } catch (const std::string& fault) {
    throw UsageError(option, path, "a safetensors file; " + fault);
  }
}

SafetensorsFolder::SafetensorsFolder(const std::string& option, const std::string& folder,
                                     const std::string& stem)
    : option_(option), path_((std::filesystem::path(folder) / (stem + ".safetensors")).string()) {
  const std::string index_path = path_ + ".index.json";
  std::set<std::string> names = {stem + ".safetensors"};
  std::error_code ignored;
  if (!std::filesystem::exists(path_, ignored) && std::filesystem::exists(index_path, ignored)) {
    const MappedFile file(option, index_path);
    const char* const text = reinterpret_cast<const char*>(file.bytes().data());
    const Json index = Json::parse(text, text + file.bytes().size(), nullptr, false);
    names.clear();
    if (index.is_object() && index.contains("weight_map") && index["weight_map"].is_object()) {
      for (const auto& [tensor, name] : index["weight_map"].items()) {
        if (name.is_string() && name.get<std::string>().find('/') == std::string::npos) names.insert(name);
      }
    }
    if (names.empty()) throw UsageError(option, index_path, "a weight_map that names files");
  }
  for (const std::string& name : names)
    files_.emplace_back(option, (std::filesystem::path(folder) / name).string());
  for (const SafetensorsFile& file : files_) {
    for (const StoredTensor& tensor : file.tensors()) tensors_[tensor.name] = {tensor, file.data(tensor)};
  }
}

std::string SafetensorsFolder::damage(int rank, int ranks) const {
  int number = 0;
  for (const auto& [name, tensor] : tensors_) {
    const std::optional<uint32_t> expected = tensor.description.checksum;
    if (number++ % ranks != rank || !expected) continue;
    const uint32_t found = crc32(tensor.data, tensor.description.bytes());
    if (found == *expected) continue;
    return name + " with the checksum " + text_of_checksum(*expected) + "; it has " +
           text_of_checksum(found) + " (the file is damaged)";
  }
  return {};
}

const FoundTensor& SafetensorsFolder::find(const std::string& name, const std::vector<int64_t>& shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) throw UsageError(option_, path_, "a tensor " + name);
  if (found->second.description.shape != shape) {
    throw UsageError(
        option_, path_,
        name + " of shape " + text_of(shape) + "; it has " + text_of(found->second.description.shape));
  }
  return found->second;
}

}  // namespace pentatron
