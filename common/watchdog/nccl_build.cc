#include "watchdog/nccl_build.h"

#include <cstdio>
#include <fstream>
#include <string_view>

#include "model/mapped_file.h"

namespace pentatron {

// The library has the line that it prints with NCCL_DEBUG=VERSION: "NCCL version 2.28.9+cuda13.0".
int cuda_of_nccl(const std::string& library) {
  if (!std::ifstream(library)) return 0;
  const MappedFile file("NCCL", library);
  const std::string_view text(reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size());
  for (size_t at = 0; (at = text.find("NCCL version ", at)) != text.npos; ++at) {
    int major = 0, minor = 0;
    const std::string line(text.substr(at, 64));
    if (std::sscanf(line.c_str(), "NCCL version %*d.%*d.%*d+cuda%d.%d", &major, &minor) == 2)
      return 1000 * major + 10 * minor;
  }
  return 0;
}

}  // namespace pentatron
