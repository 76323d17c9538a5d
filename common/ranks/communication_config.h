// What a program of several ranks asks of their communication.
#pragma once

#include <string>

namespace pentatron {

struct CommunicationConfig {
  double timeout = 300;    // seconds without progress after which the watchdog ends the run
  std::string link;        // modelled, between all ranks, such as "5us,50GB/s"; empty: the GPU's
  int ranks_per_node = 0;  // of a modelled node; 0: the GPU's
};

}  // namespace pentatron
