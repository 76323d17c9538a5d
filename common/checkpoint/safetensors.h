// Files in Hugging Face's safetensors format: 8 bytes that hold the header's size, the header, and the
// tensors, row-major, one after the other. The header is a JSON object that says of each tensor its type, its
// shape and where its bytes lie. So whoever knows all shapes knows beforehand where each element lies.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <string>
#include <vector>

#include "device/mapped_file.h"

namespace pentatron {

enum class NumberType { fp64, fp32, fp16, bf16 };
size_t bytes_of(NumberType type);

struct StoredTensor {
  std::string name;
  NumberType type;
  std::vector<int64_t> shape;
  uint64_t begin = 0;         // of its bytes, in the file
  std::string checksum = {};  // its CRC-32, eight digits; files of others have none

  uint64_t elements() const;
  uint64_t bytes() const { return elements() * bytes_of(type); }
};

// What comes before the tensors in a file that holds these, in this order. Sets where each begins. The
// checksums are its metadata, "crc32 NAME".
std::string safetensors_header(std::vector<StoredTensor>& tensors);

std::string checksum_text(uint32_t checksum);
uint32_t crc32_of(const std::byte* data, size_t bytes);
// What some bytes, which begin at `offset` of a tensor, add to its CRC-32. The exclusive or of what all parts
// of the tensor add is the CRC-32. So no rank has to see what another one has written.
uint32_t checksum_part(const StoredTensor& tensor, uint64_t offset, const std::byte* data, size_t bytes);

// A tensor in one of several files.
struct FoundTensor {
  StoredTensor description;
  const std::byte* data;
};

// The tensors of FOLDER/STEM.safetensors, or of the files that FOLDER/STEM.safetensors.index.json names.
class SafetensorsFolder {
 public:
  // UsageError, naming `option`: a file can't be read, or its tensors are not all that it has, each once.
  SafetensorsFolder(const std::string& option, const std::string& folder, const std::string& stem);
  // Throws UsageError, naming `option`, if there is no such tensor, or another shape than `shape`.
  const FoundTensor& find(const std::string& name, const std::vector<int64_t>& shape) const;
  bool has(const std::string& name) const { return tensors_.contains(name); }
  const std::map<std::string, FoundTensor>& tensors() const { return tensors_; }
  const std::string& option() const { return option_; }
  const std::string& path() const { return path_; }
  std::string checksum() const;  // of its files, one after the other (mapped_file.h)
  // Throws UsageError if a tensor has not its checksum. Each rank reads its part of the tensors, whole.
  void check(int rank, int ranks) const;

 private:
  std::string option_, path_;
  std::list<MappedFile> files_;
  std::map<std::string, FoundTensor> tensors_;
};

}  // namespace pentatron
