// Probes of stage 07.
// ranks: 4
#include "07_combined_5d/combined.h"
#include "model.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

std::string place_of(const MeshShape& shape, int rank) {
  const auto [tp, cp, dp, pp] = coordinates_of(shape, rank);
  return text("rank ", rank, " (tp ", tp, ", cp ", cp, ", dp ", dp, ", pp ", pp, ")");
}
std::string text_of(const MeshShape& s) {
  return text("tp ", s.tp, ", cp ", s.cp, ", dp ", s.dp, ", pp ", s.pp,
              (s.ep > 1 ? ", ep " + number(s.ep) : ""),
              (s.shard_ranks > 0 ? ", N " + number(s.shard_ranks) : ""), ": ");
}
constexpr MeshShape shapes[] = {{.tp = 2, .cp = 3, .dp = 4, .pp = 2},
                                {.tp = 3, .cp = 2, .dp = 2, .pp = 3},
                                {.cp = 2, .dp = 4, .ep = 4},
                                {.tp = 2, .cp = 3, .dp = 4, .pp = 2, .ep = 3},
                                {.dp = 2, .pp = 4, .ep = 2, .copies = 2},
                                {.dp = 2, .pp = 4, .copies = 2, .shard_ranks = 2},
                                {.cp = 2, .dp = 4, .ep = 2, .shard_ranks = 4}};

}  // namespace

TEST_CASE("07.1: places in the mesh", "[07.1]") {
  for (const MeshShape& s : shapes) {
    const std::pair<const char*, int> axes[] = {{"tp", s.tp}, {"cp", s.cp}, {"dp", s.dp}, {"pp", s.pp}};
    const int steps[] = {1, s.tp, s.tp * s.cp, s.tp * s.cp * s.dp};
    for (int axis = 0; axis < 4; ++axis) {
      if (axes[axis].second == 1) continue;
      const auto place = coordinates_of(s, steps[axis]);
      const int at[] = {place.tp, place.cp, place.dp, place.pp};
      for (int other = 0; other < 4; ++other)
        tell_alike(
            at[other] != (other == axis), text_of(s), place_of(s, steps[axis]), ": ", axes[other].first,
            " should be ", int{other == axis},
            ": tp varies fastest, then cp, dp, pp; ranks between two places of ", axes[other].first,
            " are the product of the faster degrees, ", steps[other],
            at[other] < axes[other].second ? "" : ", and behind the last place comes the first one again");
    }
    for (int rank = 0; rank < s.ranks(); ++rank) {
      const auto [tp, cp, dp, pp] = coordinates_of(s, rank);
      tell_alike(tp < 0 || cp < 0 || dp < 0 || pp < 0 || tp >= s.tp || cp >= s.cp || dp >= s.dp || pp >= s.pp,
                 text_of(s), place_of(s, rank), " is beyond the degree of an axis");
      tell_alike(tp + s.tp * (cp + s.cp * (dp + s.dp * pp)) != rank, text_of(s), place_of(s, rank),
                 " solves the formula for rank ", tp + s.tp * (cp + s.cp * (dp + s.dp * pp)));
    }
  }
}

TEST_CASE("07.2: who is in a group", "[07.2]") {
  for (const MeshShape& s : shapes) {
    for (int a = 0; a < s.ranks(); ++a) {
      for (int b = 0; b < a; ++b) {
        const auto x = coordinates_of(s, a), y = coordinates_of(s, b);
        const bool tp = x.tp == y.tp, cp = x.cp == y.cp, dp = x.dp == y.dp, pp = x.pp == y.pp;
        const bool weights = tp && (pp || (s.copies == 2 && x.pp + y.pp == s.pp - 1));
        const auto replica = [&s](const MeshCoordinates& at) {  // its number
          return at.cp + s.cp * (at.dp + s.dp * (s.copies == 2 && at.pp >= s.pp / 2));
        };
        const int of_x = replica(x), of_y = replica(y);
        const bool copy = of_x / s.shards() == of_y / s.shards(),
                   shard = of_x % s.shards() == of_y % s.shards();
        const std::tuple<MeshGroup, const char*, bool, const char*> groups[] = {
            {MeshGroup::tensor, "tensor", cp && dp && pp, "cp, dp and pp"},
            {MeshGroup::context, "context", tp && dp && pp, "tp, dp and pp"},
            {MeshGroup::pipeline, "pipeline", tp && cp && dp, "tp, cp and dp"},
            {MeshGroup::gradients, "gradients", weights && copy,
             "tp, pp and, of a number cp + CP dp, number / N: the same weights, on other tokens; N ranks "
             "share out a copy"},
            {MeshGroup::replicate, "replicate", weights && shard,
             "tp, pp and, of a number cp + CP dp, number % N: the same shard in all copies of N ranks"},
            {MeshGroup::experts, "experts", tp && pp && of_x / s.ep == of_y / s.ep,
             "tp, pp and number / ep, where a rank's number is cp + CP dp: they share out the experts"},
            {MeshGroup::expert_gradients, "expert gradients", weights && copy && of_x % s.ep == of_y % s.ep,
             "tp, pp, number / N and number % ep, where a rank's number is cp + CP dp: the same experts"},
            {MeshGroup::all, "all", true, "nothing"}};
        for (const auto& [group, name, due, common] : groups) {
          const bool together = in_common(s, group, a) == in_common(s, group, b);
          tell_alike(together != due, text_of(s), place_of(s, b), " and ", place_of(s, a), " are ",
                     together ? "" : "not ", "in one group \"", name, "\". Its ranks have in common ",
                     common);
        }
      }
    }
  }
}

TEST_CASE("07.3: what is summed over whom", "[07.3]") {
  World world(nullptr, nullptr);
  const Stream compute("compute");
  for (const MeshShape& shape : {MeshShape{.dp = 4, .ep = 2}, MeshShape{.dp = 2, .pp = 2, .ep = 2},
                                 MeshShape{.cp = 2, .dp = 2, .ep = 4}}) {
    Mesh mesh(shape, world);
    for (const int stage : {0, 1, 3}) {
      for (const int group : {dense_group, expert_group}) {
        if (group == expert_group && shape.ep == 1) continue;
        CombinedOptions options;
        options.zero.zero_stage = stage;
        options.data_parallel.dp_sync = DpSync::overlap;
        options.pipeline.pp = shape.pp;
        const std::string with =
            text(text_of(shape), (group == dense_group ? "dense group" : "experts' group"), ", ZeRO stage ",
                 stage, ": ");
        const MemoryBytes before = memory_in_use();
        Parameters parameters(mesh.parameter_layout({0, 1, 2, 3}));
        for (int unit = 0; unit < 4; ++unit)
          parameters.declare({"unit", unit, 8, 3, TensorSplit::replicated_outside, 0, true, group});
        ParameterGroup& all = parameters.group(group);
        doing(with, "sync_gradients()");
        const auto hooks = sync_gradients(options, mesh, parameters, group, compute);
        tell_if(!hooks, with, "sync_gradients() returns nothing");
        tell_if((dynamic_cast<Zero*>(hooks.get()) != nullptr) != (stage > 0), with,
                (stage > 0 ? "the hooks are not those of ZeRO" : "the hooks are those of ZeRO"));
        if (stage == 0) tell_if(all.gradients(0) == nullptr, with, "nobody has allocated the parameters");
        const size_t shards = parameters.shards().size();
        tell_if(shards != 4, with, shards,
                " shards for 4 units: Zero allocates its group itself, and allocate(), once, is for data "
                "parallelism alone");
        Sum sum;
        sum.counted = members_of(
            shape, group == dense_group ? MeshGroup::gradients : MeshGroup::expert_gradients, world.rank());
        for (int unit = 3; unit >= 0; --unit) {
          doing(with, "gradients of unit ", unit,
                ": all ranks with these weights sum them, for the experts' "
                "group those of mesh.expert_gradients");
          hooks->before_gradients(unit);
          write(compute, all.gradients(unit), sum.values(world.rank(), all.size(unit)));
          hooks->after_gradients(unit, true);
        }
        hooks->finish_gradient_sync();
        CUDA_CHECK(cudaDeviceSynchronize());
        const Shard shard = parameters.shards()[0];
        std::string wrong =
            sum.wrong(with + "the sum of gradients", at(shard.gradients, shard.size()), shard.begin);
        if (stage > 0 && wrong.ends_with("again"))
          wrong += ": ZeRO's second communicator has the ranks with the same shard in other copies";
        tell(wrong);
        Communicator& ranks = group == dense_group ? mesh.gradients : mesh.expert_gradients;
        const int64_t sums = traffic(ranks, "all_reduce").calls;
        tell_if(stage == 0 && sums != 4 && ranks.ranks() > 1, with, sums,
                " all-reduces by the ranks with these weights, and --dp-sync overlap has one a unit: "
                "options.data_parallel says how to sum, the mesh over whom");
        ranks.reset_traffic();
        int64_t size = 0;
        for (int unit = 0; unit < 4; ++unit) size += all.size(unit);
        const int64_t weights = elements_of<real>(Purpose::weights, before);
        const int64_t gathered = shape.pp > 1 ? size : 2 * all.largest_size();
        const int64_t due = stage < 3 ? size : size / ranks.ranks() + gathered;
        tell_if(weights != due, with, "memory of weights: ", weights, " elements in place of ", due, ": ",
                (stage < 3      ? "each rank has the weights whole"
                 : shape.pp > 1 ? "a pipeline keeps gathered weights until the step ends, or it gathers them "
                                  "again for each micro-batch"
                                : "without a pipeline gathered weights are dropped after use"));
      }
    }
  }
}

TEST_CASE("07.4: dispatch", "[07.4]") {
  World world(nullptr, nullptr);
  Communicator experts(world, world.all(), "experts");
  const Stream compute("compute");
  const int n = experts.ranks(), all = 2 * n, own = 2, rank = experts.rank(), d = 3;
  const auto count = [&](int from, int expert) { return (from + 2 * expert) % 4; };  // also none
  DeviceArena memory(Purpose::activations);
  const Matrix<int32_t> counts = memory.matrix<int32_t>(2, all);
  const Tensor permuted = memory.matrix<real>(64, d), dispatched = memory.matrix<real>(64, d);
  Communicator alone(world, {rank}, "alone");  // has all experts
  ExpertExchange exchange(all, experts, compute), at_home(all, alone, compute);
  exchange.connect(counts);
  std::vector<int32_t> sent;
  for (int e = 0; e < all; ++e) sent.push_back(count(rank, e));
  const RowCounts host(all), of_home(all);
  std::string wrong;
  for (const bool one_rank : {false, true}) {
    write(compute, counts.data, sent);
    const double counted = busy_time(compute).end;
    doing(one_rank
              ? "exchange_counts() of a rank that has all experts"
              : "exchange_counts(): each rank tells each other one how many rows it sends to its experts");
    const RowCounts& is = one_rank ? of_home : host;
    ExpertExchange& of = one_rank ? at_home : exchange;
    of.exchange_counts(counts.row_range(0, 1), counts.row_range(1, 1), is);
    const std::vector<trace::Interval> log = ran();
    const double next = busy_time(compute, shortest_kernel).begin;
    for (const trace::Interval& i : log) {
      tell_if(i.begin < counted, here(),
              "exchange_counts() does not wait until compute has written the counts");
      tell_if(i.stream == "compute", here(),
              "exchange_counts() uses the stream of compute: await_counts() waits for that of the experts' "
              "ranks");
    }
    tell_if(next >= time_of(log, "", one_rank ? "alone" : "experts").end, here(),
            "exchange_counts(): compute, or the host, waits for the counts: await_counts() does, later");
    of.await_counts();
    const std::string who =
        here() + (one_rank ? "it has all experts, so nothing travels, and came is sent: " : "");
    for (int e = 0; e < all && wrong.empty(); ++e) {
      const int from = one_rank ? rank : e / own, expert = one_rank ? e : rank * own + e % own;
      if (is.came[e] != count(from, expert))
        wrong = text(who, "came[", one_rank ? 0 : from, ", ", one_rank ? e : e % own, "] is ", is.came[e],
                     "; rank ", from, " sends ", count(from, expert), " rows to expert ", expert, " here",
                     one_rank ? "" : ": own_ counts come from each rank");
      else if (is.sent[e] != sent[e])
        wrong = text(who, "sent[", e, "] is ", is.sent[e], " on the host, and should be ", sent[e]);
    }
    CUDA_CHECK(cudaDeviceSynchronize());
    tell(wrong);
  }
  doing("dispatch of a rank that has all experts: the two orders are one, and nothing travels");
  at_home.dispatch(of_home, permuted, permuted);
  tell_if(!alone.traffic().empty(), "a rank that has all experts sends rows to itself");
  // A row's elements are its owner, 10 * rank + expert, and its place among the rows from there to there.
  const auto name = [&](int owner) { return text("rank ", owner / 10, "'s rows for expert ", owner % 10); };
  std::vector<real> by_expert, by_rank;
  std::vector<std::tuple<int, int, size_t>> of_expert, of_rank;  // from, expert, first element
  const auto add = [&](std::vector<real>& rows, auto& parts, int from, int expert) {
    parts.emplace_back(from, expert, rows.size());
    for (int i = 0; i < count(from, expert) * d; ++i)
      rows.push_back(static_cast<real>(owned(10 * from + expert, i)));
  };
  for (int e = 0; e < all; ++e) add(by_expert, of_expert, rank, e);
  for (int i = 0; i < own; ++i)
    for (int from = 0; from < n; ++from) add(by_rank, of_rank, from, rank * own + i);
  for (const bool dispatch : {true, false}) {
    const Tensor from = dispatch ? permuted : dispatched, to = dispatch ? dispatched : permuted;
    write(compute, to.data, std::vector<real>(to.size(), untouched));
    write(compute, from.data, dispatch ? by_expert : by_rank);
    const double written = busy_time(compute).end;
    const std::string call = dispatch ? "dispatch" : "combine";
    doing(call,
          ": a message of rows * d elements for each (rank, expert) that has rows, in the same order on both "
          "sides; expert e is on rank e / own; sent is [experts], came is [ranks, own experts]");
    dispatch ? exchange.dispatch(host, permuted, dispatched) : exchange.combine(host, dispatched, permuted);
    const Time travels = time_of(ran(), "", "experts");
    tell_if(travels.begin < written, here(), call,
            ": rows leave before compute has written them: the experts' stream waits for compute");
    tell_if(busy_time(compute, shortest_kernel).begin >= travels.end, here(), call,
            ": compute waits for the rows before await_rows(): nothing hides the messages");
    const int64_t moved = traffic(experts, "all_to_all_v").elements;
    experts.reset_traffic();
    const int64_t due = std::ssize(dispatch ? by_expert : by_rank);
    int64_t home = 0;
    for (int i = 0; i < own; ++i) home += count(rank, rank * own + i) * d;
    tell_if(moved != due, here(), call, " sends ", moved, " elements in place of ", due,
            moved == due - home
                ? ": rows for the rank's own experts are a message to itself; nothing else copies them"
                : ": a part has rows * d elements; dispatch sends from `permuted`, combine from "
                  "`dispatched`");
    exchange.await_rows();
    tell_if(
        busy_time(compute, shortest_kernel).begin < travels.end, here(), call,
        ": after await_rows() compute does not wait until the rows are there: arrived_ is recorded behind "
        "the messages, on the experts' stream");
    const std::vector<real> is = at(to);
    for (const auto& [owner, expert, first] : dispatch ? of_rank : of_expert) {
      if (wrong.empty())
        wrong = wrong_copy(call + ": where " + name(10 * owner + expert) + " should lie",
                           std::span(&is[first], count(owner, expert) * d), 10 * owner + expert, 0, name);
    }
    if (wrong.ends_with("never written")) wrong += ": a message of n rows has n * d elements";
    tell(wrong);
  }
}

TEST_CASE("07.5: rows of experts", "[07.5]") {
  World world(nullptr, nullptr);
  Communicator communicator(world, world.all(), "experts");
  const Stream compute("compute");
  auto options = test_options<CombinedOptions>(1, 4, 1, 1, 4, 8, 4, 1, 4);
  const int n = communicator.ranks(), own = 2;
  options.model.experts = n * own, options.model.top_k = 1, options.experts.ep = n;
  ExpertParallel experts(options, options.experts, communicator, compute);
  Sum sum;
  sum.parts = own, sum.part = "rows for own expert";
  for (const bool empty : {false, true}) {  // an expert of which there are none
    const RowCounts counts(n * own);
    for (int rank = 0; rank < n; ++rank) {
      for (int i = 0; i < own; ++i)
        counts.came[rank * own + i] = empty && i == 0 ? 0 : 1 << 4 * (rank + n * i);
    }
    const auto rows = experts.rows_of_experts(counts);
    tell_alike(std::ssize(rows.rows) != own || std::ssize(rows.first) != own, "rows_of_experts() has ",
               rows.rows.size(), " experts, and a rank has ", own,
               (empty ? ": one without rows stays in the list, its gradients are to become zero" : ""));
    int64_t first = 0;
    for (int i = 0; i < own; ++i) {
      sum.counted.clear();
      for (int rank = 0; rank < n; ++rank) sum.counted.push_back(rank + n * i);
      const std::string of = text("rows_of_experts(), own expert ", i, ": ");
      const std::string is = empty && i == 0 ? (rows.rows[i] != 0 ? "are not 0" : "")
                                             : sum.wrong(static_cast<double>(rows.rows[i]), 0);
      tell_alike(!is.empty(), of, "its rows ", is, "; came is [ranks, own experts]");
      tell_alike(rows.first[i] != first, of, "its rows begin at ", rows.first[i], ", and should at ", first,
                 ", where those of the expert before it end");
      first += rows.rows[i];
    }
    tell_alike(rows.all != first, "rows_of_experts(): all is ", rows.all, ", and the own experts have ",
               first, " rows together");
  }
  options.model.experts = 3 * n;
  ExpertParallel three(options, options.experts, communicator, compute);
  const RowCounts counts(3 * n);
  for (int e = 0; e < 3 * n; ++e) counts.came[e] = 1;
  const int64_t first = three.rows_of_experts(counts).first[2];
  tell_alike(first != 2 * n, "rows_of_experts(), own expert 2: its rows begin at ", first, ", and should at ",
             2 * n, ", behind those of all experts before it");
}

}  // namespace pentatron::probes
