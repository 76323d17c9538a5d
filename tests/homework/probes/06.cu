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
std::string text_of(const std::vector<int32_t>& values) {
  std::string text;
  for (const int32_t value : values) text += (text.empty() ? "" : ", ") + number(value);
  return text;
}
bool near(double a, double b) { return std::abs(a - b) < 1e-9; }  // NaN is near nothing

}  // namespace

TEST_CASE("06.1: who sees what", "[06.1]") {
  constexpr int ranks = 4, own = 4;  // fewer ranks are the same, as a body does not know how many there are
  for (const CpLayout layout : layouts) {
    for (int rank = 0; rank < ranks; ++rank) {
      for (int origin = 0; origin < ranks; ++origin) {
        const auto queries = positions_of(layout, ranks * own, rank, ranks),
                   keys = positions_of(layout, ranks * own, origin, ranks);
        const std::string of =
            text(to_string(layout), " on 4 ranks: rank ", rank, "'s queries at ", text_of(queries),
                 " and rank ", origin, "'s keys at ", text_of(keys), ": ");
        const auto visible = visible_block(layout, {2, own, {2, 1, 4}}, rank, origin);
        const auto [first, b] = visible.value_or(VisibleBlock{});
        for (int i = 0; i < own; ++i) {
          for (int j = 0; j < own; ++j) {
            const bool in_block = i >= first && i < first + b.queries && j < b.keys,
                       sees = in_block && (!b.diagonal || j <= i - first), due = keys[j] <= queries[i];
            tell_alike(sees != due, of, "query ", queries[i], due ? " does not see key " : " sees key ",
                       keys[j], ", which comes ", due ? "before it" : "after it");
          }
        }
        tell_alike(visible && (first + b.queries != own || b.keys > own || b.keys == 0), of, "the block has ",
                   b.queries, " queries from ", first, " on, and ", b.keys, " keys, of 4 each");
        tell_alike(visible && (b.batch != 2 || b.stride != own), of, "the block says ", b.batch,
                   " sequences of ", b.stride, " rows in memory, and there are 2 of 4");
      }
    }
  }
}

TEST_CASE("06.2: positions", "[06.2]") {
  for (const CpLayout layout : layouts) {
    for (const int ranks : {1, 2, 3}) {
      const int sequence = ranks == 1 ? 13 : 12;
      for (int rank = 0; rank < ranks; ++rank) {
        const auto is = context_positions(layout, sequence, rank, ranks),
                   due = positions_of(layout, sequence, rank, ranks);
        tell_alike(is != due, to_string(layout), ", ", sequence, " tokens on ", ranks, " ranks: rank ", rank,
                   " has ", text_of(is), ", and should have ", text_of(due), ": ",
                   layout == CpLayout::zigzag ? "rank r has the r-th chunk and the r-th from the end, " : "",
                   "ascending, as the diagonal masks by their order");
      }
    }
  }
}

TEST_CASE("06.3: merging two results", "[06.3]") {
  Device device;
  constexpr int heads = 2, size = 4, batch = 2, stride = 4, queries = 2, rows = batch * stride;
  // So many equal keys are merged already, and in the block.
  const auto before = [](int row, int h) { return 1.0 + row + 6 * h; };
  const auto added = [](int row, int h) { return 3.0 + 2 * (row + h); };
  const auto share_of = [&](int row, int block_row, int h) {
    return added(block_row, h) / (before(row, h) + added(block_row, h));
  };
  // With large scores, too, or those of the block alone.
  for (const auto& [shift, of_block] : {std::pair(0.0, 0.0), {900.0, 900.0}, {0.0, 900.0}}) {
    HostMatrix out(rows, heads * size), block_out = out, lse(rows, heads), block_lse = lse;
    for (int i = 0; i < rows; ++i) {
      for (int h = 0; h < heads; ++h) {
        lse(i, h) = std::log(before(i, h)) + shift;
        block_lse(i, h) = std::log(added(i, h)) + of_block;
        for (int j = 0; j < size; j += 2) out(i, h * size + j) = 1, block_out(i, h * size + j + 1) = 1 + i;
      }
    }
    const AccumTensor merged = device.upload<accum>(out), merged_lse = device.upload<accum>(lse);
    attention_merge({batch, queries, 1, stride, {heads, heads, size}, false}, device.upload<accum>(block_out),
                    device.upload<accum>(block_lse), merged, merged_lse, device.stream);
    const HostMatrix is = device.download(merged), is_lse = device.download(merged_lse);
    for (int i = 0; i < rows; ++i) {
      const bool in_block = i % stride < queries,
                 changed = is.slice(i, 1, 0, out.columns) != out.slice(i, 1, 0, out.columns) ||
                           is_lse.slice(i, 1, 0, heads) != lse.slice(i, 1, 0, heads);
      tell_alike(changed != in_block, "a block of 2 queries of 2 sequences, with a stride of 4: row ", i,
                 in_block ? " is not changed, and should be" : " is changed, and should not be",
                 ": in memory each sequence begins `stride` rows after the one before");
    }
    for (const int i : {0, 1, stride, stride + 1}) {
      for (int h = 0; h < heads; ++h) {
        const double all = before(i, h) + added(i, h), due = share_of(i, i, h), kept = is(i, h * size),
                     share = is(i, h * size + 1) / (1 + i), keys = std::exp(is_lse(i, h) - shift);
        const std::string of = text("a block of ", added(i, h), " equal keys, merged into ", before(i, h),
                                    of_block > 0 ? " (scores of 900)" : "", ": ");
        tell_alike(!std::isfinite(share + kept + is_lse(i, h)), of,
                   "the result is not finite: exp() overflows");
        if (shift != of_block) continue;
        std::string why = ", 1 / (1 + exp(lse - block_lse)), of a row and a head";
        if (near(share, added(i, h) / (all + added(i, h)))) why = ": the lse was merged before it was read";
        if (near(share, 1 - due)) why = ": that is the share of what was there before";
        if (near(share, share_of(i, i, 1 - h))) why = ": that is the share of another head";
        for (int r = 0; r < rows; ++r) {
          const double of_row = share_of(i, r, h), values = (1.0 + r) / (1 + i);
          if (r != i && (near(share, of_row) || near(share, due * values) || near(share, of_row * values)))
            why = text(": it is of row ", r, " of the block, which has `stride` rows a sequence, too");
        }
        tell_alike(!near(share, due), of, "the block's share in out is ", share, " and should be ",
                   added(i, h), " of ", all, " keys", why);
        tell_alike(!near(kept, 1 - due), of, "of what was there before ", kept, " remains, and should be ",
                   before(i, h), " of ", all, " keys, 1 - share");
        tell_alike(!near(keys, all), of, "the merged lse is that of ", keys, " keys, and should be of ", all,
                   ": log(exp(lse) + exp(block_lse))");
        for (int j = 2; j < size; ++j)
          tell_alike(is(i, h * size + j) != is(i, h * size + j % 2), of, "element ", j,
                     " of a head has another share");
      }
    }
  }
}

// ---- The ring. All scores are 0, so the probabilities of query q are 1 / (q + 1); values and gradients of
// outputs are rows of the identity. Then each element of a result says how often a query and a key met.

namespace {

double probability(int q, int k) { return k <= q ? 1.0 / (q + 1) : 0; }

struct Ring {
  static constexpr int batch = 2, own = 4;  // tokens of a sequence on each rank
  const Slow slow;                          // comes first: a communicator has the link of when it was made
  World world{nullptr, nullptr};
  Communicator context;
  const int n = context.ranks(), rank = context.rank(), sequence = own * n;
  Device device;
  const CpLayout layout;
  const std::vector<int32_t> positions = positions_of(layout, sequence, rank, n);
  const AttentionShape shape = {batch, own, {1, 1, sequence}};
  std::unique_ptr<RingAttention> attention;
  const std::string with = text("rank ", rank, ", ", to_string(layout), ": ");
  double written = 0;                // before a pass compute writes the keys
  std::vector<trace::Interval> log;  // of the pass

  Ring(CpLayout l, bool kernels_slow)  // of all ranks, or of an odd number, without the last one
      : slow(kernels_slow), context(world, members(world, kernels_slow), "context"), layout(l) {
    auto options =
        test_options<OptionsWith<ContextParallelOptions>>(1, sequence, 1, 1, 1, 2, sequence, batch, batch);
    options.attention = Attention::tiled;
    attention = std::make_unique<RingAttention>(options, layout, context, 1);
  }
  static std::vector<int> members(const World& world, bool are_all) {
    const std::vector<int> all = world.all();
    if (are_all) return all;
    return world.rank() == all.back() ? std::vector{all.back()} : std::vector(all.begin(), all.end() - 1);
  }
  // Rows of this rank's tokens: `value` at the token's position, or all zeros.
  Tensor rows(double value) {
    HostMatrix all(batch * own, sequence);
    for (int64_t row = 0; row < all.rows; ++row) all(row, positions[row % own]) = value;
    return device.upload<real>(all);
  }
  AttentionTensors forward(const Tensor& q, const Tensor& k, const Tensor& v) {
    AttentionTensors t = {q, k, v, device.fresh<real>(q.rows, q.columns), device.fresh<accum>(q.rows, 1), {}};
    context.reset_traffic();
    written = busy_time(device.stream).end;  // behind the allocations, which wait for all
    attention->forward(device.blas, shape, t);
    return t;
  }
  void tell_traffic(int hops, const std::string& why) {
    const int64_t sent = traffic(context, "send").elements, due = int64_t{2} * hops * batch * own * sequence;
    tell_if(sent != due, with, sent, " elements are sent in place of ", due, ": ", why);
  }

  int count(const std::string& name) const {
    return static_cast<int>(std::ranges::count(log, name, &trace::Interval::name));
  }

  // Who does not wait, or waits for too much, in virtual time, in which kernels are slow or hops are.
  std::string wrong_wait(bool backward) {
    busy(device.stream);
    log = ran();
    const int zeroed = count("memset"), due_zeroed = backward ? 2 * n + 1 : 0;
    const int sums = count("accumulate_kernel"),
              due_sums = !backward ? 0 : 2 * (layout == CpLayout::zigzag ? n - 1 : rank);
    if (count("memcpy") > 0)
      return with + "something is copied: attention reads, and a hop fills, its last place";
    if (zeroed > due_zeroed && n > 1)
      return text(with, zeroed, " matrices are zeroed in place of ", due_zeroed,
                  backward ? ": d_q once, and a part of d_k and of d_v in each step"
                           : ": the diagonal comes first, and writes out");
    if (sums != due_sums)
      return text(with, sums, " matrices are added to the sums in place of ", due_sums,
                  ": of d_k and of d_v in each step that sees keys, but in step 0 they lie there");
    if (layout != CpLayout::zigzag) return "";  // in which all ranks do the same
    const std::string wrong = wrong_wait(backward, false);
    return wrong.empty() || wrong_wait(backward, true).empty() ? "" : wrong;
  }
  // The same of each step. Its hops of the keys and of the sums may come in either order.
  std::string wrong_wait(bool backward, bool sums_first) const {
    std::vector<Time> hops, blocks, keys(n), sums(n), adds(n);  // by step, but for the hops
    int added = 0;                                              // d_k and d_v, in each step but the first
    for (const trace::Interval& i : log) {
      const Time time = {i.begin, i.end};
      if (i.stream == "context" && i.name != "accumulate_kernel" && i.name != "memset") hops.push_back(time);
      if (i.name == "tiled_forward_kernel" || i.name == "tiled_backward_keys_kernel") blocks.push_back(time);
      if (i.name == "tiled_backward_queries_kernel" && !blocks.empty()) blocks.back().end = i.end;
      if (i.name != "accumulate_kernel") continue;
      Time& add = adds[(1 + added++ / 2) % n];
      add = {std::min(add.begin, i.begin), std::max(add.end, i.end)};
    }
    if (std::ssize(blocks) != n)
      return text(with, blocks.size(), " blocks in place of ", n,
                  ": one with each rank's keys, first its own");
    if (std::ssize(hops) != (backward ? 2 * n - 1 : n - 1)) return "";  // traffic or results tell of it
    auto hop = hops.begin();
    for (int s = 0; s < n; ++s) {
      if (s + 1 < n) keys[s] = *hop++;
      if (backward && s > 0) sums[s] = *hop++;
      if (backward && s > 0 && s + 1 < n && sums_first) std::swap(keys[s], sums[s]);
    }
    if (keys[0].begin < written)
      return with + "the first hop does not wait until compute has written keys and values";
    for (int s = 0; s < n; ++s) {
      const std::string in = text(with, "step ", s, ": "), in_last = text(" in step ", s - 1);
      const Time block = blocks[s], last = s > 0 ? blocks[s - 1] : Time(), add = adds[s];
      if (s > 0 && block.begin < keys[s - 1].end)
        return in + "compute does not wait for the hop that brings its keys, begun" + in_last;
      if (s > 1 && keys[s].begin < last.end)  // in step 0 compute reads no such buffer
        return in + "the hop does not wait for compute, and fills the buffer that is still read" + in_last;
      if (s > 0 && sums[s].begin < std::max(last.end, adds[s - 1].end))
        return in + "the sums leave before compute has added its part" + in_last;
      if (add.begin < block.end) return in + "a part is added before compute has made it in the block";
      if (add.begin < sums[s].end) return in + "compute adds to sums that are still coming";
      for (const auto& [hop, name] : {std::pair(keys[s], "hop of the keys"), {sums[s], "hop of the sums"}}) {
        if (hop.end > 0 && slow.kernels && hop.begin >= block.end)
          return in + "the " + name + " begins after the block, which is there to hide it";
        if (hop.end > 0 && !slow.kernels && block.begin >= hop.end)
          return in + "the block waits for this step's " + name + ", which it is there to hide";
      }
    }
    if (backward && hops.back().begin < std::max(blocks[n - 1].end, adds[n - 1].end))
      return with + "the last hop, home, begins before compute has added its part in the last step";
    if (backward && time_of(log, "busy_kernel", "test").begin < hops.back().end)
      return with + "after backward() compute does not wait for the last hop, which brings d_k and d_v";
    return "";
  }

  // The first element that does not say that they met once. Rows are this rank's queries, or its keys.
  std::string wrong_times(const std::string& result, const HostMatrix& is, const auto& once) const {
    const bool of_queries = result == "out" || result == "d_q";
    for (int64_t row = 0; row < is.rows; ++row) {
      for (int other = 0; other < sequence; ++other) {
        const int at = positions[row % own], q = of_queries ? at : other, k = of_queries ? other : at;
        const double times = once(q, k) == 0 ? 1 + is(row, other) : is(row, other) / once(q, k);
        if (near(times, 1)) continue;
        return text(with, result, ": query ", q, " meets key ", k, " of rank ",
                    owner_of(layout, sequence, n, k),
                    std::isnan(times) ? " NaN times"
                    : k > q           ? ", which comes after it"
                    : near(times, 0)  ? " never"
                    : near(times, n)  ? " in every step"
                                      : text(" ", times, " times"),
                    ": ", why(result, times, q, k));
      }
    }
    return "";
  }
  std::string why(const std::string& result, double times, int q, int k) const {
    if (std::isnan(times) && result == "out") return "a block reads keys or values that no hop has brought";
    if (std::isnan(times) && result == "d_q") return "blocks add to d_q, which nobody has zeroed";
    if (std::isnan(times) && count("memset") < 2 * n + 1)
      return "a block adds to its part, which nobody has zeroed in this step";
    if (std::isnan(times))
      return "nobody has filled what is sent or added: a block adds to the sums in step 0, later to d_block_";
    const int asks = owner_of(layout, sequence, n, q), origin = owner_of(layout, sequence, n, k);
    const std::string step =
        text("in step ", (asks - origin + n) % n, " rank ", asks, " has the keys of rank ", origin,
             " (rank - step, around the ring), and visible_block() says what is seen");
    if (k > q) return step;
    if (result == "out" || result == "d_q")
      return "a step uses, and sends on, what the hop before brought: " + step;
    if (times > 1) return "its part of the step before is still there, or a part is added in two steps";
    if (time_of(log, "memset", "context").end + time_of(log, "accumulate_kernel", "context").end > 0)
      return "its part is zeroed, or added, on the stream of the hops, which does not wait for the block";
    return "a part was lost: each hop of the sums sends those to which compute has just added";
  }
  // The same of d_v, and whether it is another rank's.
  std::string wrong_d_v(const HostMatrix& d_v) const {
    for (int k = 0; k < sequence; ++k) {
      const int owner = owner_of(layout, sequence, n, k);
      bool equal = owner != rank;
      for (int q = 0; q < sequence; ++q) equal = equal && near(d_v(0, q), probability(q, k));
      if (equal)
        return text(with, "d_v is that of rank ", owner,
                    "'s keys: the sums' last hop, home, sends those to which compute has just added");
    }
    return wrong_times("d_v", d_v, probability);
  }
};

}  // namespace

TEST_CASE("06.4: the ring in forward", "[06.4]") {
  for (const CpLayout layout : layouts) {
    for (const bool kernels_slow : {false, true}) {
      Ring ring(layout, kernels_slow);
      const Tensor q = ring.rows(0), v = ring.rows(1);
      doing(to_string(layout),
            ": forward(): in each step but the last a rank sends on what came, seen or not");
      const MemoryBytes before = memory_in_use();
      const AttentionTensors t = ring.forward(q, q, v);
      const int64_t taken = elements_of<real>(Purpose::communication, before);
      tell_if(taken > 0, ring.with, "forward() takes memory for ", taken,
              " elements more: two buffers are enough, one to read and one to fill");
      tell(ring.wrong_wait(false));
      const HostMatrix out = ring.device.download(t.out), lse = ring.device.download(t.lse);
      HostMatrix met = out;  // how often, also where the sum of the probabilities has too many keys
      for (size_t i = 0; i < met.values.size(); ++i) met.values[i] *= std::exp(lse.values[i / ring.sequence]);
      ring.tell_traffic(ring.n - 1, "n - 1 hops bring each rank the keys and values of all others");
      const auto once = [](int q, int k) { return k <= q ? 1.0 : 0.0; };
      tell(ring.wrong_times("out", out, probability).empty() ? "" : ring.wrong_times("out", met, once));
      for (int i = 0; i < ring.own; ++i)
        tell_if(!near(std::exp(lse(i, 0)), ring.positions[i] + 1), ring.with, "lse of query ",
                ring.positions[i], " is that of ", std::exp(lse(i, 0)), " keys");
    }
  }
}

TEST_CASE("06.5: the ring in backward", "[06.5]") {
  for (const CpLayout layout : layouts) {
    for (const bool kernels_slow : {false, true}) {
      Ring ring(layout, kernels_slow);
      const Tensor zeros = ring.rows(0), ones = ring.rows(1);
      const double scale = 1 / std::sqrt(static_cast<double>(ring.sequence));
      const auto d_score = [&](int q, int k) {
        return scale * probability(q, k) * ((q == k) - probability(q, q));
      };
      for (const bool of_keys : {false, true}) {  // d_k asks for queries that are not zero, d_q for such keys
        const AttentionTensors t = ring.forward(of_keys ? ones : zeros, of_keys ? zeros : ones, ones);
        DeviceArena memory(Purpose::activations);
        const AttentionGradients g = {ring.rows(1),
                                      ring.device.fresh<real>(zeros.rows, zeros.columns),
                                      ring.rows(untouched),
                                      ring.rows(untouched),
                                      ring.attention->backward_memory(memory, ring.shape),
                                      ring.device.fresh<accum>(zeros.rows, 1)};
        ring.context.reset_traffic();
        doing(to_string(layout), ": backward(): sums travel a step behind the keys, and one hop more, home");
        ring.written = busy_time(ring.device.stream).end;
        ring.attention->backward(ring.device.blas, ring.shape, t, g);
        tell(ring.wrong_wait(true));
        const HostMatrix d_q = ring.device.download(g.d_q), d_k = ring.device.download(g.d_k),
                         d_v = ring.device.download(g.d_v);
        const int first = ring.positions[0];
        tell_if(d_k(0, first) == untouched || d_v(0, first) == untouched, ring.with,
                "nothing came to g.d_k or g.d_v: return_sums(own) is the hop that brings them");
        tell_if(std::isnan(ring.device.download(g.d_out_dot_out)(0, 0)), ring.with,
                "g.d_out_dot_out was never written: attention_dots() makes it, if t.out is there");
        ring.tell_traffic(2 * ring.n - 1, "n - 1 hops of keys and values, n of their sums");
        tell(ring.wrong_d_v(d_v));
        tell(of_keys ? ring.wrong_times("d_k", d_k, d_score) : ring.wrong_times("d_q", d_q, d_score));
        doing("backward() without t.out: then g.d_out_dot_out is there already");
        ring.attention->backward(ring.device.blas, ring.shape, {t.q, t.k, t.v, {}, t.lse, {}}, g);
      }
    }
  }
}

}  // namespace pentatron::probes
