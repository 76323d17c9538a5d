// What the body of an exercise does until somebody writes it.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <filesystem>

#pragma GCC diagnostic ignored "-Wunused-parameter"  // an empty body uses nothing
#pragma GCC diagnostic ignored "-Wunused-variable"
#pragma GCC diagnostic ignored "-Wunused-function"

#ifdef __CUDACC__
#define PENTATRON_ANYWHERE __host__ __device__
#else
#define PENTATRON_ANYWHERE
#endif

namespace pentatron {

// Ends the process. The launcher then ends the other ranks.
[[noreturn]] PENTATRON_ANYWHERE inline void not_written(const char* exercise, const char* file, int line) {
#ifdef __CUDA_ARCH__
  printf("%s is not written yet (%s:%d)\n", exercise, file, line);
  __trap();
#else
  const auto place = std::filesystem::path(file).lexically_normal();  // an #include "../" is in `file`, too
  std::fprintf(stderr, "%s is not written yet (%s:%d)\n", exercise, place.c_str(), line);
  std::_Exit(1);
#endif
}

}  // namespace pentatron
