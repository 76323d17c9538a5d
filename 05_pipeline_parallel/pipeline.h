// The executor of a pipeline schedule (schedule.h): an interpreter that runs this rank's list of
// instructions on the GPU. It runs every schedule.
//
// Messages between stages have four streams: {activations, gradients} x {in, out}. Each has a communicator of
// the two ranks of an edge. The host issues the whole list without waiting. Only events order the compute
// stream and these four, and say when a buffer may be used again.
#pragma once

#include <memory>
#include <vector>

#include "model/memory.h"
#include "model/transformer.h"
#include "program/totals.h"
#include "ranks/comm.h"
#include "simulate.h"

namespace pentatron {

// The layers of this rank's chunks, which are the stages rank, p + rank, 2p + rank, ... A stage costs what
// its products cost, in units of a layer. So the head counts; the embedding is a lookup and does not.
inline std::vector<LayerRange> layers_of_rank(const Options& options, int rank, int p, int v) {
  const ModelConfig& m = options.model;
  const double in_head = static_cast<double>(m.vocab_size) * m.d_model;
  const double in_layer = static_cast<double>(active_parameter_count(options) - 2 * in_head) / m.layers;
  const double in_attention = 2.0 * options.sequence_length * m.d_model;  // scores and output
  const std::vector<int> first = split_layers(m.layers, p * v, 0, in_head / (in_layer + in_attention));
  std::vector<LayerRange> chunks;
  for (int stage = rank; stage < p * v; stage += p)
    chunks.push_back({first[stage], first[stage + 1], stage == 0, stage == p * v - 1});
  return chunks;
}

// The communicators of this rank's two edges: from the rank before it and to the rank after it. With several
// chunks the edges form a ring (`ring`). Otherwise the first rank has no edge before it, and the last none
// after it.
struct Edges {
  std::unique_ptr<Communicator> activations_in, activations_out, gradients_in, gradients_out;

  // `line`: the pipeline's ranks, as numbers in the world, in stage order. All of them call this.
  Edges(World& world, const std::vector<int>& line, bool ring, real* scratch /*[2], on the device*/)
      : out_is_first_edge_(world.rank() == line.front()) {
    const int p = static_cast<int>(line.size());
    for (int edge = 0; edge < (ring ? p : p - 1); ++edge) {  // in the same order on all ranks
      const std::vector<int> ends = {line[edge], line[(edge + 1) % p]};
      const auto connected = [&](const char* name, int peer) {
        auto communicator = std::make_unique<Communicator>(world, ends, name, edge_blocks);
        communicator->connect(peer, peer, scratch);
        return communicator;
      };
      if (world.rank() == ends[before]) {
        activations_out = connected("activations out", after);
        gradients_in = connected("gradients in", after);
      }
      if (world.rank() == ends[after]) {
        activations_in = connected("activations in", before);
        gradients_out = connected("gradients out", before);
      }
    }
  }

  // Edge by edge, in the same order on all ranks, because ncclCommDestroy waits for the other end. In a ring,
  // rank 0 is at the ends of the first edge and of the last.
  ~Edges() {
    for (const bool out : {out_is_first_edge_, !out_is_first_edge_}) {
      (out ? activations_out : activations_in).reset();
      (out ? gradients_in : gradients_out).reset();
    }
  }

  static constexpr int before = 0, after = 1;  // the ends of an edge

 private:
  bool out_is_first_edge_;
};

class Pipeline {
 public:
  // `line`: as for Edges. `ranges`: the layers of this rank's chunks. Allocates activations for as many
  // micro-batches as are in flight at once. Throws ScheduleError if the schedule cannot run.
  Pipeline(const Schedule& schedule, World& world, const std::vector<int>& line,
           const std::vector<LayerRange>& ranges, Transformer& model, cudaStream_t compute)
      : rank_(std::find(line.begin(), line.end(), world.rank()) - line.begin()),
        list_(checked(schedule).ranks[rank_]),
        model_(model),
        compute_(compute),
        chunks_(make_chunks(schedule, ranges)),
        edges_(world, line, schedule.v > 1, chunks_[0].flights[0].activations->gradient.data) {}

  // Forward and backward of a step's micro-batches. The rank of the last stage adds their losses to `totals`.
  // `totals` is null if another rank counts the same losses.
  void run(const std::vector<Batch>& batches, StepTotals* totals) {
    for (const Instruction& i : list_) {
      Batch batch = batches[i.micro_batch];
      batch.last = i.micro_batch == chunks_[i.chunk].last;  // which a schedule may choose
      execute(i, batch, totals);
    }
  }

  // Forward of one micro-batch, without backward. Returns the logits on the rank of the last stage, and an
  // empty tensor elsewhere.
  Tensor forward(const Batch& batch) {
    Tensor logits;
    for (int c = 0; c < static_cast<int>(chunks_.size()); ++c) {
      const Activations& a = *flight({Action::forward, 0, c}).activations;
      if (!a.range.embedding) receive_activation({Action::receive_activation, 0, c});
      compute_forward({Action::forward, 0, c}, batch);
      if (!a.range.head) send_activation({Action::send_activation, 0, c});
      if (a.range.head) logits = a.logits;
    }
    return logits;
  }

 private:
  // The memory of a micro-batch in flight in one chunk.
  struct Flight {
    std::unique_ptr<Activations> activations;
    Event output_sent, gradient_came, gradient_sent;
    Event weight_gradients_made;  // the last work of a micro-batch
  };
  // An activation received from the stage before.
  struct Input {
    Tensor x;          // [1, rows * d]
    Event came, used;  // used: the input gradient has read x
  };
  struct Chunk {
    std::vector<Flight> flights;
    std::vector<Input> inputs;             // [input_buffers(list_, chunk)]; none for the first stage
    std::vector<int> flight_of, input_of;  // [micro-batches]
    int last;                              // micro-batch
  };

  std::vector<Chunk> make_chunks(const Schedule& schedule, const std::vector<LayerRange>& ranges) {
    const auto when =
        schedule.splits_backward ? WeightGradients::on_request : WeightGradients::during_backward;
    std::vector<Chunk> chunks(ranges.size());
    for (int c = 0; c < static_cast<int>(ranges.size()); ++c) {
      chunks[c].flights = std::vector<Flight>(peak_in_flight(list_, c).until_weight_gradient);
      for (Flight& flight : chunks[c].flights) flight.activations = model_.make_activations(ranges[c], when);
      chunks[c].flight_of = assign_flights(schedule, rank_, c).number;
      chunks[c].input_of = assign_inputs(schedule, rank_, c).number;
      chunks[c].last = last_micro_batch(list_, c);
      if (ranges[c].embedding) continue;
      chunks[c].inputs = std::vector<Input>(input_buffers(list_, c));
      for (Input& input : chunks[c].inputs) input.x = memory_.matrix<real>(1, model_.boundary_size());
    }
    return chunks;
  }

  Flight& flight(const Instruction& i) {
    Chunk& chunk = chunks_[i.chunk];
    return chunk.flights[chunk.flight_of[i.micro_batch]];
  }
  Input& input(const Instruction& i) {
    Chunk& chunk = chunks_[i.chunk];
    return chunk.inputs.at(chunk.input_of[i.micro_batch]);  // a stage that receives nothing has none
  }

  void execute(const Instruction& i, const Batch& batch, StepTotals* totals) {
    switch (i.action) {
      case Action::forward:
        compute_forward(i, batch);
        if (totals && flight(i).activations->range.head) totals->add_loss(flight(i).activations->loss);
        return;
      case Action::backward:
      case Action::input_gradient:
        compute_backward(i, batch);
        return;
      case Action::weight_gradient:
        model_.backward_weights(*flight(i).activations);
        flight(i).weight_gradients_made.record(compute_);
        return;
      case Action::receive_activation:
        return receive_activation(i);
      case Action::send_activation:
        return send_activation(i);
      case Action::receive_gradient:
        return receive_gradient(i);
      case Action::send_gradient:
        return send_gradient(i);
    }
  }

  void compute_forward(const Instruction& i, const Batch& batch) {
    Flight& f = flight(i);
    Activations& a = *f.activations;
    if (!a.range.embedding) {
      wait_event(compute_, input(i).came);
      a.input() = {input(i).x.data, a.output.rows, a.output.columns};
    }
    wait_event(compute_, f.output_sent);  // of the micro-batch that was here before
    model_.forward(batch, a);
  }

  void compute_backward(const Instruction& i, const Batch& batch) {
    Flight& f = flight(i);
    wait_event(compute_, f.gradient_came);
    wait_event(compute_, f.gradient_sent);  // that of the micro-batch that was here before
    model_.backward(batch, *f.activations);
    if (!f.activations->range.embedding) input(i).used.record(compute_);
    if (i.action == Action::backward) f.weight_gradients_made.record(compute_);
  }

  void receive_activation(const Instruction& i) {
    Communicator& in = *edges_.activations_in;
    wait_event(in.stream(), input(i).used);
    in.receive(input(i).x.data, input(i).x.size(), Edges::before);
    input(i).came.record(in.stream());
  }

  void send_activation(const Instruction& i) {
    Communicator& out = *edges_.activations_out;
    const Tensor output = flight(i).activations->output;
    wait_stream(out.stream(), compute_);
    out.send(output.data, output.size(), Edges::after);
    flight(i).output_sent.record(out.stream());
  }

  void receive_gradient(const Instruction& i) {
    Communicator& in = *edges_.gradients_in;
    Flight& f = flight(i);
    const Tensor gradient = f.activations->gradient;
    wait_event(in.stream(), f.weight_gradients_made);  // the micro-batch that was here before
    wait_event(in.stream(), f.gradient_sent);
    in.receive(gradient.data, gradient.size(), Edges::after);
    f.gradient_came.record(in.stream());
  }

  void send_gradient(const Instruction& i) {
    Communicator& out = *edges_.gradients_out;
    const Tensor gradient = flight(i).activations->gradient;
    wait_stream(out.stream(), compute_);
    out.send(gradient.data, gradient.size(), Edges::before);
    flight(i).gradient_sent.record(out.stream());
  }

  const int rank_;  // of the pipeline
  const Instructions list_;
  Transformer& model_;
  cudaStream_t compute_;
  DeviceArena memory_{Purpose::activations};
  std::vector<Chunk> chunks_;
  Edges edges_;
};

// For the memory prediction: `share` with this rank's chunks, their flights and their input buffers.
inline RankShare pipeline_share(const Schedule& schedule, int rank, const std::vector<LayerRange>& chunks,
                                RankShare share = {}) {
  const Instructions& list = schedule.ranks[rank];
  for (int c = 0; c < std::ssize(chunks); ++c) {
    share.parts.push_back({chunks[c], peak_in_flight(list, c).until_weight_gradient,
                           chunks[c].embedding ? 0 : input_buffers(list, c)});
  }
  share.gradients_on_request = schedule.splits_backward;
  return share;
}

}  // namespace pentatron
