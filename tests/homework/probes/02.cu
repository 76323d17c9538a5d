// Probes of stage 02.
// ranks: 3
#include "02_data_parallel/data_parallel.h"
#include "02_data_parallel/ring_all_reduce.h"
#include "mpi/array.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

using mpi_tests::Array;

std::string part_of(int p) { return "part " + number(p); }

struct Ring {
  World world{nullptr, nullptr};
  Communicator ranks{world, world.all(), "ring"};
  const int n = ranks.ranks(), rank = ranks.rank(), before = (rank + n - 1) % n;
};

// Calls a half of the ring with equal parts, which are asked for first, and with others. A rank sends all
// parts but `kept`. wrong(data, size): what is wrong behind it.
void check_half(Ring& ring, const std::string& half, int kept, const auto& values, const auto& call,
                const auto& wrong) {
  const int n = ring.n;
  for (const size_t size : {3 * n, 3 * n + 1}) {
    const Array<accum> data(values(size));
    doing(half, "(): in each step a rank receives the part that the previous one sends");
    ran();
    call(data.data(), size);
    const std::string is = wrong(data.data(), size);
    const bool with_equal = is.empty() || size % n == 0;
    tell(is + (with_equal ? "" : ". With equal parts it was right: each part has a size of its own"));
    const Traffic sent = traffic(ring.ranks, "send");
    const auto elements = static_cast<int64_t>(size - ring_part(kept, n, size).size);
    tell_if(sent.calls != n - 1 || sent.elements != elements, here(), half, "() sends ", sent.calls,
            " parts, ", sent.elements, " elements; n - 1 = ", n - 1, " parts, all but part ", kept, ", have ",
            elements);
    tell_if(std::ranges::any_of(ran(), [](auto& i) { return i.name.starts_with("mem"); }), here(), half,
            "() copies or clears memory; messages and sums are enough");
    ring.ranks.reset_traffic();
  }
}

// Two steps; `alone`: one, without finish_gradient_sync(), which is 02.5.
void check_gradients(bool alone) {
  World world(nullptr, nullptr);
  Communicator data(world, world.all(), "data");
  const Stream compute("compute");
  const int rank = data.rank(), units = 4;
  const Sum sum;
  // So many elements are summed at once during backward: naive none, overlap any number.
  for (const auto& [sync, bucket] : {std::pair(DpSync::naive, 1000), std::pair(DpSync::overlap, 1),
                                     std::pair(DpSync::bucket, 10), std::pair(DpSync::bucket, 12)}) {
    Parameters parameters({.groups = {{rank, data.ranks()}}});
    for (int unit = 0; unit < units; ++unit)
      parameters.declare({"unit", unit, 2, 6 + 3 * unit, TensorSplit::replicated_outside});
    ParameterGroup& group = parameters.group();
    group.allocate();
    const AccumTensor all = group.flat_gradients();
    const auto size = static_cast<int64_t>(all.size());
    DataParallel hooks({sync, bucket * sizeof(accum) / 1e6}, group, data, compute);
    const auto summed = [&] { return traffic(data, "all_reduce").elements; };
    const std::string places = sync == DpSync::bucket
                                   ? "buckets follow each other from the array's end to its beginning"
                                   : "each sum (ncclSum) is in place, of the elements of its unit";
    for (int step = 0; step < (alone ? 1 : 2); ++step) {
      const std::string with = text("--dp-sync ", to_string(sync),
                                    step == 0 ? ": " : ", step 2, on what finish_gradient_sync() has left: ");
      write(compute, all.data, std::vector<accum>(size, untouched));
      for (int unit = units - 1; unit >= 0; --unit) hooks.after_gradients(unit, false);
      tell_alike(!data.traffic().empty(), with,
                 "after_gradients(unit, last = false) has summed what the last micro-batch sums again");
      bool rest_too = false;              // summed when the first unit is complete: as good
      double written = 0, summed_at = 0;  // in virtual time
      busy(compute);
      for (int unit = units - 1; unit >= 0; --unit) {
        const int64_t place = group.gradients(unit) - all.data, complete = size - place;
        doing(with, "after_gradients(", unit, "): ", places);
        write(compute, all.data + place, sum.values(rank, group.size(unit), place));
        written = time_of(ran(), "memcpy", "compute").end;
        hooks.after_gradients(unit, true);
        const Time sums = time_of(ran(), "all_reduce", "data");
        tell_if(sums.begin < written, here(), with, "in after_gradients(", unit,
                ", true) the sum does not wait until compute has written the gradients");
        tell_if(busy_time(compute).begin >= sums.end && sums.end > 0, here(), with,
                "after after_gradients() compute waits for the sum, and backward is there to hide it");
        summed_at = std::max(summed_at, sums.end);
        const int64_t due = complete / bucket * bucket;
        rest_too = sync == DpSync::bucket && unit == 0 && summed() == size;
        tell_alike(summed() != due && !rest_too, with, step == 0 ? "in after_gradients(), " : "",
                   "when unit ", unit, " is complete, sums of ", summed(),
                   " elements are under way in place of ", due, ": ", complete,
                   " are complete, at the array's end",
                   sync == DpSync::bucket ? ", a bucket has " + number(bucket) : "");
      }
      if (alone) {
        const std::string wrong = sum.wrong(with + "the end of the array, which after_gradients() has summed",
                                            at(all.data + size - summed(), summed()), size - summed());
        tell(wrong.empty() ? "" : wrong + "; " + places);
      } else {
        doing(with, "finish_gradient_sync(): the sum (ncclSum) of what is not summed yet");
        hooks.finish_gradient_sync();
        const std::vector<trace::Interval> rest = ran();
        const Time sums = time_of(rest, "all_reduce", "data");
        summed_at = std::max(summed_at, sums.end);
        for (const trace::Interval& i : rest)
          tell_if(i.name == "all_reduce" && i.bytes == 0, here(), with,
                  "finish_gradient_sync() begins a sum of no elements");
        tell_if(sums.begin < written, here(), with,
                "in finish_gradient_sync() the sum does not wait until compute has written the gradients");
        tell_if(busy_time(compute).begin < summed_at, here(), with,
                "after finish_gradient_sync() compute does not wait for the sums");
        std::string wrong;
        for (int unit = units - 1; unit >= 0 && wrong.empty(); --unit)
          wrong = sum.wrong(text(with, "after finish_gradient_sync() unit ", unit, " of ", units),
                            at(group.gradients(unit), group.size(unit)), group.gradients(unit) - all.data);
        if (!wrong.empty() && rest_too)
          wrong = here() + with +
                  "after_gradients(0, true) sums all that is left, and leaves it in unsent_, so it "
                  "is summed once more at the end";
        tell(wrong);
      }
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
  Ring ring;
  for (const bool equal : {true, false}) {
    const auto size_of = [&](int rank) { return size_t(4 + (equal ? 0 : rank)); };
    const Array<accum> sent(owned_values<accum>(ring.rank, size_of(ring.rank))),
        received(std::vector<accum>(ring.n + 4, untouched));
    doing("ring_step()", equal ? "" : " with parts of different sizes",
          ": in one group all ranks send to the next one, and receive what the one before sends, or each "
          "waits for the others");
    ran();
    ring_step(sent.data(), size_of(ring.rank), received.data(), size_of(ring.before), ring.ranks);
    tell_if(ran().size() > 1, here(),
            "ring_step() has several operations, which run in turn; in one group a rank sends and receives "
            "at once");
    tell(wrong_copy("what ring_step() receives from " + rank_name(ring.before),
                    at(received.data(), size_of(ring.before)), ring.before));
  }
}

TEST_CASE("02.2: ring reduce-scatter", "[02.2]") {
  Ring ring;
  const int n = ring.n, rank = ring.rank;
  const Sum sum;
  const Array<accum> received(std::vector<accum>(3 * n, untouched));
  const auto values = [&](size_t size) { return sum.values(rank, size); };
  const auto call = [&](accum* data, size_t size) {
    ring_reduce_scatter(data, size, received.data(), ring.ranks);
  };
  check_half(ring, "ring_reduce_scatter", rank, values, call, [&](accum* data, size_t size) {
    const auto [begin, of_part] = ring_part(rank, n, size);
    std::string wrong =
        sum.wrong(part_of(rank) + " after the reduce-scatter", at(data + begin, of_part), begin);
    if (wrong.empty() && received.get(3 * n)[size / n + 1] != untouched)
      return here() + "received has room for size / ranks + 1 elements";
    if (wrong.find("is the sum of each rank's") != wrong.npos)
      wrong += ": a rank adds to another part than the one that came";
    for (int p = 0; p < n && !wrong.empty(); ++p) {
      const auto [first, of_other] = ring_part(p, n, size);
      const std::vector<accum> is = at(data + first, of_other);
      if (p != rank && sum.wrong("", is, first).empty()) wrong += "; complete is " + part_of(p);
      if (p == ring.before && wrong.ends_with("nothing was added to it") && is[0] != sum.value(rank, first))
        wrong += ", but to " + part_of(p) + ", which is sent first";
    }
    return wrong;
  });
}

TEST_CASE("02.3: ring all-gather", "[02.3]") {
  Ring ring;
  const auto values = [&](size_t size) { return owned_values<accum>(ring.rank, size); };
  const auto call = [&](accum* data, size_t size) { ring_all_gather(data, size, ring.ranks); };
  check_half(ring, "ring_all_gather", (ring.rank + 1) % ring.n, values, call, [&](accum* data, size_t size) {
    std::string wrong;
    for (int p = 0; p < ring.n && wrong.empty(); ++p) {
      const auto [begin, of_part] = ring_part(p, ring.n, size);
      wrong = wrong_copy(text("part ", p, ", complete on rank ", p), at(data + begin, of_part), p, begin);
    }
    return wrong.empty() ? ""
                         : text(wrong,
                                ": each step passes on the part that came in the step before, "
                                "beginning with part ",
                                ring.rank, ", to the same place");
  });
}

TEST_CASE("02.4: after_gradients", "[02.4]") { check_gradients(true), doing("right alone"); }
TEST_CASE("02.4, 02.5: gradients", "[02.4][02.5]") { check_gradients(false); }

}  // namespace pentatron::probes
