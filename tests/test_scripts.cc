// What the scripts around the tests do on machines that are not this one: fake commands stand for them.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "catch.h"
#include "files.h"

using pentatron::tests::read_file;
using pentatron::tests::TemporaryFolder;

namespace {

void write_script(const std::string& path, const std::string& text) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path) << "#!/bin/bash\n" << text << "\n";
  std::filesystem::permissions(path, std::filesystem::perms::all);
}

}  // namespace

TEST_CASE("a test on GPUs starts no more ranks than there are, but with NCCL over MPI", "[scripts]") {
  const TemporaryFolder folder;
  const std::string bin = folder.path() + "/bin";
  write_script(bin + "/nvidia-smi", "echo GPU 0; echo GPU 1; echo GPU 2");
  write_script(bin + "/mpirun", "echo started $2 ranks; echo 1 passed, 0 failed");
  const auto run = [&](const std::string& build) {
    for (const char* program : {"/tests-02", "/mpi_tests-02"})
      write_script(folder.path() + "/" + build + program, "echo 1 passed, 0 failed");
    const std::string command = "cd '" + folder.path() + "' && PATH='" + bin +
                                "':$PATH '" PENTATRON_TESTS "/run.sh' '[02]' " + build + " > out 2>&1";
    CHECK(std::system(command.c_str()) == 0);
    return read_file(folder.path() + "/out");
  };
  const std::string nccl = run("cuda-fp64"), over_mpi = run("cuda-fp64-mpi"), cpu = run("cpu-fp64");
  for (const std::string ranks : {"1", "2", "3"})
    CHECK(nccl.find("started " + ranks + " ranks") != std::string::npos);
  for (const std::string ranks : {"4", "8", "16"}) {
    CHECK(nccl.find("started " + ranks + " ranks") == std::string::npos);
    CHECK(nccl.find("left out: cuda-fp64 on " + ranks + " ranks; GPUs: 3") != std::string::npos);
    for (const std::string& all : {over_mpi, cpu})
      CHECK(all.find("started " + ranks + " ranks") != std::string::npos);
  }
}
