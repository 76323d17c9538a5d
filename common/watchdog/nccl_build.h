// Which CUDA an NCCL library was built with: it works as that one does, also with a later driver.
#pragma once

#include <string>

namespace pentatron {

// As CUDART_VERSION: 12030 for 12.3. 0 if the file does not say, or can't be read.
int cuda_of_nccl(const std::string& library);

}  // namespace pentatron
