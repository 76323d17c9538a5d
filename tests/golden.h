// Reads the golden files that make_golden.py writes: tensors by name, and settings. The format is safetensors
// (https://github.com/huggingface/safetensors): the length of a header, the header in JSON, the data. Only
// 64-bit floating-point numbers and integers occur; all are handed out as doubles.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace pentatron {

struct GoldenTensor {
  std::vector<int64_t> shape;
  std::vector<double> values;  // row-major, as many as the product of shape
};

class Golden {
 public:
  explicit Golden(const std::filesystem::path& path) : path_(path.string()) {
    static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error(path_ + ": cannot be opened");
    const std::vector<char> content{std::istreambuf_iterator<char>(file), {}};
    try {
      parse(content);
    } catch (const nlohmann::json::exception& error) {
      throw std::runtime_error(path_ + ": bad header: " + error.what());
    }
  }

  const GoldenTensor& operator[](const std::string& name) const {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) throw std::runtime_error(path_ + ": holds no tensor '" + name + "'");
    return found->second;
  }

  std::string metadata(const std::string& key) const {
    const auto found = metadata_.find(key);
    if (found == metadata_.end()) throw std::runtime_error(path_ + ": holds no metadata '" + key + "'");
    return found->second;
  }

 private:
  void parse(std::span<const char> content) {
    uint64_t header_bytes = 0;
    if (content.size() < sizeof header_bytes) throw std::runtime_error(path_ + ": shorter than its header");
    std::memcpy(&header_bytes, content.data(), sizeof header_bytes);
    content = content.subspan(sizeof header_bytes);
    if (header_bytes > content.size()) throw std::runtime_error(path_ + ": shorter than its header");
    const auto header = nlohmann::json::parse(content.begin(), content.begin() + header_bytes);
    const auto data = content.subspan(header_bytes);
    for (const auto& [name, entry] : header.items()) {
      if (name == "__metadata__") {
        metadata_ = entry.get<std::map<std::string, std::string>>();
      } else {
        tensors_[name] = read_tensor(name, entry, data);
      }
    }
  }

  GoldenTensor read_tensor(const std::string& name, const nlohmann::json& entry,
                           std::span<const char> data) const {
    const std::string type = entry.at("dtype");
    const std::vector<uint64_t> range = entry.at("data_offsets");  // bytes: begin, end
    GoldenTensor tensor{entry.at("shape"), {}};
    uint64_t elements = 1;
    for (const int64_t extent : tensor.shape) elements *= extent;
    if (range.size() != 2 || range[1] < range[0] || range[1] - range[0] != elements * 8 ||
        range[1] > data.size()) {
      throw std::runtime_error(path_ + ": the data of '" + name +
                               "' do not fit its shape, or the file is truncated");
    }
    const auto bytes = data.subspan(range[0], elements * 8);
    if (type == "F64") {
      tensor.values = numbers<double>(bytes);
    } else if (type == "I64") {
      tensor.values = numbers<int64_t>(bytes);
    } else {
      throw std::runtime_error(path_ + ": '" + name + "' is of type " + type + ", expected F64 or I64");
    }
    return tensor;
  }

  template <typename T>
  static std::vector<double> numbers(std::span<const char> bytes) {
    std::vector<T> raw(bytes.size() / sizeof(T));
    if (!raw.empty()) std::memcpy(raw.data(), bytes.data(), bytes.size());
    return {raw.begin(), raw.end()};
  }

  std::string path_;
  std::map<std::string, GoldenTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace pentatron
