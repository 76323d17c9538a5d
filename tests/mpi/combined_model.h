// The combined program's rank (07_combined_5d/combined.h) with batches that tests make.
#pragma once

#include <vector>

#include "../../07_combined_5d/combined.h"
#include "model.h"
#include "mpi_tests.h"

namespace pentatron {

struct CombinedCase {
  MeshShape shape;
  Options options;

  // The same on one rank, in the plainest way.
  CombinedCase alone() const {
    CombinedCase c = {{}, options};
    c.options.pp_schedule = PpSchedule::one_f_one_b;
    c.options.zero_stage = 0;
    c.options.sequence_parallel = false;
    c.options.recompute = Recompute::none;
    c.options.ep = c.options.vpp = 1;
    return c;
  }
};

// All ranks of the mesh make one, and may be fewer than those of the world.
struct CombinedModel : Combined {
  const CombinedCase of;
  HostBatchLoader loader;

  CombinedModel(const CombinedCase& c, World& world)
      : Combined(c.options, c.shape, world),
        of(c),
        loader(of.options, mesh.place.dp, of.shape.dp, positions) {
    world.begin_counting();  // as Run does
  }
  ~CombinedModel() { CUDA_CHECK(cudaStreamSynchronize(compute)); }

  void accumulate(const std::vector<HostBatch>& global) {
    Combined::accumulate(loader.load(global, compute));
  }
  int micro_batches() const { return micro_batches_of_a_rank(of.options, of.shape.dp); }
  std::vector<double> weights(int id) { return to_host(parameters.weights(id), compute); }
  std::vector<double> gradients(int id) { return to_host(parameters.gradients(id), compute); }
};

}  // namespace pentatron
