// Probes of stage 03.
// ranks: 4
#include <map>

#include "03_zero/zero.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

// Unit u has 2^u times as many elements as unit 0, so a size names its unit.
constexpr int units = 4;
const std::array<std::string, units> unit_names = {"the embedding", "layer 0", "layer 1", "the head"};

struct Opened : Zero {
  using Zero::units_, Zero::sum_copies;
};

// A rank with a group of parameters, and ZeRO.
struct Shards : About {
  World world{nullptr, nullptr};
  const int shards, rank = world.rank();  // ranks that hold a copy in shards; this one
  Communicator shard_ranks{world, every(rank - rank % shards, shards), "shard"};
  Communicator replicate_ranks{world, every(rank % shards, world.ranks() / shards, shards), "replicate"};
  Stream compute{"compute"};
  Parameters parameters{{.groups = {{shard_ranks.rank(), shard_ranks.ranks(), replicate_ranks.rank()}}}};
  ParameterGroup& group = parameters.group();
  MemoryBytes before = memory_in_use(), behind;  // the constructor
  std::unique_ptr<Zero> zero;

  explicit Shards(int stage, int count = mpi_tests::ranks()) : shards(count) {
    for (int unit = 0; unit < units; ++unit)
      parameters.declare({"unit", unit, 2 * shards, int64_t{1} << unit, TensorSplit::replicated_outside});
    with = "stage " + number(stage) + ": ";
    calls("the constructor");
    zero = std::make_unique<Zero>(stage, group, shard_ranks, replicate_ranks, compute);
    behind = memory_in_use();
  }
  void tell_no_more_memory() {
    const int64_t more =
        elements_of<real>(Purpose::weights, behind) + elements_of<accum>(Purpose::gradients, behind);
    about = "two steps";
    tell_if(more > 0, "take memory for ", more, " elements more; the constructor has it all");
  }
};

// The last operation of this name (empty: of any) on a stream, or an empty one.
trace::Interval last_of(const std::vector<trace::Interval>& all, const std::string& name,
                        const std::string& stream) {
  trace::Interval last;
  for (const trace::Interval& i : all) {
    if ((name.empty() || i.name == name) && i.stream == stream) last = i;
  }
  return last;
}

std::string shard_name(int owner) {  // the owner of a value
  if (owner >= 100) return shard_name(owner - 100) + " before the update";
  return text(unit_names[owner / 10], "'s shard ", owner % 10);
}

}  // namespace

TEST_CASE("03.1: own parts", "[03.1]") {
  for (const int stage : {1, 2, 3}) {
    Shards s(stage);
    const std::vector<Shard> shards = s.parameters.shards();
    s.tell_if(shards.size() != units, "adds ", shards.size(), " shards for ", units,
              " units: the optimizer updates what add_shard names");
    size_t all = 0;
    for (const Shard& shard : shards) {
      const size_t size = s.group.shard_size(shard.unit), begin = s.rank * size;
      s.about = unit_names[shard.unit] + ":";
      s.tell_if(shard.begin != begin || shard.end != begin + size, "its shard is [", shard.begin, ", ",
                shard.end, "), and should be [", begin, ", ", begin + size, "): rank r owns the r-th part");
      const auto tell_array = [&](const std::string& of, const auto* whole, const auto* own, int sharded) {
        s.tell_if((whole == nullptr) == (stage < sharded), of, " are ",
                  whole ? "whole, and should be a shard" : "not there as a whole");
        s.tell_if(whole && own != whole + begin, "the optimizer's ", of, " begin at element ", own - whole,
                  " of the whole ones, and should at ", begin);
      };
      tell_array("weights", s.group.weights(shard.unit), shard.weights, 3);
      tell_array("gradients", s.group.gradients(shard.unit), shard.gradients, 2);
      all += s.group.size(shard.unit);
    }
    const auto tell_memory = [&](const std::string& of, int64_t elements, bool sharded) {
      const auto due = static_cast<int64_t>(sharded ? all / s.shards + 2 * s.group.largest_size() : all);
      s.about = "memory of " + of + ":";
      s.tell_if(elements != due, elements, " elements in place of ", due, ", ",
                sharded ? "a shard of each unit and two unit buffers" : "all units");
    };
    tell_memory("weights", elements_of<real>(Purpose::weights, s.before), stage == 3);
    tell_memory("gradients", elements_of<accum>(Purpose::gradients, s.before), stage >= 2);
  }
}

namespace {

constexpr int none = -1;  // no unit

bool has(const std::vector<int>& all, int unit) { return std::ranges::find(all, unit) != all.end(); }

// `used_by_passes`: forward and backward use the weights; otherwise they are read behind weights_changed().
void check_weights(int stage, bool used_by_passes) {
  Shards s(stage);
  const std::vector<int> forward = {0, 1, 2, 3, none, none}, backward = {3, 2, 1, none, none};
  std::vector<int> held, before_update;                // units that are whole; those before the last update
  std::array<trace::Interval, units> gathered;         // the last gather of each unit
  std::map<const real*, std::pair<int, double>> used;  // whose weights compute read there last, until when
  double written = 0;                                  // when the optimizer had written weights
  int step = 0;
  ran();
  // The last call gathers the units of `due` that are not whole yet, in this order; or `some` of them.
  const auto tell_gathers = [&](const std::vector<trace::Interval>& log, const std::vector<int>& due,
                                bool some = false) {
    size_t last = 0;  // in `due`
    for (const trace::Interval& i : log) {
      if (i.stream != "shard") continue;
      s.tell_if(i.begin < written, "does not make the gathers wait until the optimizer has written weights");
      if (i.name == "busy_kernel") continue;
      s.tell_if(i.name != "all_gather", "runs ", i.name,
                i.name == "group" ? ": it begins at its end, behind what is recorded behind its gathers"
                                  : " beside the gathers, which need no copy");
      int unit = 0;
      const double elements = i.bytes / sizeof(real) * s.shards / (s.shards - 1);
      while (unit < units && elements != s.group.size(unit)) ++unit;
      s.tell_if(unit == units, "gathers ", elements, " elements, and no unit has so many");
      s.tell_if(
          has(held, unit), "gathers ", unit_names[unit], " again: it is there",
          stage < 3 ? "" : ", as its buffer's `unit` has to say; no prefetch may take the buffer in use");
      const size_t place = std::ranges::find(due, unit) - due.begin();
      s.tell_if(place == due.size(), "gathers ", unit_names[unit], ": ",
                due.empty() ? "stage 3 gathers a unit before its use"
                            : "only two units are whole at once, those which the pass uses now and next");
      s.tell_if(place < last, "gathers ", unit_names[unit], " after ", unit_names[due[last]],
                ", and it is used first: gathers end in their order");
      last = place;
      held.push_back(unit);
      gathered[unit] = i;
    }
    if (stage == 3 && held.size() > 2) std::erase_if(held, [&](int unit) { return !has(due, unit); });
    for (const int unit : due) {
      if (some || unit == none || has(held, unit)) continue;
      tell_if(stage == 3 && has(before_update, unit), here(), s.with, unit_names[unit],
              " is not gathered again: a buffer has it from before the update, and weights_changed() marks "
              "both as stale");
      s.tell_if(true, "does not gather ", unit_names[unit],
                stage < 3        ? " over shard_ranks, and a rank needs the shards of all others"
                : unit == due[0] ? ", which is used now"
                                 : ", which is next: a gather hides behind the use of the unit before");
    }
  };
  const auto owner = [&](int unit, int rank) { return 100 * (1 - step) + 10 * unit + rank; };
  const auto tell_values = [&](const std::string& when, int unit, const std::span<real>& seen) {
    const size_t size = s.group.shard_size(unit);
    std::string wrong;
    for (int rank = 0; rank < s.shards && wrong.empty(); ++rank)
      wrong = wrong_copy(s.with + when + ": shard " + number(rank), seen.subspan(rank * size, size),
                         owner(unit, rank), rank * size, shard_name);
    tell(wrong.ends_with("never written") ? wrong + ": gather() sends own_weights, which is all a rank has"
                                          : wrong);
  };
  const auto use = [&](Pass pass, int unit, int next, int after_next) {
    const std::string name = (pass == Pass::forward ? "forward of " : "backward of ") + unit_names[unit];
    s.calls("before_weights() in " + name,
            stage < 3 ? "gathers nothing, and waits" : "makes weights(unit) a buffer with the whole unit");
    // In step 0 of stage 3 gathers come before compute, in step 1 later.
    if (step == 1 || stage < 3) busy(s.shard_ranks.stream(), moves(2e10));
    s.zero->before_weights(unit, pass);
    const real* const weights = s.group.weights(unit);
    s.tell_if(weights == nullptr, "leaves no weights",
              stage < 3 ? ": after_weights() takes them in stage 3 alone" : "");
    busy(s.compute);  // it reads the weights
    const std::span<real>& seen = read(s.compute, weights, s.group.size(unit));
    const std::vector<trace::Interval> log = ran();
    tell_gathers(log, stage < 3 ? std::vector<int>{} : std::vector{unit, next});
    const trace::Interval reads = last_of(log, "busy_kernel", "compute"), own = gathered[unit];
    s.tell_if(reads.begin < own.end, "does not wait until the unit is gathered: it waits for weights_came",
              stage < 3 ? "" : ", which gathered_buffer() records behind the gather");
    tell_if(reads.waited_for != 0 && reads.waited_for != own.id, here(), s.with, name,
            " waits for more than its own gather: it waits for weights_came of the unit, which ",
            stage < 3 ? "weights_changed()" : "gathered_buffer()", " records right behind the gather");
    const auto [user, until] = used[weights];
    tell_if(user != unit && own.begin < until, here(), s.with, unit_names[unit],
            " is gathered into a buffer in which compute still reads ", unit_names[user],
            ": it waits for `free`, which after_weights() records on the stream of compute");
    used[weights] = {unit, reads.end};
    tell_values(text("step ", step, ", ", name), unit, seen);
    s.calls("after_weights() in " + name);
    s.zero->after_weights(unit, pass);
    tell_gathers(ran(), stage < 3 ? std::vector<int>{} : std::vector{next, after_next}, true);
  };
  for (; step < 2; ++step) {
    busy(s.compute);
    for (const Shard& shard : s.parameters.shards())
      write(s.compute, shard.weights,
            owned_values<real>(owner(shard.unit, s.rank), shard.size(), shard.begin));
    written = time_of(ran(), "memcpy", "compute").end;
    s.calls("weights_changed()",
            stage < 3 ? "gathers: each rank sends a shard, shard_size elements, and weights(unit) get all"
                      : "gathers nothing, and marks the buffers as stale");
    s.zero->weights_changed();
    busy(s.shard_ranks.stream());  // the next gather comes no earlier
    before_update = std::exchange(held, {});
    tell_gathers(ran(), stage < 3 ? forward : std::vector<int>{});
    for (int unit = 0; unit < units && stage < 3 && !used_by_passes; ++unit) {
      const Stream reader("reader");
      wait_event(reader, static_cast<Opened&>(*s.zero).units_[unit].weights_came);
      s.tell_if(busy_time(reader).begin < gathered[unit].end, "does not record weights_came of ",
                unit_names[unit], " behind its gather");
      const std::span<real>& seen = read(reader, s.group.weights(unit), s.group.size(unit));
      ran();
      tell_values("after weights_changed() " + unit_names[unit], unit, seen);
    }
    for (const Pass pass : {Pass::forward, Pass::backward, Pass::forward, Pass::backward}) {
      const std::vector<int>& order = pass == Pass::forward ? forward : backward;
      for (size_t i = 0; used_by_passes && order[i] != none; ++i)
        use(pass, order[i], order[i + 1], order[i + 2]);
    }
  }
  s.tell_no_more_memory();
}

// sum_copies() alone, of the last unit's shard.
void tell_sum_copies(Shards& s) {
  const Shard shard = s.parameters.shards().back();
  const auto due = static_cast<int64_t>(shard.size());
  const Sum sum = {.ranks = s.replicate_ranks.ranks()};
  write(s.compute, shard.gradients, sum.values(s.replicate_ranks.rank(), shard.size()));
  s.calls("sum_copies(" + unit_names[shard.unit] + ")", text("sums own_gradients, ", due, " elements"));
  const double written = busy_time(s.shard_ranks.stream()).end;  // the shard, and by now the terms, too
  static_cast<Opened&>(*s.zero).sum_copies(shard.unit);
  busy(s.shard_ranks.stream()), busy(s.compute);
  const std::vector<trace::Interval> log = ran();
  const Time sums = time_of(log, "all_reduce", "replicate");
  const int64_t elements = traffic(s.replicate_ranks, "all_reduce").elements;
  s.tell_if(elements != due, "sums ", elements, " elements over the copies, and should ", due,
            ", those of the own shard");
  s.tell_if(sums.begin < written,
            "does not wait for the stream of the reduce-scatter, which writes the shard");
  s.tell_if(apart(time_of(log, "busy_kernel", "shard"), sums),
            "makes the next reduce-scatter wait for its sum, which has a stream of its own");
  s.tell_if(apart(time_of(log, "busy_kernel", "compute"), sums),
            "makes compute wait for its sum, and backward should hide it");
  tell(sum.wrong(s.with + "after sum_copies() the own shard", at(shard.gradients, shard.size())));
}

// Two steps of three micro-batches, of which the second one has zeros. `shard_ranks`: those of a copy.
void check_gradients(int stage, int shard_ranks) {
  Shards s(stage, shard_ranks);
  const int n = mpi_tests::ranks();
  const Sum sum = {.parts = 2, .part = "non-zero micro-batch"};
  const std::string operation = stage == 0 ? "all_reduce" : "reduce_scatter";
  DeviceArena memory(Purpose::activations);
  const AccumTensor term = memory.matrix<accum>(2 * n, 1 << units);
  if (n > shard_ranks) tell_sum_copies(s);
  // In virtual time: until when what lies there is reduced; when all is, and the copies are summed.
  std::map<const accum*, double> reduced_until;
  double reduced = 0, summed = 0;
  uint64_t last_sum = 0, last_reduce = 0;  // what the streams of both ran last
  ran();
  const auto backward_of = [&](int unit, int step, int micro_batch) {
    const bool last = micro_batch == 2;
    const std::string of = text("(", unit_names[unit], ") in micro-batch ", micro_batch);
    s.calls("before_gradients" + of, "gives backward memory for the whole unit");
    s.zero->before_gradients(unit);
    const Gradient gradient = s.parameters.gradients(unit);
    accum* const data = gradient.sum.data;
    s.tell_if(data == nullptr, "leaves no memory for gradients");
    s.tell_if(stage >= 2 && gradient.add,
              "gives memory which after_gradients() has not taken back: backward adds to what lies there");
    busy(s.compute);
    const std::vector<accum> zeros(gradient.sum.size());
    write(s.compute, term.data,
          micro_batch == 1 ? zeros : sum.values(s.rank + n * micro_batch / 2, zeros.size()));
    accumulate({term.data, gradient.sum.rows, gradient.sum.columns}, gradient, s.compute);
    std::vector<trace::Interval> log = ran();
    const Time writes = time_of(log, "", "compute");
    const uint64_t waited_for = last_of(log, "busy_kernel", "compute").waited_for;
    s.tell_if(std::ranges::count(log, "memset", &trace::Interval::name) > 0,
              "clears memory, and backward assigns");
    s.tell_if(
        waited_for != 0 && (waited_for == last_sum || waited_for == last_reduce),
        "or after_gradients() before it makes compute wait for the sum of the unit before, which backward "
        "should hide: compute waits for its buffer's `free`, and for all sums at the end of the step");
    s.tell_if(writes.begin < reduced_until[data],
              "does not wait until the memory has been read: `free` is recorded behind the last operation "
              "that reads it, on the stream of that operation");

    const int64_t size = s.group.size(unit), due = last || stage >= 2 ? size : 0;
    s.calls("after_gradients" + of, text("reduces the ", size, " elements of the unit"));
    if (step == 0) {  // then the reduce-scatter is the latest, then the sum of the copies; in step 1 compute
      busy(s.shard_ranks.stream(), moves(3e10));
      busy(s.replicate_ranks.stream(), moves(2e10));
    }
    s.parameters.end_gradients(unit, last);
    s.zero->after_gradients(unit, last);
    log = ran();
    const Time reduces = time_of(log, operation, "shard"), sums = time_of(log, "all_reduce", "replicate");
    const double shard_written = time_of(log, "", "shard").end;
    s.tell_if(reduces.begin < writes.end, "reduces, and does not wait until backward has written");
    for (const trace::Interval& i : log) {
      const bool of_shard = i.stream == "shard", busy = i.name == "busy_kernel";
      s.tell_if(of_shard && i.waited_for != 0 && i.waited_for == last_sum,
                "makes the reduce-scatter wait until the copies have summed the unit before; it need not");
      s.tell_if(of_shard && !busy && i.name != operation && micro_batch == 0, "runs ", i.name,
                " beside the reduce-scatter, which writes the first sum to own_gradients (`add` is false)");
      if (i.name != "accumulate_kernel") continue;
      s.tell_if(i.begin < reduces.end,
                "adds the sum of this micro-batch, and does not wait for the reduce-scatter that makes it");
      const auto added = static_cast<size_t>(i.bytes / (3 * sizeof(accum)));
      s.tell_if(added != s.group.shard_size(unit), "adds ", added, " elements, and a shard has ",
                s.group.shard_size(unit));
    }
    s.tell_if(sums.begin < shard_written, "sums the copies before it reduces");
    const int64_t elements = traffic(s.shard_ranks, operation).elements;
    s.shard_ranks.reset_traffic();
    s.tell_if(elements != due, "reduces ", elements, " elements with ", operation, " in place of ", due,
              due == 0 ? ": only the last micro-batch of a step may, or a sum is summed again"
              : last   ? ""
                       : ": two unit buffers have no room to add up micro-batches first");
    s.tell_if(!last && sums.end > 0,
              "sums the copies, and may after the last one only: their sum would be summed again");
    s.tell_if(last && n > shard_ranks && sums.end == 0, "does not sum the copies");
    if (due > 0) reduced = reduced_until[data] = shard_written;
    summed = std::max(summed, sums.end);
    last_sum = last_of(log, "", "replicate").id, last_reduce = last_of(log, "", "shard").id;
  };
  for (int step = 0; step < 2; ++step) {
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      for (int unit = units - 1; unit >= 0; --unit) backward_of(unit, step, micro_batch);
    }
    s.calls("finish_gradient_sync()");
    s.zero->finish_gradient_sync();
    const double begin = busy_time(s.compute).begin;
    s.tell_if(begin < std::max(reduced, summed), "does not make compute wait for the sums of ",
              begin < reduced ? "the shard ranks" : "the copies", ", which the optimizer reads next");
    std::string wrong;
    for (const Shard& shard : s.parameters.shards()) {
      if (wrong.empty())
        wrong = sum.wrong(text(s.with, "step ", step + 1, ", shard of ", unit_names[shard.unit]),
                          at(shard.gradients, shard.size()), shard.begin);
    }
    if (step == 1 && !wrong.empty()) wrong += ". The step before was right: its sum is left, and added to";
    tell(wrong);
  }
  s.tell_no_more_memory();
}

}  // namespace

TEST_CASE("03.2: weights_changed", "[03.2]") {
  Shards s(0);
  s.calls("weights_changed()", "gathers nothing, as each rank has updated all weights");
  s.zero->weights_changed();
  for (const int stage : {3, 1, 2}) check_weights(stage, false);  // in stage 3 it records no event
  doing("right alone");
}
TEST_CASE("03.2, 03.4: weights of each use", "[03.2][03.4]") {
  for (const int stage : {3, 1, 2}) check_weights(stage, true);
}
TEST_CASE("03.3: gradients", "[03.3]") {
  for (const int stage : {0, 1, 2, 3}) check_gradients(stage, mpi_tests::ranks());
  doing("right alone");
}
TEST_CASE("03.3, 03.5: the sum of the copies", "[03.3][03.5]") {
  for (const int stage : {1, 2, 3}) check_gradients(stage, 2);
}

}  // namespace pentatron::probes
