// The kernels of experts against plain loops in double, and backward ones against differences of the forward
// ones.
// precisions: fp64 bf16
#include <algorithm>
#include <cmath>
#include <numeric>

#include "device.h"
#include "finite_differences.h"
#include "kernels/experts.h"
#include "model.h"

namespace pentatron {
namespace {

// Sizes of a routing: one of each, and none a multiple of anything; more rows than bands (64), and more
// than one block of rows.
struct Sizes {
  int rows, experts, top_k, d;
};
constexpr Sizes all_sizes[] = {{1, 1, 1, 3},   {7, 4, 2, 5},    {13, 5, 5, 301},
                               {601, 9, 3, 4}, {2100, 3, 1, 2}, {37, 40, 2, 36}};

// What the host finds for given logits.
struct Routing {
  std::vector<int32_t> chosen, place, counts;  // [rows, top_k] twice, [experts]
  HostMatrix probabilities;                    // [rows, experts]
};

Routing route_on_host(const HostMatrix& logits, int top_k) {
  const auto rows = static_cast<int>(logits.rows), experts = static_cast<int>(logits.columns);
  Routing r{{}, std::vector<int32_t>(rows * top_k), std::vector<int32_t>(experts), HostMatrix(rows, experts)};
  for (int row = 0; row < rows; ++row) {
    std::vector<int32_t> order(experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return logits(row, a) > logits(row, b); });
    r.chosen.insert(r.chosen.end(), order.begin(), order.begin() + top_k);
    double sum = 0;
    for (int e = 0; e < experts; ++e) sum += std::exp(logits(row, e));
    for (int e = 0; e < experts; ++e) r.probabilities(row, e) = std::exp(logits(row, e)) / sum;
  }
  std::vector<int32_t> copies(r.chosen.size());
  std::iota(copies.begin(), copies.end(), 0);
  std::stable_sort(copies.begin(), copies.end(), [&](int a, int b) { return r.chosen[a] < r.chosen[b]; });
  int32_t next = 0;
  for (const int32_t copy : copies) r.place[copy] = next++;
  for (const int32_t e : r.chosen) ++r.counts[e];
  return r;
}

std::vector<int32_t> download(Matrix<int32_t> from, cudaStream_t stream) {
  const std::vector<double> values = to_host(from, stream);
  return {values.begin(), values.end()};
}

void check_routing(const HostMatrix& logits, int top_k) {
  Device device;
  const Routing want = route_on_host(logits, top_k);
  const AccumTensor probabilities = device.upload<accum>(logits);
  const auto chosen = device.fresh<int32_t>(logits.rows, top_k),
             place = device.fresh<int32_t>(logits.rows, top_k);
  const auto counts = device.fresh<int32_t>(1, logits.columns);
  route_tokens(probabilities, chosen, device.stream);
  make_permutation(chosen, device.fresh<int32_t>(copy_bands(logits.rows), logits.columns), counts, place,
                   device.stream);
  CHECK(download(chosen, device.stream) == want.chosen);
  CHECK(download(counts, device.stream) == want.counts);
  CHECK(download(place, device.stream) == want.place);
  require_close(device.download(probabilities), want.probabilities,
                sum_of<accum>(static_cast<double>(logits.columns)));
}

// A routing on the device, of random logits.
struct OnDevice {
  HostMatrix logits;
  Routing host;
  AccumTensor probabilities;
  Matrix<int32_t> chosen, place;

  OnDevice(Device& device, Random& random, Sizes s)
      : logits(random.normal<accum>(s.rows, s.experts)), host(route_on_host(logits, s.top_k)) {
    for (double& p : host.probabilities.values) p = rounded<accum>(p);
    probabilities = device.upload<accum>(host.probabilities);
    chosen = {const_cast<int32_t*>(device.upload(host.chosen)), s.rows, s.top_k};
    place = {const_cast<int32_t*>(device.upload(host.place)), s.rows, s.top_k};
  }
  double weight(int row, int copy) const { return host.probabilities(row, host.chosen[copy]); }
};

}  // namespace

TEST_CASE("experts: choice and places of copies", "[07][experts][kernels]") {
  Random random;
  for (const auto [rows, experts, top_k, d] : all_sizes) {
    CAPTURE(rows, experts, top_k);
    check_routing(random.normal<accum>(rows, experts), top_k);
  }
}

TEST_CASE("experts: of equal logits the lower number is chosen", "[07][experts][kernels]") {
  check_routing(HostMatrix(5, 4, 0.25), 3);
  HostMatrix two_values(3, 6, 1);
  two_values(0, 5) = two_values(1, 2) = two_values(1, 4) = 2;
  check_routing(two_values, 4);
}

// What is chosen is found with a bias, what weighs is not.
TEST_CASE("experts: a bias moves the choice, and no probability", "[07][experts][balance][kernels]") {
  Device device;
  Random random;
  for (const Sizes s : all_sizes) {
    CAPTURE(s.rows, s.experts);
    const HostMatrix logits = random.normal<accum>(s.rows, s.experts);
    HostMatrix bias(1, s.experts), sums = route_on_host(logits, s.top_k).probabilities;
    for (int e = 0; e < s.experts; ++e) bias(0, e) = 0.25 * (e % 3);  // exact in bf16
    const HostMatrix probabilities = sums;
    for (int row = 0; row < s.rows; ++row)
      for (int e = 0; e < s.experts; ++e) sums(row, e) += bias(0, e);
    const std::vector<int32_t> want = route_on_host(sums, s.top_k).chosen;
    const AccumTensor got = device.upload<accum>(logits);
    const auto chosen = device.fresh<int32_t>(s.rows, s.top_k);
    route_tokens(got, chosen, device.stream, device.upload<real>(bias).data);
    CHECK(download(chosen, device.stream) == want);
    require_close(device.download(got), probabilities, sum_of<accum>(s.experts));

    HostMatrix loads(1, s.experts), twice(1, s.experts);
    for (const int32_t e : want) ++loads(0, e);
    const AccumTensor counted = device.fresh<accum>(1, s.experts);
    count_loads(chosen, 1, {counted, false}, device.stream);
    CHECK(device.download(counted) == loads);
    for (int e = 0; e < s.experts; ++e) twice(0, e) = 2 * loads(0, e);
    count_loads(chosen, 1, {counted, true}, device.stream);
    CHECK(device.download(counted) == twice);
    count_loads(chosen, 0, {counted, true}, device.stream);
    CHECK(device.download(counted) == twice);
  }
}

TEST_CASE("experts: a bias moves by the sign of what is missing", "[07][experts][balance][kernels]") {
  Device device;
  HostMatrix sums(1, 3), want(1, 3);
  sums.values = {5, 7, 6}, want.values = {0.75, 0.25, 0.5};
  const AccumTensor master = device.upload<accum>(HostMatrix(1, 3, 0.5));
  const Tensor weights = device.upload<real>(HostMatrix(1, 3, 0.5));
  accum* const of_weights = has_master_weights ? master.data : reinterpret_cast<accum*>(weights.data);
  const auto step = [&](StepFactors factors) {
    step_bias(0.25, 6, weights.data, of_weights, device.upload<accum>(sums).data,
              device.upload(std::vector<StepFactors>{factors}), 3, device.stream);
    CHECK(device.download(weights) == want);
  };
  step({1, 1, 1});
  step({-1, INFINITY, NAN});  // is skipped
}

TEST_CASE("experts: all tokens to one, none to the others", "[07][experts][kernels]") {
  HostMatrix logits(300, 5);
  for (int row = 0; row < 300; ++row) logits(row, 3) = 1;
  check_routing(logits, 1);
}

TEST_CASE("experts: a router that diverged chooses experts that exist", "[07][experts][kernels]") {
  Device device;
  const AccumTensor logits = device.upload<accum>(HostMatrix(4, 3, NAN));
  const auto chosen = device.fresh<int32_t>(4, 2);
  route_tokens(logits, chosen, device.stream);
  for (const int32_t e : download(chosen, device.stream)) CHECK((e >= 0 && e < 3));
}

TEST_CASE("experts: rows to their places and back", "[07][experts][kernels]") {
  Device device;
  Random random;
  for (const Sizes s : all_sizes) {
    CAPTURE(s.rows, s.experts, s.top_k, s.d);
    const OnDevice routing(device, random, s);
    const HostMatrix x = random.normal<real>(s.rows, s.d);
    HostMatrix want(s.rows * s.top_k, s.d);
    for (int copy = 0; copy < s.rows * s.top_k; ++copy) {
      const int place = routing.host.place[copy];
      for (int j = 0; j < s.d; ++j) want(place, j) = x(copy / s.top_k, j);
    }
    const Tensor copies = device.upload<real>(HostMatrix(want.rows, s.d));
    permute_tokens(device.upload<real>(x), routing.place, copies, device.stream);
    REQUIRE(device.download(copies) == want);

    const HostMatrix d_copies = random.normal<real>(want.rows, s.d),
                     router = random.normal<real>(s.experts, s.d),
                     d_logits = random.normal<accum>(s.rows, s.experts);
    HostMatrix want_d_x(s.rows, s.d);
    for (int row = 0; row < s.rows; ++row) {
      for (int j = 0; j < s.d; ++j) {
        for (int k = 0; k < s.top_k; ++k) {
          const int place = routing.host.place[row * s.top_k + k];
          want_d_x(row, j) += d_copies(place, j);
        }
        for (int e = 0; e < s.experts; ++e) want_d_x(row, j) += d_logits(row, e) * router(e, j);
      }
    }
    const Tensor d_x = device.fresh<real>(s.rows, s.d);
    permute_tokens_backward(device.upload<real>(d_copies), routing.place, device.upload<accum>(d_logits),
                            device.upload<real>(router), d_x, device.stream);
    require_close(device.download(d_x), want_d_x, sum_of<real>(s.top_k + s.experts));
    const HostMatrix before = random.normal<real>(s.rows, s.d);
    for (size_t i = 0; i < before.values.size(); ++i) want_d_x.values[i] += before.values[i];
    device.write(d_x, before);
    permute_tokens_backward(device.upload<real>(d_copies), routing.place, device.upload<accum>(d_logits),
                            device.upload<real>(router), d_x, device.stream, true);
    require_close(device.download(d_x), want_d_x, sum_of<real>(1 + s.top_k + s.experts));
  }
}

TEST_CASE("experts: what comes back is weighed and added up", "[07][experts][kernels]") {
  Device device;
  Random random;
  for (const Sizes s : all_sizes) {
    CAPTURE(s.rows, s.experts, s.top_k, s.d);
    const OnDevice routing(device, random, s);
    const HostMatrix returned = random.normal<real>(s.rows * s.top_k, s.d),
                     d_out = random.normal<real>(s.rows, s.d);
    HostMatrix want(s.rows, s.d), want_d_returned(s.rows * s.top_k, s.d), want_d_chosen(s.rows, s.top_k);
    for (int copy = 0; copy < s.rows * s.top_k; ++copy) {
      const int row = copy / s.top_k, place = routing.host.place[copy];
      for (int j = 0; j < s.d; ++j) {
        want(row, j) += routing.weight(row, copy) * returned(place, j);
        want_d_returned(place, j) = routing.weight(row, copy) * d_out(row, j);
        want_d_chosen(row, copy % s.top_k) += d_out(row, j) * returned(place, j);
      }
    }
    const Tensor device_returned = device.upload<real>(returned), out = device.fresh<real>(s.rows, s.d),
                 d_returned = device.upload<real>(HostMatrix(s.rows * s.top_k, s.d));
    const AccumTensor d_chosen = device.fresh<accum>(s.rows, s.top_k);
    combine_tokens(device_returned, routing.probabilities, routing.chosen, routing.place, out, device.stream);
    combine_tokens_backward(device.upload<real>(d_out), device_returned, routing.probabilities,
                            routing.chosen, routing.place, d_returned, d_chosen.data, device.stream);
    require_close(device.download(out), want, sum_of<real>(s.top_k));
    require_close(device.download(d_returned), want_d_returned, sum_of<real>(1));
    require_close(device.download(d_chosen), want_d_chosen, sum_of<accum>(s.d));
    const HostMatrix before = random.normal<real>(s.rows, s.d);
    for (size_t i = 0; i < before.values.size(); ++i) want.values[i] += before.values[i];
    device.write(out, before);
    combine_tokens(device_returned, routing.probabilities, routing.chosen, routing.place, out, device.stream,
                   true);
    require_close(device.download(out), want, sum_of<real>(1 + s.top_k));
  }
}

TEST_CASE("experts: the router's weight gradient is assigned or added", "[07][experts][kernels]") {
  Device device;
  Random random;
  for (const Sizes s : all_sizes) {
    CAPTURE(s.rows, s.experts, s.d);
    const HostMatrix d_logits = random.normal<accum>(s.rows, s.experts), x = random.normal<real>(s.rows, s.d),
                     before = random.normal<accum>(s.experts, s.d);
    for (const bool add : {false, true}) {
      HostMatrix want = add ? before : HostMatrix(s.experts, s.d);
      for (int row = 0; row < s.rows; ++row)
        for (int e = 0; e < s.experts; ++e)
          for (int j = 0; j < s.d; ++j) want(e, j) += d_logits(row, e) * x(row, j);
      const AccumTensor gradient = device.upload<accum>(before);
      router_wgrad(device.upload<accum>(d_logits), device.upload<real>(x), {gradient, add}, device.stream);
      require_close(device.download(gradient), want, sum_of<accum>(s.rows));
    }
  }
}

// What a block reads again comes from a cache; what another one has read does not.
TEST_CASE("experts: the router's kernels declare what each of their blocks reads", "[07][experts][kernels]") {
  Device device;
  const Sizes s = {21, 40, 2, 70};  // 3 blocks of up to 8 rows; of up to 16 experts; of up to 32 columns
  const AccumTensor d_logits = device.fresh<accum>(s.rows, s.experts), sum = device.fresh<accum>(40, s.d),
                    loads = device.fresh<accum>(1, s.experts);
  const Tensor x = device.fresh<real>(s.rows, s.d), copies = device.fresh<real>(s.rows * s.top_k, s.d),
               router = device.fresh<real>(s.experts, s.d);
  const Matrix<int32_t> chosen{const_cast<int32_t*>(device.upload(std::vector<int32_t>(42))), 21, 2};
  const auto declared = [](const auto& launch) {
    const DeclaredCosts before = declared_costs;
    launch();
    return std::pair(declared_costs.bytes - before.bytes, declared_costs.flops - before.flops);
  };
  for (const bool add : {false, true}) {
    const double of_x = x.bytes(), of_logits = d_logits.bytes(), of_sum = (add ? 2.0 : 1.0) * sum.bytes(),
                 products = 2.0 * s.rows * s.experts * s.d;
    CHECK(declared([&] {
            router_wgrad(d_logits, x, {sum, add}, device.stream);
          }) == std::pair(3 * of_x + 3 * of_logits + of_sum, products));
    CHECK(declared([&] {
            permute_tokens_backward(copies, chosen, d_logits, router, x, device.stream, add);
          }) == std::pair(copies.bytes() + (add ? 2 : 1) * of_x + of_logits + 3 * router.bytes(), products));
  }
  CHECK(declared([&] {
          count_loads(chosen, 1, {loads, false}, device.stream);
        }).first == 40 * chosen.bytes() + loads.bytes());
}

TEST_CASE("experts: fractions and the balance loss", "[07][experts][kernels]") {
  Device device;
  Random random;
  for (const Sizes s : all_sizes) {
    CAPTURE(s.rows, s.experts);
    const OnDevice routing(device, random, s);
    const double copies = s.rows * s.top_k;
    HostMatrix want(1, s.experts);
    double loss = 0.5;
    for (int e = 0; e < s.experts; ++e) {
      want(0, e) = routing.host.counts[e] / copies;
      for (int row = 0; row < s.rows; ++row) loss += 0.25 * want(0, e) * routing.host.probabilities(row, e);
    }
    const AccumTensor fractions = device.fresh<accum>(1, s.experts),
                      sum = device.upload<accum>(HostMatrix(1, 1, 0.5));
    count_loads(routing.chosen, 1 / copies, {fractions, false}, device.stream);
    add_balance_loss(routing.probabilities, fractions.data, 0.25, sum.data, device.stream);
    require_close(device.download(fractions), want, sum_of<accum>(1));
    require_close(device.download(sum), HostMatrix(1, 1, loss), sum_of<accum>(s.rows * s.experts));
  }
}

TEST_CASE("experts: the balance loss of a router is scaled with the loss", "[07][experts][kernels]") {
  Device device;
  Random random;
  const Sizes s = {5, 6, 3, 4};
  const OnDevice routing(device, random, s);
  const AccumTensor d_logits = device.fresh<accum>(s.rows, s.experts);
  const accum *fractions = device.upload<accum>(random.normal<accum>(1, s.experts)).data,
              *d_chosen = device.upload<accum>(HostMatrix(s.rows, s.top_k)).data;  // the text has no gradient
  const auto gradient = [&](double balance, const LossScale* scale) {
    route_tokens_backward(routing.probabilities, routing.chosen, d_chosen, fractions, balance, d_logits,
                          device.stream, scale);
    return device.download(d_logits);
  };
  const auto* scale = device.upload(std::vector<LossScale>{{1024, 0, 0}});
  require_close(gradient(0.3, scale), gradient(1024 * 0.3, nullptr), sum_of<accum>(s.experts));
}

#if PRECISION == 64

// The choice stays what it was: differences are smaller than those of any two logits.
TEST_CASE("gradient: experts' weights, router and balance", "[07][experts][kernels]") {
  Device device;
  Random random;
  const Sizes s = {5, 6, 3, 4};
  const OnDevice routing(device, random, s);
  const HostMatrix returned = random.normal<real>(s.rows * s.top_k, s.d),
                   w = random.normal<real>(s.rows, s.d);
  const double scale = 0.3;
  HostMatrix fractions(1, s.experts);
  for (int e = 0; e < s.experts; ++e) fractions(0, e) = routing.host.counts[e] / double(s.rows * s.top_k);
  const Tensor device_returned = device.upload<real>(returned), out = device.fresh<real>(s.rows, s.d),
               d_returned = device.upload<real>(HostMatrix(s.rows * s.top_k, s.d));
  const AccumTensor probabilities = device.fresh<accum>(s.rows, s.experts),
                    device_fractions = device.upload<accum>(fractions), loss = device.fresh<accum>(1, 1),
                    d_chosen = device.fresh<accum>(s.rows, s.top_k),
                    d_logits = device.fresh<accum>(s.rows, s.experts);
  const auto chosen = device.fresh<int32_t>(s.rows, s.top_k);
  const auto forward = [&](const HostMatrix& logits) {
    device.write(probabilities, logits);
    route_tokens(probabilities, chosen, device.stream);
    combine_tokens(device_returned, probabilities, chosen, routing.place, out, device.stream);
    device.write(loss, HostMatrix(1, 1));
    add_balance_loss(probabilities, device_fractions.data, scale, loss.data, device.stream);
    return dot(w, device.download(out)) + device.download(loss)(0, 0);
  };
  forward(routing.logits);
  combine_tokens_backward(device.upload<real>(w), device_returned, probabilities, chosen, routing.place,
                          d_returned, d_chosen.data, device.stream);
  route_tokens_backward(probabilities, chosen, d_chosen.data, device_fractions.data, scale, d_logits,
                        device.stream);
  check_gradient(device.download(d_logits), routing.logits, forward);
  device.write(probabilities, routing.host.probabilities);
  check_gradient(device.download(d_returned), returned, [&](const HostMatrix& changed) {
    device.write(device_returned, changed);
    return forward(routing.logits);
  });
}

#endif

}  // namespace pentatron
