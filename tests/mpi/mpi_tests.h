// What tests that run on several ranks share. Every rank runs every test case; a case passes if it passes on
// all of them. Use CHECK, not REQUIRE, before communication that the other ranks wait for.
#pragma once

#include <mpi.h>

#include <vector>

#include "../catch.h"

namespace mpi_tests {

int rank();
int ranks();

// Waits for all ranks without keeping a core busy, outside of the communicators under test.
void barrier();
std::vector<double> all_gather(double value);  // of each rank

// A limit for the present test case other than the usual one, in seconds.
void set_time_limit(double seconds);

}  // namespace mpi_tests
