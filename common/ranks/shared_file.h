// Files that all ranks write together: each rank writes its own blocks of the file, and no rank gathers
// anything. Here for a single process; mpi_file.cu has the same with MPI-IO.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace pentatron {

// The most bytes of a rank's memory that a collective write takes beside the data.
constexpr size_t shared_file_buffer = 16 << 20;

// `count` runs of `bytes` bytes of a file; each begins `stride` bytes after the one before.
struct FileBlock {
  uint64_t begin, bytes, count, stride;
};

class SharedFile {
 public:
  virtual ~SharedFile() = default;
  // Writes the next bytes of this rank's blocks. All ranks call it, equally often; `bytes` may be 0.
  virtual void write(const std::byte* data, size_t bytes) = 0;
  // Brings everything to the disk. Returns what went wrong for this rank, or nothing. All ranks call it.
  virtual std::string finish() = 0;
};

// All ranks call these in the same order, from one thread.
class SharedFiles {
 public:
  virtual ~SharedFiles() = default;
  // `blocks`: this rank's, ascending. No block of another rank overlaps them.
  virtual std::unique_ptr<SharedFile> create(const std::string& path, const std::vector<FileBlock>& blocks);
  // Of all ranks: the largest value, and what the first rank says that says anything.
  virtual uint64_t largest(uint64_t value) { return value; }
  virtual std::string first(const std::string& words) { return words; }
};

// Waits until the file or folder is on the disk. Returns what went wrong, or nothing.
std::string flush_to_disk(const std::string& path);
// Writes a small file, and flushes it. Likewise.
std::string write_file(const std::string& path, const std::string& text);

}  // namespace pentatron
