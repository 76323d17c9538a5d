// Probes of stage 05.
// ranks: 3
#include "../../../05_pipeline_parallel/pipeline.h"
#include "../../../05_pipeline_parallel/workbench/simulate.h"
#include "model.h"
#include "mpi/array.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

std::string letter(const Instruction& i, int v) {
  const std::string letters[] = {"F", "B", "B", "W"};
  return text(letters[static_cast<int>(i.action)], i.micro_batch,
              (v > 1 || i.chunk != 0 ? " of chunk " + number(i.chunk) : ""));
}

// The micro-batch and chunk after those of `i`: p micro-batches go through a chunk, then through the next.
Instruction next_of(Instruction i, int p, int v, int step) {
  const int first = step > 0 ? 0 : v - 1, last = v - 1 - first;
  if (++i.micro_batch % p != 0) return i;
  if (i.chunk == last) return {i.action, i.micro_batch, first};
  return {i.action, i.micro_batch - p, i.chunk + step};
}

// The first instruction of rank k that is not due. A rank keeps at most so many micro-batches (of a chunk);
// as long as it may, it goes on with a forward. A weight gradient comes `late` micro-batches after its input
// gradient; late < 0: together with it.
void tell_order(const std::string& name, const Instructions& list, int p, int m, int v, int k, int kept,
                int late = -1) {
  Instruction f = {Action::forward, 0, 0},
              b = {late < 0 ? Action::backward : Action::input_gradient, 0, v - 1};
  Instruction w = {Action::weight_gradient, 0, 0};
  const std::string of = text(name, ", p = ", p, ", m = ", m, ": rank ", k, ", ");
  int forwards = 0, backwards = 0, weights = 0;
  for (size_t n = 0;; ++n) {
    const bool ended = n == list.size(), all = backwards == m * v && (late < 0 || weights == m);
    const bool w_due = late >= 0 && weights < m && (backwards - weights > late || backwards == m);
    const bool f_due = !w_due && forwards < m * v && forwards - backwards < kept;
    const Instruction due = w_due ? w : f_due ? f : b;
    if (ended && all) break;
    const std::string step = text(of, "step ", n, ": ");
    if (all) tell_alike(true, step, letter(list[n], v), ", but all is done");
    if (ended)
      tell_alike(true, of, "the list ends after ", n, " instructions, where ", letter(due, v), " is due");
    const Instruction& is = list[n];
    if (is != due) {
      const std::string now = number(forwards - backwards), most = number(kept);
      std::string rule = "micro-batches come in ascending order";
      if (is.micro_batch >= m)
        rule = "there are only " + number(m) +
               " micro-batches, so a warm-up may be shorter than the rank could keep";
      else if (is.action != due.action && letter({is.action, 0, 0}, 1) == letter({due.action, 0, 0}, 1))
        rule = text("of Action::", late < 0 ? "backward" : "input_gradient");
      else if (is.action != due.action && (w_due || is.action == Action::weight_gradient))
        rule = "here weight gradients come " + number(late) + " micro-batches after their input gradients";
      else if (is.action != due.action && f_due && is.micro_batch >= forwards)
        rule = "its forward has to come first";
      else if (is.action != due.action)
        rule = now + (v > 1 ? " forwards without their backward, " : " micro-batches kept, p - k = ") + most +
               " allowed" + (f_due ? ": a rank goes on with forwards as long as it may" : "");
      else if (v > 1 || is.chunk != 0)
        rule = "p micro-batches go through a chunk, then through the next; backward begins at the last chunk";
      tell_alike(true, step, letter(is, v), ", where ", letter(due, v), " is due: ", rule);
    }
    if (w_due) ++w.micro_batch, ++weights;
    if (f_due) f = next_of(f, v == 1 ? m + 1 : p, v, 1), ++forwards;
    if (!w_due && !f_due) b = next_of(b, v == 1 ? m + 1 : p, v, -1), ++backwards;
  }
  SUCCEED();
}

std::string tensor_name(int owner) {
  const std::string names[] = {"the output of rank ", "the gradient of rank ", "the input of rank "};
  return names[std::min(owner / 10, 2)] + number(owner % 10);
}

}  // namespace

TEST_CASE("05.1: the order of 1F1B", "[05.1]") {
  for (const auto& [p, m] : {std::pair(2, 4), std::pair(3, 5), std::pair(4, 2)}) {
    for (int k = p - 1; k >= 0; --k) tell_order("1F1B", one_f_one_b(p, m, k), p, m, 1, k, p - k);
  }
  tell_alike(
      nth(Action::input_gradient, 0, 2, 2).chunk != 1,
      "nth(input_gradient, 0, p = 2, v = 2) is of chunk 0, and should be of 1: each action but forward "
      "is a backward, and backward begins at the last chunk");
  tell_order("with_warm_up(), v = 2", with_warm_up(2, 4, 2, 4, Action::backward), 2, 4, 2, 0, 5);
  tell_order("with_warm_up(), v = 2, 3 forwards", with_warm_up(2, 2, 2, 3, Action::backward), 2, 2, 2, 0, 4);
  tell_alike(with_warm_up(2, 1, 1, 0, Action::input_gradient).back().action != Action::input_gradient,
             "with_warm_up(): its backwards are not the action that the caller gives; ZB-H1 gives another");
}

TEST_CASE("05.2: interleaving", "[05.2]") {
  for (const auto& [p, m, v] :
       {std::tuple(2, 4, 2), std::tuple(2, 6, 3), std::tuple(3, 3, 2), std::tuple(3, 3, 1)}) {
    int kept = (v - 1) * p + 1;  // by the last rank; each before it has two more, or one with a single chunk
    for (int k = p - 1; k >= 0; --k, kept += std::min(v, 2))
      tell_order("interleaved, v = " + number(v), interleaved(p, m, v, k), p, m, v, k, std::min(kept, m * v));
  }
}

TEST_CASE("05.3: ZB-H1", "[05.3]") {
  for (const auto& [p, m] : {std::pair(2, 4), std::pair(3, 5), std::pair(4, 2)}) {
    for (int k = 0; k < p; ++k) {
      Instructions list = zb_h1(p, m, k);  // its end may come in any order
      const auto is_weight = [](const Instruction& i) { return i.action == Action::weight_gradient; };
      const auto end = std::find_if_not(list.rbegin(), list.rend(), is_weight).base();
      std::ranges::sort(end, list.end(), {}, &Instruction::micro_batch);
      tell_order("ZB-H1", list, p, m, 1, k, p - k, k);
    }
  }
}

TEST_CASE("05.4: messages", "[05.4]") {
  const std::tuple<PpSchedule, int, int, int> schedules[] = {{PpSchedule::one_f_one_b, 3, 4, 1},
                                                             {PpSchedule::one_f_one_b, 3, 1, 1},
                                                             {PpSchedule::interleaved, 2, 4, 2},
                                                             {PpSchedule::zb_h1, 3, 4, 1},
                                                             {PpSchedule::zb_v, 2, 4, 2}};
  for (const auto& [kind, p, m, v] : schedules) {
    doing("the messages of ", to_string(kind));
    const Schedule s = make_schedule(kind, p, m, v);
    for (int k = 0; k < p; ++k) {
      const Instructions compute = compute_order(kind, p, m, v, k), &list = s.ranks[k];
      const auto at = [&](const Instruction& i) { return std::ranges::find(list, i) - list.begin(); };
      const std::string of = text(s.name, ": rank ", k, ", ");
      for (size_t n = 0; n < compute.size(); ++n) {
        const Instruction& i = compute[n];
        const int stage = s.stage(k, i.chunk), step = i.action == Action::forward ? 1 : -1;
        const auto of_stage = [&](int other) {
          return text("stage ", other,
                      (other < 0 || other >= s.stages() ? ", which there is not"
                                                        : " on rank " + number(s.placement[other].rank)));
        };
        const auto other_rank = [&](int other) {
          return i.action != Action::weight_gradient && other >= 0 && other < s.stages() &&
                 s.placement[other].rank != k;
        };
        const std::string what = text(of, n == 0 ? "its first instruction " : "", letter(i, v), " (stage ",
                                      stage, " of ", s.stages(), "): ");
        // The place of the message, or -1 if none is due.
        const auto check = [&](const char* function, std::optional<Action> is, int other, bool sends) {
          tell_alike(is.has_value() != other_rank(other), what, function, " names ",
                     is ? "a message" : "no message", ", and ",
                     i.action == Action::weight_gradient
                         ? "nobody waits for a weight gradient"
                         : (other_rank(other) ? "the other end is " : "beside it is ") + of_stage(other));
          tell_alike(is && (is_send(*is) != sends || (stream_of(*is) < 2) != (step == 1)), what, function,
                     " names a message of another kind or direction");
          return is ? at({*is, i.micro_batch, i.chunk}) : -1;
        };
        const auto receive = check("receive_before()", receive_before(s, k, i), stage - step, false);
        const auto sent = check("send_after()", send_after(s, k, i), stage + step, true), here = at(i);
        tell_alike(sent == std::ssize(list), what, "no send has its micro-batch and chunk");
        tell_alike(sent >= 0 && sent != here + 1, what, "its result is not sent right after it");
        if (receive < 0) continue;
        tell_alike(receive == std::ssize(list), what, "no receive has its micro-batch and chunk");
        tell_alike(receive > here, what, "its receive comes after it");
        if (n == 0) continue;
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
  const Schedule s = make_schedule(PpSchedule::interleaved, 2, 4, 2);
  tell_alike(
      with_messages(s, 0, {{Action::forward, 0, 0}, {Action::forward, 0, 1}})[0].chunk != 1,
      "where F0 of chunk 1 follows F0 of chunk 0, its receive is not posted ahead: each chunk has buffers");
}

// ---- 05.5: each function waits for what it has to, and for nothing else.

namespace {
struct Opened : Pipeline {  // its instructions are called one by one
  Opened(const Schedule& s, World& world, TestModel& model)
      : Pipeline(s, world, world.all(), layers_of_rank(model.options, s, world.rank()), *model.transformer,
                 model.stream) {}
  ~Opened() { CUDA_CHECK(cudaDeviceSynchronize()); }
  using Pipeline::chunks_, Pipeline::in_flight, Pipeline::input, Pipeline::InFlight;
  using Pipeline::compute_forward, Pipeline::compute_backward;
  using Pipeline::send, Pipeline::receive_activation, Pipeline::receive_gradient;
};
}  // namespace

TEST_CASE("05.5: receiving and sending", "[05.5]") {
  TestModel model(test_options(3, 16, 2, 1, 24, 32, 16, 2, 8));
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ranks");
  Opened p(make_schedule(PpSchedule::one_f_one_b, 3, 4, 1), world, model);
  const cudaStream_t compute = model.stream;
  const std::vector<Batch> batches = model.loader.load(random_batches(model.options, 1), model.stream);
  const int rank = world.rank(), last = world.ranks() - 1;
  const std::string stream_names[] = {"activations in", "activations out", "gradients in", "gradients out"};
  const auto stream = [&](int message) -> cudaStream_t {  // a stream_of(), or null
    const Communicator* const communicator = p.chunks_[0].links[message].communicator;
    return communicator ? communicator->stream() : nullptr;
  };
  // All ranks, and all their streams, are at the same virtual time.
  const mpi_tests::Array<accum> one(1);
  const auto align = [&] {
    CUDA_CHECK(cudaDeviceSynchronize());
    ranks.all_reduce(one.data(), one.data(), 1);
    CUDA_CHECK(cudaDeviceSynchronize());
  };
  // A stream does something until then (virtual time); the event, if any, is recorded behind it.
  const auto busy_until = [&](cudaStream_t user, Event* event) {
    const double end = busy_time(user).end;
    if (event) event->record(user);
    return end;
  };
  const auto fill = [&] {  // all that is sent or received, of the first two micro-batches
    for (int i = 0; i < 2; ++i) {
      const Activations& a = *p.in_flight({Action::forward, i, 0}).activations;
      write(compute, a.output.data, owned_values<real>(rank, a.output.size()));
      write(compute, a.d_residual.data, owned_values<real>(10 + rank, a.d_residual.size()));
      if (rank > 0)
        write(compute, p.input({Action::forward, i, 0}).x.data,
              owned_values<real>(20 + rank, a.output.size()));
    }
    CUDA_CHECK(cudaDeviceSynchronize());
  };
  for (const bool activation : {true, false}) {
    for (int edge = 0; edge < last; ++edge) {
      const int from = activation ? edge : edge + 1, to = activation ? edge + 1 : edge;
      const std::string kind = activation ? "activation" : "gradient";
      const Instruction send = {activation ? Action::send_activation : Action::send_gradient, 0, 0};
      const Instruction receive = {activation ? Action::receive_activation : Action::receive_gradient,
                                   activation ? 1 : std::min(1, last - to), 0};
      Opened::InFlight& f = p.in_flight(receive);
      const std::string call = rank == from ? "send_" + kind + "()" : "receive_" + kind + "()";
      const auto exchange = [&] {
        doing("rank ", from, " sends its ", kind, " to rank ", to);
        if (rank == from) p.send(send);
        if (rank == to) activation ? p.receive_activation(receive) : p.receive_gradient(receive);
      };
      const bool takes_part = rank == from || rank == to;
      const int own = stream_of(rank == from ? send.action : receive.action);
      const Tensor target = rank == to && activation ? p.input(receive).x : f.activations->d_residual;
      const auto begin_of = [&] {  // the message's on this rank, in virtual time
        ran();
        exchange();
        return time_of(ran(), rank == from ? "send" : "receive", stream_names[own]).begin;
      };
      fill();
      exchange();
      tell(rank == to ? wrong_copy("what " + call + " brings", at(target), activation ? from : 10 + from, 0,
                                   tensor_name)
                      : "");
      // The event behind it, for which compute waits.
      Opened::InFlight& sent = p.in_flight(send);
      Event& came = activation && rank == to ? p.input(receive).came : f.gradient_came;
      Event& over = rank == to ? came : activation ? sent.output_sent : sent.gradient_sent;
      for (const bool waits : {false, true}) {
        const Slow messages(false);
        align();
        ran();
        exchange();
        if (takes_part && waits) wait_event(compute, over);
        busy(compute);
        const std::vector<trace::Interval> all = ran();
        const double begin = time_of(all, "busy_kernel", "compute").begin,
                     end = time_of(all, rank == from ? "send" : "receive", stream_names[own]).end;
        tell_if(takes_part && !waits && begin >= end, here(), call,
                " makes compute wait for the message at once; who needs it waits for its event, later");
        tell_if(takes_part && waits && begin < end, here(), call,
                " does not record, behind the message, the event that says that it is over");
      }
      // What it must wait for: who sends for compute, who receives for those who use the buffer.
      for (const std::string used : {"", "compute", "the send of the gradient that was there before"}) {
        const cudaStream_t out = stream(stream_of(Action::send_gradient));
        const bool by_compute = used == "compute";
        align();
        double until = 0;
        if (rank == from && used.empty()) until = busy_until(compute, nullptr);
        if (rank == to && !used.empty() && (by_compute || (!activation && out)))
          until = busy_until(by_compute ? compute : out, !by_compute  ? &f.gradient_sent
                                                         : activation ? &p.input(receive).used
                                                                      : &f.gradient_read);
        const double begin = begin_of();
        tell_if(takes_part && begin < until, here(), call,
                rank == from ? " does not wait until compute has written it"
                             : " overwrites what " + used + " still reads: it has to wait for " +
                                   (!by_compute  ? "gradient_sent"
                                    : activation ? "used"
                                                 : "gradient_read"));
      }
      // What it must not wait for.
      for (int other = -1; other < message_streams; ++other) {
        if (other == stream_of(send.action) || other == stream_of(receive.action)) continue;
        const cudaStream_t user = other >= 0 ? stream(other) : rank == to ? compute : cudaStream_t();
        align();
        const double until = user ? busy_until(user, nullptr) : 1e9;
        const double begin = begin_of();
        tell_if(takes_part && begin >= until, here(), call, " waits for the stream ",
                (other < 0 ? "of compute" : "\"" + stream_names[other] + "\""), ", and must not: ",
                (other < 0 ? "it is posted ahead, and waits only until its buffer is free"
                           : "a message there may depend on this one, and all hang"));
      }
    }
  }
  // compute_forward() and compute_backward().
  const Instruction f = {Action::forward, 0, 0}, b = {Action::backward, 0, 0};
  auto& in_flight = p.in_flight(f);
  // When compute begins with a pass, and ends.
  const auto pass = [&](bool forward) {
    doing(forward ? "compute_forward(): without the embedding, its input buffer is to be a.input()"
                  : "compute_backward()");
    ran();
    forward ? p.compute_forward(f, batches[0]) : p.compute_backward(b, batches[0]);
    return time_of(ran(), "", "compute");
  };
  const auto tell_wait = [&](bool forward, Action of, Event* event, const std::string& wrong) {
    const cudaStream_t user = stream(stream_of(of));
    align();
    const double until = user ? busy_until(user, event) : 0;
    const cudaStream_t receives = stream(stream_of(Action::receive_gradient));
    if (of == Action::send_gradient && receives) {  // receive_gradient() waits for the event, too
      wait_event(receives, *event);
      in_flight.gradient_came.record(receives);
    }
    tell_if(pass(forward).begin < until, here(), forward ? "compute_forward() " : "compute_backward() ",
            wrong);
  };
  fill();
  tell_wait(true, Action::receive_activation, rank > 0 ? &p.input(f).came : nullptr,
            "does not wait until its input came");
  tell_wait(true, Action::send_activation, &in_flight.output_sent,
            "overwrites an output that is still being sent: it has to wait for output_sent");
  tell_wait(false, Action::receive_gradient, &in_flight.gradient_came,
            "does not wait until its gradient came");
  tell_wait(false, Action::send_gradient, &in_flight.gradient_sent,
            "overwrites a gradient that is still being sent: it has to wait for gradient_sent");
  for (const bool forward : {true, false}) {  // all events are over, and each stream has other work
    align();
    double until = 1e9;
    for (int other = 0; other < message_streams; ++other) {
      if (stream(other)) until = std::min(until, busy_until(stream(other), nullptr));
    }
    tell_if(pass(forward).begin >= until, here(), forward ? "compute_forward()" : "compute_backward()",
            " waits for all of a stream, on which a message of another micro-batch is under way, and should "
            "for the event of its own alone");
  }
  for (const bool whole : {true, false}) {
    const Slow kernels(true);
    align();
    ran();
    p.compute_backward({whole ? Action::backward : Action::input_gradient, 0, 0}, batches[0]);
    const double end = time_of(ran(), "", "compute").end;
    const auto waits = [&](Action of, Event* event) {  // who waits for the event then begins behind the pass
      const cudaStream_t user = stream(stream_of(of));
      if (user) wait_event(user, *event);
      return user ? busy_time(user).begin >= end : whole || of == Action::receive_activation;
    };
    tell_if(
        !waits(Action::receive_activation, rank > 0 ? &p.input(f).used : nullptr), here(),
        "compute_backward() reads its input last, also where it is an input gradient alone, so it records "
        "`used`, and that behind the backward pass");
    tell_if(waits(Action::receive_gradient, &in_flight.gradient_read) != whole, here(), "compute_backward() ",
            whole ? "reads the gradient last, so a whole backward records gradient_read, and that at its end"
                  : "of an input gradient records gradient_read, and the weight gradients read it later");
  }
}

TEST_CASE("05.5: a stage that follows another one on its rank", "[05.5]") {
  TestModel model(test_options(6, 16, 2, 1, 24, 32, 16, 2, 8));
  World world(nullptr, nullptr);
  Opened p(make_schedule(PpSchedule::zb_v, 3, 4, 2), world, model);
  const Batch batch = model.loader.load(random_batches(model.options, 1), model.stream)[0];
  const Stream sends("sends"), receives("receives");
  doing("two stages on one rank: hand_over() copies from one to the other");
  std::string wrong;
  if (world.rank() == world.ranks() - 1) {
    const Instruction f = {Action::forward, 0, 1};
    Opened::InFlight &before = p.in_flight({Action::forward, 0, 0}), &own = p.in_flight(f);
    const Tensor from = before.activations->output, gradient = own.activations->d_residual;
    for (const Tensor& x : {from, gradient})
      write<real>(model.stream, x.data, owned_values<real>(0, x.size()));
    p.compute_forward(f, batch);
    const bool came = at(p.input(f).x) == at(from);
    const double sent = busy_time(sends).end;
    before.gradient_sent.record(sends);
    p.compute_backward({Action::backward, 0, 1}, batch);
    trace::Interval copy = {};
    for (const trace::Interval& i : ran())
      if (i.name == "memcpy" && i.stream == "compute") copy = i;
    wait_event(receives, own.gradient_read);
    const double read = busy_time(receives).begin;
    const double other = busy_time(sends).end;
    own.gradient_came.record(sends);
    p.compute_backward({Action::input_gradient, 0, 1}, batch);
    const double begin = time_of(ran(), "", "compute").begin;
    wrong = begin < other ? "compute_backward() of an input gradient, too, waits until its gradient came"
            : !came       ? "compute_forward() does not copy the output from there to its input"
            : at(before.activations->d_residual) != at(gradient)
                ? "compute_backward() does not copy its gradient there"
            : copy.begin < sent ? "compute_backward() copies over a gradient that is still sent from there"
            : read < copy.end ? "compute_backward() records gradient_read before its gradient is copied there"
                              : "";
  }
  tell(wrong.empty() ? "" : here() + "the previous stage is on this rank, too: " + wrong);
}

}  // namespace pentatron::probes
