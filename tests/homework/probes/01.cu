// Probes of stage 01.
// ranks: 1
#include "kernels/matmul.h"
#include "kernels/optimizer_step.h"
#include "kernels/rotary.h"
#include "model/optimizer.h"
#include "mpi/array.h"
#include "probe.h"

namespace pentatron::probes {
namespace {

using mpi_tests::Array;

std::string decimal(double value, int digits = 6) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*g", digits, value);
  return text;
}

double tolerance = 1e-9;  // relative

// `what` is `found`, and should be `expected`, because of `why`.
void tell_number(const std::string& what, double found, double expected, const std::string& why) {
  int digits = 6;  // or so many that they differ
  while (digits < 17 && decimal(found, digits) == decimal(expected, digits)) ++digits;
  const double difference = std::abs(found - expected), of = std::abs(expected);
  tell_if(!(difference <= tolerance * of + 1e-15),
          what + " is " + decimal(found, digits) + ", and should be " + decimal(expected, digits) + ": " +
              (difference < 1e-7 * of ? "so small a difference comes from a float: compute in accum" : why));
}

}  // namespace

TEST_CASE("01.1: clip factor", "[01.1]") {
  const Stream stream("compute");
  const std::string compared = "the norm is compared with the limit, and not its square";
  const struct {
    double norm, limit, factor;
    std::string why;
  } cases[] = {{3, 0, 1, "a limit of 0 is no limit"},
               {0.5, 1, 1, "a gradient that is shorter than the limit keeps its length"},
               {4, 2, 2 / (4 + 1e-6), "the limit over the norm, of which the square is given, and 1e-6"},
               {2, 3, 1, compared},
               {0.6, 0.5, 0.5 / (0.6 + 1e-6), compared}};
  for (const auto& c : cases) {
    const Array<double> squared(std::vector{c.norm * c.norm});
    const Array<StepFactors> factors(1);
    step_factors(squared.data(), c.limit, AdamW{}, 1, nullptr, factors.data(), stream);
    tell_number(
        "the factor of a gradient of norm " + decimal(c.norm) + " with a limit of " + decimal(c.limit),
        factors.get(1)[0].gradient, c.factor, c.why);
  }
}

TEST_CASE("01.2: the learning rate", "[01.2]") {
  for (const int warmup : {4, 0}) {
    TrainingConfig config;
    config.lr = 2, config.steps = warmup + 8, config.warmup_steps = warmup;
    const auto tell_rate = [&](int step, double share, const std::string& why) {
      tell_number("with --lr 2, " + number(warmup) + " steps of warm-up and 8 others, that of step " +
                      number(step) + " (the first is 0)",
                  learning_rate(config, step), share * config.lr, why);
    };
    for (int step = 0; step < warmup; ++step)
      tell_rate(step, (step + 1.0) / warmup, "it rises by equal parts, and even the first step learns");
    const std::string half = "half a cosine goes from all to a tenth, over the steps after the warm-up";
    tell_rate(warmup, 1, half);
    tell_rate(warmup + 4, 0.55, half);
    tell_rate(warmup + 2, 0.55 + 0.45 * std::sqrt(0.5), half);
    tell_rate(warmup + 8, 0.1, half);
    tell_rate(warmup + 12, 0.1, "after the last step it stays");
  }
}

TEST_CASE("01.3: dgrad and wgrad", "[01.3]") {
  const Stream stream("compute");
  const Blas blas(stream);
  const int rows = 3, out = 3, in = 2;
  // A row of d_y has a single 1. So a product has rows of the other matrix, whose values name them.
  const Array<real> d_y({0, 1, 0, /**/ 0, 0, 1, /**/ 1, 0, 0});
  const Array<real> other({0, 1, 1000, 1001, 2000, 2001});  // owned(row, column)
  const real before = 1e6;
  const auto tell_row = [&](const std::string& what, std::vector<real> found, int row, bool adds) {
    for (real& value : found) {
      tell_if(!adds && value >= before, what + " was added to what lay there before");
      tell_if(adds && value < before, what + " was not added to what the micro-batches before have left");
      value -= adds ? before : 0;
    }
    tell(wrong_copy(what, found, row, 0, [](int r) { return "row " + number(r); }));
  };

  // Behind ran(): `call` has launched one product.
  const auto tell_launches = [](const std::string& call) {
    std::string names;
    const std::vector<trace::Interval> log = ran();
    for (const trace::Interval& i : log) names += (names.empty() ? "" : " and ") + i.name;
    tell_if(log.size() > 1, call, " launches ", names,
            ", where one product assigns, or adds: its beta is 0 or 1");
  };

  doing("linear_dgrad(): d_x [rows, in] is d_y [rows, out] times W [out, in]");
  const Array<real> d_x(std::vector<real>(rows * in, before));
  ran();
  linear_dgrad(blas, {d_y.data(), rows, out}, {other.data(), out, in}, {d_x.data(), rows, in});
  tell_launches("linear_dgrad()");
  const int picked[] = {1, 2, 0};  // by row r of d_y
  for (int r = 0; r < rows; ++r) {
    const std::vector<real> all = d_x.get(rows * in);
    tell_row("d_x, row " + number(r) + ", of d_y and the rows of W,", {&all[r * in], &all[r * in] + in},
             picked[r], false);
  }
  for (const bool add : {false, true}) {
    doing("linear_wgrad(): d_weight [out, in] is d_y^T [out, rows] times x [rows, in]");
    const Array<accum> d_weight(std::vector<accum>(out * in, before));
    ran();
    linear_wgrad(blas, {d_y.data(), rows, out}, {other.data(), rows, in}, {{d_weight.data(), out, in}, add});
    tell_launches("linear_wgrad()");
    const std::vector<accum> all = d_weight.get(out * in);
    for (int r = 0; r < rows; ++r) {
      const auto row = all.begin() + picked[r] * in;
      tell_row("d_weight, row " + number(picked[r]) +
                   ", of d_y^T and the rows of x, with add = " + number(add) + ",",
               {row, row + in}, r, add);
    }
    linear_wgrad(blas, {d_y.data(), 0, out}, {other.data(), 0, in}, {{d_weight.data(), out, in}, add});
    tell_number("d_weight of no rows, with add = " + number(add) + ", on what was " + decimal(all[0]) + ",",
                d_weight.get(1)[0], add ? all[0] : 0, "their sum is 0, which is assigned, or added");
  }
}

TEST_CASE("01.4: rotary backward", "[01.4]") {
  const Stream stream("compute");
  const HeadShape shape = {4, 2, 4};
  const int rows = 3, size = shape.head_size, half = size / 2;
  // Position p turns by p times 90 degrees: what comes out is what went in at another place, or its opposite.
  const Array<accum> table({1, 1, 0, 0, /**/ 0, 0, 1, 1, /**/ -1, -1, 0, 0, /**/ 0, 0, -1, -1});
  const std::vector<int32_t> position = {2, 0, 3};
  const Array<int32_t> positions(position);
  const auto values = [&](int owner, int heads) {
    std::vector<real> all;
    for (int row = 0; row < rows; ++row) {
      for (int head = 0; head < heads; ++head) {
        for (const real value : owned_values<real>(owner + head, size, 10 * row + 1)) all.push_back(value);
      }
    }
    return all;
  };
  const Array<real> d_q(values(0, 4)), d_k(values(10, 2)), d_v(values(20, 2)),
      d_qkv(std::vector<real>(rows * shape.qkv_columns(), NAN));
  doing("rotary_backward()");
  rotary_backward({d_q.data(), rows, 4 * size}, {d_k.data(), rows, 2 * size}, {d_v.data(), rows, 2 * size},
                  positions.data(), {table.data(), 4, size}, shape, {d_qkv.data(), rows, shape.qkv_columns()},
                  stream);
  const std::vector<real> found = d_qkv.get(rows * shape.qkv_columns());
  const auto name = [](double value) {
    if (value == 0) return std::string("0");
    const auto v = std::llround(std::abs(value));
    const int owner = static_cast<int>(v / 1000), kind = owner / 10;
    return std::string(value < 0 ? "minus " : "") + "element " + number(v % 10 - 1) + " of head " +
           number(owner % 10) + " of " + std::array{"d_q", "d_k", "d_v"}[kind] + " in row " +
           number(v % 1000 / 10);
  };
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < shape.qkv_columns(); ++column) {
      const int head = column / size, i = column % size, kind = head < 4 ? 0 : head < 6 ? 1 : 2;
      const int owner = kind == 0 ? head : kind == 1 ? 6 + head : 14 + head;
      const auto turned = [&](int p) {  // back, from position p
        const int from = (i + p * half) % size;
        const bool opposite = p == 2 || p == (i < half ? 3 : 1);
        return (opposite ? -1 : 1) * owned(owner, 10 * row + 1 + from);
      };
      const int p = position[row];
      const double expected = turned(kind < 2 ? p : 0), is = found[row * shape.qkv_columns() + column];
      const std::string what = "row " + number(row) + " of d_qkv, where position " + number(p) +
                               " turned by " + number(90 * p) + " degrees: column " + number(column) + " ";
      tell_if(std::isnan(is), what + "was never written; it is the place of " + name(expected));
      tell_if(kind < 2 && is != expected && is == turned(row),
              what + "is turned by the angle of position " + number(row) +
                  ": a row's angle is that of its position, positions[row], and not of its number");
      tell_if(kind == 2 && is != expected, what + "is " + name(is) + ", and should be " + name(expected) +
                                               ": forward does not turn v, so d_v is copied");
      tell_if(is == -expected, what + "is " + name(is) + ", and should be the opposite: backward turns back");
      for (const int other : {0, 1, 2, 3})
        tell_if(kind < 2 && is != expected && is == turned(other),
                what + "is turned by the angle of position " + number(other) +
                    ": a row of the table has size / 2 cosines, then as many sines");
      tell_if(is != expected, what + "is " + name(is) + ", and should be " + name(expected));
    }
  }
}

TEST_CASE("01.5: AdamW", "[01.5]") {
  const Stream stream("compute");
  AdamW adamw = {0.1, 0.8, 0.9, 0.3};
  const std::string skips = "a step that overflowed changes nothing, and nothing decays";
  const auto check = [&](const std::string& with, double gradient, StepFactors factors, double m, double v,
                         const std::string& why) {
    const Array<real> weight(std::vector<real>{2});
    const Array<accum> g(std::vector{gradient}), moment1(std::vector{m}), moment2(std::vector{v});
    const Array<StepFactors> f(std::vector{factors});
    doing("adamw_step()");
    adamw_step(adamw, weight.data(), weight.data(), g.data(), moment1.data(), moment2.data(), f.data(), 1,
               stream);
    const double used = factors.gradient * gradient;
    const bool skipped = factors.gradient < 0;
    const double m1 = skipped ? m : 0.8 * m + 0.2 * used, v1 = skipped ? v : 0.9 * v + 0.1 * used * used;
    tell_number(with + ": the first moment", moment1.get(1)[0], m1,
                skipped ? skips : "beta1 m + (1 - beta1) g; g is factor times gradient, without decay");
    tell_number(with + ": the second moment", moment2.get(1)[0], v1,
                skipped ? skips : "beta2 v + (1 - beta2) g^2; g is factor times gradient");
    const auto weight_with = [&](double m, double v) {
      const double root = std::sqrt(v) * factors.inverse_correction2 + adamw_epsilon;
      return skipped ? 2 : 2 * (1 - 0.1 * adamw.weight_decay) - factors.step_size * m / root;
    };
    const double is = weight.get(1)[0];
    const bool old = std::abs(is - weight_with(m, v)) < 1e-9;
    tell_number(with + ": a weight of 2", is, weight_with(m1, v1),
                old ? "the step takes the moments that have this gradient, not those before" : why);
  };
  for (const double digits : {1e-6, 1e-9}) {  // epsilon does less than what is wrong otherwise
    tolerance = digits, adamw.weight_decay = 0.3;
    check("with no gradient, lr 0.1 and a decay of 0.3", 0, {1, 0.5, 1}, 0, 0,
          "it shrinks by the decay times the learning rate, and no more: the step is 0 / epsilon");
    adamw.weight_decay = 0;
    check("with a gradient of 4.1, a factor of 0.5 and no decay", 4.1, {0.5, 0.5, 1}, 1, 1,
          "step_size m / (sqrt(v) + epsilon) is subtracted");
    check("with a correction of 3 for the root of v, and no decay", 4.1, {0.5, 0.5, 3}, 1, 1,
          "the root is multiplied by inverse_correction2");
    check("with a gradient of 1e-8, a correction of 3 and no decay", 1e-8, {1, 0.5, 3}, 0, 0,
          "epsilon is added to the corrected root, not below it");
    adamw.weight_decay = 0.3;
    check("with a gradient of 4.1, lr 0.1 and a decay of 0.3", 4.1, {0.5, 0.5, 1}, 1, 1,
          "decay shrinks the weight as it was before the step, and not the step that is subtracted");
    check("with a factor below 0", 4.1, {-1, 0.5, 1}, 1, 1, skips);
  }
}

}  // namespace pentatron::probes
