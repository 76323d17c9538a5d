#include "device/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <iomanip>
#include <set>

#include "device/errors.h"

namespace pentatron {

namespace fs = std::filesystem;

std::string in_tree(const std::string& path) {
  const fs::path program = fs::canonical("/proc/self/exe");
  return program.parent_path().parent_path().parent_path() / path;
}

std::string names_in_tree(const std::string& folder) {
  std::set<std::string> names;
  std::error_code unreadable;  // then there are none
  for (const auto& file : fs::directory_iterator(in_tree(folder), unreadable))
    names.insert(file.path().stem());
  std::string words;
  for (const std::string& name : names) words += (words.empty() ? "" : ", ") + name;
  return words;
}

MappedFile::MappedFile(const std::string& option, const std::string& path, const std::string& instead) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // or a pipe waits for a writer
  struct stat status {};
  const bool is_there = file >= 0 && fstat(file, &status) == 0;
  require(is_there, option, path, instead, "a readable file (", std::strerror(errno), ")");
  const auto bytes = static_cast<size_t>(status.st_size);
  void* const mapping = mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);  // the mapping stays
  require(S_ISREG(status.st_mode), option, path, instead, "a regular file");
  require(bytes > 0, option, path, instead, "a file that is not empty");
  require(mapping != MAP_FAILED, option, path, "a file that can be mapped (", std::strerror(errno), ")");
  bytes_ = {static_cast<std::byte*>(mapping), bytes};
}

MappedFile::~MappedFile() { munmap(bytes_.data(), bytes_.size()); }

std::string MappedFile::checksum() const {
  constexpr size_t part = 1 << 20, parts = 64;
  const size_t size = bytes_.size(), step = std::max(part, size / parts);
  uLong sum = 0;
  for (size_t at = 0; at < size; at += step)
    sum = crc32_z(sum, reinterpret_cast<const Bytef*>(&bytes_[at]), std::min(part, size - at));
  return pentatron::text(size, " bytes with CRC-32 ", std::hex, std::setfill('0'), std::setw(8), sum);
}

}  // namespace pentatron
