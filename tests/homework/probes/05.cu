// Probes of stage 05.
// ranks: 3
#include "../../../05_pipeline_parallel/pipeline.h"
#include "../../../05_pipeline_parallel/workbench/simulate.h"
#include "model.h"
#include "mpi/array.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

using enum Action;

std::string letter(const Instruction& i, int v) {
  const std::string letters[] = {"F", "B", "B", "W"};
  return text(letters[static_cast<int>(i.action)], i.micro_batch,
              (v > 1 || i.chunk != 0 ? " of chunk " + number(i.chunk) : ""));
}

// All forwards or backwards of a rank: p micro-batches go through a chunk, then through the next.
Instructions in_order(Action action, int p, int m, int v) {
  Instructions all;
  for (int first = 0; first < m; first += p) {
    for (int n = 0; n < v; ++n) {
      const int chunk = action == Action::forward ? n : v - 1 - n;
      for (int i = first; i < std::min(first + p, m); ++i) all.push_back({action, i, chunk});
    }
  }
  return all;
}

// The first instruction of rank k that is not due. A rank keeps at most so many micro-batches (of a chunk);
// as long as it may, it goes on with a forward. A weight gradient comes `late` micro-batches after its input
// gradient; late < 0: nowhere.
void tell_order(const std::string& name, const Instructions& list, int p, int m, int v, int k, int kept,
                Action back = backward, int late = -1) {
  const Instructions forwards = in_order(forward, p, m, v), backwards = in_order(back, p, m, v);
  const std::string of = text(name, ", p = ", p, ", m = ", m, ": rank ", k, ", ");
  int f = 0, b = 0, w = late < 0 ? m : 0;  // so many are done
  size_t n = 0;
  for (; b < m * v || w < m; ++n) {
    const bool w_due = w < m && (b - w > late || b == m * v), f_due = !w_due && f < m * v && f - b < kept;
    const Instruction due = w_due ? Instruction{weight_gradient, w, 0} : f_due ? forwards[f] : backwards[b];
    if (n == list.size())
      tell_alike(true, of, "the list ends after ", n, " instructions, where ", letter(due, v), " is due");
    const Instruction& is = list[n];
    const std::string rule =
        is.micro_batch >= m ? text("there are only ", m, " micro-batches, so the warm-up is shorter")
        : is.action == due.action && (v > 1 || is.chunk != 0)
            ? "p micro-batches go through a chunk, then the next; any backward begins at the last chunk"
        : is.action == due.action ? "micro-batches come in ascending order"
        : letter({is.action, 0, 0}, 1) == letter({due.action, 0, 0}, 1)
            ? text("of Action::", back == backward ? "backward" : "input_gradient, which the caller gives")
        : w_due || is.action == weight_gradient
            ? text("here weight gradients come ", late, " micro-batches after their input gradients")
        : f_due && is.micro_batch >= f
            ? "its forward has to come first"
            : text(f - b,
                   v > 1 ? " forwards without their backward, " : " micro-batches kept, p - k = ", kept,
                   " allowed", f_due ? ": a rank goes on with forwards as long as it may" : "");
    tell_alike(is != due, of, "step ", n, ": ", letter(is, v), ", where ", letter(due, v), " is due: ", rule);
    ++(w_due ? w : f_due ? f : b);
  }
  if (n < list.size()) tell_alike(true, of, "step ", n, ": ", letter(list[n], v), ", but all is done");
}

std::string tensor_name(int owner) {
  const std::string names[] = {"the output of rank ", "the gradient of rank ", "the input of rank "};
  return names[std::min(owner / 10, 2)] + number(owner % 10);
}

// As stream_of() counts them.
enum { activations_in, activations_out, gradients_in, gradients_out };
const std::string stream_names[] = {"activations in", "activations out", "gradients in", "gradients out"},
                  message_names[] = {"receive_activation", "send_activation", "receive_gradient",
                                     "send_gradient"};
std::string name_of(std::optional<Action> action) {
  return action && is_message(*action) ? message_names[stream_of(*action)] : "no message";
}

}  // namespace

TEST_CASE("05.1: the order of 1F1B", "[05.1]") {
  for (const auto& [p, m] : {std::pair(2, 4), {3, 5}, {4, 2}}) {
    for (int k = p - 1; k >= 0; --k) tell_order("1F1B", one_f_one_b(p, m, k), p, m, 1, k, p - k);
  }
  tell_order("with_warm_up(input_gradient), v = 2", with_warm_up(2, 4, 2, 4, input_gradient), 2, 4, 2, 0, 5,
             input_gradient);
  tell_order("with_warm_up(), v = 2, 3 forwards", with_warm_up(2, 2, 2, 3, backward), 2, 2, 2, 0, 4);
}

TEST_CASE("05.2: interleaving", "[05.2]") {
  for (const auto& [p, m, v] : {std::tuple(2, 4, 2), {2, 6, 3}, {3, 3, 2}, {3, 3, 1}}) {
    int kept = (v - 1) * p + 1;  // by the last rank; each before it has two more, or one with a single chunk
    for (int k = p - 1; k >= 0; --k, kept += std::min(v, 2))
      tell_order("interleaved, v = " + number(v), interleaved(p, m, v, k), p, m, v, k, std::min(kept, m * v));
  }
}

TEST_CASE("05.3: ZB-H1", "[05.3]") {
  for (const auto& [p, m] : {std::pair(2, 4), {3, 5}, {4, 2}}) {
    for (int k = 0; k < p; ++k) {
      Instructions list = zb_h1(p, m, k);  // its end may come in any order
      const auto is_weight = [](const Instruction& i) { return i.action == weight_gradient; };
      const auto end = std::find_if_not(list.rbegin(), list.rend(), is_weight).base();
      std::ranges::sort(end, list.end(), {}, &Instruction::micro_batch);
      tell_order("ZB-H1", list, p, m, 1, k, p - k, input_gradient, k);
    }
  }
}

TEST_CASE("05.4: messages", "[05.4]") {
  using enum PpSchedule;
  for (const auto& [kind, p, m, v] : {std::tuple(one_f_one_b, 3, 4, 1),
                                      {one_f_one_b, 3, 1, 1},
                                      {interleaved, 2, 4, 2},
                                      {zb_h1, 3, 4, 1},
                                      {zb_v, 2, 4, 2}}) {
    doing("the messages of ", to_string(kind));
    const Schedule s = make_schedule(kind, p, m, v);
    for (int k = 0; k < p; ++k) {
      const Instructions compute = compute_order(kind, p, m, v, k), &list = s.ranks[k];
      const auto at = [&](const Instruction& i) { return std::ranges::find(list, i) - list.begin(); };
      for (size_t n = 0; n < compute.size(); ++n) {
        const Instruction& i = compute[n];
        const bool up = i.action == forward;
        const std::string what =
            text(s.name, ": rank ", k, ", ", n == 0 ? "its first instruction " : "", letter(i, v), " (stage ",
                 s.stage(k, i.chunk), " of ", s.stages(), "): ");
        // The place of the message before or after it, which is due if that stage is on another rank.
        const auto place = [&](bool sends) {
          const auto is = sends ? send_after(s, k, i) : receive_before(s, k, i);
          const auto other = neighbour(s, k, i.chunk, sends == up ? 1 : -1);
          std::optional<Action> due;
          if (other && other->rank != k && up) due = sends ? send_activation : receive_activation;
          if (other && other->rank != k && i.action != weight_gradient && !up)
            due = sends ? send_gradient : receive_gradient;
          tell_alike(is != due, what, sends ? "send_after()" : "receive_before()", " names ", name_of(is),
                     ", and should name ", name_of(due), ": ",
                     i.action == weight_gradient ? "nobody waits for a weight gradient"
                     : !other
                         ? "there is no stage beside it"
                         : text("stage ", s.stage(other->rank, other->chunk), " is on rank ", other->rank));
          return due ? at({*due, i.micro_batch, i.chunk}) : -1;
        };
        const auto receive = place(false), send = place(true);
        tell_alike(send >= 0 && send != at(i) + 1, what,
                   "no send of its micro-batch and chunk is right after it");
        tell_alike(receive > at(i), what, "no receive of its micro-batch and chunk comes before it");
        if (receive < 0 || n == 0) continue;
        const Instruction& before = compute[n - 1];
        const bool same = before.micro_batch == i.micro_batch && before.chunk == i.chunk;
        tell_alike(same && receive < at(before), what, "its receive is posted before ", letter(before, v),
                   ", which makes the buffer of this micro-batch");
        tell_alike(!same && receive > at(before), what, "its receive is posted after ", letter(before, v),
                   ", and should be before it, so that the transfer runs meanwhile");
        tell_alike(n > 1 && !same && receive < at(compute[n - 2]), what,
                   "its receive is posted more than one compute instruction ahead");
      }
    }
    try {
      simulate(s);
    } catch (const ScheduleError& error) {
      tell_alike(true, s.name, ": ", error.what());
    }
  }
  const Schedule s = make_schedule(interleaved, 2, 4, 2);
  const Instructions list = with_messages(s, 0, {{forward, 0, 0}, {forward, 0, 1}});
  tell_alike(list[0].chunk != 1, "the receive of F0 of chunk 1, after F0 of chunk 0, is not posted ahead");
}

// ---- 05.5: each function waits for what it has to, and for nothing else.

namespace {

struct Opened : Pipeline {  // its instructions are called one by one
  Opened(const Schedule& s, World& world, TestModel& model)
      : Pipeline(s, world, world.all(), layers_of_rank(model.options, s, world.rank()), *model.transformer,
                 model.stream) {}
  ~Opened() { CUDA_CHECK(cudaDeviceSynchronize()); }
  using Pipeline::chunks_, Pipeline::in_flight, Pipeline::input, Pipeline::InFlight, Pipeline::Input;
  using Pipeline::compute_backward, Pipeline::send, Pipeline::receive_activation, Pipeline::receive_gradient;

  Time pass(const Instruction& i, const Batch& batch) {  // when compute begins with it, and ends
    ran();
    i.action == Action::forward ? compute_forward(i, batch) : compute_backward(i, batch);
    return time_of(ran(), "", "compute");
  }
};

// A call has to wait for a stream's work (null: of no stream), or for the event that is recorded behind it;
// or must not.
struct Wait {
  cudaStream_t stream;
  Event* event;
  bool due;
  std::string otherwise;
};

// When a stream begins that waits for the event.
double begin_behind(const Event& event) {
  const Stream reader("reader");
  wait_event(reader, event);
  return busy_time(reader).begin;
}

}  // namespace

TEST_CASE("05.5: receiving and sending", "[05.5]") {
  TestModel model(test_options(3, 16, 2, 1, 24, 32, 16, 2, 8));
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  Opened p(make_schedule(PpSchedule::one_f_one_b, 3, 4, 1), world, model);
  const cudaStream_t compute = model.stream;
  const Batch batch = model.loader.load(random_batches(model.options, 1), compute)[0];
  const int rank = world.rank(), last = world.ranks() - 1;
  Opened::InFlight& in_flight = p.in_flight({forward, 1, 0});
  Opened::Input* const input = rank > 0 ? &p.input({forward, 1, 0}) : nullptr;
  const Tensor output = in_flight.activations->output, gradient = in_flight.activations->d_residual;
  Event* const events[] = {input ? &input->came : nullptr, &in_flight.output_sent, &in_flight.gradient_came,
                           &in_flight.gradient_sent};
  cudaStream_t streams[message_streams] = {};  // null: there is none
  for (int i = 0; i < message_streams; ++i) {
    if (const Communicator* c = p.chunks_[0].links[i].communicator) streams[i] = c->stream();
  }
  // All ranks, and all their streams, are at the same virtual time.
  const mpi_tests::Array<accum> one(1);
  const auto align = [&] {
    CUDA_CHECK(cudaDeviceSynchronize());
    ranks.all_reduce(one.data(), one.data(), 1);
    CUDA_CHECK(cudaDeviceSynchronize());
  };
  // What a call, which returns its time on the stream `own`, waits for; it must not for all of another stream
  // of messages. Without `waits` nothing is asked on this rank.
  const auto tell_waits = [&](const std::string& name, std::vector<Wait> waits, int own, const auto& call) {
    for (int other = 0; other < message_streams && !waits.empty(); ++other)
      waits.push_back({other == own ? nullptr : streams[other], nullptr, false,
                       " waits for the whole stream \"" + stream_names[other] +
                           "\", and must not: a message there may depend on this call, and all hang"});
    waits.resize(7);  // the ranks call it together
    for (const Wait& wait : waits) {
      align();
      const double until = wait.stream ? busy_time(wait.stream).end : 0;
      if (wait.stream && wait.event) wait.event->record(wait.stream);
      const bool waited = call().begin >= until;
      tell_if(wait.stream && waited != wait.due, here(), name, wait.otherwise);
    }
  };
  for (const bool activation : {true, false}) {
    for (int edge = 0; edge < last; ++edge) {
      const int from = activation ? edge : edge + 1, to = activation ? edge + 1 : edge;
      const bool takes_part = rank == from || rank == to;
      const int own = (activation ? activations_in : gradients_in) + (rank == from ? 1 : 0);
      const std::string call = message_names[own] + "()";
      const auto exchange = [&] {
        doing("rank ", from, " sends its ", activation ? "activation" : "gradient", " to rank ", to);
        ran();
        if (rank == from) p.send({activation ? send_activation : send_gradient, 1, 0});
        if (rank == to && activation) p.receive_activation({receive_activation, 1, 0});
        if (rank == to && !activation) p.receive_gradient({receive_gradient, 1, 0});
        return time_of(ran(), "", stream_names[own]);
      };
      const Tensor target = activation && input ? input->x : gradient;
      const size_t size = target.size();
      write(compute, output.data, owned_values<real>(rank, size));
      write(compute, gradient.data, owned_values<real>(10 + rank, size));
      if (input) write(compute, input->x.data, owned_values<real>(20 + rank, size));
      CUDA_CHECK(cudaDeviceSynchronize());
      exchange();
      const int owner = activation ? from : 10 + from;
      tell(rank == to ? wrong_copy("what " + call + " brings", at(target), owner, 0, tensor_name) : "");
      {
        const Slow messages(false);
        align();
        const double end = exchange().end;
        tell_if(takes_part && begin_behind(*events[own]) < end, here(), call,
                " does not record, behind the message, the event that says that it is over");
        tell_if(takes_part && busy_time(compute).begin >= end, here(), call,
                " makes compute wait for the message at once; who needs it waits for its event, later");
      }
      for (const bool sends : {true, false}) {  // if one end waits, the message is late on the other one, too
        std::vector<Wait> waits;
        if (sends && rank == from)
          waits = {{compute, nullptr, true, " does not wait until compute has written it"}};
        if (!sends && rank == to)
          waits = {{compute, activation ? &input->used : &in_flight.gradient_read, true,
                    text(" overwrites what compute still reads: it has to wait for ",
                         activation ? "used" : "gradient_read")},
                   {activation ? nullptr : streams[gradients_out], events[gradients_out], true,
                    " overwrites a gradient that is still being sent: it has to wait for gradient_sent"},
                   {compute, nullptr, false,
                    " waits for all of compute, and should wait only until its buffer is free"}};
        tell_waits(call, waits, own, exchange);
      }
    }
  }
  const auto forwards = [&] { return p.pass({forward, 1, 0}, batch); };
  doing("compute_forward(): without the embedding, its input buffer is to be a.input()");
  tell_waits("compute_forward()",
             {{streams[activations_in], events[activations_in], true, " does not wait until its input came"},
              {streams[activations_out], events[activations_out], true,
               " overwrites an output that is still being sent: it has to wait for output_sent"}},
             -1, forwards);
  const auto backwards = [&] { return p.pass({backward, 1, 0}, batch); };
  doing("compute_backward()");
  tell_waits("compute_backward()",
             {{streams[gradients_in], events[gradients_in], true, " does not wait until its gradient came"},
              {rank == last ? streams[gradients_out] : nullptr, events[gradients_out], true,
               " overwrites a gradient that is still being sent: it has to wait for gradient_sent"}},
             -1, backwards);
  for (const bool whole : {true, false}) {
    const Slow kernels(true);
    align();
    const double end = p.pass({whole ? backward : input_gradient, 1, 0}, batch).end;
    tell_if(input && begin_behind(input->used) < end, here(),
            "compute_backward(), also of an input gradient, records `used` behind the pass, which reads its "
            "input");
    const bool read = begin_behind(in_flight.gradient_read) >= end;
    tell_if(rank < last && read != whole, here(), "compute_backward() ",
            whole ? "reads the gradient last, so a whole backward records gradient_read, and that at its end"
                  : "of an input gradient records gradient_read, and the weight gradients read it later");
  }
}

TEST_CASE("05.5: a stage that follows another one on its rank", "[05.5]") {
  TestModel model(test_options(6, 16, 2, 1, 24, 32, 16, 2, 8));
  World world(nullptr, nullptr);
  Opened p(make_schedule(PpSchedule::zb_v, 3, 4, 2), world, model);
  const Batch batch = model.loader.load(random_batches(model.options, 1), model.stream)[0];
  doing("two stages on one rank: hand_over() copies from one to the other");
  std::string wrong;
  if (world.rank() == world.ranks() - 1) {
    const Instruction f = {forward, 0, 1};
    Opened::InFlight &before = p.in_flight({forward, 0, 0}), &own = p.in_flight(f);
    const Tensor output = before.activations->output, gradient = own.activations->d_residual;
    for (const Tensor& x : {output, gradient})
      write<real>(model.stream, x.data, owned_values<real>(0, x.size()));
    p.pass(f, batch);
    const bool came = at(p.input(f).x) == at(output);
    const Stream sends("sends"), receives("receives");
    const double sent = busy_time(sends).end;
    before.gradient_sent.record(sends);
    p.compute_backward({backward, 0, 1}, batch);
    Time copy;
    for (const trace::Interval& i : ran())
      if (i.name == "memcpy" && i.stream == "compute") copy = {i.begin, i.end};
    const double read = begin_behind(own.gradient_read), received = busy_time(receives).end;
    own.gradient_came.record(receives);
    const double begin = p.pass({input_gradient, 0, 1}, batch).begin;
    wrong = begin < received ? "compute_backward() of an input gradient, too, waits until its gradient came"
            : !came          ? "compute_forward() does not copy the output from there to its input"
            : at(before.activations->d_residual) != at(gradient)
                ? "compute_backward() does not copy its gradient there"
            : copy.begin < sent ? "compute_backward() copies over a gradient that is still sent from there"
            : read < copy.end ? "compute_backward() records gradient_read before its gradient is copied there"
                              : "";
  }
  tell(wrong.empty() ? "" : here() + "the previous stage is on this rank, too: " + wrong);
}

}  // namespace pentatron::probes
