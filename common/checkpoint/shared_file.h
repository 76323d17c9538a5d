// Files that all ranks write together: each rank writes its own bytes of the file, and no rank gathers
// anything. What goes wrong with the disk is thrown as a std::system_error.
#pragma once

#include <fcntl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace pentatron {

// Throws what errno says, unless `good`.
void check_errno(bool good);

// Ranks may open the same file, if their bytes do not overlap. They need not wait for each other: a
// positioned write moves no pointer that they share.
class SharedFile {
 public:
  explicit SharedFile(const std::string& path, int flags = O_WRONLY | O_CREAT);  // those of open()
  ~SharedFile();
  SharedFile(const SharedFile&) = delete;
  SharedFile& operator=(const SharedFile&) = delete;

  void write(const std::byte* data, size_t bytes, uint64_t offset);
  void flush();  // brings everything to the disk
  int descriptor() const { return file_; }

 private:
  int file_;
};

// Opens `lock`, a file that says who uses its folder. The kernel frees it when the process ends, however that
// ends, also where the folder is on another host (NFS 4, Lustre with -o flock). Returns who has it, or
// nothing: then this process has it as long as the file is open, or the file system knows no locks.
std::string lock_folder(const std::string& folder, std::unique_ptr<SharedFile>& lock);

// Writes the first bytes of a file, which may have more, and flushes it.
void write_text(const std::string& path, const std::string& text);

}  // namespace pentatron
