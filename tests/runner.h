// What main.cc, which runs the test cases of every program, asks of what is different: one process
// (one_process.cc) or several ranks (mpi/ranks.cc).
#pragma once

#include <string>

namespace runner {

enum Verdict : int { skipped, passed, failed };

constexpr int kFailed = 1, kNoTestMatches = 3;  // exit statuses

void start(int* argc, char*** argv);
void finish();
bool has_ranks();
int rank();
int ranks();
void case_begins(const std::string& name);
Verdict case_ends(const std::string& name, Verdict mine);  // that of all ranks; called by all
std::string counts();                                      // "N passed, N failed" so far
void count(Verdict verdict);

}  // namespace runner
