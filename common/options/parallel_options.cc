#include "options/parallel_options.h"

namespace pentatron {

void declare_communication(CommandLine& line, CommunicationConfig& config) {
  line.group("Communication");
  line.number("--timeout", config.timeout, 0.1, 1e6,
              "seconds after which a stream that stands still ends the run");
  line.words("--link", "LINK", config.link,
             "modelled link between ranks, such as 5us,50GB/s, used as it is (NCCL over MPI)", "the GPU's");
  line.number("--ranks-per-node", config.ranks_per_node, 0, 1 << 20,
              "ranks of a modelled node, 0: the GPU's number");
}

}  // namespace pentatron
