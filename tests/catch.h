// Catch2, whichever of its two generations is installed: 3 in the first form, 2 in the second.
#pragma once

#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#else
#include <catch2/catch.hpp>
#endif

#include <iostream>

constexpr int kNoTestMatches = 3;  // exit status

// A filter may be wrong, or its test may be in another program or precision.
inline void say_that_no_test_matches(const char* filter) {
  std::cerr << "no test here is called " << filter << "; make check T='" << filter
            << "' looks everywhere, and names the nearest\n";
}
