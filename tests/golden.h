// Reads the golden files that make_golden.py writes: tensors by name, and settings. The format is safetensors
// (https://github.com/huggingface/safetensors): the length of a header, the header in JSON, the data. Only
// 64-bit floating-point numbers and integers occur; all are handed out as doubles.
#pragma once

#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "files.h"

namespace pentatron {

class Golden {
 public:
  explicit Golden(const std::string& path) : content_(tests::read_file(path)) {
    uint64_t header_bytes = 0;
    data_ = sizeof header_bytes;
    if (content_.size() < data_) throw std::runtime_error(path + ": cannot be read");
    std::memcpy(&header_bytes, content_.data(), data_);
    header_ = nlohmann::json::parse(content_.substr(data_, header_bytes));
    data_ += header_bytes;
  }

  // The elements of a tensor, row-major.
  std::vector<double> operator[](const std::string& name) const {
    return header_.at(name).at("dtype") == "I64" ? elements<int64_t>(name) : elements<double>(name);
  }

  std::string metadata(const std::string& key) const { return header_.at("__metadata__").at(key); }

 private:
  template <class T>
  std::vector<double> elements(const std::string& name) const {
    const std::vector<uint64_t> range = header_.at(name).at("data_offsets");  // bytes: begin, end
    std::vector<T> raw((range[1] - range[0]) / sizeof(T));
    if (data_ + range[1] > content_.size()) throw std::runtime_error(name + " is cut off");
    std::memcpy(raw.data(), content_.data() + data_ + range[0], raw.size() * sizeof(T));
    return {raw.begin(), raw.end()};
  }

  std::string content_;
  nlohmann::json header_;
  size_t data_;  // where it begins
};

}  // namespace pentatron
