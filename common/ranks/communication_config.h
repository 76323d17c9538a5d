// What a program of several ranks asks of their communication.
#pragma once

#include <string>

namespace pentatron {

struct CommunicationConfig {
  double timeout = 300;  // seconds without progress after which the watchdog ends the run
  // The modelled link between all ranks, such as "5us,50GB/s". Empty and 0: the modelled GPU's.
  std::string link;
  int ranks_per_node = 0;
};

}  // namespace pentatron
