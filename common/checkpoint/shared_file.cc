#include "checkpoint/shared_file.h"

#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <system_error>

namespace pentatron {

void check_errno(bool good) {
  if (!good) throw std::system_error(errno, std::generic_category());
}

SharedFile::SharedFile(const std::string& path, int flags)
    : file_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {
  check_errno(file_ >= 0);
}

SharedFile::~SharedFile() { close(file_); }

void SharedFile::write(const std::byte* data, size_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t written = pwrite(file_, data, bytes, static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    check_errno(written > 0);
    data += written;
    bytes -= written;
    offset += written;
  }
}

void SharedFile::flush() { check_errno(fsync(file_) == 0); }

std::string lock_folder(const std::string& folder, std::unique_ptr<SharedFile>& lock) try {
  lock = std::make_unique<SharedFile>(folder + "/lock", O_RDWR | O_CREAT);
  const int file = lock->descriptor();
  char words[300] = {};
  if (flock(file, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return {};
    return pread(file, words, sizeof words - 1, 0) > 0 ? words : "another process";
  }
  char host[200] = {};
  gethostname(host, sizeof host - 1);
  if (ftruncate(file, 0) == 0) dprintf(file, "process %d of %s", getpid(), host);
  return {};
} catch (const std::system_error&) {  // it can not be opened
  return {};
}

void write_text(const std::string& path, const std::string& text) {
  SharedFile file(path);
  file.write(reinterpret_cast<const std::byte*>(text.data()), text.size(), 0);
  file.flush();
}

}  // namespace pentatron
