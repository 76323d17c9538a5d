// Probes of stage 04.
// ranks: 3
#include <map>

#include "04_tensor_parallel/tensor_parallel.h"
#include "model.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

struct Opened : TensorParallel {
  using TensorParallel::begin_sum, TensorParallel::gathered_;  // begin_sum(): its caller waits for the sum
};

// A rank's region, with `own` rows outside under sequence parallelism, and rows to work on.
struct Region : About {
  const Slow slow;  // comes first: a communicator has the link of when it was made
  static constexpr int own = 4, d = 4;
  World world{nullptr, nullptr};
  Communicator tensor{world, world.all(), "tensor"};
  const int n = tensor.ranks(), rank = tensor.rank(), rows = own * n;
  Stream compute{"compute"};
  Blas blas{compute};
  DeviceArena memory{Purpose::activations};
  const bool sequence_parallel;
  const Tensor outside = memory.matrix<real>(sequence_parallel ? own : rows, d),
               all = memory.matrix<real>(rows, d), result = memory.matrix<real>(rows, d),
               identity = memory.matrix<real>(d, d);
  std::unique_ptr<TensorParallel> region;
  const std::string summed_by = sequence_parallel ? "reduce_scatter" : "all_reduce";
  const Sum sum = {.place_name = [](int64_t place) {
    return text("row ", place / d % own, " of rank ", place / d / own);
  }};

  explicit Region(bool sp, int chunks = 1, bool kernels_slow = false)
      : slow(kernels_slow), sequence_parallel(sp) {
    with = sp ? "with --sequence-parallel: " : "without --sequence-parallel: ";
    const auto options = test_options<Options>(1, d, 1, 1, d, 2 * n, rows, 1, 1);
    const int most = 2 * rows;  // there is room for more
    region = make_tensor_parallel(options, TensorParallelOptions{sp, chunks}, most, tensor, compute);
    std::vector<real> ones(d * d);
    for (int i = 0; i < d; ++i) ones[i * d + i] = 1;
    write(compute, identity.data, ones);
    write(compute, result.data, std::vector<real>(result.size(), NAN));
    CUDA_CHECK(cudaDeviceSynchronize());
  }
  // The rows that this rank has outside: each rank's are its own, or all have the same.
  void write_outside(int owner = 0) {
    write(compute, outside.data, owned_values<real>(owner + (sequence_parallel ? rank : 0), outside.size()));
  }
  void write_terms() { write(compute, all.data, sum.values(rank, all.size())); }

  // The call's result has all ranks' rows, or their sum. `because` is said behind what is wrong.
  void tell_rows(const Tensor& x, int owner = 0, const std::string& because = "") {
    tell_if(x.rows != rows, "has ", x.rows, " rows in place of ", rows, ", those of all ranks");
    const auto seen = at(x);
    const size_t part = outside.size();
    std::string wrong;
    for (size_t r = 0; r * part < x.size() && wrong.empty(); ++r)
      wrong = wrong_copy(with + about + (sequence_parallel ? ", rows of rank " + number(r) : ""),
                         std::span(&seen[r * part], part), owner + static_cast<int>(r), 0, [](int of) {
                           return text("rank ", of % 10, of < 10 ? "" : " in use " + number(of / 10));
                         });
    tell(wrong.empty() ? "" : wrong + because);
  }
  void tell_sum(const Tensor& x, const std::string& because = "") {
    tell_if(x.rows != outside.rows, "has ", x.rows, " rows in place of ", outside.rows);
    const int64_t begin = sequence_parallel ? rank * outside.size() : 0;
    const std::string wrong = sum.wrong(with + about, at(x), begin);
    tell(wrong.empty() ? "" : wrong + because);
  }
  // What was sent since the last look, by this operation alone.
  void tell_operation(const std::string& operation) {
    std::string other;
    for (const auto& [name, t] : tensor.traffic()) {
      if (name != operation) other = name;
    }
    const int64_t elements = traffic(tensor, operation).elements, due = operation.empty() ? 0 : all.size();
    tensor.reset_traffic();
    tell_if(!other.empty(), "communicates by ", other,
            due == 0 ? "; nothing is to be sent" : " and not by " + operation);
    tell_if(elements != due, "has ", operation, " of ", elements, " elements in place of ", due);
  }
  // What compute has run, busy before and behind `work`, and what the other stream.
  using Streams = std::array<std::vector<trace::Interval>, 2>;
  Streams ran_by(const std::function<void()>& work) {
    tensor.reset_traffic();
    ran();
    busy(compute);
    work();
    busy(compute);
    Streams streams;
    for (const trace::Interval& i : ran()) streams[i.stream != "compute"].push_back(i);
    return streams;
  }
  // In `work` compute and communication take turns: each operation waits for the one before it.
  Streams tell_waits(const std::function<void()>& work) {
    const auto [computes, messages] = ran_by(work);
    const bool turns = computes.size() == messages.size() + 1;  // otherwise the messages are one turn
    for (size_t i = 0; i < messages.size(); ++i) {
      const std::string name = (i == 0 ? "the first " : "the next ") + messages[i].name;
      // In another order they do not overlap; of that the results tell.
      tell_if(!apart(computes[turns ? i : 0], messages[i]), "does not make ", name,
              " wait for compute, which writes what it sends");
      tell_if(!apart(messages[i], turns ? computes[i + 1] : computes.back()),
              "does not make compute wait for ", name, ", whose result it reads");
    }
    return {computes, messages};
  }
  void tell_alone(const std::function<void(TensorParallel&)>& work) {
    Communicator one(world, {rank}, "one");
    calls(about + " of one tensor rank", "has nobody to send to, and no buffers");
    work(*make_tensor_parallel({}, {}, rows, one, compute));
    tell_if(!one.traffic().empty(), "communicates, and there is nobody to send to");
  }
  // `work` has two chunks: products, and messages before them (`enters`) or after them.
  void tell_chunks(bool enters, const std::function<void()>& work) {
    const auto [products, messages] = ran_by(work);
    if (products.size() != 4 || messages.size() != 2) return;  // the first and the last one are busy()
    for (const int c : {0, 1}) {
      const trace::Interval &product = products[1 + c], &message = messages[c];
      tell_if(enters && product.begin < message.end, "does not make the product of chunk ", c,
              " wait for its gather");
      tell_if(!enters && message.begin < product.end, "does not make the sum of chunk ", c,
              " wait for its product");
    }
    tell_if(enters && messages[0].begin < products[0].end, "gathers before compute has written x");
    tell_if(!enters && products[3].begin < messages[1].end, "does not make compute wait for the sums");
    tell_if(enters && apart(messages[1], products[1]),
            "runs the gather of chunk 1 and the product of chunk 0, which hides it, one after the other");
    tell_if(!enters && apart(messages[0], products[2]),
            "runs the sum of chunk 0 and the product of chunk 1, which hides it, one after the other");
  }
};

}  // namespace

TEST_CASE("04.1: gather and sum", "[04.1]") {
  for (const bool sp : {false, true}) {
    Region r(sp);
    auto& opened = static_cast<Opened&>(*r.region);
    r.write_outside();
    r.calls("gather()", sp ? "sends x.size() elements of each rank, into gathered_" : "returns x as it is");
    Tensor rows, sum;
    r.tell_waits([&] { rows = r.region->enter(r.outside); });
    r.tell_operation(sp ? "all_gather" : "");
    r.tell_rows(rows);
    r.tell_if(sp && rows.data != opened.gathered_.data,
              "does not fill gathered_; entered_ keeps a region's input for weight gradients");

    r.write_terms();
    r.calls("begin_sum()", "is in place; a reduce-scatter leaves rank r its own rows, the r-th part");
    r.tell_waits([&] { sum = r.region->leave(r.all); });
    r.tell_operation(r.summed_by);
    r.tell_sum(sum);
    r.tell_if(sum.data < r.all.data || sum.data >= r.all.data + r.all.size(),
              "is not in place: gathered_ has a gradient that weight gradients still read");
    const auto [computes, messages] = r.ran_by([&] { opened.begin_sum(r.all); });
    r.tell_if(apart(computes.back(), messages.back()),
              "makes compute wait for the sum, so nothing hides it; its caller is who waits");
    r.tell_alone([&](TensorParallel& one) { one.leave(r.all); });
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
    write(r.compute, statistics.data, mine);
    r.calls("combine()");
    r.tell_waits([&] { r.region->combine(statistics); });
    const auto seen = at(statistics);
    const Traffic sent = traffic(r.tensor, "all_reduce");
    for (int i = 0; i < rows; ++i) {
      const double largest = seen[i];
      r.tell_if(largest != r.n - 1, "leaves ", largest, ", and the largest logit of all ranks is ", r.n - 1,
                std::isnan(largest)              ? ": not the maximum of each row is in largest_"
                : largest == r.n * (r.n - 1)     ? ": the common one was summed over the ranks"
                : largest == r.n * (r.n - 1) / 2 ? ": that is their sum"
                                                 : ": this rank has " + number(r.rank));
      const std::string sum = r.sum.wrong(seen[rows + i] * std::exp(largest), 0),
                        target = r.sum.wrong(seen[2 * rows + i], 0);
      r.tell_if(sum.find("divided") != sum.npos,
                "adds sums of exponentials relative to each rank's own largest logit: first they are "
                "rescaled to the common one, for which the own one is still needed");
      r.tell_if(!sum.empty(), "leaves a sum of exponentials, relative to the common largest, that ", sum);
      r.tell_if(!target.empty(), "leaves a target's logit that ", target,
                "; one rank has it, the others have 0, so it is summed");
    }
    r.tell_if(sent.calls != 2 || sent.elements != 3 * rows, "has ", sent.calls, " all-reduces of ",
              sent.elements, " elements: one of a maximum and one of two sums for each of ", rows,
              " rows are due; each message has its latency");
    r.tell_alone([&](TensorParallel& one) { one.combine(statistics); });
  }
}

TEST_CASE("04.3: partial gradients", "[04.3]") {
  for (const bool sp : {false, true}) {
    Region r(sp);
    // Of each its words, and whether a rank's gradient is a part of the sum.
    const std::map<TensorSplit, std::pair<const char*, bool>> splits = {
        {TensorSplit::by_output, {"split by output", false}},
        {TensorSplit::by_input, {"split by input", false}},
        {TensorSplit::replicated_outside, {"held whole, used outside the regions (a norm)", sp}},
        {TensorSplit::replicated_inside, {"held whole, used inside a region", true}}};
    Parameters parameters({.tensor_rank = r.rank, .tensor_ranks = r.n});
    for (const int unit : {0, 1}) {
      for (const auto& [split, of] : splits) parameters.declare({of.first, unit, 2 * r.n, 2 * r.n, split});
    }
    parameters.allocate();
    const Shard shard = parameters.shards().back();  // each unit has one
    write(r.compute, shard.gradients, r.sum.values(r.rank, shard.size()));
    r.calls("sum_partial_gradients()");
    const auto [computes, messages] = r.tell_waits([&] { r.region->sum_partial_gradients(parameters); });
    const auto seen = at(shard.gradients, shard.size());
    std::string wrong;
    int64_t due_elements = 0;
    for (const ParameterRange& range : parameters.ranges(shard)) {
      const auto& [name, partial] = splits.at(range.parameter->tensor_split);
      due_elements += partial ? static_cast<int64_t>(range.size) : 0;
      const Sum due = {.counted = partial ? std::vector<int>{} : std::vector{r.rank}};
      if (wrong.empty())
        wrong = due.wrong(
            text(r.with, "in the last of 2 shards the gradient of a weight that is ", name,
                 partial ? ", of which each rank has a part of the sum" : ", which is whole on each rank"),
            std::span(&seen[range.begin_in_shard], range.size), static_cast<int64_t>(range.begin_in_shard));
    }
    if (!wrong.empty() && traffic(r.tensor, "all_reduce").elements == 2 * due_elements)
      wrong += ". As many elements are summed as should be, but others: a weight begins at begin_in_shard";
    tell(wrong);
    r.tell_if(messages.size() != 1, "has ", messages.size(),
              " messages, each with its latency: a group makes one of all sums");
    r.tell_alone([&](TensorParallel& one) { one.sum_partial_gradients(parameters); });
  }
}

TEST_CASE("04.4: gather again in backward", "[04.4]") {
  for (const bool sp : {false, true}) {
    Region r(sp);
    TensorParallel& region = *r.region;
    const auto meanwhile = [&] { busy(r.compute, shortest_kernel); };
    Tensor sum;
    r.write_terms();
    r.calls("enter_backward()");
    const auto [computes, messages] = r.tell_waits([&] { sum = region.enter_backward(r.all, meanwhile); });
    r.tell_if(computes.size() != 3, "does not call `meanwhile`: the weight gradients are lost");
    r.tell_operation(r.summed_by);
    r.tell_if(apart(computes[1], messages[0]),
              "runs the sum and the work of `meanwhile`, which is there to hide it, one after the other");
    r.tell_sum(sum);

    std::vector<trace::Interval> log;
    const auto busy_again = [&] { return time_of(log, "busy_kernel", "compute"); };
    const auto gather = [&] { return time_of(log, "all_gather", "tensor"); };
    for (int layer = 0; layer < 3; ++layer) {  // in the same memory: other rows each time
      r.write_outside(50);
      const Tensor d_out = region.leave_backward(r.outside);
      const auto gradient = at(d_out);
      r.write_outside(10 * layer);
      // In layer 0 compute is late, in layer 1 the gather; in layer 2 nobody has prefetched.
      const double busy_until = busy_time(layer == 1 ? r.tensor.stream() : cudaStream_t{r.compute}).end;
      r.tensor.reset_traffic();
      if (layer < 2) {
        r.calls("prefetch_entered()");
        region.prefetch_entered(r.outside);
      }
      r.calls("entered()");
      const Tensor x = region.entered(r.outside);
      busy(r.compute);
      log = ran();
      const int64_t gathers = traffic(r.tensor, "all_gather").calls;
      r.tell_if(gathers != sp, layer < 2 ? "and prefetch_entered() gather" : "gathers", " the same rows ",
                gathers, " times, and should ", int64_t{sp}, " times");
      r.tell_if(sp && layer == 0 && gather().begin >= busy_until,
                "is late: prefetch_entered() waits for compute, and its rows are there");
      r.tell_if(layer == 2 && gather().begin < busy_until,
                "gathers where compute may still read: without a prefetch it waits for compute first");
      r.tell_if(busy_again().begin < gather().end, "does not make compute wait for its rows");
      r.about = text("in use ", layer, " of the same memory entered()");
      r.tell_rows(x, 10 * layer);
      r.tell_if(sp && at(d_out) != gradient,
                "overwrites the gradient of the region's output: weight gradients need both, in two buffers");
    }

    region.enter_backward(r.all, [&] { busy(r.compute); });  // a weight gradient that reads the rows
    log = ran();
    const double read_until = busy_again().end;
    r.calls("prefetch_entered()");
    region.prefetch_entered(r.result.row_range(0, r.outside.rows));
    busy(r.compute);
    log = ran();
    r.tell_if(gather().begin < read_until,
              "overwrites rows that a weight gradient still reads: it has to wait for entered_used_, which "
              "enter_backward() records behind `meanwhile`");
    r.tell_if(sp && busy_again().begin >= gather().end,
              "makes compute wait for the rows at once; entered() is who waits");
    r.calls("entered() when other rows were prefetched");
    r.tell_rows(region.entered(r.outside), 20);
    // As in a model: rows have come, then a sum begins, and the weight gradients that read them hide it.
    region.prefetch_entered(r.outside);
    const auto [reads, sums] =
        r.ran_by([&] { region.enter_backward(r.all, [&] { region.entered(r.outside), meanwhile(); }); });
    r.about = "entered()";
    r.tell_if(apart(reads[1], sums.back()),
              "makes compute wait for enter_backward()'s sum, too, and should for entered_came_ alone");
  }
}

TEST_CASE("04.5: products behind gathers", "[04.5]") {
  for (const bool sp : {false, true}) {
    Region r(sp, 2);
    r.write_outside();
    r.calls("enter_linear()", sp ? "packs what it gathers into the first y.rows of gathered_"
                                 : "gathers nothing, it is one product");
    r.tell_chunks(true, [&] { r.region->enter_linear(r.blas, r.outside, r.identity, r.result); });
    r.tell_operation(sp ? "all_gather" : "");
    const std::string packed =
        ". What a gather writes is packed, chunk by chunk; y has all rows of rank 0, then of rank 1";
    r.tell_rows(r.result, 0, sp ? packed : "");
  }
}

TEST_CASE("04.5: products before sums", "[04.5]") {
  for (const bool sp : {false, true}) {
    Region r(sp, 2, true);
    r.write_terms();
    r.calls("leave_linear()",
            "makes chunks with some rows of each rank, as a collective gives each its own; of_chunk is a "
            "chunk of the rows outside, with sequence parallelism in gathered_");
    Tensor sum;
    r.tell_chunks(false, [&] { sum = r.region->leave_linear(r.blas, r.all, r.identity, r.result); });
    r.tell_if(traffic(r.tensor, r.summed_by).calls == 1,
              "has one sum for 2 chunks: a sum of all hides behind no product");
    r.tell_operation(r.summed_by);
    const std::string in_place =
        ". x lies in place, all rows of rank 0, then of rank 1. A chunk's product is packed: some rows of "
        "each rank, as a reduce-scatter reads them";
    r.tell_sum(sum, sp ? in_place : "");
  }
}

}  // namespace pentatron::probes
