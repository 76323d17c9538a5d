#include "runner.h"

namespace runner {

void start(int*, char***) {}
void finish() {}
bool has_ranks() { return false; }
int rank() { return 0; }
int ranks() { return 1; }
void case_begins(const std::string&) {}
Verdict case_ends(const std::string&, Verdict mine) { return mine; }

}  // namespace runner
