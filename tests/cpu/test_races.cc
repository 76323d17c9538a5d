// ThreadSanitizer sees a missing event, a missing wait and a race in a kernel, names the kernel, and is
// silent about correct programs. The cases (race_cases.cc) are programs of their own, built for
// ThreadSanitizer by "make test".
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <string>

#include "../catch.h"
#include "../files.h"

namespace {

struct Outcome {
  int status;
  std::string output;
};

Outcome run(const std::string& folder, const std::string& name) {
  const auto builds = std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path();
  const std::string program = builds / folder / "race_cases";
  INFO(program << " is built by: make test");
  REQUIRE(std::filesystem::exists(program));
  const pentatron::tests::TemporaryFolder temporary;
  const std::string output = temporary.path() + "/output";
  const int status = std::system(("'" + program + "' " + name + " > '" + output + "' 2>&1").c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, pentatron::tests::read_file(output)};
}

// Runs the cases of a build folder whose names begin, or do not begin, with "block"; returns how many there
// are.
int check_cases(const std::string& folder, bool about_blocks) {
  std::istringstream names(run(folder, "").output);
  int cases = 0;
  for (std::string name; names >> name;) {
    if (name.starts_with("block") != about_blocks) continue;
    const bool wrong = name.find("missing") != name.npos || name.find("racing") != name.npos ||
                       name.find("early") != name.npos;
    const Outcome outcome = run(folder, name);
    const bool reported = outcome.output.find("WARNING: ThreadSanitizer: data race") != name.npos;
    INFO(name << ": " << outcome.output);
    CHECK(reported == wrong);
    CHECK((outcome.status != 0) == wrong);
    ++cases;
  }
  return cases;
}

}  // namespace

TEST_CASE("ThreadSanitizer reports a missing order between streams", "[01][standin]") {
  CHECK(check_cases("cpu-fp32-thread", false) >= 10);
  CHECK(run("cpu-fp32-thread", "missing-event").output.find("read_values") != std::string::npos);
}

TEST_CASE("ThreadSanitizer reports races inside a block and between blocks", "[01][standin]") {
  CHECK(check_cases("cpu-fp32-block4-thread", true) >= 4);
}
