// What a rank of the combined program has (07_combined_5d/main.cu), with batches that tests make.
#pragma once

#include <vector>

#include "../../07_combined_5d/combined.h"
#include "checkpoint/checkpoint.h"
#include "model.h"
#include "mpi_tests.h"

namespace pentatron {

struct CombinedCase {
  MeshShape shape;
  CombinedOptions options;

  // The same on one rank, in the plainest way.
  CombinedCase alone() const {
    CombinedCase c = {{}, options};
    c.options.pipeline.pp_schedule = PpSchedule::one_f_one_b;
    c.options.zero.zero_stage = 0;
    c.options.tensor.sequence_parallel = false;
    c.options.recompute = Recompute::none;
    c.options.experts.ep = c.options.pipeline.vpp = 1;
    return c;
  }
};

// All ranks of the mesh make one, and may be fewer than those of the world. The members are made in this
// order, which is that in which they need each other.
struct CombinedModel {
  const CombinedCase of;
  const CombinedOptions& options = of.options;
  const Stream compute{"compute"};
  Mesh mesh;
  const std::vector<LayerRange> chunks;
  const std::vector<int32_t> positions;
  const std::unique_ptr<TensorParallel> tensor_parallel;
  std::unique_ptr<AttentionCore> attention;
  FeedForward dense_mlp;
  std::unique_ptr<ExpertParallel> with_experts;  // null: the MLP is dense
  FeedForward& feed_forward;
  Parameters parameters;
  const TransformerParameters ids;
  const std::unique_ptr<UnitHooks> dense, experts;
  const Seams seams;
  Transformer model;
  Pipeline pipeline;
  Optimizer optimizer;
  StepTotals totals{compute};
  HostBatchLoader loader;

  CombinedModel(const CombinedCase& c, World& world);
  ~CombinedModel();

  // Forward and backward of this rank's part of a step; then the global gradient, loss and norm are on their
  // way.
  void accumulate(const std::vector<HostBatch>& global);
  double balance_loss = 0;  // this rank's part

  void update(int64_t step);

  int micro_batches() const { return micro_batches_of_a_rank(options, of.shape.dp); }
  std::vector<double> weights(int id) { return to_host(parameters.weights(id), compute); }
  std::vector<double> gradients(int id) { return to_host(parameters.gradients(id).sum, compute); }

 private:
  Seams initialised();
};

}  // namespace pentatron
