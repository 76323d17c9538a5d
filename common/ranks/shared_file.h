// Files that all ranks write together: each rank writes its own blocks of the file, and no rank gathers
// anything.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace pentatron {

// `count` runs of `bytes` bytes of a file; each begins `stride` bytes after the one before.
struct FileBlock {
  uint64_t begin, bytes, count, stride;
};

// Says where in a file the next bytes of a rank belong, if they fill these blocks in order.
class FilePlaces {
 public:
  explicit FilePlaces(const std::vector<FileBlock>& blocks);
  // Calls `take` with each run of the bytes and its place, until it returns false.
  using Take = std::function<bool(const std::byte* data, size_t bytes, uint64_t place)>;
  void next(const std::byte* data, size_t bytes, const Take& take);

 private:
  std::vector<FileBlock> blocks_;
  size_t block_ = 0;             // the next byte's block,
  uint64_t run_ = 0, done_ = 0;  // its run, and the bytes of the run that were taken
};

// Ranks may open the same file, if their blocks do not overlap. They need not wait for each other: a
// positioned write moves no pointer that they share.
class SharedFile {
 public:
  // `blocks`: this rank's, ascending. Creates the file if it is not there.
  SharedFile(const std::string& path, const std::vector<FileBlock>& blocks);
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  // Writes the next bytes of the blocks; nothing, if something went wrong before.
  void write(const std::byte* data, size_t bytes);
  // Brings everything to the disk. Returns what went wrong, or nothing.
  std::string finish();

 private:
  FilePlaces places_;
  int file_;
  std::string error_;
};

// A file that says who uses its folder. The kernel frees it when the process ends, however that ends, also
// where the folder is on another host (NFS 4, Lustre with -o flock).
class FolderLock {
 public:
  FolderLock() = default;
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;
  // Returns who has it, or nothing: then this process has it, or the file system knows no locks.
  std::string take(const std::string& folder);

 private:
  int file_ = -1;
};

// Waits until the file or folder is on the disk. Returns what went wrong, or nothing.
std::string flush_to_disk(const std::string& path);
// Writes a small file, and flushes it. Likewise.
std::string write_file(const std::string& path, const std::string& text);
// Writes over the beginning of a file. Likewise.
std::string overwrite(const std::string& path, const std::string& text);

}  // namespace pentatron
