// Files in Hugging Face's safetensors format: 8 bytes that hold the header's size, the header, and the
// tensors, row-major, one after the other. The header is a JSON object that says of each tensor its type, its
// shape and where its bytes lie. So whoever knows all shapes knows beforehand where each element lies.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/checksum.h"
#include "model/mapped_file.h"

namespace pentatron {

enum class NumberType { fp64, fp32, fp16, bf16 };
size_t bytes_of(NumberType type);
std::string_view to_string(NumberType type);  // as in a header: "F64", ...

struct StoredTensor {
  std::string name;
  NumberType type;
  std::vector<int64_t> shape;
  uint64_t begin = 0;                               // of its bytes, in the file
  std::optional<uint32_t> checksum = std::nullopt;  // its CRC-32; files of others have none

  uint64_t elements() const;
  uint64_t bytes() const { return elements() * bytes_of(type); }
  std::string form() const;  // "F32 [2, 3]"
};

// What comes before the tensors in a file that holds these, in this order. Sets where each begins. The
// checksums are its metadata, "crc32 NAME"; what they are does not change its size.
std::string safetensors_header(std::vector<StoredTensor>& tensors);

// What a rank adds to the checksums of a file's tensors.
class TensorChecksums {
 public:
  explicit TensorChecksums(
      const std::vector<StoredTensor>& tensors)  // in the order of the file; outlive this
      : tensors_(tensors), parts_(tensors.size()) {}
  // Bytes of one tensor, which begin at `place` of the file. Places ascend.
  void add(const std::byte* data, size_t bytes, uint64_t place);
  // One of each tensor. The exclusive or of all ranks' makes the CRC-32 (checksum.h).
  std::vector<uint32_t> parts();

 private:
  const std::vector<StoredTensor>& tensors_;
  std::vector<PartialChecksum> parts_;
  size_t tensor_ = 0;  // of the last bytes
};

class SafetensorsFile {
 public:
  // UsageError, naming `option`: it can't be read, or tensors overlap, leave gaps, or do not end with the
  // file.
  SafetensorsFile(const std::string& option, const std::string& path);

  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // in the order of their places
  const std::byte* data(const StoredTensor& tensor) const { return file_.bytes().data() + tensor.begin; }

 private:
  MappedFile file_;
  std::vector<StoredTensor> tensors_;
};

// Element i of an array of numbers of some type. Exact: a double holds the numbers of all types.
double number_at(NumberType type, const std::byte* array, uint64_t i);

// A tensor in one of several files.
struct FoundTensor {
  StoredTensor description;
  const std::byte* data;
};

// The tensors of FOLDER/STEM.safetensors, or of the files that FOLDER/STEM.safetensors.index.json names.
class SafetensorsFolder {
 public:
  SafetensorsFolder(const std::string& option, const std::string& folder, const std::string& stem);
  // Throws UsageError, naming `option`, if there is no such tensor, or another shape than `shape`.
  const FoundTensor& find(const std::string& name, const std::vector<int64_t>& shape) const;
  bool has(const std::string& name) const { return tensors_.contains(name); }
  size_t size() const { return tensors_.size(); }
  const std::string& option() const { return option_; }
  const std::string& path() const { return path_; }
  // What is expected of a tensor that has not its checksum; nothing if all have. Each rank reads its part of
  // the tensors, whole.
  std::string damage(int rank, int ranks) const;

 private:
  std::string option_, path_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, FoundTensor> tensors_;
};

}  // namespace pentatron
