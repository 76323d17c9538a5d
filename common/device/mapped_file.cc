#include "device/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iomanip>

#include "device/errors.h"

namespace pentatron {

MappedFile::MappedFile(const std::string& option, const std::string& path, const std::string& instead) {
  const auto invalid = [&](const std::string& expected) {
    throw UsageError(option, path, instead + expected);
  };
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a pipe would wait for its writer
  if (file < 0) invalid(std::string("a readable file (") + std::strerror(errno) + ")");
  struct stat status {};
  const bool regular = fstat(file, &status) == 0 && S_ISREG(status.st_mode);
  const size_t bytes = regular ? static_cast<size_t>(status.st_size) : 0;
  void* mapping = bytes > 0 ? mmap(nullptr, bytes, PROT_READ, MAP_PRIVATE, file, 0) : nullptr;
  close(file);  // the mapping stays
  if (!regular) invalid("a regular file");
  if (bytes == 0) invalid("a file that is not empty");
  if (mapping == MAP_FAILED) invalid(std::string("a file that can be mapped (") + std::strerror(errno) + ")");
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
