// The executor of a pipeline schedule (schedule.h): an interpreter that runs this rank's list of
// instructions on the GPU. It runs every schedule.
//
// Messages between stages have four streams: {activations, gradients} x {in, out}. Each has a communicator of
// two ranks. The host issues the whole list without waiting. Only events order the compute
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

// The layers of a rank's chunks. A stage costs what its products cost, in units of a layer. So the head
// counts; the embedding is a lookup and does not.
inline std::vector<LayerRange> layers_of_rank(const Options& options, const Schedule& schedule, int rank) {
  const ModelConfig& m = options.model;
  const double in_head = static_cast<double>(m.vocab_size) * m.d_model;
  const double in_layer = static_cast<double>(active_parameter_count(options) - 2 * in_head) / m.layers;
  const double in_attention = 2.0 * options.sequence_length * m.d_model;  // scores and output
  const int stages = schedule.stages();
  const std::vector<int> first = split_layers(m.layers, stages, 0, in_head / (in_layer + in_attention));
  std::vector<LayerRange> chunks;
  for (int chunk = 0; chunk < schedule.v; ++chunk) {
    const int stage = schedule.stage(rank, chunk);
    chunks.push_back({first[stage], first[stage + 1], stage == 0, stage == stages - 1});
  }
  return chunks;
}

// The way of one kind of message, from one rank of the pipeline to another.
struct Way {
  bool gradients;  // or activations
  int from, to;
  bool operator==(const Way&) const = default;
};
// All ways of the schedule, in an order that is the same on all ranks. It follows from the placement: usually
// from each rank to the next one and back; with chunks in turns a ring; in a V two of each.
inline std::vector<Way> ways_of(const Schedule& s) {
  std::vector<Way> ways;
  for (int stage = 0; stage + 1 < s.stages(); ++stage) {
    const int before = s.places[stage].rank, after = s.places[stage + 1].rank;
    for (const Way& way : {Way{false, before, after}, Way{true, after, before}}) {
      if (before != after && std::find(ways.begin(), ways.end(), way) == ways.end()) ways.push_back(way);
    }
  }
  return ways;
}

// The communicators of this rank's ways, each of two ranks.
class Edges {
 public:
  // `line`: the pipeline's ranks, as numbers in the world. All of them call this.
  Edges(World& world, const std::vector<int>& line, const Schedule& schedule,
        real* scratch /*[2], on the device*/) {
    for (const Way& way : ways_of(schedule)) {
      const std::vector<int> ends = {line[way.from], line[way.to]};
      const bool out = world.rank() == ends[sender];
      if (!out && world.rank() != ends[receiver]) continue;
      const std::string name =
          std::string(way.gradients ? "gradients" : "activations") + (out ? " out" : " in");
      const auto same = std::count_if(mine_.begin(), mine_.end(), [&](const auto& other) {
        return other.first.gradients == way.gradients && (line[other.first.from] == world.rank()) == out;
      });
      mine_.emplace_back(
          way, std::make_unique<Communicator>(world, ends, name + (same > 0 ? " 2" : ""), edge_blocks));
      mine_.back().second->connect(out ? receiver : sender, out ? receiver : sender, scratch);
    }
  }

  // In the same order on all ranks, because ncclCommDestroy waits for the other end.
  ~Edges() {
    for (auto& [way, communicator] : mine_) communicator.reset();
  }

  Communicator& of(const Way& way) {
    return *std::find_if(mine_.begin(), mine_.end(), [&](const auto& m) { return m.first == way; })->second;
  }

  static constexpr int sender = 0, receiver = 1;  // the ends of a way

 private:
  std::vector<std::pair<Way, std::unique_ptr<Communicator>>> mine_;
};

class Pipeline {
 public:
  // `line`: as for Edges. `ranges`: the layers of this rank's chunks. Allocates activations for as many
  // micro-batches as are in flight at once. Throws ScheduleError if the schedule cannot run.
  Pipeline(const Schedule& schedule, World& world, const std::vector<int>& line,
           const std::vector<LayerRange>& ranges, Transformer& model, cudaStream_t compute)
      : rank_(std::find(line.begin(), line.end(), world.rank()) - line.begin()),
        schedule_(checked(schedule)),
        list_(schedule_.ranks[rank_]),
        model_(model),
        compute_(compute),
        chunks_(make_chunks(ranges)),
        edges_(world, line, schedule_, chunks_[0].flights[0].activations->gradient.data) {}

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
      const Instruction i = {Action::forward, 0, c};
      if (receive_before(schedule_, rank_, i)) receive_activation({Action::receive_activation, 0, c});
      compute_forward(i, batch);
      if (send_after(schedule_, rank_, i)) send_activation({Action::send_activation, 0, c});
      if (flight(i).activations->range.head) logits = flight(i).activations->logits;
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
  // An activation from the stage before.
  struct Input {
    Tensor x;          // [1, rows * d]
    Event came, used;  // used: the input gradient has read x
  };
  struct Chunk {
    std::vector<Flight> flights;
    std::vector<Input> inputs;             // [input_buffers]; none for the first stage
    std::vector<int> flight_of, input_of;  // [micro-batches]
    int last;                              // micro-batch
  };

  std::vector<Chunk> make_chunks(const std::vector<LayerRange>& ranges) {
    const auto when =
        schedule_.splits_backward ? WeightGradients::on_request : WeightGradients::during_backward;
    std::vector<Chunk> chunks(ranges.size());
    for (int c = 0; c < static_cast<int>(ranges.size()); ++c) {
      chunks[c].flights = std::vector<Flight>(peak_in_flight(list_, c).until_weight_gradient);
      for (Flight& flight : chunks[c].flights) flight.activations = model_.make_activations(ranges[c], when);
      chunks[c].flight_of = assign_flights(schedule_, rank_, c).number;
      chunks[c].input_of = assign_inputs(schedule_, rank_, c).number;
      chunks[c].last = last_micro_batch(list_, c);
      if (ranges[c].embedding) continue;
      chunks[c].inputs = std::vector<Input>(input_buffers(schedule_, rank_, c));
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
      hand_over(i, &Activations::output, input(i).x);
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
    hand_over(i, &Activations::gradient, f.activations->gradient);
    model_.backward(batch, *f.activations);
    if (!f.activations->range.embedding) input(i).used.record(compute_);
    if (i.action == Action::backward) f.weight_gradients_made.record(compute_);
  }

  // Where the stage that `i` needs a tensor from is on this rank, too, copies it from there.
  void hand_over(const Instruction& i, Tensor Activations::*tensor, const Tensor& to) {
    const auto source = source_of(schedule_, rank_, i);
    if (!source || source->rank != rank_) return;
    const Tensor from = flight({i.action, i.micro_batch, source->chunk}).activations.get()->*tensor;
    CUDA_CHECK(cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDeviceToDevice, compute_));
  }

  Communicator& way(const Instruction& i) {
    const bool gradients = i.action == Action::send_gradient || i.action == Action::receive_gradient;
    const int peer = peer_of(schedule_, rank_, i).rank;
    return edges_.of(is_send(i.action) ? Way{gradients, rank_, peer} : Way{gradients, peer, rank_});
  }

  void receive_activation(const Instruction& i) {
    Communicator& in = way(i);
    wait_event(in.stream(), input(i).used);
    in.receive(input(i).x.data, input(i).x.size(), Edges::sender);
    input(i).came.record(in.stream());
  }

  void send_activation(const Instruction& i) {
    Communicator& out = way(i);
    const Tensor output = flight(i).activations->output;
    wait_stream(out.stream(), compute_);
    out.send(output.data, output.size(), Edges::receiver);
    flight(i).output_sent.record(out.stream());
  }

  void receive_gradient(const Instruction& i) {
    Communicator& in = way(i);
    Flight& f = flight(i);
    const Tensor gradient = f.activations->gradient;
    wait_event(in.stream(), f.weight_gradients_made);  // the micro-batch that was here before
    wait_event(in.stream(), f.gradient_sent);
    in.receive(gradient.data, gradient.size(), Edges::sender);
    f.gradient_came.record(in.stream());
  }

  void send_gradient(const Instruction& i) {
    Communicator& out = way(i);
    const Tensor gradient = flight(i).activations->gradient;
    wait_stream(out.stream(), compute_);
    out.send(gradient.data, gradient.size(), Edges::receiver);
    flight(i).gradient_sent.record(out.stream());
  }

  const int rank_;  // of the pipeline
  const Schedule schedule_;
  const Instructions& list_;
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
                           chunks[c].embedding ? 0 : input_buffers(schedule, rank, c)});
  }
  share.gradients_on_request = schedule.splits_backward;
  return share;
}

}  // namespace pentatron
