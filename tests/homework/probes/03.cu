// Probes of stage 03.
// ranks: 4
#include <map>

#include "03_zero/zero.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

// Unit u has 2^u times as many elements as unit 0, so a sum of sizes names its units.
constexpr int units = 4;
const std::array<std::string, units> unit_names = {"the embedding", "layer 0", "layer 1", "the head"};

struct Opened : Zero {
  using Zero::units_, Zero::sum_copies;
};

// A rank with a group of parameters, and ZeRO.
struct Shards {
  World world{nullptr, nullptr};
  const int shards, rank = world.rank();  // ranks that hold a copy in shards; this one
  Communicator shard_ranks{world, every(rank - rank % shards, shards), "shard"};
  Communicator replicate_ranks{world, every(rank % shards, world.ranks() / shards, shards), "replicate"};
  Stream compute{"compute"};
  Parameters parameters{{.groups = {{shard_ranks.rank(), shard_ranks.ranks(), replicate_ranks.rank()}}}};
  MemoryBytes before = memory_in_use(), behind;  // the constructor
  std::unique_ptr<Zero> zero;
  std::string with;
  int64_t smallest, all = 0, largest = 0;

  explicit Shards(int stage, int count = mpi_tests::ranks()) : shards(count) {
    for (int unit = 0; unit < units; ++unit)
      parameters.declare({"unit", unit, 2 * shards, int64_t{1} << unit, TensorSplit::replicated_outside});
    for (int unit = 0; unit < units; ++unit) all += group().size(unit);
    smallest = group().size(0), largest = group().largest_size();
    with = "stage " + number(stage) + ": ";
    doing(with, "the constructor");
    zero = std::make_unique<Zero>(stage, group(), shard_ranks, replicate_ranks, compute);
    behind = memory_in_use();
  }
  ParameterGroup& group() { return parameters.group(); }

  // Memory beside what the stage needs: shards or whole units, and two unit buffers.
  void tell_memory(int stage) {
    for (const bool weights : {true, false}) {
      const bool sharded = stage >= (weights ? 3 : 2);
      const int64_t needed = sharded ? all / shard_ranks.ranks() + 2 * largest : all;
      const int64_t elements = weights ? elements_of<real>(Purpose::weights, before)
                                       : elements_of<accum>(Purpose::gradients, before);
      tell_if(elements != needed, here(), with, "memory of ", weights ? "weights: " : "gradients: ", elements,
              " elements in place of ", needed, ". ",
              elements < needed
                  ? "Shards alone are too little here"
                  : text("All units have ", all, sharded ? ", but only two whole ones are kept" : ""));
    }
  }
  void tell_no_more_memory() {
    const int64_t more =
        elements_of<real>(Purpose::weights, behind) + elements_of<accum>(Purpose::gradients, behind);
    tell_if(more > 0, here(), with, "two steps take memory for ", more,
            " elements more; the constructor has it all");
  }
  // The units of which something was gathered or reduced since the last call, as bits.
  int64_t units_in(const std::string& operation) {
    const int64_t elements = traffic(shard_ranks, operation).elements;
    shard_ranks.reset_traffic();
    return elements / smallest;
  }
};

std::string names_of(int64_t bits) {
  if (bits >> units) return "more than all units";
  std::string text;
  for (int unit = 0; unit < units; ++unit) {
    if (bits >> unit & 1) text += (text.empty() ? "" : " and ") + unit_names[unit];
  }
  return text.empty() ? "nothing" : text;
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
    tell_if(shards.size() != units, here(), s.with, shards.size(), " shards were added for ", units,
            " units: the optimizer updates what add_shard names");
    for (const Shard& shard : shards) {
      const size_t size = s.group().shard_size(shard.unit), begin = s.shard_ranks.rank() * size;
      const std::string of = here() + s.with + unit_names[shard.unit] + ": ";
      tell_if(shard.begin != begin || shard.end != begin + size, of, "its shard is [", shard.begin, ", ",
              shard.end, "), and should be [", begin, ", ", begin + size, "): rank r owns the r-th of ",
              s.shard_ranks.ranks(), " equal parts");
      const real* const weights = s.group().weights(shard.unit);
      const accum* const gradients = s.group().gradients(shard.unit);
      tell_if((weights != nullptr) != (stage < 3), of, "weights are ",
              (weights ? "whole, and stage 3 has a shard" : "not there as a whole"));
      tell_if((gradients != nullptr) != (stage < 2), of, "gradients are ",
              (gradients ? "whole; stages 2, 3 have a shard" : "not there as a whole"));
      tell_if(weights && shard.weights != weights + begin, of, "the optimizer's weights begin at element ",
              shard.weights - weights, ", and should at ", begin, ", in the whole ones");
      tell_if(gradients && shard.gradients != gradients + begin, of,
              "the optimizer's gradients begin at element ", shard.gradients - gradients,
              ", and the sum of the own shard is left at ", begin);
    }
    s.tell_memory(stage);
  }
}

namespace {

// `used_by_passes`: forward and backward use the weights; otherwise they are read behind weights_changed().
void check_weights(bool used_by_passes) {
  Shards whole(0);
  doing("stage 0: weights_changed() gathers nothing, as each rank has updated all weights");
  whole.zero->weights_changed();
  for (const int stage : {3, 1, 2}) {  // in stage 3, weights_changed() records no event
    Shards s(stage);
    const int n = s.shard_ranks.ranks();
    ran();
    std::vector<int> held, before_update;  // the units that were gathered last
    // A call may gather these two units (-1: none), and with `must` both are whole behind it.
    const auto gathers = [&](const std::string& call, int use, int next, bool must) {
      const int allowed = (use < 0 ? 0 : 1 << use) | (next < 0 ? 0 : 1 << next);
      const int64_t bits = s.units_in("all_gather");
      if (stage < 3) return;
      std::string wrong;
      for (const int unit : held) {
        if (bits >> unit & 1)
          wrong = "gathers " + unit_names[unit] +
                  " again: it was in a buffer, whose `unit` has to say so; and no prefetch may take the "
                  "buffer in use";
      }
      if (wrong.empty() && bits & ~allowed)
        wrong = text("gathers ", names_of(bits), ", and should gather ", allowed ? "at most " : "",
                     names_of(allowed), ": only two units are whole at once");
      tell_alike(!wrong.empty(), here(), s.with, call, wrong);
      for (int unit = 0; unit < units; ++unit) {
        if (bits >> unit & 1) held.push_back(unit);
      }
      if (held.size() > 2) std::erase_if(held, [&](int unit) { return unit != use && unit != next; });
      for (const int unit : {use, next}) {
        if (!must || unit < 0 || std::ranges::find(held, unit) != held.end()) continue;
        const bool old = std::ranges::find(before_update, unit) != before_update.end();
        tell_alike(old, here(), s.with, unit_names[unit],
                   " is not gathered again: a buffer has it from before the update, and weights_changed() "
                   "marks both as stale");
        tell_alike(
            true, here(), s.with, call, "does not gather ", unit_names[unit],
            (unit == next
                 ? ", which is next: a gather that begins when its weights are needed hides behind nothing"
                 : ", which is used now"));
      }
    };
    // In virtual time: gathers, when the optimizer had written; who used memory last, until when.
    std::array<trace::Interval, units> gathered;
    std::map<const real*, std::pair<int, double>> used;
    double written = 0;
    const auto note_gathers = [&](const std::vector<trace::Interval>& log, const std::string& call,
                                  int first) {
      double begin = 1e9;
      int before = 0;  // the unit gathered before this one
      for (const trace::Interval& i : log) {
        tell_if(i.stream == "shard" && i.name != "all_gather" && i.name != "busy_kernel", here(), s.with,
                call, "runs ", i.name,
                i.name == "group" ? ": it begins when it ends, behind what its gathers record"
                                  : " beside the gathers, which need no copy");
        if (i.name != "all_gather" || i.stream != "shard") continue;
        const int unit =
            static_cast<int>(std::lround(std::log2(i.bytes * n / ((n - 1) * s.smallest * sizeof(real)))));
        tell_if(i.begin < written, here(), s.with, call, "the gather of ", unit_names[unit],
                " does not wait until the optimizer has written weights");
        tell_if(unit == first && begin < i.begin, here(), s.with, call, "another unit is gathered before ",
                unit_names[unit], ", which is used first: gathers end in their order");
        tell_if(first < 0 && unit < before, here(), s.with, call, unit_names[unit], " is gathered after ",
                unit_names[before], ", and forward needs it first");
        begin = std::min(begin, i.begin), before = unit;
        gathered[unit] = i;
      }
    };
    const auto note_use = [&](const std::string& name, int unit, const real* weights,
                              const trace::Interval& reads) {
      const trace::Interval& own = gathered[unit];
      tell_if(reads.begin < own.end, here(), s.with, "before_weights() in ", name,
              " does not wait until the unit is gathered: it waits for weights_came",
              stage < 3 ? "" : ", which gathered_buffer() records behind the gather");
      for (int other = 0; other < units; ++other)
        tell_if(reads.waited_for == gathered[other].id && gathered[other].end > own.end, here(), s.with, name,
                " waits until ", unit_names[other],
                " is gathered, too: it waits for its own weights_came, which ",
                (stage < 3 ? "weights_changed()" : "gathered_buffer()"), " records right behind each gather");
      const auto [user, until] = used[weights];
      tell_if(user != unit && own.begin < until, here(), s.with, unit_names[unit],
              " is gathered into a buffer in which compute still reads ", unit_names[user],
              ": it waits for `free`, which after_weights() records on the stream of compute");
    };
    std::vector<std::tuple<std::string, int, const std::span<real>*>> uses;
    const auto use = [&](int step, int unit, Pass pass) {
      const std::string name = text(pass == Pass::forward ? "forward of " : "backward of ", unit_names[unit]);
      const auto behind = [&](int u) {
        return u < 0 ? -1 : pass == Pass::forward ? (u + 1 < units ? u + 1 : -1) : u > 1 ? u - 1 : -1;
      };
      const int next = behind(unit);
      doing(s.with, "before_weights() in ", name,
            stage < 3 ? ": it gathers nothing, and waits"
                      : ": weights(unit) become a buffer with the whole unit");
      // In step 0 of stage 3 gathers come before compute, in step 1 later.
      for (int i = 0; i < 2 && (step == 1 || stage < 3); ++i) busy(s.shard_ranks.stream());
      s.zero->before_weights(unit, pass);
      const real* const weights = s.group().weights(unit);
      tell_alike(weights == nullptr, s.with, "before_weights() in ", name, " leaves no weights",
                 stage < 3 ? ": after_weights() takes them in stage 3 alone" : "");
      busy(s.compute);  // it reads the weights
      const std::vector<trace::Interval> log = ran();
      note_gathers(log, "before_weights() in " + name + ": ", unit);
      for (const trace::Interval& i : log) {
        if (i.name != "busy_kernel" || i.stream != "compute") continue;
        const auto awaited = std::ranges::find(log, i.waited_for, &trace::Interval::id);
        tell_if(awaited != log.end() && awaited->name == i.name, here(), s.with, "before_weights() in ", name,
                " waits for all of the gathers' stream, and should for weights_came of the unit alone");
        note_use(name, unit, weights, i);
        used[weights] = {unit, i.end};
      }
      uses.emplace_back(text("step ", step, ", ", name), unit,
                        &read(s.compute, weights, s.group().size(unit)));
      gathers("before_weights() in " + name + " ", unit, next, true);
      doing(s.with, "after_weights() in ", name);
      s.zero->after_weights(unit, pass);
      gathers("after_weights() in " + name + " ", next, behind(next), false);
    };
    for (int step = 0; step < 2; ++step) {
      const auto owner = [&](int unit, int rank) { return 100 * (1 - step) + 10 * unit + rank; };
      busy(s.compute);
      for (const Shard& shard : s.parameters.shards())
        write(s.compute, shard.weights,
              owned_values<real>(owner(shard.unit, s.shard_ranks.rank()), shard.size(), shard.begin));
      doing(s.with, "weights_changed() ",
            stage < 3 ? "gathers: each rank sends a shard, shard_size elements, and weights(unit) get all"
                      : "gathers nothing, and marks the buffers as stale");
      written = time_of(ran(), "memcpy", "compute").end;
      s.zero->weights_changed();
      note_gathers(ran(), "weights_changed(): ", -1);
      tell_if(busy_time(s.shard_ranks.stream()).begin < written, here(), s.with,
              "weights_changed(): the gathers' stream does not wait until the optimizer has written weights, "
              "and what is gathered next reads them");
      for (int unit = 0; unit < units && stage < 3 && !used_by_passes; ++unit) {
        const Stream reader("reader");
        wait_event(reader, static_cast<Opened&>(*s.zero).units_[unit].weights_came);
        tell_if(busy_time(reader).begin < gathered[unit].end, here(), s.with,
                "weights_changed() does not record weights_came of ", unit_names[unit], " behind its gather");
      }
      before_update = std::exchange(held, {});
      const int64_t bits = s.units_in("all_gather");
      tell_alike(stage < 3 && bits != (1 << units) - 1, here(), s.with, "weights_changed() gathers ",
                 names_of(bits), " over shard_ranks, and a rank needs all other ranks' shards, once");
      tell_alike(stage == 3 && bits != 0, here(), s.with, "weights_changed() gathers ", names_of(bits),
                 "; stage 3 gathers a unit before its use");
      for (int unit = 0; unit < units && !used_by_passes && stage < 3; ++unit)
        uses.emplace_back(text("after weights_changed() ", unit_names[unit]), unit,
                          &read(s.shard_ranks.stream(), s.group().weights(unit), s.group().size(unit)));
      for (int micro_batch = 0; micro_batch < 2 && used_by_passes; ++micro_batch) {
        for (int unit = 0; unit < units; ++unit) use(step, unit, Pass::forward);
        for (int unit = units - 1; unit > 0; --unit) use(step, unit, Pass::backward);
      }
      CUDA_CHECK(cudaDeviceSynchronize());
      std::string wrong;
      for (const auto& [name, unit, seen] : uses) {
        const size_t size = s.group().shard_size(unit);
        for (int rank = 0; rank < s.shard_ranks.ranks() && wrong.empty(); ++rank)
          wrong = wrong_copy(s.with + name + ": shard " + number(rank),
                             std::span(seen->data() + rank * size, size), owner(unit, rank), rank * size,
                             shard_name);
      }
      uses.clear();
      tell(wrong.ends_with("never written") ? wrong + ": gather() sends own_weights, which is all a rank has"
                                            : wrong);
    }
    s.tell_no_more_memory();
  }
}

// sum_copies() alone, of the last unit's shard.
void tell_sum_copies(Shards& s) {
  const Shard shard = s.parameters.shards().back();
  const Sum sum = {.ranks = s.replicate_ranks.ranks()};
  const std::string call = here() + s.with + "sum_copies(" + unit_names[shard.unit] + ") ";
  write(s.compute, shard.gradients, sum.values(s.replicate_ranks.rank(), shard.size()));
  CUDA_CHECK(cudaDeviceSynchronize());
  ran();
  doing(s.with, "sum_copies() of own_gradients, ", shard.size(), " elements");
  busy(s.shard_ranks.stream());  // it writes the shard
  static_cast<Opened&>(*s.zero).sum_copies(shard.unit);
  busy(s.shard_ranks.stream()), busy(s.compute);
  std::vector<trace::Interval> shards, others;
  for (const trace::Interval& i : ran()) (i.stream == "shard" ? shards : others).push_back(i);
  const Time sums = time_of(others, "all_reduce", "replicate");
  const int64_t elements = traffic(s.replicate_ranks, "all_reduce").elements,
                due = static_cast<int64_t>(shard.size());
  s.replicate_ranks.reset_traffic(), s.shard_ranks.reset_traffic();
  tell_if(elements != due, call, "sums ", elements, " elements over the copies, and should ", due,
          ", those of the own shard");
  tell_if(sums.begin < shards.front().end, call,
          "does not wait for the stream of the reduce-scatter, which writes the shard");
  tell_if(shards.back().begin >= sums.end, call,
          "makes the stream of the reduce-scatters wait for its sum, so the next one does not run meanwhile");
  tell_if(time_of(others, "busy_kernel", "compute").begin >= sums.end, call,
          "makes compute wait for its sum, and backward should hide it");
  tell(sum.wrong(s.with + "after sum_copies() the own shard", at(shard.gradients, shard.size())));
}

// Two steps of two micro-batches. `shard_ranks`: those of a copy.
void check_gradients(const std::vector<int>& stages, int shard_ranks) {
  for (const int stage : stages) {
    Shards s(stage, shard_ranks);
    const int n = mpi_tests::ranks(), copies = n / shard_ranks;
    const Sum sum = {.parts = 2,
                     .part = "non-zero micro-batch"};  // of three, of which the second one has zeros
    const std::string operation = stage == 0 ? "all_reduce" : "reduce_scatter";
    DeviceArena memory(Purpose::activations);
    const AccumTensor term = memory.matrix<accum>(2 * n, 1 << units);
    if (copies > 1) tell_sum_copies(s);
    std::map<const accum*, double> reduced_until;  // and added, in virtual time, by memory
    double reduced_at = 0, copied_at = 0;          // the sums of a copy's ranks, and those of the copies
    uint64_t sum_before = 0, last_before = 0;      // of the copies; and the last one of the shard's stream
    ran();
    for (int step = 0; step < 2; ++step) {
      for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
        const bool last = micro_batch == 2;
        for (int unit = units - 1; unit >= 0; --unit) {
          const std::string call = text("(", unit_names[unit], ") in micro-batch ", micro_batch, " ");
          const std::string with = here() + s.with;
          doing(s.with, "before_gradients", call, "gives backward memory for the whole unit");
          s.zero->before_gradients(unit);
          const Gradient gradient = s.parameters.gradients(unit);
          tell_alike(gradient.sum.data == nullptr, with, "before_gradients", call,
                     "leaves no memory for gradients");
          tell_alike(stage >= 2 && gradient.add, with,
                     "after_gradients() has not taken the memory back: in micro-batch ", micro_batch,
                     " backward adds to what lies there");
          busy(s.compute);
          const size_t size = gradient.sum.size();
          write(s.compute, term.data,
                micro_batch == 1 ? std::vector<accum>(size) : sum.values(s.rank + n * micro_batch / 2, size));
          accumulate({term.data, gradient.sum.rows, gradient.sum.columns}, gradient, s.compute);
          const std::vector<trace::Interval> backward = ran();
          const Time adds = time_of(backward, "", "compute");
          for (const trace::Interval& i : backward) {
            tell_if(i.name == "memset", with, "before_gradients", call,
                    "clears memory, and backward assigns");
            tell_if(
                i.waited_for != 0 && (i.waited_for == sum_before || i.waited_for == last_before), with,
                "before_gradients() or after_gradients(): compute waits for the sum of the unit before, "
                "which "
                "backward should hide: it waits for `free` of its own buffer, and at the end of the step for "
                "all sums");
          }
          tell_if(adds.begin < reduced_until[gradient.sum.data], with, "before_gradients", call,
                  "does not wait, and backward writes into memory that is still being read: `free` has to "
                  "be recorded behind the last operation that reads it, on the stream of that operation");
          doing(s.with, "after_gradients", call, "reduces the ", s.group().size(unit),
                " elements of the unit");
          // In step 0 the reduce-scatter is the latest, then the sum of the copies; in step 1 compute is.
          for (int i = 0; i < 3 && step == 0; ++i) busy(s.shard_ranks.stream());
          for (int i = 0; i < 2 && step == 0; ++i) busy(s.replicate_ranks.stream());
          s.parameters.end_gradients(unit, last);
          s.zero->after_gradients(unit, last);
          const std::vector<trace::Interval> log = ran();
          const Time reduces = time_of(log, operation, "shard"),
                     copies_sum = time_of(log, "all_reduce", "replicate");
          const double shard_written = time_of(log, "", "shard").end;
          tell_if(reduces.begin < adds.end, with, "after_gradients", call,
                  "reduces, and does not wait until backward has written");
          reduced_until[gradient.sum.data] =
              std::max(reduces.end, time_of(log, "accumulate_kernel", "shard").end);
          reduced_at = std::max(reduced_at, reduces.end), copied_at = std::max(copied_at, copies_sum.end);
          for (const trace::Interval& i : log) {
            tell_if(i.stream == "shard" && i.waited_for != 0 && i.waited_for == sum_before, with,
                    "the reduce-scatter in after_gradients", call,
                    "waits for the sum of the copies of the unit before, which has a stream of its own");
            tell_if(i.stream == "shard" && i.name != operation && i.name != "busy_kernel" && micro_batch == 0,
                    with, "after_gradients", call, "runs ", i.name,
                    " beside the reduce-scatter, which can write the sum of a step's first micro-batch to "
                    "own_gradients itself (`add` is false then)");
            if (i.name != "accumulate_kernel") continue;
            tell_if(
                i.begin < reduces.end, with, "after_gradients", call,
                "adds the sum of this micro-batch, and does not wait for the reduce-scatter that makes it");
            const auto added = static_cast<size_t>(i.bytes / (3 * sizeof(accum)));
            tell_if(added != s.group().shard_size(unit), with, "after_gradients", call, "adds ", added,
                    " elements, and a shard has ", s.group().shard_size(unit));
          }
          for (const trace::Interval& i : log) {
            if (i.stream == "replicate") sum_before = i.id;
            if (i.stream == "shard") last_before = i.id;
          }
          tell_if(copies_sum.begin < shard_written, with, "after_gradients", call,
                  "sums the copies before it reduces");
          const int64_t bits = s.units_in(operation);
          tell_alike(stage < 2 && !last && bits != 0, with, "after_gradients", call,
                     "reduces, and only the last micro-batch of a step may: a sum would be summed again");
          const int64_t summed = traffic(s.replicate_ranks, "all_reduce").elements;
          s.replicate_ranks.reset_traffic();
          tell_alike(!last && summed != 0, with, "after_gradients", call,
                     "sums the copies, and may after the last one only: their sum would be summed again");
          tell_alike(last && copies > 1 && summed == 0, with, "after_gradients", call,
                     "does not sum the copies");
          tell_alike(stage >= 2 && bits != 1 << unit, with, "after_gradients", call, "reduces ",
                     names_of(bits), " and not ", unit_names[unit],
                     ": two unit buffers have no room to add up micro-batches first");
          tell_alike(last && bits != 1 << unit, with, "after_gradients", call, "reduces ", bits * s.smallest,
                     " elements with ", operation, ", and the unit has ", s.group().size(unit));
        }
      }
      doing(s.with, "finish_gradient_sync()");
      s.zero->finish_gradient_sync();
      s.shard_ranks.reset_traffic();
      const double begin = busy_time(s.compute).begin;
      tell_if(begin < std::max(reduced_at, copied_at), here(), s.with,
              "finish_gradient_sync(): compute does not wait for the sums ",
              begin < reduced_at ? "of the shard ranks" : "of the copies",
              ", and the optimizer reads them next");
      std::string wrong;
      for (const Shard& shard : s.parameters.shards()) {
        if (wrong.empty())
          wrong = sum.wrong(s.with + "step " + number(step + 1) + ", shard of " + unit_names[shard.unit],
                            at(shard.gradients, shard.size()), shard.begin);
      }
      if (step == 1 && !wrong.empty()) wrong += ". The step before was right: its sum is left, and added to";
      tell(wrong);
    }
    s.tell_no_more_memory();
  }
}

}  // namespace

TEST_CASE("03.2: weights_changed", "[03.2]") { check_weights(false), doing("right alone"); }
TEST_CASE("03.2, 03.4: weights of each use", "[03.2][03.4]") { check_weights(true); }
TEST_CASE("03.3: gradients", "[03.3]") {
  check_gradients({0, 1, 2, 3}, mpi_tests::ranks());
  doing("right alone");
}
TEST_CASE("03.3, 03.5: the sum of the copies", "[03.3][03.5]") { check_gradients({1, 2, 3}, 2); }

}  // namespace pentatron::probes
