// A model with experts on a mesh of tensor x context x data ranks, as the programs build it. Context ranks
// here take whole sequences of a micro-batch, which is all that experts see of them.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "../../02_data_parallel/data_parallel.h"
#include "../../03_zero/zero.h"
#include "../../04_tensor_parallel/tensor_parallel.h"
#include "../../07_combined_5d/expert_parallel.h"
#include "model.h"
#include "mpi_tests.h"

namespace pentatron {

// Data ranks are what is left. options.ep says how many share out the experts.
struct ExpertLayout {
  int tensor = 1, context = 1;
  bool sequence_parallel = false;
  int zero_stage = -1;  // -1: data parallelism
  DpSync sync = DpSync::overlap;
  double bucket_mb = 25;
  WeightGradients weight_gradients = WeightGradients::at_once;
};

// A rank's place among `ranks`: tensor fastest, then context, then data.
struct ExpertPlace {
  int ranks, tensor_ranks, context_ranks, rank;
  int tensor() const { return rank % tensor_ranks; }
  int group() const { return rank / tensor_ranks; }  // rank in context x data
  int context() const { return group() % context_ranks; }
  int data() const { return group() / context_ranks; }
  int data_ranks() const { return ranks / tensor_ranks / context_ranks; }

  // The ranks that are like this one in what `key` says of them.
  std::vector<int> like(const std::function<std::pair<int, int>(const ExpertPlace&)>& key) const {
    std::vector<int> members;
    for (int other = 0; other < ranks; ++other) {
      if (key({ranks, tensor_ranks, context_ranks, other}) == key(*this)) members.push_back(other);
    }
    return members;
  }
};

struct ExpertModel {
  Options options;
  ExpertLayout layout;
  ExpertPlace place;
  Communicator all, tensor_ranks, data_ranks, context_ranks, expert_ranks, same_experts;
  Stream stream{"compute"};
  AttentionCore attention{options.attention};
  ParameterMesh mesh;
  ExpertParallel feed_forward;
  TensorParallel region;
  Parameters parameters{mesh};
  TransformerParameters ids;
  std::vector<std::unique_ptr<DataParallel>> data_parallel;  // of both spans; or
  std::vector<std::unique_ptr<Zero>> zero;
  std::unique_ptr<HooksOfBothSpans> hooks;
  std::unique_ptr<Transformer> transformer;
  std::vector<std::unique_ptr<Activations>> activations;  // [micro-batches]
  std::unique_ptr<Optimizer> optimizer;
  StepTotals totals{stream};
  std::vector<BatchBuffer> buffers;  // [micro-batches of this rank]

  // On all ranks of the world or, on rank 0, alone.
  ExpertModel(World& world, const Options& o, ExpertLayout l, bool alone = false)
      : options(o),
        layout(l),
        place{alone ? 1 : world.ranks(), l.tensor, l.context, alone ? 0 : world.rank()},
        all(world, place.like([](auto) { return std::pair(0, 0); }), "all"),
        tensor_ranks(world, place.like([](auto p) { return std::pair(0, p.group()); }), "tensor"),
        data_ranks(world, place.like([](auto p) { return std::pair(p.tensor(), 0); }), "data"),
        context_ranks(world, place.like([](auto p) { return std::pair(p.tensor(), p.data()); }), "context"),
        expert_ranks(world, place.like([&](auto p) { return std::pair(p.tensor(), p.group() / o.ep); }),
                     "experts"),
        same_experts(world, place.like([&](auto p) { return std::pair(p.tensor(), p.group() % o.ep); }),
                     "same experts"),
        mesh{place.tensor(),      l.tensor,          expert_ranks.rank(), o.ep,
             o.model.experts,     data_ranks.rank(), data_ranks.ranks(),  same_experts.rank(),
             same_experts.ranks()},
        feed_forward(options, mesh, rows(), expert_ranks, context_ranks, stream),
        region(layout.sequence_parallel, rows(), options.model.d_model, tensor_ranks, stream) {
    ids = declare_transformer(options.model, feed_forward, parameters);
    if (layout.zero_stage < 0) parameters.allocate();
    for (const Span span : {Span::dense, Span::experts}) {
      Communicator& ranks = span == Span::dense ? data_ranks : same_experts;
      if (layout.zero_stage < 0) {
        data_parallel.push_back(
            std::make_unique<DataParallel>(layout.sync, layout.bucket_mb, parameters, ranks, stream, span));
      } else {
        zero.push_back(std::make_unique<Zero>(layout.zero_stage, parameters, ranks, stream, ZeroScope{.span = span}));
      }
    }
    hooks = layout.zero_stage < 0 ? std::make_unique<HooksOfBothSpans>(*data_parallel[0], *data_parallel[1])
                                  : std::make_unique<HooksOfBothSpans>(*zero[0], *zero[1]);
    parameters.initialise(options.seed, stream);
    for (const auto& z : zero) z->weights_changed();
    transformer =
        std::make_unique<Transformer>(options.model, ids, parameters, options.micro_batch_size / l.context,
                                      options.sequence_length, options.sequence_length, options.recompute,
                                      Seams{hooks.get(), &region, &attention, &feed_forward}, stream);
    const bool deferred = layout.weight_gradients == WeightGradients::deferred;
    for (int i = 0; i < micro_batches(); ++i) {
      buffers.emplace_back(rows());
      if (i == 0 || deferred)
        activations.push_back(
            transformer->make_activations(whole_model(options.model), layout.weight_gradients));
    }
    optimizer = std::make_unique<Optimizer>(options, parameters, stream);
    world.begin_counting();
  }
  ~ExpertModel() {
    stream.synchronize();
    for (const Communicator* c :
         {&all, &tensor_ranks, &data_ranks, &context_ranks, &expert_ranks, &same_experts})
      CUDA_CHECK(cudaStreamSynchronize(c->stream()));
  }

  int64_t rows() const {
    return int64_t{options.micro_batch_size} / layout.context * options.sequence_length;
  }
  int micro_batches() const { return micro_batches_of_a_rank(options, place.data_ranks()); }

  void accumulate(const std::vector<HostBatch>& global) {
    totals.reset();
    feed_forward.begin_step();
    parameters.zero_gradients(stream);
    const int mine = micro_batches();
    std::vector<Batch> batches;
    for (int i = 0; i < mine; ++i) batches.push_back(upload(i, global));
    for (int i = 0; i < mine; ++i) {
      Activations& a = *activations[i % activations.size()];
      transformer->forward(batches[i], a);
      transformer->backward(batches[i], a);
      if (place.tensor() == 0) totals.add_loss(a.loss);
    }
    if (layout.weight_gradients == WeightGradients::deferred) {
      for (const auto& a : activations) transformer->backward_weights(*a);
    }
    totals.add_loss(feed_forward.balance_loss());
    for (const auto& z : zero) z->finish();
    for (const auto& d : data_parallel) d->finish();
    if (layout.tensor > 1) region.sum_partial_gradients(parameters);
    optimizer->add_norm_squared(totals.norm_squared());
    all.sum_scalars(totals.data(), totals.size, stream);
  }

  void update(int64_t step) {
    optimizer->step(step, totals.norm_squared());
    for (const auto& z : zero) z->weights_changed();
    totals.wait();
  }

 private:
  Batch upload(int i, const std::vector<HostBatch>& global) {
    const HostBatch& host = global[place.data() * micro_batches() + i];
    const int64_t first = place.context() * rows();
    for (int64_t row = 0; row < rows(); ++row) {
      buffers[i].tokens()[row] = host.tokens[first + row];
      buffers[i].targets()[row] = host.targets[first + row];
      buffers[i].positions()[row] = static_cast<int32_t>(row % options.sequence_length);
    }
    double targets = 0;
    for (const HostBatch& batch : global)
      for (const int32_t target : batch.targets) targets += target != ignored_target;
    return buffers[i].upload(targets, std::ssize(global), i + 1 == micro_batches(), stream);
  }
};

}  // namespace pentatron
