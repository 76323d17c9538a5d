// Probes of stage 04.
// ranks: 3
#include "04_tensor_parallel/tensor_parallel.h"
#include "model.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

// A rank's region, with `own` rows outside under sequence parallelism, and rows to work on.
struct Region {
  const Slow slow;  // comes first: a communicator has the link of when it was made
  static constexpr int own = 4, d = 4;
  World world{nullptr, nullptr};
  Communicator tensor{world, world.all(), "tensor"};
  const int n = tensor.ranks(), rank = tensor.rank(), rows = own * n;
  Stream compute{"compute"};
  Blas blas{compute};
  DeviceArena memory{Purpose::activations};
  const bool sequence_parallel;
  const std::string with = sequence_parallel ? "with --sequence-parallel: " : "without --sequence-parallel: ";
  const Tensor outside = memory.matrix<real>(sequence_parallel ? own : rows, d),
               all = memory.matrix<real>(rows, d);
  const Tensor result = memory.matrix<real>(rows, d), identity = memory.matrix<real>(d, d);
  std::unique_ptr<TensorParallel> region;
  const Sum sum = {.place_name = [](int64_t place) {
    return text("row ", place / d % own, " of rank ", place / d / own);
  }};

  explicit Region(bool sp, int chunks = 1, bool kernels_slow = false)
      : slow(kernels_slow), sequence_parallel(sp) {
    const auto options = test_options<Options>(1, d, 1, 1, d, 2 * n, rows, 1, 1);
    const int most = 2 * rows;  // there is room for more
    region = make_tensor_parallel(options, TensorParallelOptions{sp, chunks}, most, tensor, compute);
    std::vector<real> ones(d * d);
    for (int i = 0; i < d; ++i) ones[i * d + i] = 1;
    write(compute, identity.data, ones);
    write(compute, result.data, std::vector<real>(result.size(), untouched));
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  // The rows that this rank has outside: each rank's are its own, or all have the same.
  void write_outside(int owner = 0) {
    const int whose = owner + (sequence_parallel ? rank : 0);
    write(compute, outside.data, owned_values<real>(whose, outside.size()));
  }
  void write_terms() { write(compute, all.data, sum.values(rank, all.size())); }
  // What is wrong with all ranks' rows.
  std::string wrong_rows(const std::string& what, const Tensor& x, int owner = 0) {
    if (x.rows != rows)
      return text(here(), with, what, ": ", x.rows, " rows in place of ", rows, ", those of all ranks");
    const auto seen = at(x);
    const size_t part = outside.size();
    std::string wrong;
    for (size_t r = 0; r * part < x.size() && wrong.empty(); ++r)
      wrong = wrong_copy(with + what + (sequence_parallel ? ", rows of rank " + number(r) : ""),
                         std::span(seen.data() + r * part, part), owner + static_cast<int>(r), 0, [](int of) {
                           return text("rank ", of % 10, (of < 10 ? "" : " in use " + number(of / 10)));
                         });
    return wrong;
  }
  std::string wrong_sum(const std::string& what, const Tensor& x) {
    if (x.rows != outside.rows)
      return text(here(), with, what, ": ", x.rows, " rows in place of ", outside.rows);
    const auto seen = at(x);
    return sum.wrong(with + what, seen, sequence_parallel ? static_cast<int64_t>(rank * outside.size()) : 0);
  }
  // In `work` compute and communication take turns: each operation waits for the one before it.
  void tell_waits(const std::string& what, const std::function<void()>& work) {
    ran();
    busy(compute);
    work();
    busy(compute);
    std::vector<trace::Interval> computes, communicates, order;
    for (const trace::Interval& i : ran()) (i.stream == "compute" ? computes : communicates).push_back(i);
    const size_t n = communicates.size();
    for (size_t i = 0; i < n; ++i) {
      if (i == 0 || computes.size() == n + 1) order.push_back(computes[i]);
      order.push_back(communicates[i]);
    }
    order.push_back(computes.back());
    for (size_t i = 1; i < order.size(); ++i) {
      const auto name = [&](size_t k, const char* of_compute) {
        return order[k].name == "busy_kernel" ? of_compute : "the " + order[k].name;
      };
      const bool other_order = order[i].end <= order[i - 1].begin;  // of which the results tell
      tell_if(order[i].begin < order[i - 1].end && !other_order, here(), with, what, ": ",
              name(i, "what compute does next"), " does not wait for ",
              name(i - 1, "what compute has written"));
    }
    tensor.reset_traffic();
  }
  void tell_alone(const std::string& what, const std::function<void(TensorParallel&)>& work) {
    Communicator one(world, {rank}, "one");
    doing(what, " of one tensor rank, which has nobody to send to, and no buffers");
    work(*make_tensor_parallel({}, {}, rows, one, compute));
    tell_if(!one.traffic().empty(), what, " of one tensor rank communicates, and there is nobody to send to");
  }
  // `work` has two chunks: products, and messages before them (`enters`) or after them.
  void tell_chunks(const std::string& what, bool enters, const std::function<void()>& work) {
    ran();
    busy(compute);
    work();
    busy(compute);
    std::vector<trace::Interval> products, messages;
    for (const trace::Interval& i : ran()) (i.stream == "compute" ? products : messages).push_back(i);
    if (products.size() != 4 || messages.size() != 2) return;  // the first and the last one are busy()
    for (const int c : {0, 1}) {
      tell_if(enters && products[1 + c].begin < messages[c].end, here(), with, what,
              ": the product of chunk ", c, " does not wait for its gather");
      tell_if(!enters && messages[c].begin < products[1 + c].end, here(), with, what, ": the sum of chunk ",
              c, " does not wait for its product");
    }
    tell_if(enters && messages[0].begin < products[0].end, here(), with, what,
            ": the gather does not wait until compute has written x");
    tell_if(!enters && products[3].begin < messages[1].end, here(), with, what,
            ": compute does not wait for the sums");
    const trace::Interval &hides = products[enters ? 1 : 2], &hidden = messages[enters ? 1 : 0];
    tell_if(
        hides.begin >= hidden.end || hidden.begin >= hides.end, here(), with, what, ": the ",
        enters ? "gather of chunk 1 and the product of chunk 0" : "sum of chunk 0 and the product of chunk 1",
        ", which is there to hide it, run one after the other");
  }
  void tell_operation(const std::string& what, const std::string& operation) {
    std::string others;
    for (const auto& [name, t] : tensor.traffic())
      others += name == operation ? "" : (others.empty() ? "" : ", ") + name;
    const int64_t elements = traffic(tensor, operation).elements, due = all.size();
    tell_if(!others.empty(), here(), with, what, " communicates by ", others,
            (operation.empty() ? "; nothing is to be sent" : " and not by " + operation));
    tell_if(!operation.empty() && elements != due, here(), with, what, ": ", operation, " of ", elements,
            " elements in place of ", due);
    tensor.reset_traffic();
  }
};

struct Opened : TensorParallel {
  using TensorParallel::begin_sum, TensorParallel::gathered_;  // begin_sum(): its caller waits for the sum
};

}  // namespace

TEST_CASE("04.1: gather and sum", "[04.1]") {
  for (const bool sp : {false, true}) {
    Region r(sp);
    r.write_outside();
    auto& opened = static_cast<Opened&>(*r.region);
    doing(r.with, "gather(): ", sp ? "x.size() elements of each rank, into gathered_" : "returns x as it is");
    if (sp) r.tell_waits("gather()", [&] { r.region->enter(r.outside); });
    const Tensor gathered = r.region->enter(r.outside);
    std::string wrong = r.wrong_rows("gather()", gathered);
    r.tell_operation("gather()", sp ? "all_gather" : "");
    tell(wrong);
    tell_if(sp && gathered.data != opened.gathered_.data, here(), r.with,
            "gather() does not fill gathered_; entered_ keeps a region's input for weight gradients");
    doing(r.with,
          "begin_sum(): in place; with sequence parallelism a reduce-scatter leaves rank r its own rows, the "
          "r-th part");
    r.tell_waits("begin_sum()", [&] { r.region->leave(r.all); });
    ran();
    const Tensor sums = opened.begin_sum(r.all);
    busy(r.compute);
    const std::vector<trace::Interval> of_sum = ran();
    tell_if(time_of(of_sum, "busy_kernel", "compute").begin >= time_of(of_sum, "", "tensor").end, here(),
            r.with, "begin_sum(): compute waits for the sum, so nothing hides it; its caller is who waits");
    r.tensor.reset_traffic();
    r.write_terms();
    wrong = r.wrong_sum("begin_sum()", r.region->leave(r.all));
    r.tell_operation("begin_sum()", sp ? "reduce_scatter" : "all_reduce");
    tell(wrong);
    tell_if(sums.data < r.all.data || sums.data >= r.all.data + r.all.size(), here(), r.with,
            "begin_sum() is in place: gathered_ has a gradient that weight gradients still read");
    r.tell_alone("begin_sum()", [&](TensorParallel& one) { one.leave(r.all); });
  }
}

TEST_CASE("04.2: vocabulary-parallel loss", "[04.2]") {
  for (const bool sp : {false, true}) {
    Region r(sp);
    const int rows = r.rows;
    const AccumTensor statistics = r.memory.matrix<accum>(3, rows);
    // Rank r: the largest is r, 16^r the sum of exponentials, and the target's logit.
    std::vector<accum> mine(3 * rows);
    for (int i = 0; i < rows; ++i) {
      mine[i] = r.rank;
      mine[rows + i] = r.sum.value(r.rank, 0) * std::exp(-r.rank);
      mine[2 * rows + i] = r.sum.value(r.rank, 0);
    }
    doing("combine()");
    r.tell_waits("combine()", [&] { r.region->combine(statistics); });
    write(r.compute, statistics.data, mine);
    r.tensor.reset_traffic();
    r.region->combine(statistics);
    const auto seen = at(statistics);
    const Traffic sent = traffic(r.tensor, "all_reduce");
    std::string wrong;
    for (int i = 0; i < rows && wrong.empty(); ++i) {
      const double largest = seen[i];
      const std::string sum = r.sum.wrong(seen[rows + i] * std::exp(largest), 0),
                        target = r.sum.wrong(seen[2 * rows + i], 0);
      if (largest != r.n - 1)
        wrong = text("the largest logit of all ranks is ", r.n - 1, ", and combine() leaves ", text(largest),
                     std::isnan(largest)              ? ": not the maximum of each row is in largest_"
                     : largest == r.n * (r.n - 1)     ? ": the common one was summed over the ranks"
                     : largest == r.n * (r.n - 1) / 2 ? ": that is their sum"
                                                      : ": this rank has " + number(r.rank));
      else if (sum.find("divided") != sum.npos)  // nobody divides here
        wrong =
            "a rank's sum of exponentials was added as it was, relative to the rank's own largest logit: "
            "first it is rescaled to the common one, and for that the rank's own is still needed";
      else if (!sum.empty())
        wrong = "the sum of exponentials, relative to the common largest logit, " + sum;
      else if (!target.empty())
        wrong = "the target's logit " + target + "; one rank has it, the others have 0, so it is summed";
    }
    tell(wrong.empty() ? "" : here() + r.with + wrong);
    tell_if(sent.calls != 2 || sent.elements != 3 * rows, r.with, "combine() has ", sent.calls,
            " all-reduces of ", sent.elements, " elements: one of a maximum and one of two sums for each of ",
            rows, " rows are due; each message has its latency");
    r.tell_alone("combine()", [&](TensorParallel& one) { one.combine(statistics); });
  }
}

TEST_CASE("04.3: partial gradients", "[04.3]") {
  // With the regions in which the gradient is partial: without sequence parallelism (1), with it (2).
  const std::tuple<TensorSplit, const char*, int> splits[] = {
      {TensorSplit::by_output, "split by output", 0},
      {TensorSplit::by_input, "split by input", 0},
      {TensorSplit::replicated_outside, "held whole, used outside the regions (a norm)", 2},
      {TensorSplit::replicated_inside, "held whole, used inside a region", 1 + 2}};
  for (const bool sp : {false, true}) {
    Region r(sp);
    Parameters parameters({.tensor_rank = r.rank, .tensor_ranks = r.n});
    for (const int unit : {0, 1}) {
      for (const auto& [split, name, partial] : splits)
        parameters.declare({name, unit, 2 * r.n, 2 * r.n, split});
    }
    parameters.allocate();
    const Shard shard = parameters.shards().back();  // each unit has one
    r.tell_waits("sum_partial_gradients()", [&] { r.region->sum_partial_gradients(parameters); });
    write(r.compute, shard.gradients, r.sum.values(r.rank, shard.size()));
    doing(r.with, "sum_partial_gradients()");
    ran();
    r.region->sum_partial_gradients(parameters);
    const auto messages = std::ranges::count(ran(), "tensor", &trace::Interval::stream);
    const auto seen = at(shard.gradients, shard.size());
    std::string wrong;
    int64_t due_elements = 0;
    for (const ParameterRange& range : parameters.ranges(shard)) {
      const auto find = [&](const auto& s) { return std::get<0>(s) == range.parameter->tensor_split; };
      const bool partial = std::get<2>(*std::ranges::find_if(splits, find)) >> sp & 1;
      due_elements += partial ? static_cast<int64_t>(range.size) : 0;
      Sum due;
      if (!partial) due.counted = {r.rank};
      if (wrong.empty())
        wrong = due.wrong(
            text(r.with, "in the last of 2 shards the gradient of a weight that is ", range.parameter->name,
                 partial ? ", of which each rank has a part of the sum" : ", which is whole on each rank"),
            std::span(seen.data() + range.begin_in_shard, range.size),
            static_cast<int64_t>(range.begin_in_shard));
    }
    if (!wrong.empty() && traffic(r.tensor, "all_reduce").elements == 2 * due_elements)
      wrong += ". As many elements are summed as should be, but others: a weight begins at begin_in_shard";
    tell(wrong);
    tell_if(messages != 1, r.with, "sum_partial_gradients() has ", messages,
            " messages, each with its latency: a group makes one of all sums");
    r.tell_alone("sum_partial_gradients()",
                 [&](TensorParallel& one) { one.sum_partial_gradients(parameters); });
  }
}

TEST_CASE("04.4: gather again in backward", "[04.4]") {
  for (const bool sp : {false, true}) {
    Region r(sp);
    TensorParallel& region = *r.region;
    const std::string operation = sp ? "reduce_scatter" : "all_reduce";
    r.write_terms();
    CUDA_CHECK(cudaDeviceSynchronize());
    ran();
    doing(r.with, "enter_backward()");
    region.enter_backward(r.all, [&] { busy(r.compute); });
    trace::Interval meanwhile, sums;
    for (const trace::Interval& i : ran()) {
      if (i.name == "busy_kernel") meanwhile = i;
      if (i.name == operation) sums = i;
    }
    tell_if(meanwhile.id == 0, here(), r.with,
            "enter_backward() does not call `meanwhile`: the weight gradients are lost");
    tell_if(sums.id != 0 && (sums.begin >= meanwhile.end || meanwhile.waited_for == sums.id), here(), r.with,
            "enter_backward(): the sum and the work of `meanwhile`, which is there to hide it, run one after "
            "the other");
    r.tell_operation("enter_backward()", operation);
    r.tell_waits("enter_backward()", [&] { region.enter_backward(r.all, [] {}); });
    r.write_terms();
    tell(r.wrong_sum("enter_backward()", region.enter_backward(r.all, [] {})));
    r.tensor.reset_traffic();
    for (int layer = 0; layer < 3; ++layer) {  // in the same memory: other rows each time
      r.write_outside(50);
      const Tensor d_out = region.leave_backward(r.outside);
      r.write_outside(10 * layer);
      CUDA_CHECK(cudaDeviceSynchronize());
      ran();
      double came = 0;
      if (layer < 2) {
        busy(layer == 0 ? static_cast<cudaStream_t>(r.compute) : r.tensor.stream());
        doing(r.with, "prefetch_entered()");
        region.prefetch_entered(r.outside);
        const std::vector<trace::Interval> log = ran();
        const Time gather = time_of(log, "all_gather", "tensor");
        came = gather.end;
        tell_if(sp && layer == 0 && gather.begin >= time_of(log, "busy_kernel", "compute").end, here(),
                r.with, "prefetch_entered() waits for compute, and its rows are there");
      }
      doing(r.with, "entered()");
      const double reads = layer < 2 ? 0 : busy_time(r.compute).end;
      const Tensor x = region.entered(r.outside);
      busy(r.compute);
      const std::vector<trace::Interval> log = ran();
      tell_if(
          time_of(log, "all_gather", "tensor").begin < reads, here(), r.with,
          "entered() gathers where compute may still read: without a prefetch it waits for compute first");
      came = std::max(came, time_of(log, "all_gather", "tensor").end);
      tell_if(time_of(log, "busy_kernel", "compute").begin < came, here(), r.with,
              "entered(): compute does not wait for its rows");
      tell(r.wrong_rows(text("in use ", layer, " of the same memory entered()"), x, 10 * layer));
      tell_if(sp && !r.wrong_rows("", d_out, 50).empty(), here(), r.with,
              "entered() overwrites the gradient of the region's output: weight gradients need both, so "
              "entered_ is a buffer of its own");
      const int64_t gathers = traffic(r.tensor, "all_gather").calls - sp;
      tell_if(gathers != sp, here(), r.with,
              layer < 2 ? "prefetch_entered() and entered() gather" : "entered() gathers", " the same rows ",
              gathers, " times, and should ", int64_t{sp}, " times");
      region.enter_backward(r.all, [&] { busy(r.compute); });  // a weight gradient that reads the rows
      const double until = time_of(ran(), "busy_kernel", "compute").end;
      if (sp && layer == 0) {
        const Tensor other = r.result.row_range(0, r.outside.rows);
        region.prefetch_entered(other);
        tell_if(time_of(ran(), "all_gather", "tensor").begin < until, here(), r.with,
                "prefetch_entered() overwrites rows that a weight gradient still reads: it has to wait for "
                "entered_used_, which enter_backward() records behind `meanwhile`");
        tell(r.wrong_rows("when other rows were prefetched, entered()", region.entered(r.outside)));
      }
      CUDA_CHECK(cudaDeviceSynchronize());
      r.tensor.reset_traffic();
    }
    // As in a model: rows have come, then a sum begins, and the weight gradients that read them hide it.
    ran();
    region.prefetch_entered(r.outside);
    busy(r.compute);
    const std::vector<trace::Interval> rows = ran();
    tell_if(time_of(rows, "busy_kernel", "compute").begin >= time_of(rows, "all_gather", "tensor").end && sp,
            here(), r.with, "prefetch_entered(): compute waits for the rows at once; entered() is who waits");
    region.enter_backward(r.all, [&] { region.entered(r.outside), busy(r.compute); });
    const std::vector<trace::Interval> log = ran();
    tell_if(time_of(log, "busy_kernel", "compute").begin >= time_of(log, operation, "tensor").end, here(),
            r.with,
            "entered(): compute waits for the sum that enter_backward() has begun, too, and should for "
            "entered_came_ alone");
  }
}

TEST_CASE("04.5: products in chunks", "[04.5]") {
  for (const bool sp : {false, true}) {
    const std::string
        enters = sp ? "enter_linear(): gathers lie packed in the first y.rows of gathered_"
                    : "enter_linear(): nothing is gathered, it is one product",
        leaves =
            "leave_linear(): a chunk has some rows of each rank, so that a collective gives each "
            "its own; of_chunk is a chunk of the rows outside, with sequence parallelism in gathered_";
    for (const bool kernels_slow : {false, true}) {
      Region r(sp, 2, kernels_slow);
      doing(r.with, enters);
      r.tell_chunks("enter_linear()", true,
                    [&] { r.region->enter_linear(r.blas, r.outside, r.identity, r.result); });
      doing(r.with, leaves);
      r.tell_chunks("leave_linear()", false,
                    [&] { r.region->leave_linear(r.blas, r.all, r.identity, r.result); });
    }
    Region r(sp, 2);
    r.write_outside();
    doing(r.with, enters);
    r.region->enter_linear(r.blas, r.outside, r.identity, r.result);
    std::string wrong = r.wrong_rows("enter_linear()", r.result);
    if (sp && !wrong.empty())
      wrong += ". What a gather writes is packed, chunk by chunk; y has all rows of rank 0, then of rank 1";
    tell(wrong);
    r.tell_operation("enter_linear()", sp ? "all_gather" : "");
    r.write_terms();
    write(r.compute, r.result.data, std::vector<real>(r.result.size(), NAN));
    doing(r.with, leaves);
    wrong = r.wrong_sum("leave_linear()", r.region->leave_linear(r.blas, r.all, r.identity, r.result));
    if (sp && !wrong.empty())
      wrong +=
          ". x lies in place, all rows of rank 0, then of rank 1. A chunk's product is packed: some rows of "
          "each rank, as a reduce-scatter reads them";
    const std::string operation = sp ? "reduce_scatter" : "all_reduce";
    const int64_t sums = traffic(r.tensor, operation).calls;
    tell_if(sums == 1, here(), r.with, "leave_linear() has ", sums,
            " sums for 2 chunks: a sum of all hides behind no product");
    r.tell_operation("leave_linear()", operation);
    tell(wrong);
  }
}

}  // namespace pentatron::probes
