// Probes of stage 02.
// ranks: 3
#include "02_data_parallel/data_parallel.h"
#include "02_data_parallel/ring_all_reduce.h"
#include "mpi/array.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

std::string part_of(int p) { return "part " + number(p); }

// How many steps of the ring, and elements, a half sends; each step is a send.
void tell_traffic(const Communicator& ranks, const std::string& half, size_t size) {
  const Traffic sent = traffic(ranks, "send");
  const int n = ranks.ranks(), rank = ranks.rank();
  const int kept = half == "reduce-scatter" ? rank : (rank + 1) % n;
  const auto elements = static_cast<int64_t>(size - ring_part(kept, n, size).size);
  tell_if(sent.calls != n - 1 || sent.elements != elements, here(), "the ", half, " sends ", sent.calls,
          " parts, ", sent.elements, " elements; n - 1 = ", n - 1, " parts, all but part ", kept, ", have ",
          elements);
  tell_if(std::ranges::any_of(ran(), [](auto& i) { return i.name.starts_with("mem"); }), here(), "the ", half,
          " copies or clears memory; messages and sums are enough");
}

// Two steps; `alone`: one, without finish_gradient_sync(), which is 02.5.
void check_gradients(bool alone) {
  World world(nullptr, nullptr);
  Communicator data(world, world.all(), "data");
  const Stream compute("compute");
  const int rank = data.rank(), units = 4;
  const Sum sum;
  for (const auto& [sync, bucket] : {std::pair(DpSync::naive, 10), std::pair(DpSync::overlap, 10),
                                     std::pair(DpSync::bucket, 10), std::pair(DpSync::bucket, 12)}) {
    Parameters parameters({.groups = {{rank, data.ranks()}}});
    for (int unit = 0; unit < units; ++unit)
      parameters.declare({"unit", unit, 2, 6 + 3 * unit, TensorSplit::replicated_outside});
    ParameterGroup* const group = &parameters.group();
    group->allocate();
    const AccumTensor all = group->flat_gradients();
    DataParallel hooks({sync, bucket * sizeof(accum) / 1e6}, *group, data, compute);
    double written = 0, summed_at = 0;  // in virtual time
    uint64_t last_sum = 0;
    ran();
    for (int step = 0; step < 2; ++step) {
      const std::string with =
          text("--dp-sync ", to_string(sync),
               step == 0 ? ": " : ", step 2, with what finish_gradient_sync() of step 1 has left: ");
      const std::string places =
          sync == DpSync::bucket
              ? "the first bucket ends where the array ends, another one where the one before it began"
              : "each sum (ncclSum) is in place, of the elements of its unit";
      write(compute, all.data, std::vector<accum>(all.size(), untouched));
      for (int unit = units - 1; unit >= 0; --unit) hooks.after_gradients(unit, false);
      tell_alike(!data.traffic().empty(), with,
                 "after_gradients(unit, last = false) has summed: only the step's last micro-batch may, or a "
                 "sum is summed again");
      for (int unit = units - 1; unit >= 0; --unit) {
        accum* const of_unit = group->gradients(unit);
        busy(compute);
        write(compute, of_unit, sum.values(rank, group->size(unit), of_unit - all.data));
        doing(with, "after_gradients(", unit, "): ", places);
        const std::vector<trace::Interval> backward = ran();
        for (const trace::Interval& i : backward)
          tell_if(last_sum != 0 && i.waited_for == last_sum, here(), with,
                  "after after_gradients() compute waits for the sum, and backward is there to hide it");
        written = time_of(backward, "memcpy", "compute").end;
        hooks.after_gradients(unit, true);
        const std::vector<trace::Interval> sums_of_unit = ran();
        for (const trace::Interval& i : sums_of_unit) last_sum = i.name == "all_reduce" ? i.id : last_sum;
        const Time sum_of = time_of(sums_of_unit, "all_reduce", "data");
        tell_if(sum_of.begin < written, here(), with, "in after_gradients(", unit,
                ", true) the sum does not wait until compute has written the gradients");
        summed_at = std::max(summed_at, sum_of.end);
        const int64_t complete = all.size() - (of_unit - all.data);
        const int64_t expected = sync == DpSync::naive     ? 0
                                 : sync == DpSync::overlap ? complete
                                                           : complete / bucket * bucket;
        const int64_t sent = traffic(data, "all_reduce").elements;
        const bool rest_too = sync == DpSync::bucket && unit == 0 && sent == complete;  // at once: as good
        tell_alike(sent != expected && !rest_too, with, step == 0 ? "in after_gradients(), " : "",
                   "when unit ", unit, " is complete, sums of ", sent,
                   " elements are under way, and should be of ", expected, ": ", complete,
                   " are complete at the end of the array",
                   (sync == DpSync::bucket ? ", a bucket has " + number(bucket) : ""));
      }
      if (alone) {
        const size_t sent = traffic(data, "all_reduce").elements, begin = all.size() - sent;
        const std::string wrong =
            sum.wrong(with + "the end of the gradients, which after_gradients() has summed",
                      at(all.data + begin, sent), begin);
        tell(wrong.empty() ? "" : wrong + "; " + places);
        data.reset_traffic();
        break;
      }
      if (sync == DpSync::naive) {
        busy(compute);
        write(compute, all.data, sum.values(rank, all.size()));
        written = time_of(ran(), "memcpy", "compute").end;
      }
      doing(with, "finish_gradient_sync(): the sum (ncclSum) of what is not summed yet");
      hooks.finish_gradient_sync();
      const std::vector<trace::Interval> rest = ran();
      const Time sum_of = time_of(rest, "all_reduce", "data");
      summed_at = std::max(summed_at, sum_of.end);
      const auto is_empty = [](auto& i) { return i.name == "all_reduce" && i.bytes == 0; };
      tell_if(std::ranges::any_of(rest, is_empty), here(), with,
              "finish_gradient_sync() begins a sum of no elements");
      tell_if(sum_of.begin < written, here(), with,
              "in finish_gradient_sync() the sum does not wait until compute has written the gradients");
      tell_if(busy_time(compute).begin < summed_at, here(), with,
              "after finish_gradient_sync() compute does not wait for the sums");
      std::string wrong;
      for (int unit = units - 1; unit >= 0 && wrong.empty(); --unit) {
        const size_t place = group->gradients(unit) - all.data;
        wrong = sum.wrong(with + "after finish_gradient_sync() unit " + number(unit) + " of " + number(units),
                          at(group->gradients(unit), group->size(unit)), place);
      }
      tell(wrong);
      const int64_t summed = traffic(data, "all_reduce").elements, size = all.size();
      tell_alike(summed != size, with, "in a step ", summed, " elements are summed, of ", size);
      data.reset_traffic();
    }
  }
}

}  // namespace

TEST_CASE("02.1: parts of an array", "[02.1]") {
  for (const int n : {1, 2, 3, 4}) {
    for (const size_t whole : std::vector<size_t>{12, 10, 2, 5'000'000'000}) {  // also more than an int
      size_t end = 0, smallest = whole, largest = 0;
      const std::string of = text("of ", whole, " elements on ", n, " ranks: ");
      for (int i = 0; i < n; ++i) {
        const auto [begin, size] = ring_part(i, n, whole);
        tell_alike(begin != end || begin + size > whole, of, part_of(i), " begins at ", begin, " with ", size,
                   " elements; part ", i - 1, " ends at ", end);
        end = begin + size, smallest = std::min(smallest, size), largest = std::max(largest, size);
      }
      tell_alike(end != whole, of, "the last part ends at ", end, ", so the rest is in no part");
      tell_alike(largest > smallest + 1, of, "a part has ", largest, " elements, another one ", smallest,
                 "; sizes may differ by one");
      for (int i = -2 * n; i < 0; ++i) {
        const RingPart here = ring_part(i, n, whole), same = ring_part(i + 2 * n, n, whole);
        tell_alike(here.begin != same.begin || here.size != same.size, of, "part ", i, " is not part ",
                   (i + 2 * n) % n,
                   ": a negative index wraps round, but % of a negative number is negative in C++");
      }
    }
  }
}

TEST_CASE("02.1: a step of the ring", "[02.1]") {
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ring");
  const int n = ranks.ranks(), rank = ranks.rank(), before = (rank + n - 1) % n;
  for (const bool equal : {true, false}) {
    const auto size_of = [&](int r) { return size_t(4 + (equal ? 0 : r)); };
    const mpi_tests::Array<accum> sent(owned_values<accum>(rank, size_of(rank))),
        received(std::vector<accum>(n + 4, untouched));
    doing(equal ? "ring_step(): all ranks send to the next one and receive from the one before, in one "
                  "group, or each waits for the others"
                : "ring_step() with parts of different sizes: as many elements are received as the previous "
                  "rank sends");
    ran();
    ring_step(sent.data(), size_of(rank), received.data(), size_of(before), ranks);
    tell_if(ran().size() > 1, here(),
            "ring_step() has several operations, which run in turn; in one group a rank "
            "sends and receives at once");
    tell(wrong_copy("what ring_step() receives from rank " + number(before),
                    at(received.data(), size_of(before)), before));
  }
}

// Equal parts are asked for first.
static std::string uneven(size_t size) {
  return size % mpi_tests::ranks() == 0 ? ""
                                        : ". With equal parts it was right: each part has a size of its own";
}

TEST_CASE("02.2: ring reduce-scatter", "[02.2]") {
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ring");
  const int n = ranks.ranks(), rank = ranks.rank();
  for (const size_t size : {size_t(3 * n), size_t(3 * n + 1)}) {
    const Sum sum;
    const std::vector<accum> mine = sum.values(rank, size);
    const mpi_tests::Array<accum> data(mine), scratch(std::vector<accum>(size, untouched));
    ran();
    doing("ring_reduce_scatter(): in each step a rank receives the part that the previous one sends");
    ring_reduce_scatter(data.data(), size, scratch.data(), ranks);
    const auto [begin, of_part] = ring_part(rank, n, size);
    std::string wrong =
        sum.wrong(part_of(rank) + " after the reduce-scatter", at(data.data() + begin, of_part), begin);
    if (wrong.find("is the sum of each rank's") != wrong.npos)
      wrong += ": a rank adds to another part than the one that came";
    for (int p = 0; p < n && !wrong.empty(); ++p) {
      const RingPart other = ring_part(p, n, size);
      const std::vector<accum> is = at(data.data() + other.begin, other.size);
      if (p != rank && sum.wrong("", is, other.begin).empty()) wrong += text("; complete is ", part_of(p));
      if (p == (rank + n - 1) % n && wrong.ends_with("nothing was added to it") && is[0] != mine[other.begin])
        wrong += text(", but to ", part_of(p), ", which is sent first");
    }
    tell(wrong.empty() ? "" : wrong + uneven(size));
    tell_traffic(ranks, "reduce-scatter", size);
    tell_if(at(scratch.data(), size)[size / n + 1] != untouched, here(),
            "received has room for size / ranks + 1 elements");
    ranks.reset_traffic();
  }
}

TEST_CASE("02.3: ring all-gather", "[02.3]") {
  World world(nullptr, nullptr);
  Communicator ranks(world, world.all(), "ring");
  const int n = ranks.ranks(), rank = ranks.rank();
  for (const size_t size : {size_t(3 * n), size_t(3 * n + 1)}) {
    std::vector<accum> mine(size);  // part p of rank r is finished if p is r, else it is of owner 10 + r
    for (int p = 0; p < n; ++p) {
      const auto [begin, of_part] = ring_part(p, n, size);
      for (size_t i = 0; i < of_part; ++i) mine[begin + i] = owned(p == rank ? p : 10 + rank, begin + i);
    }
    const mpi_tests::Array<accum> data(mine);
    ran();
    doing("ring_all_gather(): in each step a rank receives the part that the previous one sends");
    ring_all_gather(data.data(), size, ranks);
    std::string wrong;
    for (int p = 0; p < n && wrong.empty(); ++p) {
      const auto [begin, of_part] = ring_part(p, n, size);
      const auto name = [](int p) {
        return p < 10 ? part_of(p) : "rank " + number(p - 10) + "'s partial sum";
      };
      wrong = wrong_copy(part_of(p), at(data.data() + begin, of_part), p, begin, name);
    }
    if (!wrong.empty())
      wrong += text(": each step passes on the part that came in the step before, beginning with part ", rank,
                    ", to the same place", uneven(size));
    tell(wrong);
    tell_traffic(ranks, "all-gather", size);
    ranks.reset_traffic();
  }
}

TEST_CASE("02.4: after_gradients", "[02.4]") { check_gradients(true), doing("right alone"); }
TEST_CASE("02.4, 02.5: gradients", "[02.4][02.5]") { check_gradients(false); }

}  // namespace pentatron::probes
