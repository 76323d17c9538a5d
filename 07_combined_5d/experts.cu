// The program of 02 with experts in the place of the MLP (expert_parallel.h). The data-parallel ranks share
// out the experts: dp = ep. Compare this file with main.cu of 02.
#include "../02_data_parallel/data_parallel.h"
#include "checkpoint/checkpoint.h"
#include "expert_parallel.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/optimizer.h"
#include "model/transformer.h"
#include "run/parallel_program.h"
#include "run/totals.h"

namespace pentatron {

struct ExpertProgramOptions : Options, CommunicationConfig {
  DataParallelOptions data_parallel;
  ExpertOptions experts;
};
void declare(CommandLine& line, ExpertProgramOptions& o) {
  declare(line, o, o.data_parallel);
  declare(line, o, o.experts);
}

// Sets ep to `ranks`: all ranks share out the experts. Throws UsageError if E is not a multiple of the ranks.
void fit_to_ranks(ExpertProgramOptions& options, int ranks) {
  options.experts.ep = ranks;
  const int experts = options.model.experts;
  require(experts > 0 && experts % ranks == 0, "--experts", experts, "1 or more, a multiple of the ranks (",
          ranks, ")");
}

}  // namespace pentatron

using namespace pentatron;

namespace {

void train(const ExpertProgramOptions& options, World& world) {
  const TokenData data(options.data, options.model.vocab_size, options.sequence_length);
  const Stream compute("compute");
  TensorRegion region;
  AttentionCore attention(options.attention);
  Communicator expert_ranks(world, world.all(), "experts");
  ExpertParallel feed_forward(options, options.experts, expert_ranks, compute);

  Parameters parameters(
      {.groups = {{world.rank(), world.ranks()}, {}}});  // group 1: no other rank holds these experts
  const TransformerParameters ids = declare_transformer(options.model, feed_forward, parameters);
  Communicator data_ranks(world, world.all(), "data");
  const RankShare share = expert_parallel_share(
      data_parallel_share(options, options.data_parallel, world.ranks()), options.experts);
  MemoryPrediction predicted = predict_memory(share);
  predicted.resident += parameter_memory(options, expert_units(share, options.experts));
  require_memory(predicted);
  parameters.allocate();
  parameters.initialise(options.seed, compute);
  DataParallel data_parallel(options.data_parallel, parameters.group(), data_ranks, compute);
  const Seams seams = {{&data_parallel}, &region, &attention, &feed_forward};

  Transformer model(options, ids, parameters, options.sequence_length, seams, compute);
  const auto activations = model.make_activations(whole_model(options.model));
  Optimizer optimizer(options, parameters, compute);
  Checkpoint checkpoint(options, parameters, optimizer, compute, data.checksum());
  BatchLoader loader(data, options, world.rank(), world.ranks());
  StepTotals totals(compute);
  Run run(options, data, parameters, totals, checkpoint);

  while (run.next_step()) {
    for (const Batch& batch : loader.load(run.step(), compute)) {
      model.forward(batch, *activations);
      model.backward(batch, *activations);
      totals.add_loss(activations->loss);
    }
    feed_forward.add_balance_loss(totals);
    data_parallel.finish_gradient_sync();
    optimizer.add_norm_squared(totals.norm_squared());
    data_ranks.sum_scalars(totals.data(), totals.size, compute);
    optimizer.step(run.step(), totals.norm_squared());
  }
  run.summarize(predicted, {{"dp", world.ranks()}, {"ep", world.ranks()}});
  const auto logits = [&](const Batch& batch) { return model.forward(batch, *activations); };
  run.show_sample(write_sample(options, parameters[ids.head], logits, compute));
}

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, "Trains a transformer with experts, which data-parallel ranks share out.",
                     train);
}
