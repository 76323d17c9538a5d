// Probes of stage 01.
// ranks: 1
#include <iomanip>

#include "kernels/matmul.h"
#include "kernels/optimizer_step.h"
#include "kernels/rotary.h"
#include "model/optimizer.h"
#include "mpi/array.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

using mpi_tests::Array;

double tolerance = 1e-9;  // relative

// `what` is `found`, and should be `expected`, because of `why`.
void tell_number(const std::string& what, double found, double expected, const std::string& why) {
  const double difference = std::abs(found - expected), of = std::abs(expected);
  std::ostringstream is;
  is << std::setprecision(difference < 1e-4 * of ? 12 : 6) << found << ", and should be " << expected;
  tell_if(!(difference <= tolerance * of + 1e-15), what, " is ", is.str(), ": ",
          difference < 1e-7 * of ? "so small a difference comes from a float: compute in accum" : why);
}

}  // namespace

TEST_CASE("01.1: clip factor", "[01.1]") {
  const Stream stream("compute");
  const auto check = [&](double norm, double limit, double factor, const std::string& why) {
    const Array<double> squared(std::vector{norm * norm});
    const Array<StepFactors> factors(1);
    step_factors(squared.data(), limit, AdamW{}, 1, nullptr, factors.data(), stream);
    tell_number(text("the factor of a gradient of norm ", norm, " with a limit of ", limit),
                factors.get(1)[0].gradient, factor, why);
  };
  check(3, 0, 1, "a limit of 0 is no limit");
  check(0.5, 1, 1, "a gradient that is shorter than the limit keeps its length");
  check(4, 2, 2 / (4 + 1e-6), "the limit over the norm, of which the square is given, and 1e-6");
  check(2, 3, 1, "the norm is compared with the limit, and not its square");
  check(0.6, 0.5, 0.5 / (0.6 + 1e-6), "the norm is compared with the limit, and not its square");
}

TEST_CASE("01.2: the learning rate", "[01.2]") {
  for (const int warmup : {4, 0}) {
    TrainingConfig config;
    config.lr = 2, config.steps = warmup + 8, config.warmup_steps = warmup;
    const auto due = [&](int step) {
      const double decay = std::clamp((step - warmup) / 8.0, 0.0, 1.0);
      const double share = step < warmup ? (step + 1.0) / warmup : 0.55 + 0.45 * std::cos(M_PI * decay);
      return share * config.lr;
    };
    const auto check = [&](int step, const std::string& why) {
      const double is = learning_rate(config, step);
      std::string other;
      for (const int by : {-1, 1}) {
        if (step + by >= 0 && std::abs(is - due(step + by)) < 1e-9)
          other = "that is the rate of step " + number(step + by) + "; ";
      }
      tell_number(
          text("--lr 2, ", warmup, " steps of warm-up, then 8: the rate of step ", step, " (the first is 0)"),
          is, due(step), other + why);
    };
    for (int step = 0; step < warmup; ++step)
      check(step, "it rises by equal parts, and even the first step learns");
    for (const int step : {0, 7, 4, 2, 8})
      check(warmup + step, "half a cosine goes from all to a tenth, over the steps after the warm-up");
    check(warmup + 12, "after the last step it stays");
  }
}

TEST_CASE("01.3: dgrad and wgrad", "[01.3]") {
  const Stream stream("compute");
  const Blas blas(stream);
  const int rows = 3, out = 3, in = 2;
  // A row of d_y has a single 1. So the rows of a product are rows of the other matrix, owned(row, column).
  // Where the product goes lies owned(1000, 0), so owner 1000 + row is that row, added.
  const Array<real> d_y({0, 1, 0, /**/ 0, 0, 1, /**/ 1, 0, 0}), other({0, 1, 1000, 1001, 2000, 2001});
  const std::vector<accum> before(3 * in, owned(1000, 0));
  const auto name = [](int owner) { return text("row ", owner % 1000); };
  // `owners`: of the product's rows. `launch_it` gets its place.
  const auto check = [&](const std::string& call, const std::string& product, const std::vector<int>& owners,
                         const auto& launch_it) {
    doing(call, ": ", product);
    const Array<accum> result(before);
    ran();
    launch_it(result.data());
    const std::vector<trace::Interval> log = ran();
    if (log.size() > 1)
      tell(text(call, " launches ", log[0].name, " and ", log[1].name,
                ", where one product assigns, or adds: its beta is 0 or 1"));
    const std::vector<accum> all = at(result.data(), 3 * in);
    const auto [least, most] = std::ranges::minmax(all);
    tell_if(owners[0] < 1000 && most >= before[0], product, ", was added to what lay there before");
    tell_if(owners[0] >= 1000 && least < before[0], product,
            ", was not added to what the micro-batches before have left");
    for (int row = 0; row < 3; ++row)
      tell(wrong_copy(text(product, ", row ", row), std::span(&all[row * in], in), owners[row], 0, name));
  };
  check("linear_dgrad()", "d_x [rows, in] = d_y [rows, out] W [out, in]", {1, 2, 0}, [&](real* d_x) {
    linear_dgrad(blas, {d_y.data(), rows, out}, {other.data(), out, in}, {d_x, rows, in});
  });
  for (const int add : {0, 1}) {
    check("linear_wgrad()", text("d_weight [out, in] = d_y^T [out, rows] x [rows, in], add = ", add),
          {1000 * add + 2, 1000 * add, 1000 * add + 1}, [&](accum* d_weight) {
            linear_wgrad(blas, {d_y.data(), rows, out}, {other.data(), rows, in},
                         {{d_weight, out, in}, add == 1});
          });
    const Array<accum> d_weight(before);
    linear_wgrad(blas, {d_y.data(), 0, out}, {other.data(), 0, in}, {{d_weight.data(), out, in}, add == 1});
    tell_number(text("d_weight of no rows, with add = ", add, ", on what was ", before[0], ","),
                d_weight.get(1)[0], add * before[0], "their sum is 0, which is assigned, or added");
  }
}

TEST_CASE("01.4: rotary backward", "[01.4]") {
  const Stream stream("compute");
  const HeadShape shape = {4, 2, 4};
  const int rows = 3, size = shape.head_size, half = size / 2, columns = shape.qkv_columns();
  // Position p turns by p times 90 degrees: what comes out is what went in at another place, or its opposite.
  const Array<accum> table({1, 1, 0, 0, /**/ 0, 0, 1, 1, /**/ -1, -1, 0, 0, /**/ 0, 0, -1, -1});
  const std::vector<int32_t> position = {2, 0, 3};
  const Array<int32_t> positions(position);
  const std::string names[] = {"", "d_q", "d_k", "d_v"};  // by owner of the values
  const int widths[] = {0, 4 * size, 2 * size, 2 * size}, begins[] = {0, 0, 4 * size, 6 * size};  // in d_qkv
  const Array<real> d_q(owned_values<real>(1, rows * 4 * size)), d_k(owned_values<real>(2, rows * 2 * size)),
      d_v(owned_values<real>(3, rows * 2 * size)), d_qkv(std::vector<real>(rows * columns, NAN));
  const auto name = [&](double value) {
    if (!(std::abs(value) >= 1000 && std::abs(value) < 4000)) return text(value);
    const auto owner = std::lround(std::abs(value)) / 1000, place = std::lround(std::abs(value)) % 1000;
    return text(value < 0 ? "minus " : "", names[owner], "[", place / widths[owner], ", ",
                place % widths[owner], "]");
  };
  doing("rotary_backward()");
  rotary_backward({d_q.data(), rows, 4 * size}, {d_k.data(), rows, 2 * size}, {d_v.data(), rows, 2 * size},
                  positions.data(), {table.data(), 4, size}, shape, {d_qkv.data(), rows, columns}, stream);
  const std::vector<real> all = d_qkv.get(rows * columns);
  for (int place = 0; place < rows * columns; ++place) {
    const int row = place / columns, column = place % columns, i = column % size, p = position[row];
    const int owner = column < 4 * size ? 1 : column < 6 * size ? 2 : 3;
    const auto turned_by = [&](int p) {  // back, by the angle of position p
      const int from = column - i + (i + p * half) % size - begins[owner];
      const bool opposite = p == 2 || p == (i < half ? 3 : 1);
      return (opposite ? -1 : 1) * owned(owner, row * widths[owner] + from);
    };
    const double found = all[place], due = turned_by(owner < 3 ? p : 0);
    const auto wrong = [&]() -> std::string {
      if (std::isnan(found)) return "was never written; it is the place of " + name(due);
      const std::string is = "is " + name(found) + ", and should be " + name(due);
      if (owner == 3) return is + ": forward does not turn v, so d_v is copied";
      if (found == turned_by(row))
        return text("is turned by the angle of position ", row,
                    ": a row's angle is that of its position, positions[row], and not of its number");
      if (found == -due) return is + ": backward turns back";
      for (const int other : {0, 1, 2, 3}) {
        if (found == turned_by(other))
          return text("is turned by the angle of position ", other,
                      ": a row of the table has size / 2 cosines, then as many sines");
      }
      return is;
    };
    tell_if(found != due, "d_qkv[", row, ", ", column, "], where heads have ", size, " columns and position ",
            p, " turned by ", 90 * p, " degrees, ", wrong());
  }
}

TEST_CASE("01.5: AdamW", "[01.5]") {
  const Stream stream("compute");
  AdamW adamw = {0.1, 0.8, 0.9, 0.3};
  // A step of two moments, which are `before`, and a weight of 2: what they become.
  const auto step = [&](double gradient, StepFactors factors, double before) {
    const Array<real> weight(std::vector<real>{2});
    const Array<accum> g(std::vector{gradient}), m(std::vector{before}), v(std::vector{before});
    const Array<StepFactors> f(std::vector{factors});
    doing("adamw_step()");
    adamw_step(adamw, weight.data(), weight.data(), g.data(), m.data(), v.data(), f.data(), 1, stream);
    return std::array{m.get(1)[0], v.get(1)[0], weight.get(1)[0]};
  };
  const auto check = [&](const std::string& with, double gradient, StepFactors factors, double before,
                         const std::string& why) {
    const auto [m, v, weight] = step(gradient, factors, before);
    const double used = factors.gradient * gradient;
    const double m_due = 0.8 * before + 0.2 * used, v_due = 0.9 * before + 0.1 * used * used;
    tell_number(with + ": the first moment", m, m_due,
                "beta1 m + (1 - beta1) g; g is factor times gradient, without decay");
    tell_number(with + ": the second moment", v, v_due,
                "beta2 v + (1 - beta2) g^2; g is factor times gradient");
    const auto weight_with = [&](double m, double v) {
      const double root = std::sqrt(v) * factors.inverse_correction2 + adamw_epsilon;
      return 2 * (1 - 0.1 * adamw.weight_decay) - factors.step_size * m / root;
    };
    const bool old = std::abs(weight - weight_with(before, before)) < 1e-9;
    tell_number(with + ": a weight of 2", weight, weight_with(m_due, v_due),
                old ? "the step takes the moments that have this gradient, not those before" : why);
  };
  for (const double digits : {1e-6, 1e-9}) {  // epsilon does less than what is wrong otherwise
    tolerance = digits, adamw.weight_decay = 0.3;
    check("with no gradient, lr 0.1 and a decay of 0.3", 0, {1, 0.5, 1}, 0,
          "it shrinks by the decay times the learning rate, and no more: the step is 0 / epsilon");
    adamw.weight_decay = 0;
    check("with a gradient of 4.1, a factor of 0.5 and no decay", 4.1, {0.5, 0.5, 1}, 1,
          "step_size m / (sqrt(v) + epsilon) is subtracted");
    check("with a correction of 3 for the root of v, and no decay", 4.1, {0.5, 0.5, 3}, 1,
          "the root is multiplied by inverse_correction2");
    check("with a gradient of 1e-8, a correction of 3 and no decay", 1e-8, {1, 0.5, 3}, 0,
          "epsilon is added to the corrected root, not below it");
    adamw.weight_decay = 0.3;
    check("with a gradient of 4.1, lr 0.1 and a decay of 0.3", 4.1, {0.5, 0.5, 1}, 1,
          "decay shrinks the weight as it was before the step, and not the step that is subtracted");
  }
  const auto [m, v, weight] = step(4.1, {-1, 0.5, 1}, 1);
  tell_if(m != 1 || v != 1 || weight != 2,
          "with a factor below 0, moments of 1 and 1 and a weight of 2 become ", m, ", ", v, " and ", weight,
          ": a step that overflowed changes nothing, and nothing decays");
}

}  // namespace pentatron::probes
