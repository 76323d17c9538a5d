// Probes of stage 06.
// ranks: 4
#include "06_context_parallel/ring_attention.h"
#include "device.h"
#include "model.h"
#include "options/parallel_options.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

constexpr CpLayout layouts[] = {CpLayout::zigzag, CpLayout::contiguous};

// Who has a token, and what a rank has, as context_positions (06.2) should say.
int owner_of(CpLayout layout, int sequence, int ranks, int position) {
  const int half = position * 2 * ranks / sequence;  // a rank has two
  return layout == CpLayout::zigzag ? std::min(half, 2 * ranks - 1 - half) : half / 2;
}
std::vector<int32_t> positions_of(CpLayout layout, int sequence, int rank, int ranks) {
  std::vector<int32_t> all;
  for (int i = 0; i < sequence; ++i) {
    if (owner_of(layout, sequence, ranks, i) == rank) all.push_back(i);
  }
  return all;
}
std::string key_of(CpLayout layout, int sequence, int ranks, int position) {
  return text("key ", position, " of rank ", owner_of(layout, sequence, ranks, position));
}
std::string text_of(const std::vector<int32_t>& values) {
  std::string text;
  for (const int32_t value : values) text += (text.empty() ? "" : ", ") + number(value);
  return text;
}

}  // namespace

TEST_CASE("06.1: who sees what", "[06.1]") {
  for (const CpLayout layout : layouts) {
    for (const int ranks : {2, 3, 4}) {
      const int sequence = 4 * ranks;
      for (int rank = 0; rank < ranks; ++rank) {
        for (int origin = 0; origin < ranks; ++origin) {
          const auto visible = visible_block(layout, {2, 4, {2, 1, 4}}, rank, origin);
          const auto queries = positions_of(layout, sequence, rank, ranks);
          const auto keys = positions_of(layout, sequence, origin, ranks);
          const std::string of_both =
              text(to_string(layout), " on ", ranks, " ranks: rank ", rank, "'s queries at ",
                   text_of(queries), " and rank ", origin, "'s keys at ", text_of(keys), ": ");
          const auto sees = [&](int i, int j) {
            if (!visible) return false;
            const auto& [first, b] = *visible;
            return i >= first && i < first + b.queries && j < b.keys && (!b.diagonal || j <= i - first);
          };
          for (int i = 0; i < 4; ++i) {
            for (int j = 0; j < 4; ++j) {
              const bool due = keys[j] <= queries[i];
              tell_alike(sees(i, j) != due, of_both, "query ", queries[i],
                         (due ? " does not see key " : " sees key "), keys[j],
                         (due ? ", which comes before it" : ", which comes after it"));
            }
          }
          if (!visible) continue;
          const AttentionBlock& b = visible->block;
          tell_alike(visible->first_query + b.queries != 4 || b.keys > 4 || b.keys == 0, of_both,
                     "the block has queries ", visible->first_query, " to ", visible->first_query + b.queries,
                     " and ", b.keys, " keys, of 4 each");
          tell_alike(b.batch != 2 || b.stride != 4, of_both,
                     "in memory each of the 2 sequences has 4 rows; the block says ", b.batch, " and ",
                     b.stride);
        }
      }
    }
  }
}

TEST_CASE("06.2: positions", "[06.2]") {
  for (const CpLayout layout : layouts) {
    for (const int ranks : {1, 2, 3}) {
      const int sequence = ranks == 1 ? 13 : 12, parts = layout == CpLayout::zigzag ? 2 * ranks : ranks,
                size = sequence / parts;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto positions = context_positions(layout, sequence, rank, ranks);
        const std::string of = text(to_string(layout), ", ", sequence, " tokens on ", ranks, " ranks: rank ",
                                    rank, " has ", text_of(positions), ": ");
        for (const int position : positions) {
          const bool there = position >= 0 && position < sequence;
          const int owner = there ? owner_of(layout, sequence, ranks, position) : -1;
          tell_alike(
              owner != rank, of, position, " is in chunk ", position / size, " (the first is 0) of ", parts,
              there ? text(", which is rank ", owner, "'s") : ", beyond the sequence",
              layout == CpLayout::zigzag ? ": rank r has the r-th chunk and the r-th from the end" : "");
        }
        tell_alike(!std::ranges::is_sorted(positions), of,
                   "they do not ascend, and the diagonal masks by their order");
        tell_alike(std::ssize(positions) != sequence / ranks, of, positions.size(), " tokens; each rank has ",
                   sequence / ranks);
      }
    }
  }
}

TEST_CASE("06.3: merging two results", "[06.3]") {
  Device device;
  const int heads = 2, size = 4, batch = 2, stride = 4, queries = 2;
  // With large scores, too, or those of the block alone.
  for (const auto& [shift, of_block] : {std::pair(0.0, 0.0), {900.0, 900.0}, {0.0, 900.0}}) {
    const auto before = [](int64_t row, int64_t h) { return 1.0 + static_cast<double>(row + 6 * h); };
    const auto added = [](int64_t row, int64_t h) { return 3.0 + 2.0 * static_cast<double>(row + h); };
    const int64_t rows = batch * stride;
    HostMatrix out(rows, heads * size), block_out(rows, heads * size), lse(rows, heads),
        block_lse(rows, heads);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < heads * size; ++j) out(i, j) = j % 2 == 0, block_out(i, j) = j % 2 * (1.0 + i);
      for (int64_t h = 0; h < heads; ++h)
        lse(i, h) = std::log(before(i, h)) + shift, block_lse(i, h) = std::log(added(i, h)) + of_block;
    }
    const AccumTensor merged = device.upload<accum>(out), merged_lse = device.upload<accum>(lse);
    attention_merge({batch, queries, 1, stride, {heads, heads, size}, false}, device.upload<accum>(block_out),
                    device.upload<accum>(block_lse), merged, merged_lse, device.stream);
    const HostMatrix is = device.download(merged), is_lse = device.download(merged_lse);
    std::vector<int32_t> changed, in_block;
    for (int row = 0; row < rows; ++row) {
      const auto same = [row](const HostMatrix& a, const HostMatrix& b) {
        return a.slice(row, 1, 0, a.columns) == b.slice(row, 1, 0, b.columns);
      };
      if (!same(is, out) || !same(is_lse, lse)) changed.push_back(row);
      if (row % stride < queries) in_block.push_back(row);
    }
    tell_alike(changed != in_block, "a block of ", queries, " queries of ", batch,
               " sequences, with a stride of ", stride,
               ": rows changed: ", changed.empty() ? "none" : text_of(changed), ", and should be ",
               text_of(in_block), ": in memory each sequence begins `stride` rows after the one before");
    for (const int64_t i : in_block) {
      for (int64_t h = 0; h < heads; ++h) {
        const std::string of = "a block of " + text(added(i, h)) + " equal keys, merged into " +
                               text(before(i, h)) + (of_block > 0 ? " (scores of 900)" : "") + ": ";
        const double kept = is(i, h * size), share = is(i, h * size + 1) / (1.0 + i),
                     keys = std::exp(is_lse(i, h) - shift);
        const double all = before(i, h) + added(i, h), due = added(i, h) / all;
        tell_alike(std::isnan(share) || std::isnan(kept) || !std::isfinite(is_lse(i, h)), of,
                   "the result is not finite: exp() overflows");
        if (shift != of_block) continue;
        if (std::abs(share - due) > 1e-9) {
          const double of_keys = added(i, h) / share;  // the sum of which the block has this share
          for (int64_t r = 0; r < rows; ++r) {         // or it is another row's
            const double share_there = added(r, h) / (before(i, h) + added(r, h)),
                         values = (1.0 + r) / (1.0 + i);
            for (const double as : {share_there, due * values, share_there * values})
              tell_alike(r != i && std::abs(share - as) < 1e-9, of, "row ", i, " gets row ", r,
                         " of the block: its out and lse have `stride` rows a sequence, too");
          }
          tell_alike(
              true, of, "the block's share in out is ", text(share), " and should be ", text(added(i, h)),
              " of ", text(all), " keys",
              (std::abs(of_keys - all - added(i, h)) < 1e-6
                   ? ": the lse was merged before the share was taken"
               : std::abs(share - 1 + due) < 1e-9 ? ": that is the share of what was there before"
               : std::abs(of_keys * added(i, 1 - h) / added(i, h) - before(i, 1 - h) - added(i, 1 - h)) < 1e-6
                   ? ": that is the share of another head"
                   : ", 1 / (1 + exp(lse - block_lse)), of a row and a head"));
        }
        tell_alike(std::abs(kept - 1 + due) > 1e-9, of, "of what was there before ", text(kept),
                   " remains, and should be ", text(before(i, h)), " of ", text(all), " keys, 1 - share");
        tell_alike(std::abs(keys - all) > 1e-9, of, "the merged lse is that of ", text(keys),
                   " keys, and should be of ", text(all), ": log(exp(lse) + exp(block_lse))");
        for (int64_t j = 2; j < size; ++j)
          tell_alike(is(i, h * size + j) != is(i, h * size + j % 2), of, "element ", j,
                     " of a head has another share");
      }
    }
  }
}

// ---- The ring. All scores are 0, so the probabilities of query i are 1 / (i + 1); values and gradients of
// outputs are rows of the identity. Then each element of a result says how often a query and a key met.

namespace {

constexpr int batch = 2;

// What a pass did in virtual time: hops of keys and of sums, blocks and what was added to the sums, by step.
struct Steps {
  std::vector<Time> keys, sums, blocks, adds;
  Time home;              // the last hop of the sums
  bool complete = false;  // else traffic and results tell what is missing

  // The two hops of a step may come in either order.
  Steps(const std::vector<trace::Interval>& log, int ranks, bool backward, bool sums_first) : adds(ranks) {
    int added = 0;  // keys and values, in each step but the first
    std::vector<Time> hops;
    for (const trace::Interval& i : log) {
      if (i.stream == "context" && i.name != "accumulate_kernel" && i.name != "memset")
        hops.push_back({i.begin, i.end});
      if (i.name == "tiled_forward_kernel" || i.name == "tiled_backward_keys_kernel")
        blocks.push_back({i.begin, i.end});
      if (i.name == "tiled_backward_queries_kernel" && !blocks.empty()) blocks.back().end = i.end;
      if (i.name == "accumulate_kernel") {
        Time& add = adds[(1 + added++ / 2) % ranks];
        add = {std::min(add.begin, i.begin), std::max(add.end, i.end)};
      }
    }
    complete = std::ssize(blocks) == ranks && std::ssize(hops) == (backward ? 2 * ranks - 1 : ranks - 1) &&
               added == (backward ? 2 * (ranks - 1) : 0);
    hops.resize(2 * ranks);
    auto hop = hops.begin();
    for (int step = 0; step < ranks; ++step) {
      const bool both = backward && step > 0 && step + 1 < ranks;
      keys.push_back(step + 1 < ranks ? *hop++ : Time{});
      sums.push_back(backward && step > 0 ? *hop++ : Time{});
      if (both && sums_first) std::swap(keys.back(), sums.back());
    }
    home = *hop;
  }
};

struct Ring {
  const Slow slow;  // comes first: a communicator has the link of when it was made
  World world{nullptr, nullptr};
  Communicator context;
  const int n = context.ranks(), sequence = 4 * n, own = 4;
  Device device;
  CpLayout layout;
  std::vector<int32_t> positions;
  AttentionShape shape;
  std::unique_ptr<RingAttention> attention;
  std::string with;

  Ring(CpLayout l, bool kernels_slow)  // of all ranks, or of an odd number, without the last one
      : slow(kernels_slow),
        context(world, members(world, !kernels_slow), "context"),
        layout(l),
        positions(context_positions(l, sequence, context.rank(), n)) {
    auto options =
        test_options<OptionsWith<ContextParallelOptions>>(1, sequence, 1, 1, 1, 2, sequence, batch, batch);
    options.attention = Attention::tiled;
    shape = {batch, own, {1, 1, sequence}};
    attention = std::make_unique<RingAttention>(options, layout, context, 1);
    with = "rank " + number(context.rank()) + ", " + to_string(layout) + ": ";
  }
  static std::vector<int> members(const World& world, bool odd) {
    std::vector<int> all = world.all();
    const int last = all.back();
    if (odd) all.pop_back();
    return odd && world.rank() == last ? std::vector{last} : all;
  }
  double written = 0;         // before a pass compute writes the keys
  bool on_hops = false;       // something is zeroed or added on their stream
  std::ptrdiff_t zeroed = 0;  // matrices, in backward: d_q, and its part of d_k and d_v in each step
  // Rows of this rank's tokens: `value` at the token's position, or all zeros.
  Tensor rows(double value) {
    HostMatrix all(batch * own, sequence);
    for (int64_t row = 0; row < all.rows; ++row) all(row, positions[row % own]) = value;
    return device.upload<real>(all);
  }
  AttentionTensors forward(const Tensor& q, const Tensor& k, const Tensor& v) {
    AttentionTensors t = {q, k, v, device.fresh<real>(q.rows, q.columns), device.fresh<accum>(q.rows, 1), {}};
    written = busy_time(device.stream).end;  // behind the allocations, which wait for all
    attention->forward(device.blas, shape, t);
    return t;
  }
  std::string key(int position) const { return key_of(layout, sequence, n, position); }

  // Whether this rank masks the keys of `origin` as if they were earlier, its own or later, and they are not.
  // times(i, j): how often its query i met their key j.
  std::string wrong_mask(int origin, const auto& times) const {
    const int rank = context.rank();
    const auto as = [&](int other) {  // as rank 1 of 3 masks that one's keys
      const auto q = context_positions(layout, 3 * own, 1, 3),
                 k = context_positions(layout, 3 * own, other, 3);
      int seen = 0;
      for (int i = 0; i < own; ++i) {
        for (int j = 0; j < own; ++j) {
          if (!(std::abs(times(i, j) - (k[j] <= q[i])) <= 1e-9)) return false;
          seen += k[j] <= q[i];
        }
      }
      return seen > 0;  // if nothing is seen, it can have another cause
    };
    const int right = origin < rank ? 0 : origin == rank ? 1 : 2;
    const std::string whose[] = {"an earlier rank's", "its own", "a later rank's"};
    for (const int other : {0, 1, 2}) {
      if (other != right && as(other))
        return text(to_string(layout), " on ", n, " ranks: in step ", (rank - origin + n) % n, " rank ", rank,
                    " has the keys of rank ", origin, " (rank - step, around the ring), but masks them as ",
                    whose[other]);
    }
    return "";
  }

  // Who does not wait, or waits for too much, in virtual time, in which kernels are slow or hops are.
  // `written`: when compute had the keys; `used`: when it goes on after the pass.
  std::string wrong_wait(bool backward) {
    busy(device.stream);
    const std::vector<trace::Interval> log = ran();
    const double used = time_of(log, "busy_kernel", "test").begin;
    zeroed = 0;
    int copies = 0, sums = 0;
    for (const trace::Interval& i : log) {
      copies += i.name == "memcpy";
      sums += i.name == "accumulate_kernel";
      zeroed += i.name == "memset";
      on_hops = on_hops || (i.stream == "context" && (i.name == "memset" || i.name == "accumulate_kernel"));
    }
    const int due_zeroed = backward ? 2 * n + 1 : 0;
    const int due_sums = backward ? 2 * (layout == CpLayout::zigzag ? n - 1 : context.rank()) : 0;
    if (copies > 0) return with + "something is copied: attention reads, and a hop fills, its last place";
    if (zeroed > due_zeroed)
      return with + text(zeroed, " matrices are zeroed in place of ", due_zeroed,
                         backward ? ": d_q once, and a part of d_k and of d_v in each step"
                                  : ": the diagonal comes first, and writes out");
    if (sums != due_sums)
      return with + text(sums, " matrices are added to the sums in place of ", due_sums,
                         ": of d_k and of d_v in each step that sees keys, but in step 0 they lie there");
    const std::string wrong = wrong_wait(Steps(log, n, backward, false), backward, used);
    return wrong.empty() || wrong_wait(Steps(log, n, backward, true), backward, used).empty() ? "" : wrong;
  }
  std::string wrong_wait(const Steps& of, bool backward, double used) const {
    if (layout != CpLayout::zigzag) return "";  // in which all ranks do the same
    if (std::ssize(of.blocks) != n)
      return with +
             text(of.blocks.size(), " blocks in place of ", n, ": one with each rank's keys, first its own");
    if (!of.complete) return "";
    if (of.keys[0].begin < written)
      return with +
             "the first hop does not wait until compute has written keys and values: the context "
             "stream waits for compute before each hop";
    for (int s = 0; s < n; ++s) {
      const std::string in = text(with, "step ", s, ": "), before = text("step ", s - 1);
      const Time block = of.blocks[s], keys = of.keys[s], sums = of.sums[s];
      if (s > 0) {
        const Time last = of.blocks[s - 1];
        if (block.begin < of.keys[s - 1].end)
          return in + "compute does not wait for the hop that brings its keys, begun in " + before;
        if (s > 1 && keys.end > 0 && keys.begin < last.end)  // in step 0 compute reads no such buffer
          return in + "the hop fills the buffer that compute still reads in " + before +
                 ": the context stream waits for compute before each hop";
        if (backward && sums.begin < std::max(last.end, of.adds[s - 1].end))
          return in + "the sums leave before compute has added its part in " + before;
        if (backward && of.adds[s].begin < block.end)
          return in + "a part is added before the block has made it: compute, which makes it, adds it";
        if (backward && of.adds[s].begin < sums.end) return in + "compute adds to sums that are still coming";
        if (backward && slow.kernels && sums.begin >= block.end)
          return in + "the hop of the sums begins after the block, which is there to hide it";
        if (backward && !slow.kernels && block.begin >= sums.end)
          return in + "the block waits for the hop of the sums, which it is there to hide";
      }
      if (keys.end > 0 && slow.kernels && keys.begin >= block.end)
        return in + "the hop begins after the block, which is there to hide it";
      if (keys.end > 0 && !slow.kernels && block.begin >= keys.end)
        return in + "the block waits for its own step's hop, which brings the keys of the next one";
    }
    if (backward && of.home.begin < std::max(of.blocks[n - 1].end, of.adds[n - 1].end))
      return with + "the last hop, home, begins before compute has added its part in the last step";
    if (backward && used < of.home.end)
      return with + "after backward() compute does not wait for the last hop, which brings d_k and d_v";
    return "";
  }

  // What is wrong with an element that says how often they met.
  std::string wrong_times(const std::string& what, double found, int q, int k, double once) const {
    if (std::isnan(found))
      return what + ": NaN: " +
             (what.ends_with("out")   ? "a block reads keys or values that no hop has brought"
              : what.ends_with("d_q") ? "blocks add to d_q, which nobody has zeroed"
              : zeroed < 2 * n + 1    ? "a block adds to its part, which nobody has zeroed in this step"
                                      : "a hop sends, or compute adds, what nobody has filled: in step 0 a "
                                        "block adds to the sums, later to d_block_");
    const std::string meets = what + ": query " + number(q) + " meets " + key(k);
    const double times = found / once;
    if (once == 0 ? found == 0 : std::abs(times - 1) < 1e-9) return "";
    if (k > q)
      return meets +
             ", which comes after it: a block has the keys of origin(step), of which visible_block() says "
             "what is seen, from which query on";
    std::string how = std::abs(times) < 1e-9 ? "never" : text(times, " times");
    if (how == "never" && (what.ends_with("d_k") || what.ends_with("d_v")))
      how +=
          on_hops
              ? ": its part is zeroed, or added, on the stream of the hops, which does not wait for the block"
              : ": a part was lost: each hop of the sums sends those to which compute has just added";
    if (std::abs(times - n) < 1e-9) return meets + " in every step";
    if (times > 1.5) how += ": its part of the step before is still there, or a part is added in two steps";
    return meets + " " + how;
  }
};

}  // namespace

TEST_CASE("06.4: the ring in forward", "[06.4]") {
  for (const CpLayout layout : layouts) {
    for (const bool kernels_slow : {false, true}) {
      Ring ring(layout, kernels_slow);
      const Tensor q = ring.rows(0), v = ring.rows(1);
      ring.context.reset_traffic();
      doing(to_string(layout),
            ": forward(): in each step but the last a rank sends on what came, seen or not");
      const MemoryBytes before = memory_in_use();
      const AttentionTensors t = ring.forward(q, q, v);
      const int64_t taken = elements_of<real>(Purpose::communication, before);
      tell_if(taken > 0, ring.with, "forward() takes memory for ", taken,
              " elements more: two buffers are enough, one to read and one to fill");
      std::string wrong = ring.wrong_wait(false);
      const HostMatrix out = ring.device.download(t.out), lse = ring.device.download(t.lse);
      for (int origin = 0; origin < ring.n && wrong.empty(); ++origin) {
        const auto keys = positions_of(layout, ring.sequence, origin, ring.n);
        wrong = ring.wrong_mask(origin, [&](int i, int j) { return out(i, keys[j]) * std::exp(lse(i, 0)); });
      }
      for (int64_t row = 0; row < out.rows && wrong.empty(); ++row) {
        const int i = ring.positions[row % ring.own];
        for (int j = 0; j < ring.sequence && wrong.empty(); ++j)
          wrong = ring.wrong_times(ring.with + "out", out(row, j) * (i + 1), i, j, j <= i);
        for (int j = 0; j < ring.sequence && wrong.ends_with(" never"); ++j) {
          const double times = out(row, j) * (i + 1);
          if (std::abs(times - (j <= i)) > 1e-9 && times > 1e-9)
            wrong += text(", but ", ring.key(j), " ", times, " times",
                          times > 1.5 ? ": each step uses, and sends on, what the hop before brought" : "");
        }
        if (wrong.empty() && std::abs(std::exp(lse(row, 0)) - (i + 1)) > 1e-9)
          wrong = text(ring.with, "lse of query ", i, " is that of ", text(std::exp(lse(row, 0))), " keys");
      }
      const int64_t due = int64_t{2} * (ring.n - 1) * v.size();
      const int64_t sent = traffic(ring.context, "send").elements;
      tell_if(sent != due, ring.with, sent, " elements of keys and values are sent in place of ", due,
              ": n - 1 hops bring each rank the keys of all others");
      tell(wrong);
    }
  }
}

TEST_CASE("06.5: the ring in backward", "[06.5]") {
  for (const CpLayout layout : layouts) {
    for (const bool kernels_slow : {false, true}) {
      Ring ring(layout, kernels_slow);
      const Tensor zeros = ring.rows(0), ones = ring.rows(1);
      const double scale = 1 / std::sqrt(static_cast<double>(ring.sequence));
      const int64_t rows = zeros.rows, columns = zeros.columns;
      for (const bool of_keys : {false, true}) {  // d_k asks for queries that are not zero, d_q for such keys
        const AttentionTensors t = ring.forward(of_keys ? ones : zeros, of_keys ? zeros : ones, ones);
        DeviceArena memory(Purpose::activations);
        const AttentionGradients g = {ring.rows(1),
                                      ring.device.fresh<real>(rows, columns),
                                      ring.rows(untouched),
                                      ring.rows(untouched),
                                      ring.attention->backward_memory(memory, ring.shape),
                                      ring.device.fresh<accum>(rows, 1)};
        ring.context.reset_traffic();
        doing(to_string(layout), ": backward(): sums travel a step behind the keys, and one hop more, home");
        ring.written = busy_time(ring.device.stream).end;
        ring.attention->backward(ring.device.blas, ring.shape, t, g);
        std::string wrong = ring.wrong_wait(true);
        const HostMatrix d_q = ring.device.download(g.d_q), d_k = ring.device.download(g.d_k),
                         d_v = ring.device.download(g.d_v);
        const int64_t place = ring.positions[0];
        if (wrong.empty() && (d_k(0, place) == untouched || d_v(0, place) == untouched))
          wrong = ring.with + "nothing came to g.d_k or g.d_v: return_sums(own) is the hop that brings them";
        if (wrong.empty() && std::isnan(ring.device.download(g.d_out_dot_out)(0, 0)))
          wrong =
              ring.with + "g.d_out_dot_out was never written: attention_dots() makes it, if t.out is there";
        const auto p = [](int i, int j) { return j <= i ? 1.0 / (i + 1) : 0.0; };
        const auto d_score = [&](int i, int j) { return scale * p(i, j) * ((i == j) - p(i, i)); };
        for (int origin = 0; origin < ring.n && wrong.empty() && !of_keys; ++origin) {
          const auto keys = positions_of(layout, ring.sequence, origin, ring.n);
          wrong = ring.wrong_mask(origin, [&](int i, int j) {
            const int q = ring.positions[i], k = keys[j];
            return q + k == 0 ? 1 : d_q(i, k) / (scale / (q + 1) * ((q == k) - 1.0 / (q + 1)));
          });
        }
        tell(wrong);
        // The rank whose keys these gradients are.
        for (int rank = 0; rank < ring.n && wrong.empty(); ++rank) {
          const auto theirs = context_positions(layout, ring.sequence, rank, ring.n);
          bool equal = rank != ring.context.rank();
          for (int64_t j = 0; j < ring.own; ++j) {
            for (int i = 0; i < ring.sequence; ++i)
              equal = equal && std::abs(d_v(j, i) - p(i, theirs[j])) < 1e-9;
          }
          if (equal)
            wrong =
                text(ring.with, "d_v is that of rank ", rank,
                     "'s keys: sums make one hop more than keys, to their owner; it sends what the last step "
                     "added to");
        }
        for (int64_t row = 0; row < rows && wrong.empty(); ++row) {
          const int own = ring.positions[row % ring.own];
          for (int other = 0; other < ring.sequence && wrong.empty(); ++other) {
            wrong = ring.wrong_times(ring.with + "d_v", d_v(row, other), other, own, p(other, own));
            if (wrong.empty() && of_keys)
              wrong = ring.wrong_times(ring.with + "d_k", d_k(row, other), other, own, d_score(other, own));
            if (wrong.empty() && !of_keys)
              wrong = ring.wrong_times(ring.with + "d_q", d_q(row, other), own, other, d_score(own, other));
          }
        }
        const int64_t due = int64_t{2} * (2 * ring.n - 1) * zeros.size();
        const int64_t sent = traffic(ring.context, "send").elements;
        tell_if(sent != due, ring.with, sent, " elements are sent in place of ", due,
                ": n - 1 hops of keys and values, n of their sums");
        tell(wrong);
        doing("backward() without t.out: then g.d_out_dot_out is there already");
        ring.attention->backward(ring.device.blas, ring.shape, {t.q, t.k, t.v, {}, t.lse, {}}, g);
      }
    }
  }
}

}  // namespace pentatron::probes
