// SharedFiles with MPI-IO. A rank's file view shows it its own blocks as if they were the whole file. A
// collective write may exchange data first, so that each rank writes long runs (two-phase I/O; Thakur, Gropp
// and Lusk, 1999): slices of columns have short ones.
//
// The calls have a communicator of their own, and wait without spinning, because the thread that writes
// shares its core with the training.
#include <algorithm>

#include "ranks/comm.h"
#include "ranks/mpi_wait.h"
#include "ranks/shared_file.h"

namespace pentatron {
namespace {

// MPI's text of an error ends with the system's: "... (No space left on device)".
std::string text_of(int status) {
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, text, &length);
  std::string words(text, length);
  std::replace(words.begin(), words.end(), '\n', ' ');
  const size_t last = words.rfind(':');
  return last == words.npos ? words : words.substr(words.find_first_not_of(' ', last + 1));
}

class MpiFile : public SharedFile {
 public:
  MpiFile(MPI_Comm ranks, const std::string& path, const std::vector<FileBlock>& blocks) {
    MPI_Info info;
    MPI_CHECK(MPI_Info_create(&info));
    MPI_CHECK(MPI_Info_set(info, "cb_buffer_size", std::to_string(shared_file_buffer).c_str()));
    note(MPI_File_open(ranks, path.c_str(), MPI_MODE_CREATE | MPI_MODE_WRONLY, info, &file_));
    MPI_CHECK(MPI_Info_free(&info));
    if (file_ == MPI_FILE_NULL) return;
    if (blocks.empty()) {  // of a type without bytes there is no view
      note(MPI_File_set_view(file_, 0, MPI_BYTE, MPI_BYTE, "native", MPI_INFO_NULL));
      return;
    }
    std::vector<int> one_each(blocks.size(), 1);
    std::vector<MPI_Aint> begins;
    std::vector<MPI_Datatype> types;
    for (const FileBlock& block : blocks) {
      MPI_Datatype run, runs;
      const int count = static_cast<int>(block.count);
      MPI_CHECK(MPI_Type_contiguous(static_cast<int>(block.bytes), MPI_BYTE, &run));
      if (block.bytes == block.stride) {
        MPI_CHECK(MPI_Type_contiguous(count, run, &runs));
      } else {
        MPI_CHECK(MPI_Type_create_hvector(count, 1, static_cast<MPI_Aint>(block.stride), run, &runs));
      }
      MPI_CHECK(MPI_Type_free(&run));
      begins.push_back(static_cast<MPI_Aint>(block.begin));
      types.push_back(runs);
    }
    MPI_Datatype mine;
    MPI_CHECK(MPI_Type_create_struct(static_cast<int>(blocks.size()), one_each.data(), begins.data(),
                                     types.data(), &mine));
    MPI_CHECK(MPI_Type_commit(&mine));
    for (MPI_Datatype& type : types) MPI_CHECK(MPI_Type_free(&type));
    note(MPI_File_set_view(file_, 0, MPI_BYTE, mine, "native", MPI_INFO_NULL));
    MPI_CHECK(MPI_Type_free(&mine));
  }
  ~MpiFile() override {
    if (file_ != MPI_FILE_NULL) MPI_File_close(&file_);
  }

  void write(const std::byte* data, size_t bytes) override {
    if (file_ == MPI_FILE_NULL) return;
    MPI_Request request = MPI_REQUEST_NULL;
    note(MPI_File_iwrite_at_all(file_, static_cast<MPI_Offset>(written_), data, static_cast<int>(bytes),
                                MPI_BYTE, &request));
    wait(request);
    written_ += bytes;
  }

  std::string finish() override {
    if (file_ != MPI_FILE_NULL) note(MPI_File_sync(file_));
    return error_;
  }

 private:
  void note(int status) {
    if (status != MPI_SUCCESS && error_.empty()) error_ = text_of(status);
  }

  MPI_File file_ = MPI_FILE_NULL;
  uint64_t written_ = 0;  // bytes of this rank
  std::string error_;
};

class MpiFiles : public SharedFiles {
 public:
  MpiFiles() { MPI_CHECK(MPI_Comm_dup(MPI_COMM_WORLD, &ranks_)); }
  ~MpiFiles() override { MPI_Comm_free(&ranks_); }

  std::unique_ptr<SharedFile> create(const std::string& path, const std::vector<FileBlock>& blocks) override {
    return std::make_unique<MpiFile>(ranks_, path, blocks);
  }

  uint64_t largest(uint64_t value) override {
    MPI_Request request;
    MPI_CHECK(MPI_Iallreduce(MPI_IN_PLACE, &value, 1, MPI_UINT64_T, MPI_MAX, ranks_, &request));
    wait(request);
    return value;
  }

  std::string first(const std::string& words) override {
    int rank = 0, ranks = 0;
    MPI_CHECK(MPI_Comm_rank(ranks_, &rank));
    MPI_CHECK(MPI_Comm_size(ranks_, &ranks));
    // The first rank has the largest number.
    const uint64_t speaker = largest(words.empty() ? 0 : ranks - rank);
    if (speaker == 0) return {};
    char text[512] = {};
    words.copy(text, sizeof text - 1);
    MPI_Request request;
    MPI_CHECK(MPI_Ibcast(text, sizeof text, MPI_CHAR, ranks - static_cast<int>(speaker), ranks_, &request));
    wait(request);
    return text;
  }

 private:
  MPI_Comm ranks_;
};

}  // namespace

std::unique_ptr<SharedFiles> World::files() const { return std::make_unique<MpiFiles>(); }

}  // namespace pentatron
