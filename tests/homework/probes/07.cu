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
  return text("tp ", s.tp, ", cp ", s.cp, ", dp ", s.dp, ", pp ", s.pp, ", ep ", s.ep, ", N ", s.shards(),
              ": ");
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
    for (int rank = 0; rank < s.ranks(); ++rank) {
      const auto [tp, cp, dp, pp] = coordinates_of(s, rank);
      const std::tuple<const char*, int, int> axes[] = {
          {"tp", s.tp, tp}, {"cp", s.cp, cp}, {"dp", s.dp, dp}, {"pp", s.pp, pp}};
      int step = 1;  // ranks between two places of an axis
      for (const auto& [name, degree, place] : axes) {
        const int due = rank / step % degree;
        tell_alike(place != due, text_of(s), place_of(s, rank), ": ", name, " should be ", due,
                   ": tp varies fastest, then cp, dp, pp; ranks between two places of ", name,
                   " are the product of the faster degrees, ", step,
                   place < degree ? "" : ", and behind the last place comes the first one again");
        step *= degree;
      }
    }
  }
}

TEST_CASE("07.2: who is in a group", "[07.2]") {
  for (const MeshShape& s : shapes) {
    const auto number_of = [&s](const MeshCoordinates& at) {  // among those with the same weights
      return at.cp + s.cp * (at.dp + s.dp * (s.copies == 2 && at.pp >= s.pp / 2));
    };
    for (int a = 0; a < s.ranks(); ++a) {
      for (int b = 0; b < a; ++b) {
        const auto x = coordinates_of(s, a), y = coordinates_of(s, b);
        const bool tp = x.tp == y.tp, cp = x.cp == y.cp, dp = x.dp == y.dp, pp = x.pp == y.pp;
        const bool weights = tp && (pp || (s.copies == 2 && x.pp + y.pp == s.pp - 1));
        const int n = number_of(x), m = number_of(y), shards = s.shards();
        const bool copy = n / shards == m / shards, shard = n % shards == m % shards;
        const std::tuple<MeshGroup, const char*, bool, const char*> groups[] = {
            {MeshGroup::tensor, "tensor", cp && dp && pp, "cp, dp and pp"},
            {MeshGroup::context, "context", tp && dp && pp, "tp, dp and pp"},
            {MeshGroup::pipeline, "pipeline", tp && cp && dp, "tp, cp and dp"},
            {MeshGroup::gradients, "gradients", weights && copy,
             "tp, pp and number / N: the same weights, on other tokens; N ranks share out a copy"},
            {MeshGroup::replicate, "replicate", weights && shard,
             "tp, pp and number % N: the same shard in all copies of N ranks"},
            {MeshGroup::experts, "experts", tp && pp && n / s.ep == m / s.ep,
             "tp, pp and number / ep: they share out the experts"},
            {MeshGroup::expert_gradients, "expert gradients", weights && copy && n % s.ep == m % s.ep,
             "tp, pp, number / N and number % ep: the same experts"},
            {MeshGroup::all, "all", true, "nothing"}};
        for (const auto& [group, name, due, common] : groups) {
          const bool together = in_common(s, group, a) == in_common(s, group, b);
          tell_alike(together != due, text_of(s), place_of(s, b), " and ", place_of(s, a), " are ",
                     together ? "" : "not ", "in one group \"", name, "\". Its ranks have in common ", common,
                     " (a rank's number is cp + CP dp)");
        }
      }
    }
  }
}

TEST_CASE("07.3: what is summed over whom", "[07.3]") {
  World world(nullptr, nullptr);
  const Stream compute("compute");
  const int units = 4;
  for (const MeshShape& shape : {MeshShape{.dp = 4, .ep = 2}, MeshShape{.dp = 2, .pp = 2, .ep = 2},
                                 MeshShape{.cp = 2, .dp = 2, .ep = 4}}) {
    Mesh mesh(shape, world);
    for (const int stage : {0, 1, 3}) {
      for (const int number : {dense_group, expert_group}) {
        const bool dense = number == dense_group;
        const std::string with =
            text(text_of(shape), dense ? "dense group" : "experts' group", ", ZeRO stage ", stage, ": ");
        Communicator& ranks = dense ? mesh.gradients : mesh.expert_gradients;
        CombinedOptions options;
        options.zero.zero_stage = stage;
        options.data_parallel.dp_sync = DpSync::overlap;
        options.pipeline.pp = shape.pp;
        const MemoryBytes before = memory_in_use();
        Parameters parameters(mesh.parameter_layout({0, 1, 2, 3}));
        for (int unit = 0; unit < units; ++unit)
          parameters.declare({"unit", unit, 8, 3, TensorSplit::replicated_outside, 0, true, number});
        ParameterGroup& group = parameters.group(number);
        doing(with, "sync_gradients()");
        const auto hooks = sync_gradients(options, mesh, parameters, number, compute);
        tell_if(!hooks, with, "sync_gradients() returns nothing");
        tell_if((dynamic_cast<Zero*>(hooks.get()) != nullptr) != (stage > 0), with, "the hooks are ",
                stage > 0 ? "not " : "", "those of ZeRO");
        tell_if(stage == 0 && !group.gradients(0), with, "nobody has allocated the parameters");
        const size_t shards = parameters.shards().size();
        tell_if(shards != units, with, shards,
                " shards for 4 units: data parallelism needs one allocate(), and Zero none");
        const Sum sum = {.counted = ranks.members()};
        for (int unit = units - 1; unit >= 0; --unit) {
          doing(with, "gradients of unit ", unit,
                ": all ranks with these weights sum them, those of experts over mesh.expert_gradients");
          hooks->before_gradients(unit);
          write(compute, group.gradients(unit), sum.values(world.rank(), group.size(unit)));
          hooks->after_gradients(unit, true);
        }
        hooks->finish_gradient_sync();
        const Shard shard = parameters.shards()[0];
        std::string wrong =
            sum.wrong(with + "the sum of gradients", at(shard.gradients, shard.size()), shard.begin);
        if (stage > 0 && wrong.ends_with("again"))
          wrong += ": ZeRO's second communicator has the ranks with the same shard in other copies";
        tell(wrong);
        const int64_t sums = traffic(ranks, "all_reduce").calls;
        tell_if(stage == 0 && sums != units && ranks.ranks() > 1, with, sums,
                " all-reduces over the ranks with these weights: options.data_parallel asks for one a unit");
        ranks.reset_traffic();
        const int64_t weights = elements_of<real>(Purpose::weights, before), unit = group.size(0);
        const int64_t whole = stage < 3 || shape.pp > 1 ? units : 2;  // units that are whole
        const int64_t due = whole * unit + (stage < 3 ? 0 : units * unit / ranks.ranks());
        tell_if(weights != due, with, "memory of weights: ", weights, " elements in place of ", due, ": ",
                stage < 3      ? "each rank has the weights whole"
                : shape.pp > 1 ? "a pipeline keeps gathered weights for all micro-batches of a step"
                               : "without a pipeline gathered weights are dropped after use");
      }
    }
  }
}

TEST_CASE("07.4: dispatch", "[07.4]") {
  World world(nullptr, nullptr);
  const Stream compute("compute");
  const int rank = world.rank(), all = 2 * world.ranks(), d = 3;
  DeviceArena memory(Purpose::activations);
  const Matrix<int32_t> counts = memory.matrix<int32_t>(2, all);
  const Tensor permuted = memory.matrix<real>(64, d), dispatched = memory.matrix<real>(64, d);
  // Rows from a rank for an expert have the owner 10 * rank + expert. There are so many, also none:
  const auto rows_of = [](int owner) { return (owner / 10 + 2 * (owner % 10)) % 4; };
  const auto name = [](int owner) { return text("rank ", owner / 10, "'s rows for expert ", owner % 10); };
  std::string wrong;
  for (const bool one_rank : {false, true}) {
    Communicator ranks(world, one_rank ? std::vector{rank} : world.all(), "experts");
    ExpertExchange exchange(all, ranks, compute);
    const RowCounts host(all);
    if (!one_rank) exchange.connect(counts);
    const int own = all / ranks.ranks();
    std::vector<int> by_expert, came, by_rank;  // owners; came: [ranks, own experts]
    std::vector<int32_t> sent;
    for (int e = 0; e < all; ++e) {
      by_expert.push_back(10 * rank + e);
      came.push_back(10 * ranks.members()[e / own] + ranks.rank() * own + e % own);
      sent.push_back(rows_of(by_expert[e]));
    }
    for (int i = 0; i < all; ++i) by_rank.push_back(came[i % ranks.ranks() * own + i / ranks.ranks()]);

    const std::string call = text("exchange_counts()", one_rank ? " of a rank that has all experts" : "");
    doing(call, ": each rank tells each other one how many rows it sends to its experts");
    write(compute, counts.data, sent);
    const double counted = busy_time(compute).end;
    exchange.exchange_counts(counts.row_range(0, 1), counts.row_range(1, 1), host);
    const std::vector<trace::Interval> log = ran();
    const double next = busy_time(compute, shortest_kernel).begin;
    for (const trace::Interval& i : log) {
      tell_if(i.begin < counted, here(), call, " does not wait until compute has written the counts");
      tell_if(i.stream == "compute", here(), call,
              " uses the stream of compute: await_counts() waits for that of the experts' ranks");
    }
    tell_if(log.empty(), here(), call,
            " does nothing: the host needs the counts, also where one rank has all experts");
    tell_if(next >= time_of(log, "", "experts").end, here(), call,
            ": compute, or the host, waits for the counts: await_counts() does, later");
    exchange.await_counts();
    for (int e = 0; e < all && wrong.empty(); ++e) {
      if (host.came[e] != rows_of(came[e]))
        wrong = text(here(), call, ": came[", e / own, ", ", e % own, "] is ", host.came[e], "; ",
                     name(came[e]), " are ", rows_of(came[e]),
                     one_rank ? ": nothing travels, and came is sent" : ": own_ counts come from each rank");
      else if (host.sent[e] != sent[e])
        wrong =
            text(here(), call, ": sent[", e, "] is ", host.sent[e], " on the host, and should be ", sent[e]);
    }
    tell(wrong);
    if (one_rank) {
      doing("dispatch of a rank that has all experts: the two orders are one, and nothing travels");
      exchange.dispatch(host, permuted, permuted);
      tell_if(!ranks.traffic().empty(), "a rank that has all experts sends rows to itself");
      break;
    }

    for (const bool dispatch : {true, false}) {
      const Tensor from = dispatch ? permuted : dispatched, to = dispatch ? dispatched : permuted;
      const std::string call = dispatch ? "dispatch" : "combine";
      std::vector<real> rows;
      int64_t home = 0;  // elements for the rank itself
      for (const int owner : dispatch ? by_expert : by_rank) {
        const std::vector<real> part = owned_values<real>(owner, rows_of(owner) * d);
        rows.insert(rows.end(), part.begin(), part.end());
        home += owner / 10 == rank && owner % 10 / own == rank ? std::ssize(part) : 0;
      }
      write(compute, to.data, std::vector<real>(to.size(), untouched));
      write(compute, from.data, rows);
      const double written = busy_time(compute).end;
      doing(call,
            ": a message of rows * d elements for each (rank, expert), in the same order on both sides; "
            "expert e "
            "is on rank e / own; sent is [experts], came is [ranks, own experts]");
      ranks.reset_traffic();
      dispatch ? exchange.dispatch(host, permuted, dispatched) : exchange.combine(host, dispatched, permuted);
      const Time travels = time_of(ran(), "", "experts");
      tell_if(travels.begin < written, here(), call,
              ": rows leave before compute has written them: the experts' stream waits for compute");
      tell_if(busy_time(compute, shortest_kernel).begin >= travels.end, here(), call,
              ": compute waits for the rows before await_rows(): nothing hides the messages");
      const int64_t moved = traffic(ranks, "all_to_all_v").elements, due = std::ssize(rows);
      tell_if(moved != due, here(), call, " sends ", moved, " elements in place of ", due,
              moved == due - home
                  ? ": rows for the rank's own experts are a message to itself; nothing else copies them"
                  : ": a part has rows * d elements; dispatch sends `permuted`, combine `dispatched`");
      exchange.await_rows();
      tell_if(busy_time(compute, shortest_kernel).begin < travels.end, here(), call,
              ": after await_rows() compute does not wait until the rows are there: the experts' stream "
              "records arrived_ behind the messages");
      const std::vector<real> is = at(to);
      const real* first = is.data();
      for (const int owner : dispatch ? by_rank : by_expert) {
        const std::span part(first, rows_of(owner) * d);
        if (wrong.empty())
          wrong = wrong_copy(call + ": where " + name(owner) + " should lie", part, owner, 0, name);
        first += part.size();
      }
      if (wrong.ends_with("never written")) wrong += ": a message of n rows has n * d elements";
      tell(wrong);
    }
  }
}

TEST_CASE("07.5: rows of experts", "[07.5]") {
  World world(nullptr, nullptr);
  const int n = 2, own = 3;
  Communicator neighbours(world, every(world.rank() / n * n, n), "experts");
  const Stream compute("compute");
  auto options = test_options<CombinedOptions>(1, 4, 1, 1, 4, 8, 4, 1, 4);
  options.model.experts = n * own, options.model.top_k = 1, options.experts.ep = n;
  ExpertParallel experts(options, options.experts, neighbours, compute);
  Sum sum = {.parts = own, .part = "rows for own expert", .ranks = n};
  for (const bool empty : {false, true}) {  // nothing comes for own expert 0
    const RowCounts counts(n * own);
    for (int e = 0; e < n * own; ++e)
      counts.came[e] = empty && e % own == 0 ? 0 : 1 << 4 * (e / own + n * (e % own));
    const auto rows = experts.rows_of_experts(counts);
    tell_alike(std::ssize(rows.rows) != own || std::ssize(rows.first) != own, "rows_of_experts() has ",
               std::min(rows.rows.size(), rows.first.size()), " experts, and a rank has ", own,
               empty ? ": one without rows stays in the list, its gradients are to become zero" : "");
    int64_t first = 0;
    for (int i = 0; i < own; ++i) {
      sum.counted = every(n * i, n);
      const std::string of = text("rows_of_experts(), own expert ", i, ": ");
      const std::string nothing = rows.rows[i] == 0 ? "" : "is not 0";
      const std::string is = empty && i == 0 ? nothing : sum.wrong(static_cast<double>(rows.rows[i]), 0);
      tell_alike(!is.empty(), of, "its number of rows ", is, "; came is [ranks, own experts]");
      tell_alike(rows.first[i] != first, of, "its rows begin at ", rows.first[i], ", and should at ", first,
                 ", where those of the expert before it end");
      first += rows.rows[i];
    }
    tell_alike(rows.all != first, "rows_of_experts(): all is ", rows.all, ", and the own experts have ",
               first, " rows together");
  }
}

}  // namespace pentatron::probes
