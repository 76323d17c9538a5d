// The executor of a pipeline schedule (schedule.h): an interpreter that runs this rank's list of instructions
// on the GPU. It runs every schedule. This is the way of a micro-batch through one chunk, the layers of a
// stage:
//
//                    receive_activation       forward            send_activation
//   previous stage -----------------------> x ----------> output ------------------> next stage
//                                                  |
//                                             activations
//                                                  |
//   previous stage <----------------- gradient <-------- gradient <----------------- next stage
//                    send_gradient             backward            receive_gradient
//
// These are four kinds of memory. A later micro-batch uses each of them again. So before an instruction
// writes to one, it waits for an event: the earlier micro-batch, whose data were there, needs them no more.
//
//   memory        is written by              is read last by            event
//   x             receive_activation         the input gradient         used
//   activations   forward                    the weight gradients       none: both are on the compute stream
//   output        forward                    send_activation            output_sent
//   gradient      receive_gradient; then     send_gradient, and the     gradient_sent, gradient_read
//                 backward, in its place     weight gradients
//
// Where two neighbouring stages are on this rank, a copy takes the place of the message between them. So
// gradient_read also waits for the copy of a gradient.
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

#include "gradients_on_request.h"
#include "model/batch.h"
#include "model/transformer.h"
#include "ranks/comm.h"
#include "run/totals.h"
#include "stages.h"

namespace pentatron {

class Pipeline {
 public:
  // `pipeline_ranks`: the pipeline's ranks, as numbers in the world. `ranges`: the layers of this rank's
  // chunks. `parameters`: with two copies of the model, run() sums their gradients; null: the caller does.
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
    // All ranks make their communicators in the same order. A stage sends activations to the next stage, and
    // receives gradients from there. So two ranks share two communicators, for all their chunks. In a V they
    // share two for the way down and two for the way up.
    for (const auto& [from, to] : edges_of(schedule_, rank_)) {
      connect(world, pipeline_ranks, Action::send_activation, from, to);
      connect(world, pipeline_ranks, Action::send_gradient, to, from);
    }
    if (!parameters || schedule_.copies == 1) return;
    std::vector<int> members;
    for (const int rank : replicas_of(schedule_, rank_)) members.push_back(pipeline_ranks[rank]);
    copies_.emplace(world, members, "copies");
  }

  // All ranks destroy them in the same order, because ncclCommDestroy waits for the other end.
  ~Pipeline() {
    for (auto& [ends, communicator] : communicators_) communicator.reset();
  }

  // Forward and backward of a step's micro-batches. The rank of the last stage adds their losses to `totals`,
  // which is null if another rank counts the same losses. If the pipeline has two copies of the model, each
  // then has the gradients of all micro-batches.
  void run(const std::vector<Batch>& batches, StepTotals* totals) {
    execute(list_, batches, totals);
    if (copies_) {
      const AccumTensor gradients = parameters_->group().flat_gradients();
      wait_stream(copies_->stream(), compute_);
      copies_->all_reduce(gradients.data, gradients.data, gradients.size());
      wait_stream(compute_, copies_->stream());
    }
  }

  // Forward of one micro-batch, without backward, through the stages of the first copy of the model. Returns
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

 protected:  // tests call the instructions one by one
  // ---- What a chunk has

  // The memory of a micro-batch in flight. The event gradient_read is done when the weight gradients have
  // been computed, each of the others when its message is complete.
  struct InFlight {
    std::unique_ptr<Activations> activations;  // also output and d_residual
    Event output_sent, gradient_came, gradient_sent, gradient_read;
  };
  // The memory of an activation that the previous stage sends.
  struct Input {
    Tensor x;          // [outside, d]
    Event came, used;  // x has been received; the input gradient has read it
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
    std::vector<int> in_flight_of, input_of;  // [micro-batches]: the number of its InFlight, of its Input
    int last_micro_batch;                     // its weight gradients are the last ones of a step
    std::array<Link, message_streams> links;  // [stream_of]; empty if the chunk has no such message
    std::optional<int> previous;              // the chunk of the previous stage, if that is on this rank, too
  };

  InFlight& in_flight(const Instruction& i) {
    Chunk& chunk = chunks_[i.chunk];
    return chunk.in_flight[chunk.in_flight_of[i.micro_batch]];
  }
  Input& input(const Instruction& i) {
    Chunk& chunk = chunks_[i.chunk];
    return chunk.inputs.at(chunk.input_of[i.micro_batch]);  // the first stage has none
  }
  const Link& link(const Instruction& message) {
    return chunks_[message.chunk].links[stream_of(message.action)];
  }

  // ---- The interpreter

  void execute(const Instructions& list, const std::vector<Batch>& batches, StepTotals* totals) {
    for (const Instruction& i : list) {
      Batch batch = batches[i.micro_batch];
      batch.last = i.micro_batch == chunks_[i.chunk].last_micro_batch;
      const Action action = i.action;
      if (action == Action::forward) compute_forward(i, batch);
      const Activations& a = *in_flight(i).activations;
      if (action == Action::forward && totals && a.range.head) totals->add_loss(a.loss);
      if (action == Action::backward || action == Action::input_gradient) compute_backward(i, batch);
      if (action == Action::weight_gradient) compute_weight_gradients(i);
      if (is_send(action)) send(i);
      if (action == Action::receive_activation) receive_activation(i);
      if (action == Action::receive_gradient) receive_gradient(i);
    }
  }

  // Forward of one chunk: compute waits until its input came and its output's memory is free. If the previous
  // stage is on this rank, copies its output first.
  void compute_forward(const Instruction& i, const Batch& batch) {
    InFlight& f = in_flight(i);
    Activations& a = *f.activations;
    if (!a.range.embedding) {
      if (const InFlight* previous = in_previous_stage(i))
        hand_over(previous->activations->output, input(i).x);
      wait_event(compute_, input(i).came);
      a.input() = input(i).x;
    }
    wait_event(compute_, f.output_sent);  // the earlier micro-batch's output
    model_.forward(batch, a);
  }

  // Backward, in place of the gradient that came; in the last stage, from the loss. Then copies it to a
  // previous stage on this rank. Records `used`, and at the end, unless weight gradients are apart,
  // gradient_read.
  void compute_backward(const Instruction& i, const Batch& batch) {
    InFlight& f = in_flight(i);
    wait_event(compute_, f.gradient_came);
    wait_event(compute_, f.gradient_sent);  // as receive_gradient does; the last stage has none
    model_.backward(batch, *f.activations);
    if (!f.activations->range.embedding) input(i).used.record(compute_);
    if (const InFlight* previous = in_previous_stage(i)) {
      wait_event(compute_, previous->gradient_sent);  // the earlier micro-batch's, in the previous stage
      hand_over(f.activations->d_residual, previous->activations->d_residual);
    }
    if (i.action == Action::backward) f.gradient_read.record(compute_);
  }

  void compute_weight_gradients(const Instruction& i) {
    in_flight(i).activations->queue->issue_all();
    in_flight(i).gradient_read.record(compute_);
  }

  // The memory of this micro-batch in the previous stage, if that stage is on this rank, too. The micro-batch
  // is in flight there until its gradient comes. So this chunk copies the output from there, and later the
  // gradient to there.
  InFlight* in_previous_stage(const Instruction& i) {
    const std::optional<int> chunk = chunks_[i.chunk].previous;
    return chunk ? &in_flight({i.action, i.micro_batch, *chunk}) : nullptr;
  }
  void hand_over(const Tensor& from, const Tensor& to) {
    CUDA_CHECK(cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDeviceToDevice, compute_));
  }

  // ---- Messages: the stream waits, runs the message, and records an event when that is complete

  // Sends `output`, or the gradient in `d_residual`, once compute has written it.
  void send(const Instruction& i) {
    const Link& out = link(i);
    InFlight& f = in_flight(i);
    const bool gradient = i.action == Action::send_gradient;
    wait_stream(out.stream(), compute_);
    out.send(gradient ? f.activations->d_residual : f.activations->output);
    (gradient ? f.gradient_sent : f.output_sent).record(out.stream());
  }

  // These receive into x, or into d_residual, when its last reader is done: they wait for its events, not for
  // all of compute.
  void receive_activation(const Instruction& i) {
    const Link& in = link(i);
    wait_event(in.stream(), input(i).used);  // by the earlier micro-batch's input gradient
    in.receive(input(i).x);
    input(i).came.record(in.stream());
  }

  void receive_gradient(const Instruction& i) {
    const Link& in = link(i);
    InFlight& f = in_flight(i);
    wait_event(in.stream(), f.gradient_read);  // both by the earlier micro-batch
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
      chunk.last_micro_batch = last_micro_batch(list_, c);
      if (ranges[c].embedding) continue;
      const ModelChunk previous = *neighbour(schedule_, rank_, c, -1);
      if (previous.rank == rank_) chunk.previous = previous.chunk;
      chunk.inputs = std::vector<Input>(input_buffers(schedule_, rank_, c));
      const Tensor shape = chunk.in_flight[0].activations->output;
      for (Input& input : chunk.inputs) input.x = memory_.matrix<real>(shape.rows, shape.columns);
    }
    return chunks;
  }

  // Sets the link of this rank's end of the messages that `send` sends from one chunk to another. Their
  // communicator is made when the first two chunks of these two ranks need it.
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
  // [send_activation or send_gradient, from rank, to rank]: all chunks of these ranks share it.
  std::map<std::tuple<Action, int, int>, std::unique_ptr<Communicator>> communicators_;
  std::set<std::string> names_;
  std::optional<Communicator> copies_;  // the ranks with the same stages, which sum their gradients
};

}  // namespace pentatron
