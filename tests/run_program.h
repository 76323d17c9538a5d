// Starts programs as a user does.
#pragma once

#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "catch.h"
#include "files.h"

namespace pentatron::tests {

struct Outcome {
  int status;  // -1: ended by a signal
  std::string out, err;
};

// Starts the program `name` that lies beside the tests. `arguments` and what stands `before` it are for the
// shell.
inline Outcome run(const TemporaryFolder& folder, const std::string& arguments,
                   const std::string& name = "01_single_gpu", const std::string& before = "") {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / name;
  REQUIRE(std::filesystem::exists(program));
  const std::string out = folder.path() + "/out", err = folder.path() + "/err";
  const std::string command =
      before + "'" + program.string() + "' " + arguments + " >'" + out + "' 2>'" + err + "'";
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, read_file(out), read_file(err)};
}

}  // namespace pentatron::tests
