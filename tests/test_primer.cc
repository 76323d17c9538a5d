// The primer of the collectives, started as a user starts it: its lists are those of the lecture notes.
#include <algorithm>
#include <string>

#include "run_program.h"

using pentatron::tests::Outcome;
using pentatron::tests::run;
using pentatron::tests::TemporaryFolder;

TEST_CASE("02: the primer prints the worked examples of three ranks", "[02][primer][mpirun]") {
  const TemporaryFolder folder;
  const Outcome outcome = run(folder, "--max-bytes 16384", "collectives", "mpirun -n 3 ");
  INFO(outcome.out << outcome.err);
  CHECK(outcome.status == 0);
  CHECK(outcome.err.empty());
  const std::string expected = R"(
broadcast: all get what rank 0 has
  rank 0  [1, 1, 1, 1, 1]  ->  [1, 1, 1, 1, 1]
  rank 1  [2, 2, 2, 2, 2]  ->  [1, 1, 1, 1, 1]
  rank 2  [3, 3, 3, 3, 3]  ->  [1, 1, 1, 1, 1]

all-reduce: all get the sum
  rank 0  [1, 1, 1, 1, 1]  ->  [6, 6, 6, 6, 6]
  rank 1  [2, 2, 2, 2, 2]  ->  [6, 6, 6, 6, 6]
  rank 2  [3, 3, 3, 3, 3]  ->  [6, 6, 6, 6, 6]

all-gather: all get the parts of all
  rank 0  [1, 1]  ->  [1, 1, 2, 2, 3, 3]
  rank 1  [2, 2]  ->  [1, 1, 2, 2, 3, 3]
  rank 2  [3, 3]  ->  [1, 1, 2, 2, 3, 3]

reduce-scatter: rank r gets the sum of part r (of two numbers)
  rank 0  [1, 2, 1, 4, 1, 8]  ->  [6, 12]
  rank 1  [2, 4, 4, 16, 8, 64]  ->  [14, 56]
  rank 2  [3, 6, 9, 36, 27, 216]  ->  [36, 288]

all-to-all: part i of rank r becomes part r of rank i
  rank 0  [11, 12, 13]  ->  [11, 21, 31]
  rank 1  [21, 22, 23]  ->  [12, 22, 32]
  rank 2  [31, 32, 33]  ->  [13, 23, 33]

send and receive: from each rank to the next
  rank 0  [1, 1, 1, 1, 1]  ->  [3, 3, 3, 3, 3]
  rank 1  [2, 2, 2, 2, 2]  ->  [1, 1, 1, 1, 1]
  rank 2  [3, 3, 3, 3, 3]  ->  [2, 2, 2, 2, 2]
)";
  CHECK(outcome.out.starts_with(expected));
  CHECK(outcome.out.find("rank 0  [11, 12, 13]  ->  [63, 66, 69]") != std::string::npos);
  CHECK(outcome.out.find("sent by each rank: 2\n") !=
        std::string::npos);  // numbers, by the ring's first half
  CHECK(outcome.out.find("sent by each rank: 4\n") != std::string::npos);
  // A row for each size up to the largest.
  CHECK(outcome.out.find("\n        4096 ") != std::string::npos);
  CHECK(outcome.out.find("\n       16384 ") != std::string::npos);
  CHECK(outcome.out.find("\n       65536 ") == std::string::npos);
  const Outcome seeded = run(folder, "--max-bytes 4096 --seed 7", "collectives", "mpirun -n 3 ");
  CHECK(seeded.out.find("rank 0  [18, 19, 20]  ->  [84, 87, 90]") != std::string::npos);
}

TEST_CASE("02: the primer refuses wrong options, once", "[02][primer][bad-input][mpirun]") {
  const TemporaryFolder folder;
  for (const std::string arguments :
       {"--max-bytes 12", "--link fast", "--link 5us,0GB/s", "--ranks-per-node -1", "--layers 2"}) {
    const Outcome outcome = run(folder, arguments, "collectives", "mpirun -n 2 ");
    INFO(arguments << "\n" << outcome.err);
    CHECK(outcome.status == 2);
    CHECK(outcome.out.empty());
    CHECK(std::count(outcome.err.begin(), outcome.err.end(), '\n') == 1);
    CHECK(outcome.err.starts_with(arguments.substr(0, arguments.find(' ')) + ": "));
  }
  const Outcome alone = run(folder, "", "collectives");
  CHECK(alone.status == 2);
  CHECK(alone.out.empty());
  CHECK(alone.err == "mpirun -n: 1 is not valid; expected 2 ranks or more\n");
}
