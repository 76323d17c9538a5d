// The executor of a pipeline schedule (schedule.h): an interpreter that runs this rank's list of
// instructions on the GPU. It runs every schedule.
//
// Messages between stages have four streams: {activations, gradients} x {in, out}. Each has a communicator of
// two ranks. (Grouped messages have one of each for all ranks.) The host issues the whole list without
// waiting. Only events order the compute stream and these four, and say when a buffer may be used again.
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

namespace pentatron {

// The schedule of a pipeline that has the whole batch.
inline Schedule schedule_of(const TrainingConfig& training, const PipelineOptions& options) {
  return make_schedule(options, options.pp, micro_batches_of_a_rank(training, 1));
}
inline void fit_to_ranks(const Options& all, PipelineOptions& options, int ranks) {
  complete_pipeline_options(all, options, ranks, micro_batches_of_a_rank(all, 1));
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
  const std::vector<int> first = split_layers(m.layers, stages, in_head / (in_layer + in_attention));
  std::vector<LayerRange> chunks;
  for (int chunk = 0; chunk < schedule.v; ++chunk) {
    const int stage = schedule.stage(rank, chunk);
    chunks.push_back({first[stage], first[stage + 1], stage == 0, stage == stages - 1});
  }
  return chunks;
}

// The ranks with the same stages, which sum their gradients: this one, or with two copies k and p - 1 - k.
inline std::vector<int> replicas_of(const Schedule& s, int rank) {
  if (s.copies == 1) return {rank};
  return {std::min(rank, s.p - 1 - rank), std::max(rank, s.p - 1 - rank)};
}

// The units of a rank's chunks, ascending.
inline std::vector<int> units_of(const std::vector<LayerRange>& ranges) {
  std::vector<int> units;
  for (const LayerRange& range : ranges) {
    if (range.embedding) units.push_back(embedding_unit);
    for (int layer = range.first; layer < range.last; ++layer) units.push_back(unit_of_layer(layer));
    if (range.head) units.push_back(head_unit(range.last));
  }
  std::sort(units.begin(), units.end());
  return units;
}

inline ParameterLayout pipeline_layout(const Schedule& s, int rank, const std::vector<LayerRange>& chunks) {
  return {.groups = {{rank == replicas_of(s, rank)[0] ? 0 : 1, s.copies}}, .units = units_of(chunks)};
}

// The stages between which a rank sends or receives: (where activations come from, where they go to).
inline std::vector<std::pair<ModelChunk, ModelChunk>> edges_of(const Schedule& s, int rank) {
  std::vector<std::pair<ModelChunk, ModelChunk>> edges;
  for (int n = 0; n + 1 < std::ssize(s.placement); ++n) {
    const ModelChunk from = s.placement[n], to = s.placement[n + 1];
    const bool is_end = (n + 1) % s.stages() == 0;  // of a copy of the model
    if (!is_end && from.rank != to.rank && (from.rank == rank || to.rank == rank))
      edges.emplace_back(from, to);
  }
  return edges;
}

// The channels of NCCL that a rank's Pipeline will have: for its messages (connect), and for the sum of two
// copies' gradients if it has to compute that.
inline int channels_of_pipeline(const Schedule& s, int rank, bool sums_copies) {
  std::set<std::pair<int, int>> ranks;
  for (const auto& [from, to] : edges_of(s, rank)) ranks.emplace(from.rank, to.rank);
  int communicators = 2 * static_cast<int>(ranks.size());  // of activations and of gradients
  if (s.grouped_messages) communicators = std::min(communicators, 1);
  return edge_blocks * communicators + (sums_copies && s.copies > 1 ? data_blocks : 0);
}

class Pipeline {
 public:
  // `line`: the pipeline's ranks, as numbers in the world. `ranges`: the layers of this rank's chunks.
  // `parameters`: whose gradients the copies of the model sum in run(); null: the caller sums them. Allocates
  // the activations of micro-batches in flight. Throws ScheduleError if the schedule cannot run.
  Pipeline(const Schedule& schedule, World& world, const std::vector<int>& line,
           const std::vector<LayerRange>& ranges, Transformer& model, cudaStream_t compute,
           Parameters* parameters = nullptr)
      : rank_(std::find(line.begin(), line.end(), world.rank()) - line.begin()),
        schedule_(checked(schedule)),
        model_(model),
        compute_(compute),
        parameters_(parameters),
        chunks_(make_chunks(ranges)) {
    // In the same order on all ranks. A stage sends activations to the next one, and gets gradients from
    // there. So each rank has two communicators with the next one; chunks share them. In a V there are two
    // for the way down and two for the way up.
    for (const auto& [from, to] : edges_of(schedule_, rank_)) {
      connect(world, line, Action::send_activation, from, to);
      connect(world, line, Action::send_gradient, to, from);
    }
    if (!parameters || schedule_.copies == 1) return;
    std::vector<int> members;
    for (const int rank : replicas_of(schedule_, rank_)) members.push_back(line[rank]);
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
  // The memory of a micro-batch in flight in one chunk.
  struct InFlight {
    std::unique_ptr<Activations> activations;
    Event output_sent, gradient_came, gradient_sent;
    Event read;  // by the last that reads the gradient of a micro-batch
  };
  // An activation from the stage before. Forward reads it as input().
  struct Input {
    Tensor x;          // [outside, d]
    Event came, used;  // used: the input gradient has read x
  };
  // Where one kind of message goes to, or comes from.
  struct Link {
    Communicator* communicator = nullptr;
    int peer = 0;  // the other end, as a rank of the communicator
  };
  struct Chunk {
    std::vector<InFlight> in_flight;
    std::vector<Input> inputs;                // [input_buffers]; none for the first stage
    std::vector<int> in_flight_of, input_of;  // [micro-batches]
    int last;                                 // micro-batch
    std::array<Link, message_streams> links;  // [stream_of]; none where there is no such message
    std::optional<int> before;                // the chunk of this rank that is the stage before
  };

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
      if (before.rank == rank_) chunk.before = before.chunk;
      chunk.inputs = std::vector<Input>(input_buffers(schedule_, rank_, c));
      const Tensor shape = chunk.in_flight[0].activations->output;
      for (Input& input : chunk.inputs) input.x = memory_.matrix<real>(shape.rows, shape.columns);
    }
    return chunks;
  }

  void connect(World& world, const std::vector<int>& line, Action send, ModelChunk from, ModelChunk to) {
    const bool out = rank_ == from.rank, grouped = schedule_.grouped_messages;
    auto& communicator = communicators_[grouped ? Key() : Key(send, from.rank, to.rank)];
    if (!communicator) {
      std::string name = send == Action::send_gradient ? "gradients" : "activations";
      name += out ? " out" : " in";
      if (!names_.insert(name).second) name += " 2";  // in a V
      if (grouped) name = "messages";
      const std::vector<int> members = grouped ? line : std::vector{line[from.rank], line[to.rank]};
      communicator = std::make_unique<Communicator>(world, members, name, edge_blocks);
    }
    const int peer = grouped ? (out ? to.rank : from.rank) : (out ? 1 : 0);
    real* const scratch = chunks_[0].in_flight[0].activations->gradient.data;
    communicator->connect(peer, peer, scratch);
    const int receive = stream_of(send) - 1;  // its other end
    chunks_[out ? from.chunk : to.chunk].links[out ? stream_of(send) : receive] = {communicator.get(), peer};
  }

  Link& link_of(const Instruction& message) {
    return chunks_[message.chunk].links[stream_of(message.action)];
  }
  InFlight& in_flight(const Instruction& i) {
    Chunk& chunk = chunks_[i.chunk];
    return chunk.in_flight[chunk.in_flight_of[i.micro_batch]];
  }
  Input& input(const Instruction& i) {
    Chunk& chunk = chunks_[i.chunk];
    return chunk.inputs.at(chunk.input_of[i.micro_batch]);  // a stage that receives nothing has none
  }

  void execute(const Instructions& list, const std::vector<Batch>& batches, StepTotals* totals) {
    for (size_t n = 0; n < list.size(); ++n) {
      if (!is_message(list[n].action)) {
        compute(list[n], batches, totals);
        continue;
      }
      const size_t first = n;
      while (schedule_.grouped_messages && n + 1 < list.size() && is_message(list[n + 1].action)) ++n;
      exchange({list.begin() + first, list.begin() + n + 1});
    }
  }
  void compute(const Instruction& i, const std::vector<Batch>& batches, StepTotals* totals) {
    Activations& a = *in_flight(i).activations;
    Batch batch = batches[i.micro_batch];
    batch.last = i.micro_batch == chunks_[i.chunk].last;  // which a schedule may choose
    if (i.action == Action::forward) {
      compute_forward(i, batch);
      if (totals && a.range.head) totals->add_loss(a.loss);
    } else if (i.action == Action::weight_gradient) {
      a.queue->issue_all();
      in_flight(i).read.record(compute_);
    } else {
      compute_backward(i, batch);
    }
  }

  // Starts one message or a group, and records what it completes.
  void exchange(const Instructions& messages) {
    {
      std::optional<Communicator::Group> group;
      if (messages.size() > 1) group.emplace(*link_of(messages[0]).communicator);
      for (const Instruction& i : messages) {
        if (is_send(i.action)) send(i);
        if (i.action == Action::receive_activation) receive_activation(i);
        if (i.action == Action::receive_gradient) receive_gradient(i);
      }
    }
    for (const Instruction& i : messages) completion(i).record(link_of(i).communicator->stream());
  }
  Event& completion(const Instruction& i) {
    if (i.action == Action::receive_activation) return input(i).came;
    if (i.action == Action::send_activation) return in_flight(i).output_sent;
    return i.action == Action::receive_gradient ? in_flight(i).gradient_came : in_flight(i).gradient_sent;
  }

  void compute_forward(const Instruction& i, const Batch& batch) {
    InFlight& f = in_flight(i);
    Activations& a = *f.activations;
    if (!a.range.embedding) {
      if (const InFlight* before = in_flight_before(i)) hand_over(before->activations->output, input(i).x);
      wait_event(compute_, input(i).came);
      a.input() = input(i).x;
    }
    wait_event(compute_, f.output_sent);  // of the micro-batch that was here before
    model_.forward(batch, a);
  }

  void compute_backward(const Instruction& i, const Batch& batch) {
    InFlight& f = in_flight(i);
    wait_event(compute_, f.gradient_came);
    wait_event(compute_, f.gradient_sent);  // that of the micro-batch that was here before
    model_.backward(batch, *f.activations);
    if (!f.activations->range.embedding) input(i).used.record(compute_);
    if (const InFlight* before = in_flight_before(i)) {
      wait_event(compute_, before->gradient_sent);  // that of the micro-batch that was there before
      hand_over(f.activations->gradient, before->activations->gradient);
    }
    if (i.action == Action::backward) f.read.record(compute_);
  }

  // The micro-batch in the stage before, if that stage is on this rank, too. There it is in flight earlier
  // and longer. So this chunk copies both: the output from there, and the gradient to there.
  InFlight* in_flight_before(const Instruction& i) {
    const std::optional<int> before = chunks_[i.chunk].before;
    return before ? &in_flight({i.action, i.micro_batch, *before}) : nullptr;
  }
  void hand_over(const Tensor& from, const Tensor& to) {
    CUDA_CHECK(cudaMemcpyAsync(to.data, from.data, from.bytes(), cudaMemcpyDeviceToDevice, compute_));
  }

  void send(const Instruction& i) {
    const auto [out, peer] = link_of(i);
    const Activations& a = *in_flight(i).activations;
    const Tensor tensor = i.action == Action::send_activation ? a.output : a.gradient;
    wait_stream(out->stream(), compute_);
    out->send(tensor.data, tensor.size(), peer);
  }

  void receive_activation(const Instruction& i) {
    const auto [in, peer] = link_of(i);
    wait_event(in->stream(), input(i).used);
    in->receive(input(i).x.data, input(i).x.size(), peer);
  }

  void receive_gradient(const Instruction& i) {
    const auto [in, peer] = link_of(i);
    InFlight& f = in_flight(i);
    const Tensor gradient = f.activations->gradient;
    wait_event(in->stream(), f.read);  // that of the micro-batch that was here before
    wait_event(in->stream(), f.gradient_sent);
    in->receive(gradient.data, gradient.size(), peer);
  }

  const int rank_;  // of the pipeline
  const Schedule schedule_;
  const Instructions& list_ = schedule_.ranks[rank_];
  Transformer& model_;
  cudaStream_t compute_;
  Parameters* const parameters_;
  DeviceArena memory_{Purpose::activations};
  std::vector<Chunk> chunks_;
  // One for all messages if they are grouped, else one for each kind from one rank to another.
  using Key = std::tuple<Action, int, int>;
  std::map<Key, std::unique_ptr<Communicator>> communicators_;
  std::set<std::string> names_;
  std::optional<Communicator> copies_;  // of the model, which sum their gradients
};

// For the memory prediction: a rank's chunks, the micro-batches in flight in each, and its input buffers.
inline RankShare pipeline_share(const TrainingConfig& training, const Schedule& schedule, int rank) {
  RankShare share;
  const Instructions& list = schedule.ranks[rank];
  const std::vector<LayerRange> chunks = layers_of_rank(training, schedule, rank);
  for (int c = 0; c < std::ssize(chunks); ++c) {
    share.parts.push_back({chunks[c], peak_in_flight(list, c).until_weight_gradient,
                           chunks[c].embedding ? 0 : input_buffers(schedule, rank, c)});
  }
  share.gradients_on_request = schedule.splits_backward;
  share.replicas = {schedule.copies};
  return share;
}

}  // namespace pentatron
