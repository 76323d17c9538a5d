// Each backward kernel against its forward kernel, by central differences.
// precisions: fp64
#if PRECISION == 64

#include "device.h"
#include "finite_differences.h"
#include "kernels/attention.h"
#include "kernels/embedding.h"
#include "kernels/loss.h"
#include "kernels/norm.h"
#include "kernels/rotary.h"
#include "kernels/swiglu.h"

namespace pentatron {
namespace {

// Below, the function is dot(w, kernel's output) for a random w, so that d_output = w.

TEST_CASE("gradient: embedding", "[01][kernels]") {
  Device device;
  Random random;
  const int rows = 13, d = 5, vocabulary = 7, first = 2;
  const HostMatrix table = random.normal<real>(vocabulary, d), w = random.normal<real>(rows, d);
  const std::vector<int32_t> tokens = random.integers(rows, 0, vocabulary + first + 2);
  std::vector<int32_t> by_token(rows);
  std::iota(by_token.begin(), by_token.end(), 0);
  std::stable_sort(by_token.begin(), by_token.end(),
                   [&](int32_t a, int32_t b) { return tokens[a] < tokens[b]; });

  const Tensor device_table = device.upload<real>(table), out = device.fresh<real>(rows, d);
  const int32_t* device_tokens = device.upload(tokens);
  const AccumTensor gradient = device.upload<accum>(HostMatrix(vocabulary, d));
  embedding_backward(device.upload<real>(w), device_tokens, device.upload(by_token), first, {gradient, true},
                     device.stream);
  check_gradient(device.download(gradient), table, [&](const HostMatrix& x) {
    device.write(device_table, x);
    embedding_forward(device_table, device_tokens, first, out, device.stream);
    return dot(w, device.download(out));
  });
}

TEST_CASE("gradient: rmsnorm", "[01][kernels]") {
  Device device;
  Random random;
  const int rows = 5, d = 11;
  const HostMatrix x = random.normal<real>(rows, d), weight = random.normal<real>(1, d),
                   w = random.normal<real>(rows, d);
  const Tensor device_x = device.upload<real>(x), device_weight = device.upload<real>(weight),
               out = device.fresh<real>(rows, d), d_x = device.fresh<real>(rows, d);
  const AccumTensor rstd = device.fresh<accum>(rows, 1), d_weight = device.fresh<accum>(1, d);
  const auto forward = [&] {
    rmsnorm_forward(device_x, {}, device_weight.data, 1e-5, device_x, out, rstd.data, device.stream);
    return dot(w, device.download(out));
  };
  forward();
  rmsnorm_backward(device.upload<real>(w), device_x, device_weight.data, rstd.data, false, d_x,
                   device.fresh<accum>(rmsnorm_bands(rows), d), d_weight.data, device.stream);
  check_gradient(device.download(d_x), x, [&](const HostMatrix& changed) {
    device.write(device_x, changed);
    return forward();
  });
  device.write(device_x, x);
  check_gradient(device.download(d_weight), weight, [&](const HostMatrix& changed) {
    device.write(device_weight, changed);
    return forward();
  });
}

TEST_CASE("gradient: rotary positions", "[01][kernels]") {
  Device device;
  Random random;
  const HeadShape shape{4, 2, 6};
  const int rows = 3, q_columns = 24, k_columns = 12;
  const HostMatrix qkv = random.normal<real>(rows, shape.qkv_columns()),
                   w_q = random.normal<real>(rows, q_columns), w_k = random.normal<real>(rows, k_columns),
                   w_v = random.normal<real>(rows, k_columns);
  const AccumTensor table = device.fresh<accum>(31, shape.head_size);
  fill_rotary_table(rotary_frequencies(100, static_cast<int>(table.columns)), table, device.stream);
  const int32_t* positions = device.upload(std::vector<int32_t>{30, 0, 7});
  const Tensor device_qkv = device.upload<real>(qkv), d_qkv = device.fresh<real>(rows, qkv.columns),
               q = device.fresh<real>(rows, q_columns), k = device.fresh<real>(rows, k_columns),
               v = device.fresh<real>(rows, k_columns);
  rotary_backward(device.upload<real>(w_q), device.upload<real>(w_k), device.upload<real>(w_v), positions,
                  table, shape, d_qkv, device.stream);
  check_gradient(device.download(d_qkv), qkv, [&](const HostMatrix& x) {
    device.write(device_qkv, x);
    rotary_forward(device_qkv, positions, table, shape, q, k, v, device.stream);
    return dot(w_q, device.download(q)) + dot(w_k, device.download(k)) + dot(w_v, device.download(v));
  });
}

TEST_CASE("gradient: swiglu", "[01][kernels]") {
  Device device;
  Random random;
  const int rows = 3, f = 13;
  const HostMatrix gate_up = random.normal<real>(rows, 2 * f, 2), w = random.normal<real>(rows, f);
  const Tensor device_gate_up = device.upload<real>(gate_up), out = device.fresh<real>(rows, f),
               d_gate_up = device.fresh<real>(rows, 2 * f);
  swiglu_backward(device.upload<real>(w), device_gate_up, d_gate_up, device.stream);
  check_gradient(device.download(d_gate_up), gate_up, [&](const HostMatrix& x) {
    device.write(device_gate_up, x);
    swiglu_forward(device_gate_up, out, device.stream);
    return dot(w, device.download(out));
  });
}

TEST_CASE("gradient: cross-entropy", "[01][kernels]") {
  Device device;
  Random random;
  const int rows = 5, vocabulary = 11;
  const double scale = 0.25;
  const HostMatrix logits = random.normal<real>(rows, vocabulary, 2);
  const int32_t* targets = device.upload(std::vector<int32_t>{0, 10, ignored_target, 3, 3});
  const Tensor device_logits = device.upload<real>(logits);
  const AccumTensor statistics = device.fresh<accum>(3, rows), loss = device.fresh<accum>(1, 1);
  const auto forward = [&] {
    cross_entropy_statistics(device_logits, targets, 0, statistics, device.stream);
    cross_entropy_loss(statistics, targets, scale, loss.data, device.stream);
    return device.download(loss)(0, 0);
  };
  forward();
  cross_entropy_backward(device_logits, targets, 0, scale, nullptr, statistics, device.stream);
  check_gradient(device.download(device_logits), logits, [&](const HostMatrix& x) {
    device.write(device_logits, x);
    return forward();
  });
}

TEST_CASE("gradient: attention", "[01][kernels]") {
  const Attention kind = GENERATE(Attention::naive, Attention::tiled);
  Device device;
  Random random;
  const AttentionShape shape{2, 5, {4, 2, 6}};
  const AttentionBlock block = whole_sequences(shape);
  const int rows = 10, q_columns = 24, k_columns = 12;
  const HostMatrix w = random.normal<real>(rows, q_columns);
  const HostMatrix inputs[] = {random.normal<real>(rows, q_columns), random.normal<real>(rows, k_columns),
                               random.normal<real>(rows, k_columns)};  // q, k, v
  Tensor x[3], d_x[3];
  for (int i = 0; i < 3; ++i) {
    x[i] = device.upload<real>(inputs[i]);
    d_x[i] = device.fresh<real>(rows, inputs[i].columns);
  }
  const Scores scores{device.fresh<real>(shape.batch * shape.score_rows(), shape.sequence), true};
  const AttentionTensors t = {
      x[0],  x[1], x[2], device.fresh<real>(rows, q_columns), device.fresh<accum>(rows, shape.head.heads),
      scores};
  const auto forward = [&] {
    attention_forward(kind, device.blas, block, t);
    return dot(w, device.download(t.out));
  };
  forward();
  const Tensor d_out = device.upload<real>(w);
  const AccumTensor dots = device.fresh<accum>(rows, shape.head.heads);
  attention_dots(t.out, d_out, dots, device.stream);
  const BackwardMemory memory = {device.fresh<real>(shape.score_rows(), shape.sequence)};
  attention_backward<real>(kind, device.blas, block, t, {d_out, d_x[0], d_x[1], d_x[2], memory, dots}, false);
  for (int i = 0; i < 3; ++i) {
    CAPTURE(i);
    check_gradient(device.download(d_x[i]), inputs[i], [&](const HostMatrix& changed) {
      device.write(x[i], changed);
      return forward();
    });
    device.write(x[i], inputs[i]);
  }
}

}  // namespace
}  // namespace pentatron

#endif
