// A file mapped into memory, read-only: only what is looked at is read from disk. Every file that an option
// names is opened here, so each program refuses folders, pipes and devices alike.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

namespace pentatron {

// The whole path of a file of this tree. The program is in the tree's build/CONFIGURATION.
std::string in_tree(const std::string& path);
// The names of a folder's files, sorted, without their last extension: "a100, b200". Empty if it can't be
// read.
std::string names_in_tree(const std::string& folder);

class MappedFile {
 public:
  // Throws UsageError, naming `option`, if the file can't be read, is empty, or is no regular file.
  // `instead`: what else the option takes, such as "one of a, b, or ".
  MappedFile(const std::string& option, const std::string& path, const std::string& instead = "");
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }
  // The file's size and a CRC-32, in words: of all of it up to 64 MiB, else of 64 MiB in 64 parts, equally
  // far from each other.
  std::string checksum() const;
  std::string_view text() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

 private:
  std::span<std::byte> bytes_;
};

}  // namespace pentatron
