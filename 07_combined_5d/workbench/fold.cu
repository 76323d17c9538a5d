#include <cstdlib>

#include "../fold.h"
#include "clock/device_profile.h"

namespace pentatron {

void fold_world(const CombinedOptions& options, World& world) {
  if (options.ranks == 0 || options.show_mesh || options.pipeline.show_schedule)
    return;  // a picture needs none
  const MeshShape shape = mesh_shape(options, options.ranks);
  const DeviceProfile gpu = load_profile(options.gpu);
  const char* const given = std::getenv("NCCL_CPU_RANKS_PER_NODE");  // also by --ranks-per-node
  const int ranks_per_node = given ? std::max(std::atoi(given), 1) : static_cast<int>(gpu.gpus_per_node);
  const PresentRanks present = present_ranks(options, shape, ranks_per_node);
  require(world.ranks() == std::ssize(present.ranks), "mpirun -n", world.ranks(), present.ranks.size(),
          ", the ranks that differ of ", shape.ranks());
  world.fold(shape.ranks(), present.ranks, present.stand_for[world.rank()]);
}

}  // namespace pentatron
