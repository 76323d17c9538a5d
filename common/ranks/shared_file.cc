#include "ranks/shared_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

namespace pentatron {
namespace {

// Writes all bytes at one place of the file. Returns what went wrong, or nothing.
std::string write_at(int file, const std::byte* data, size_t bytes, uint64_t place) {
  while (bytes > 0) {
    const ssize_t written = pwrite(file, data, bytes, static_cast<off_t>(place));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return std::strerror(written < 0 ? errno : ENOSPC);
    data += written;
    bytes -= written;
    place += written;
  }
  return {};
}

}  // namespace

FilePlaces::FilePlaces(const std::vector<FileBlock>& blocks) {
  for (const FileBlock& b : blocks)  // runs without gaps are one
    blocks_.push_back(b.bytes == b.stride ? FileBlock{b.begin, b.bytes * b.count, 1, 0} : b);
}

void FilePlaces::next(const std::byte* data, size_t bytes, const Take& take) {
  while (bytes > 0) {
    const FileBlock& block = blocks_[block_];
    const size_t size = std::min<uint64_t>(bytes, block.bytes - done_);
    if (!take(data, size, block.begin + run_ * block.stride + done_)) return;
    data += size;
    bytes -= size;
    done_ += size;
    if (done_ == block.bytes) done_ = 0, ++run_;
    if (run_ == block.count) run_ = 0, ++block_;
  }
}

SharedFile::SharedFile(const std::string& path, const std::vector<FileBlock>& blocks) : places_(blocks) {
  file_ = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) error_ = std::strerror(errno);
}

SharedFile::~SharedFile() {
  if (file_ >= 0) close(file_);
}

void SharedFile::write(const std::byte* data, size_t bytes) {
  if (!error_.empty()) return;
  places_.next(data, bytes, [this](const std::byte* run, size_t size, uint64_t place) {
    error_ = write_at(file_, run, size, place);
    return error_.empty();
  });
}

std::string SharedFile::finish() {
  if (error_.empty() && fsync(file_) != 0) error_ = std::strerror(errno);
  return error_;
}

FolderLock::~FolderLock() {
  if (file_ >= 0) close(file_);
}

std::string FolderLock::take(const std::string& folder) {
  file_ = open((folder + "/lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (file_ < 0) return {};
  char words[300] = {};
  if (flock(file_, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return {};
    return pread(file_, words, sizeof words - 1, 0) > 0 ? words : "another process";
  }
  char host[200] = {};
  gethostname(host, sizeof host - 1);
  const int size = std::snprintf(words, sizeof words, "process %d of %s", getpid(), host);
  if (ftruncate(file_, 0) == 0) write_at(file_, reinterpret_cast<const std::byte*>(words), size, 0);
  return {};
}

std::string flush_to_disk(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  const bool good = file >= 0 && fsync(file) == 0;
  const std::string error = good ? "" : std::strerror(errno);
  if (file >= 0) close(file);
  return error;
}

std::string write_file(const std::string& path, const std::string& text) {
  unlink(path.c_str());
  return overwrite(path, text);
}

std::string overwrite(const std::string& path, const std::string& text) {
  SharedFile file(path, {{0, text.size(), 1, 0}});
  file.write(reinterpret_cast<const std::byte*>(text.data()), text.size());
  return file.finish();
}

}  // namespace pentatron
