// The executor of a pipeline schedule (schedule.h): an interpreter that runs this rank's list of
// instructions on the GPU. It runs every schedule. This is the way of a micro-batch through one chunk of
// layers:
//
//                          receive_activation      forward            send_activation
//   stage before  ---------------------------> x ----------> output ----------------------> stage after
//                                                    |
//                                               activations
//                                                    |
//   stage before  <---------------------- gradient <-------- gradient <-------------------- stage after
//                      send_gradient               backward           receive_gradient
//
// These are four kinds of memory, which other micro-batches use again. Who writes one waits, by an event,
// until the micro-batch that was there before has been read:
//
//   memory        is written by              is read last by            event
//   x             receive_activation         the input gradient         used
//   activations   forward                    the weight gradients       none: both are on the compute stream
//   output        forward                    send_activation            output_sent
//   gradient      receive_gradient; then     send_gradient, and the     gradient_sent, gradient_read
//                 backward, in its place     weight gradients
//
// Where a neighbouring stage is on this rank, too, a copy takes the place of the message.
//
// Messages have four streams: {activations, gradients} x {in, out}. Each has a communicator of two ranks. The
// host issues the whole list without waiting. Only events order the compute stream and these four.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "choose_schedule.h"
#include "gradients_on_request.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/transformer.h"
#include "ranks/comm.h"
#include "run/totals.h"
#include "stages.h"

namespace pentatron {

// The schedule of a pipeline that has the whole batch.
inline Schedule schedule_of(const TrainingConfig& training, const PipelineOptions& options) {
  return chosen_schedule(options, options.pp, micro_batches_of_a_rank(training, 1));
}
inline void fit_to_ranks(const Options& all, PipelineOptions& options, int ranks) {
  complete_pipeline_options(all, options, ranks, micro_batches_of_a_rank(all, 1));
}

class Pipeline {
 public:
  // `pipeline_ranks`: the pipeline's ranks, as numbers in the world. `ranges`: the layers of this rank's
  // chunks. `parameters`: whose gradients the copies of the model sum in run(); null: the caller sums them.
  // Allocates the activations of micro-batches in flight. Throws ScheduleError if the schedule cannot run.
  Pipeline(const Schedule& schedule, World& world, const std::vector<int>& pipeline_ranks,
           const std::vector<LayerRange>& ranges, Transformer& model, cudaStream_t compute,
           Parameters* parameters = nullptr)
      : rank_(std::ranges::find(pipeline_ranks, world.rank()) - pipeline_ranks.begin()),
        schedule_(checked(schedule)),
        model_(model),
        compute_(compute),
        parameters_(parameters),
        chunks_(make_chunks(ranges)) {
    // In the same order on all ranks. A stage sends activations to the next one, and gets gradients from
    // there. So each rank has two communicators with the next one; chunks share them. In a V there are two
    // for the way down and two for the way up.
    for (const auto& [from, to] : edges_of(schedule_, rank_)) {
      connect(world, pipeline_ranks, Action::send_activation, from, to);
      connect(world, pipeline_ranks, Action::send_gradient, to, from);
    }
    if (!parameters || schedule_.copies == 1) return;
    std::vector<int> members;
    for (const int rank : replicas_of(schedule_, rank_)) members.push_back(pipeline_ranks[rank]);
    copies_.emplace(world, members, "copies");
  }

  // In the same order on all ranks, because ncclCommDestroy waits for the other end.
  ~Pipeline() {
    for (auto& [of, communicator] : communicators_) communicator.reset();
  }

  // Forward and backward of a step's micro-batches. The rank of the last stage adds their losses to `totals`.
  // `totals` is null if another rank counts the same losses. At the end each copy of the model has the
  // gradients of all micro-batches.
  void run(const std::vector<Batch>& batches, StepTotals* totals) {
    execute(list_, batches, totals);
    if (copies_) {
      const AccumTensor gradients = parameters_->group().flat_gradients();
      wait_stream(copies_->stream(), compute_);
      copies_->all_reduce(gradients.data, gradients.data, gradients.size());
      wait_stream(compute_, copies_->stream());
    }
  }

  // Forward of one micro-batch, without backward, from stage to stage of the first copy of the model. Returns
  // the logits on the rank of the last stage, and an empty tensor elsewhere.
  Tensor forward(const Batch& batch) {
    Instructions forwards;
    for (int stage = 0; stage < schedule_.stages(); ++stage) {
      const auto [rank, chunk] = schedule_.placement[stage];
      if (rank == rank_) forwards.push_back({Action::forward, 0, chunk});
    }
    execute(with_messages(schedule_, rank_, forwards), {batch}, nullptr);
    const Activations& last = *in_flight(forwards.back()).activations;
    return last.range.head ? last.logits : Tensor();
  }

 private:
  // ---- What a chunk has

  // The memory of a micro-batch in flight. An event is done when its message is complete, or (gradient_read)
  // when the weight gradients have been computed.
  struct InFlight {
    std::unique_ptr<Activations> activations;  // also output and gradient
    Event output_sent, gradient_came, gradient_sent, gradient_read;
  };
  // The memory of an activation from the stage before.
  struct Input {
    Tensor x;          // [outside, d]
    Event came, used;  // x is there; the input gradient has read it
  };
  // Where messages of one kind go to, or come from.
  struct Link {
    Communicator* communicator = nullptr;
    int peer = 0;  // the other end, as a rank of the communicator

    cudaStream_t stream() const { return communicator->stream(); }
    void send(const Tensor& x) const { communicator->send(x.data, x.size(), peer); }
    void receive(const Tensor& x) const { communicator->receive(x.data, x.size(), peer); }
  };
  struct Chunk {
    std::vector<InFlight> in_flight;
    std::vector<Input> inputs;                // [input_buffers]; none for the first stage
    std::vector<int> in_flight_of, input_of;  // [micro-batches]: which of these a micro-batch has
    int last;                                 // the micro-batch whose weight gradients come last in a step
    std::array<Link, message_streams> links;  // [stream_of]; none where there is no such message
    std::optional<int> chunk_before;          // where the stage before is on this rank, too: its chunk
  };

  InFlight& in_flight(const Instruction& i) {
    Chunk& chunk = chunks_[i.chunk];
    return chunk.in_flight[chunk.in_flight_of[i.micro_batch]];
  }
  Input& input(const Instruction& i) {
    Chunk& chunk = chunks_[i.chunk];
    return chunk.inputs.at(chunk.input_of[i.micro_batch]);  // a stage that receives nothing has none
  }
  const Link& link(const Instruction& message) {
    return chunks_[message.chunk].links[stream_of(message.action)];
  }

  // ---- The interpreter

  void execute(const Instructions& list, const std::vector<Batch>& batches, StepTotals* totals) {
    for (const Instruction& i : list) {
      Batch batch = batches[i.micro_batch];
      batch.last = i.micro_batch == chunks_[i.chunk].last;  // which a schedule may choose
      const Action action = i.action;
      if (action == Action::forward) compute_forward(i, batch);
      if (action == Action::forward && totals) add_loss(i, *totals);
      if (action == Action::backward || action == Action::input_gradient) compute_backward(i, batch);
      if (action == Action::weight_gradient) compute_weight_gradients(i);
      if (action == Action::send_activation) send_activation(i);
      if (action == Action::send_gradient) send_gradient(i);
      if (action == Action::receive_activation) receive_activation(i);
      if (action == Action::receive_gradient) receive_gradient(i);
    }
  }

  void compute_forward(const Instruction& i, const Batch& batch) {
    InFlight& f = in_flight(i);
    Activations& a = *f.activations;
    if (!a.range.embedding) {
      if (const InFlight* before = in_flight_before(i)) hand_over(before->activations->output, input(i).x);
      wait_event(compute_, input(i).came);
      a.input() = input(i).x;
    }
    wait_event(compute_, f.output_sent);  // by the micro-batch that was here before
    model_.forward(batch, a);
  }

  void compute_backward(const Instruction& i, const Batch& batch) {
    InFlight& f = in_flight(i);
    wait_event(compute_, f.gradient_came);
    wait_event(compute_, f.gradient_sent);  // by the micro-batch that was here before
    model_.backward(batch, *f.activations);
    if (!f.activations->range.embedding) input(i).used.record(compute_);
    if (const InFlight* before = in_flight_before(i)) {
      wait_event(compute_, before->gradient_sent);  // by the micro-batch that was there before
      hand_over(f.activations->d_residual, before->activations->d_residual);
    }
    if (i.action == Action::backward) f.gradient_read.record(compute_);
  }

  void compute_weight_gradients(const Instruction& i) {
    in_flight(i).activations->queue->issue_all();
    in_flight(i).gradient_read.record(compute_);
  }

  // The micro-batch in the stage before, if that stage is on this rank, too. There it is in flight earlier
  // and longer. So this chunk copies both: the output from there, and the gradient to there.
  InFlight* in_flight_before(const Instruction& i) {
    const std::optional<int> before = chunks_[i.chunk].chunk_before;
    return before ? &in_flight({i.action, i.micro_batch, *before}) : nullptr;
  }
  void hand_over(const Tensor& from, const Tensor& to) {
    CUDA_CHECK(cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDeviceToDevice, compute_));
  }

  void add_loss(const Instruction& i, StepTotals& totals) {
    const Activations& a = *in_flight(i).activations;
    if (a.range.head) totals.add_loss(a.loss);
  }

  // ---- Messages: each waits, starts, and records the event that says that it is complete

  void send_activation(const Instruction& i) {
    const Link& out = link(i);
    InFlight& f = in_flight(i);
    wait_stream(out.stream(), compute_);
    out.send(f.activations->output);
    f.output_sent.record(out.stream());
  }

  void send_gradient(const Instruction& i) {
    const Link& out = link(i);
    InFlight& f = in_flight(i);
    wait_stream(out.stream(), compute_);
    out.send(f.activations->d_residual);
    f.gradient_sent.record(out.stream());
  }

  void receive_activation(const Instruction& i) {
    const Link& in = link(i);
    wait_event(in.stream(), input(i).used);  // by the micro-batch that was here before
    in.receive(input(i).x);
    input(i).came.record(in.stream());
  }

  void receive_gradient(const Instruction& i) {
    const Link& in = link(i);
    InFlight& f = in_flight(i);
    wait_event(in.stream(), f.gradient_read);  // by the micro-batch that was here before
    wait_event(in.stream(), f.gradient_sent);
    in.receive(f.activations->d_residual);
    f.gradient_came.record(in.stream());
  }

  // ---- What the constructor makes

  std::vector<Chunk> make_chunks(const std::vector<LayerRange>& ranges) {
    std::vector<Chunk> chunks(ranges.size());
    for (int c = 0; c < std::ssize(ranges); ++c) {
      Chunk& chunk = chunks[c];
      chunk.in_flight = std::vector<InFlight>(peak_in_flight(list_, c).until_weight_gradient);
      for (InFlight& f : chunk.in_flight) {
        f.activations = model_.make_activations(ranges[c]);
        if (schedule_.splits_backward)
          f.activations->queue = std::make_unique<WgradsOnRequest>(*f.activations, model_, compute_);
      }
      chunk.in_flight_of = assign_activations(schedule_, rank_, c);
      chunk.input_of = assign_inputs(schedule_, rank_, c);
      chunk.last = last_micro_batch(list_, c);
      if (ranges[c].embedding) continue;
      const ModelChunk before = *neighbour(schedule_, rank_, c, -1);
      if (before.rank == rank_) chunk.chunk_before = before.chunk;
      chunk.inputs = std::vector<Input>(input_buffers(schedule_, rank_, c));
      const Tensor shape = chunk.in_flight[0].activations->output;
      for (Input& input : chunk.inputs) input.x = memory_.matrix<real>(shape.rows, shape.columns);
    }
    return chunks;
  }

  // Makes what the messages need that go by `send` from one stage to another.
  void connect(World& world, const std::vector<int>& pipeline_ranks, Action send, ModelChunk from,
               ModelChunk to) {
    const bool out = rank_ == from.rank;
    auto& communicator = communicators_[{send, from.rank, to.rank}];
    if (!communicator) {
      std::string name = send == Action::send_gradient ? "gradients" : "activations";
      name += out ? " out" : " in";
      if (!names_.insert(name).second) name += " 2";  // in a V
      const std::vector<int> members = {pipeline_ranks[from.rank], pipeline_ranks[to.rank]};
      communicator = std::make_unique<Communicator>(world, members, name, edge_blocks);
    }
    const int peer = out ? 1 : 0;
    real* const scratch = chunks_[0].in_flight[0].activations->d_residual.data;
    communicator->connect(peer, peer, scratch);
    Chunk& chunk = chunks_[out ? from.chunk : to.chunk];
    chunk.links[stream_of(out ? send : other_end(send))] = {communicator.get(), peer};
  }

  const int rank_;  // this one's number in the pipeline
  const Schedule schedule_;
  const Instructions& list_ = schedule_.ranks[rank_];
  Transformer& model_;
  cudaStream_t compute_;
  Parameters* const parameters_;
  DeviceArena memory_{Purpose::activations};
  std::vector<Chunk> chunks_;
  // A communicator for each kind of message from one rank to another. Chunks share it.
  std::map<std::tuple<Action, int, int>, std::unique_ptr<Communicator>> communicators_;
  std::set<std::string> names_;
  std::optional<Communicator> copies_;  // the ranks with the same stages, which sum their gradients
};

// What a pipeline rank keeps, as its schedule says.
struct PipelineRank {
  int copies;                         // of the model
  bool splits_backward;               // weight gradients come later
  std::vector<ModelPart> parts = {};  // [chunks]
  int inputs = 0;                     // buffers for the inputs of all chunks
};
inline PipelineRank pipeline_rank(const TrainingConfig& training, const Schedule& schedule, int rank) {
  PipelineRank keeps = {schedule.copies, schedule.splits_backward};
  const std::vector<LayerRange> chunks = layers_of_rank(training, schedule, rank);
  for (int c = 0; c < std::ssize(chunks); ++c) {
    keeps.parts.push_back({chunks[c], peak_in_flight(schedule.ranks[rank], c).until_weight_gradient});
    if (!chunks[c].embedding) keeps.inputs += input_buffers(schedule, rank, c);
  }
  return keeps;
}

// What predict_memory (memory.h) needs of this rank. `share` has its MLP already.
inline RankShare pipeline_share(RankShare share, const PipelineRank& rank) {
  share.parts = rank.parts;
  share.replicas *= rank.copies;
  size_t& bytes = share.added[Purpose::activations];
  bytes += rank.inputs * share.outside * share.columns.d * sizeof(real);
  if (!rank.splits_backward) return share;
  // For its weight gradients each micro-batch has the gradients of layers to itself, and copies of those that
  // are the residual stream's: of attention's output, of the MLP's, and of the embedding's.
  const size_t copy = share.rows * share.columns.d * sizeof(real);
  for (const auto& [range, in_flight] : rank.parts) {
    bytes += in_flight * (range.last - range.first) * (share.gradients_of_layer() + 2 * copy);
    if (range.embedding) bytes += in_flight * copy;
  }
  return share;
}

}  // namespace pentatron
