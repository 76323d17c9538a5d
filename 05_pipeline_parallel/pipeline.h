// The executor of a pipeline schedule (schedule.h): an interpreter that runs this rank's list of
// instructions on the GPU. It runs every schedule.
//
// Messages between stages have four streams: {activations, gradients} x {in, out}. Each has a communicator of
// two ranks. (Grouped messages have one of each for all ranks.) The host issues the whole list without
// waiting. Only events order the compute stream and these four, and say when a buffer may be used again.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "choose_schedule.h"
#include "model/batch.h"
#include "model/memory.h"
#include "model/transformer.h"
#include "ranks/comm.h"
#include "run/totals.h"

namespace pentatron {

// The schedule of a pipeline that has the whole batch.
inline Schedule schedule_of(const PipelineOptions& options) {
  return make_schedule(options, options.pp, micro_batches_of_a_rank(options, 1));
}
inline void fit_to_ranks(PipelineOptions& options, int ranks) {
  complete_pipeline_options(options, ranks, micro_batches_of_a_rank(options, 1));
}

// The layers of a rank's chunks. A stage costs what its products cost, in units of a layer. So the head
// counts; the embedding is a lookup and does not.
inline std::vector<LayerRange> layers_of_rank(const TrainingConfig& options, const Schedule& schedule,
                                              int rank) {
  const ModelConfig& m = options.model;
  const double in_head = static_cast<double>(m.vocab_size) * m.d_model;
  const double in_layer = static_cast<double>(active_parameter_count(options.model) - 2 * in_head) / m.layers;
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
  for (int n = 0; n + 1 < std::ssize(s.places); ++n) {
    if ((n + 1) % s.stages() == 0) continue;  // a copy of the model ends here
    const int before = s.places[n].rank, after = s.places[n + 1].rank;
    for (const Way& way : {Way{false, before, after}, Way{true, after, before}}) {
      if (before != after && std::find(ways.begin(), ways.end(), way) == ways.end()) ways.push_back(way);
    }
  }
  return ways;
}

// The communicators of this rank's ways: each of two ranks, or for grouped messages one of all ranks.
class Edges {
 public:
  // `line`: the pipeline's ranks, as numbers in the world. All of them call this.
  Edges(World& world, const std::vector<int>& line, const Schedule& schedule,
        real* scratch /*[2], on the device*/)
      : rank_(static_cast<int>(std::find(line.begin(), line.end(), world.rank()) - line.begin())) {
    if (schedule.grouped_messages)
      for_all_ = std::make_unique<Communicator>(world, line, "messages", edge_blocks);
    for (const Way& way : ways_of(schedule)) {
      const bool out = rank_ == way.from;
      if (!out && rank_ != way.to) continue;
      const std::string name =
          std::string(way.gradients ? "gradients" : "activations") + (out ? " out" : " in");
      const auto same = std::count_if(mine_.begin(), mine_.end(), [&](const auto& other) {
        return other.first.gradients == way.gradients && (other.first.from == rank_) == out;
      });
      mine_.emplace_back(way, nullptr);
      if (!for_all_) {
        mine_.back().second = std::make_unique<Communicator>(world, std::vector{line[way.from], line[way.to]},
                                                             name + (same > 0 ? " 2" : ""), edge_blocks);
      }
      of(way).connect(peer(way), peer(way), scratch);
    }
  }

  // In the same order on all ranks, because ncclCommDestroy waits for the other end.
  ~Edges() {
    for (auto& [way, communicator] : mine_) communicator.reset();
  }

  Communicator& of(const Way& way) {
    if (for_all_) return *for_all_;
    return *std::find_if(mine_.begin(), mine_.end(), [&](const auto& m) { return m.first == way; })->second;
  }
  // The other end of a way, as a rank of its communicator.
  int peer(const Way& way) const {
    const bool out = rank_ == way.from;
    if (for_all_) return out ? way.to : way.from;
    return out ? 1 : 0;
  }

 private:
  const int rank_;  // of the pipeline
  std::unique_ptr<Communicator> for_all_;
  std::vector<std::pair<Way, std::unique_ptr<Communicator>>> mine_;
};

// The ranks with the same stages, ascending: this one, or with two copies of the model k and p - 1 - k. They
// sum their gradients.
inline std::vector<int> replicas_of(const Schedule& s, int rank) {
  if (s.copies == 1) return {rank};
  return {std::min(rank, s.p - 1 - rank), std::max(rank, s.p - 1 - rank)};
}

// Sums the gradients of all micro-batches over the copies of the model. `compute` waits for the sum.
inline void sum_gradients(Parameters& parameters, Communicator& copies, cudaStream_t compute) {
  if (copies.ranks() == 1) return;
  const AccumTensor gradients = parameters.group().flat_gradients();
  wait_stream(copies.stream(), compute);
  copies.all_reduce(gradients.data, gradients.data, gradients.size());
  wait_stream(compute, copies.stream());
}

class Pipeline {
 public:
  // `line`: as for Edges. `ranges`: the layers of this rank's chunks. Allocates activations for as many
  // micro-batches as are in flight at once. Throws ScheduleError if the schedule cannot run.
  Pipeline(const Schedule& schedule, World& world, const std::vector<int>& line,
           const std::vector<LayerRange>& ranges, Transformer& model, cudaStream_t compute)
      : rank_(std::find(line.begin(), line.end(), world.rank()) - line.begin()),
        schedule_(checked(schedule)),
        model_(model),
        compute_(compute),
        chunks_(make_chunks(ranges)),
        edges_(world, line, schedule_, chunks_[0].flights[0].activations->gradient.data) {}

  // Forward and backward of a step's micro-batches. The rank of the last stage adds their losses to `totals`.
  // `totals` is null if another rank counts the same losses.
  void run(const std::vector<Batch>& batches, StepTotals* totals) {
    for (size_t n = 0; n < list_.size(); ++n) {
      if (!is_message(list_[n].action)) {
        compute(list_[n], batches, totals);
        continue;
      }
      const size_t first = n;
      while (schedule_.grouped_messages && n + 1 < list_.size() && is_message(list_[n + 1].action)) ++n;
      exchange({list_.begin() + first, list_.begin() + n + 1});
    }
  }

  // Forward of one micro-batch, without backward. Returns the logits on the rank of the last stage, and an
  // empty tensor elsewhere.
  Tensor forward(const Batch& batch) {
    Tensor logits;
    for (int c = 0; c < static_cast<int>(chunks_.size()); ++c) {
      const Instruction i = {Action::forward, 0, c};
      if (schedule_.copy(rank_, c) != schedule_.copy_of(0)) continue;
      if (receive_before(schedule_, rank_, i)) exchange({{Action::receive_activation, 0, c}});
      compute_forward(i, batch);
      if (send_after(schedule_, rank_, i)) exchange({{Action::send_activation, 0, c}});
      if (flight(i).activations->range.head) logits = flight(i).activations->logits;
    }
    return logits;
  }

 private:
  // The memory of a micro-batch in flight in one chunk.
  struct Flight {
    std::unique_ptr<Activations> activations;
    Event output_sent, gradient_came, gradient_sent;
    Event read;  // by the last that reads the gradient of a micro-batch
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

  void compute(const Instruction& i, const std::vector<Batch>& batches, StepTotals* totals) {
    Activations& a = *flight(i).activations;
    Batch batch = batches[i.micro_batch];
    batch.last = i.micro_batch == chunks_[i.chunk].last;  // which a schedule may choose
    if (i.action == Action::forward) {
      compute_forward(i, batch);
      if (totals && a.range.head) totals->add_loss(a.loss);
    } else if (i.action == Action::weight_gradient) {
      model_.backward_weights(a);
      flight(i).read.record(compute_);
    } else {
      compute_backward(i, batch);
    }
  }

  // Starts one message or a group, and records what it completes.
  void exchange(const Instructions& messages) {
    {
      std::optional<Communicator::Group> group;
      if (messages.size() > 1) group.emplace(communicator(messages[0]));
      for (const Instruction& i : messages) start(i);
    }
    for (const Instruction& i : messages) completion(i).record(communicator(i).stream());
  }
  void start(const Instruction& i) {
    if (i.action == Action::receive_activation) receive_activation(i);
    if (i.action == Action::send_activation) send_activation(i);
    if (i.action == Action::receive_gradient) receive_gradient(i);
    if (i.action == Action::send_gradient) send_gradient(i);
  }
  Event& completion(const Instruction& i) {
    if (i.action == Action::receive_activation) return input(i).came;
    if (i.action == Action::send_activation) return flight(i).output_sent;
    return i.action == Action::receive_gradient ? flight(i).gradient_came : flight(i).gradient_sent;
  }

  void compute_forward(const Instruction& i, const Batch& batch) {
    Flight& f = flight(i);
    Activations& a = *f.activations;
    if (!a.range.embedding) {
      if (const Flight* before = flight_before(i)) hand_over(before->activations->output, input(i).x);
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
    if (const Flight* before = flight_before(i)) {
      wait_event(compute_, before->gradient_sent);  // that of the micro-batch that was there before
      hand_over(f.activations->gradient, before->activations->gradient);
    }
    if (i.action == Action::backward) f.read.record(compute_);
  }

  // The flight of the stage before, if that stage is on this rank, too. It begins before this chunk's flight
  // and ends after it. So this chunk copies both: the output from there, and the gradient to there.
  Flight* flight_before(const Instruction& i) {
    const auto before = neighbour(schedule_, rank_, i.chunk, /*next=*/false);
    return before && before->rank == rank_ ? &flight({i.action, i.micro_batch, before->chunk}) : nullptr;
  }
  void hand_over(const Tensor& from, const Tensor& to) {
    CUDA_CHECK(cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDeviceToDevice, compute_));
  }

  Way way(const Instruction& i) const {
    const bool gradients = i.action == Action::send_gradient || i.action == Action::receive_gradient;
    const int peer = peer_of(schedule_, rank_, i).rank;
    return is_send(i.action) ? Way{gradients, rank_, peer} : Way{gradients, peer, rank_};
  }
  Communicator& communicator(const Instruction& i) { return edges_.of(way(i)); }
  int peer(const Instruction& i) const { return edges_.peer(way(i)); }

  void receive_activation(const Instruction& i) {
    Communicator& in = communicator(i);
    wait_event(in.stream(), input(i).used);
    in.receive(input(i).x.data, input(i).x.size(), peer(i));
  }

  void send_activation(const Instruction& i) {
    Communicator& out = communicator(i);
    const Tensor output = flight(i).activations->output;
    wait_stream(out.stream(), compute_);
    out.send(output.data, output.size(), peer(i));
  }

  void receive_gradient(const Instruction& i) {
    Communicator& in = communicator(i);
    Flight& f = flight(i);
    const Tensor gradient = f.activations->gradient;
    wait_event(in.stream(), f.read);  // that of the micro-batch that was here before
    wait_event(in.stream(), f.gradient_sent);
    in.receive(gradient.data, gradient.size(), peer(i));
  }

  void send_gradient(const Instruction& i) {
    Communicator& out = communicator(i);
    const Tensor gradient = flight(i).activations->gradient;
    wait_stream(out.stream(), compute_);
    out.send(gradient.data, gradient.size(), peer(i));
  }

  const int rank_;  // of the pipeline
  const Schedule schedule_;
  const Instructions& list_ = schedule_.ranks[rank_];
  Transformer& model_;
  cudaStream_t compute_;
  DeviceArena memory_{Purpose::activations};
  std::vector<Chunk> chunks_;
  Edges edges_;
};

// For the memory prediction: this rank's chunks, their flights and their input buffers.
inline RankShare pipeline_share(const Schedule& schedule, int rank, const std::vector<LayerRange>& chunks) {
  RankShare share;
  const Instructions& list = schedule.ranks[rank];
  for (int c = 0; c < std::ssize(chunks); ++c) {
    share.parts.push_back({chunks[c], peak_in_flight(list, c).until_weight_gradient,
                           chunks[c].embedding ? 0 : input_buffers(schedule, rank, c)});
  }
  share.gradients_on_request = schedule.splits_backward;
  share.replicas = {schedule.copies};
  return share;
}

}  // namespace pentatron
