// The kernels of a layer, and what it waits for the other ranks of its tensor, context and expert groups: in
// the order of transformer.cu, with each kernel's cost as its launch declares it (clock/cost.h).
#pragma once

#include "../../common/cpu/nccl/modelled_link.h"
#include "../combined.h"
#include "clock/device_profile.h"
#include "kernels/norm.h"
#include "style.h"

namespace pentatron {

// Seconds in which a rank's compute stream is busy, or waits for the ranks of an axis.
struct Work {
  double kernels = 0, tensor = 0, context = 0, experts = 0;
  int launches = 0, collectives = 0;  // kernels, and operations with other ranks, that the host issues
  // Of a unit's pass: whether it has operations with such ranks; in how many seconds the first one has to
  // start, so that nothing is late, and weight gradients begin.
  bool meets = false;
  double until_meeting = 0, until_gradients = 0;

  double seconds() const { return kernels + tensor + context + experts; }
  Work& operator+=(const Work& w) {
    if (!meets) until_meeting += w.until_meeting, meets = w.meets;
    if (until_gradients == 0 && w.until_gradients > 0) until_gradients = seconds() + w.until_gradients;
    kernels += w.kernels, tensor += w.tensor, context += w.context, experts += w.experts;
    launches += w.launches, collectives += w.collectives;
    return *this;
  }
  Work operator*(double n) const { return {kernels * n, tensor * n, context * n, experts * n}; }
};

class LayerCost {
 public:
  using Pair = std::array<Work, 2>;  // of backward: input gradients, weight gradients
  // An operation that was counted: a kernel, or a wait for `sent` bytes.
  struct Term {
    const char* name;
    Cost cost;
    double sent, seconds;
  };
  mutable std::vector<Term>* terms = nullptr;  // where they are noted, if anywhere

  // What is gathered and summed together: a layer, the embedding, the head.
  struct Unit {
    Work forward;
    Pair backward;
    std::array<double, 2> size;  // elements on this rank, by parameter group
    int parameters;              // of the first group: matrices and norms
    int number;                  // in the model
  };

  // `schedule` and `style` live as long as this.
  LayerCost(const CombinedOptions& options, const MeshShape& shape, const DeviceProfile& gpu,
            const Schedule& schedule, const Style& style = own_style)
      : o_(options),
        shape_(shape),
        style_(style),
        gpu_(used_by(style, gpu)),
        network_{true,
                 {gpu.link_latency, gpu_.link_bandwidth},
                 {gpu.network_latency, gpu_.network_bandwidth},
                 static_cast<int>(gpu.gpus_per_node),
                 gpu.ll_bandwidth},
        schedule_(schedule) {}

 protected:
  static constexpr double r = sizeof(real), a = sizeof(accum);

  nccl_mpi::Collectives collectives(MeshGroup group) const {
    return {network_, members_of(shape_, group, 0)};
  }

  // ---- Operations of the compute stream

  void run(Work& w, const char* name, const Cost& cost) const {
    const double seconds = gpu_.seconds(cost);
    w.kernels += seconds;
    if (!w.meets) w.until_meeting += seconds;
    ++w.launches;
    if (terms != nullptr) terms->push_back({name, cost, 0, seconds});
  }
  void product(Work& w, const char* name, int64_t m, int64_t n, int64_t k) const {
    if (m > 0) run(w, name, products(m, n, k, 1, sizeof(real), sizeof(real), false));
  }
  // Weight gradients follow now.
  static void begin_gradients(Work& w) {
    if (w.until_gradients == 0) w.until_gradients = w.seconds();
  }
  void wgrad(Work& w, const char* name, int64_t out, int64_t in, int64_t rows) const {
    run(w, name, products(out, in, rows, 1, sizeof(real), sizeof(accum), adds_));
  }
  // The compute stream waits for a collective or for messages that take `lasts`, of which what runs
  // `meanwhile` (and is counted after this call) hides as much. `sent`: bytes of this rank.
  void wait(Work& w, double Work::*axis, const char* name, double sent, double lasts,
            double meanwhile = 0) const {
    const double seconds = std::max(0.0, lasts - meanwhile);
    w.*axis += seconds;
    if (sent > 0 && !w.meets) w.until_meeting += std::max(0.0, meanwhile - lasts), w.meets = true;
    if (terms != nullptr && seconds > 0) terms->push_back({name, {}, sent, seconds});
  }

  // ---- Tensor ranks: the borders of a region (tensor_parallel.h)

  double gather() const { return sp_ ? crossing_ + tensor_.all_gather(r * outside_ * c_.d) : 0; }
  double reduce() const {
    if (shape_.tp == 1) return 0;
    return crossing_ +
           (sp_ ? tensor_.reduce_scatter(r * outside_ * c_.d) : tensor_.all_reduce(r * rows_ * c_.d));
  }
  // What a rank sends for them: the ring's steps, each a block of the rows (an all-reduce takes twice as
  // many).
  double sent() const { return (shape_.tp - 1) * (sp_ ? 1 : 2.0 / shape_.tp) * r * outside_ * c_.d; }
  void enter(Work& w) const {
    wait(w, &Work::tensor, "all-gather of rows", sp_ ? sent() : 0, gather());
    w.collectives += sp_;
  }
  void leave(Work& w) const {
    wait(w, &Work::tensor, sp_ ? "reduce-scatter of rows" : "all-reduce of rows", sent(), reduce());
    w.collectives += shape_.tp > 1;
  }
  // Backward of a region's beginning. Its input is gathered again: that began `before` dgrad, in seconds. The
  // gradient is summed while weight gradients run. `input`: those that read the gathered input; `other`:
  // those before them in the queue. If weight gradients are put off, nothing hides the sum and the gather.
  void enter_backward(Pair& p, double before, const Work& dgrad, const Work& other, const Work& input) const {
    Work& now = p[0];
    now += dgrad;
    if (schedule_.splits_backward) {
      leave(now);
      p[1] += other;
      enter(p[1]);
      p[1] += input;
      return;
    }
    const double d = dgrad.seconds(), came = std::max(0.0, gather() - before);
    const double wgrads = std::max(d + other.seconds(), came) + input.seconds();
    const double sum = std::max(d, came) + reduce();
    begin_gradients(now);
    wait(now, &Work::tensor, "rows and their sums, as far as not hidden", sp_ ? 2 * sent() : sent(),
         (sp_ ? std::max(wgrads, sum) : sum) - d, other.seconds() + input.seconds());
    now += other, now += input;
    now.collectives += sp_ + (shape_.tp > 1);
  }

  // ---- Attention (attention.h); if context ranks share the sequence, with an exchange

  // The scores in memory, without the half that causality saves.
  void naive_attention(Work& w, const AttentionBlock& b, bool backward) const {
    const double scores = double(b.head.heads) * b.queries * b.keys;
    const int heads = b.head.heads * b.batch, size = b.head.head_size;
    const auto batch = [&](const char* name, int m, int n, int k) {
      run(w, name, products(m, n, k, heads, sizeof(real), sizeof(real), false));
    };
    if (!backward || o_.recompute == Recompute::selective) {
      batch("scores", b.queries, b.keys, size);
      run(w, "softmax", moves(2 * r * b.batch * scores));
    }
    if (!backward) return batch("attention out", b.queries, size, b.keys);
    batch("d_v", b.keys, size, b.queries);
    batch("d_scores", b.queries, b.keys, size);
    run(w, "softmax", moves(3 * r * b.batch * scores));
    batch("d_q", b.queries, size, b.keys);
    batch("d_k", b.keys, size, b.queries);
  }

  void attention_kernels(Work& w, const AttentionBlock& block, bool backward) const {
    if (o_.attention == Attention::naive) return naive_attention(w, block, backward);
    const bool tiled = o_.attention == Attention::tiled;
    const Cost::Unit unit = tiled ? Cost::Unit::cores : Cost::Unit::tensor_cores;
    if (!backward) return run(w, "attention", attention_cost(block, 2, unit, false));
    if (!tiled) run(w, "attention's turns", little);
    run(w, tiled ? "attention, keys and values" : "attention",
        attention_cost(block, tiled ? 4 : 5, unit, true));
    if (tiled) run(w, "attention, queries", attention_cost(block, 3, unit, true));
  }

  // Keys and values, or their gradients, of elements of so many bytes, travel to the next rank of a ring. All
  // wait for the slowest hop.
  double hop(double element) const {
    const double bytes = 2 * element * rows_ * c_.kv;
    double slowest = 0;
    for (int i = 0; i < shape_.cp; ++i) {
      const int next = context_[(i + head_ranks_) % shape_.cp];
      slowest = std::max(slowest, network_.for_message(context_[i], next, bytes).seconds(bytes));
    }
    return slowest;
  }
  // A collective of keys and one of values, or of their gradients, in a group.
  double of_both(nccl_mpi::Collective::Kind kind, double element) const {
    const nccl_mpi::Collective one = {kind, element * rows_ * c_.kv};
    return tokens_.seconds(std::array{one, one});
  }
  double keys_come() const { return gathers_ ? of_both(nccl_mpi::Collective::all_gather, r) : hop(r); }
  double gradients_leave() const {
    return gathers_ ? of_both(nccl_mpi::Collective::reduce_scatter, a) : hop(a);
  }
  // A message of so many bytes to each of the other ranks.
  double exchange(const std::vector<int>& ranks, double bytes) const {
    nccl_mpi::Messages messages(network_, ranks[0]);
    for (size_t i = 1; i < ranks.size(); ++i) messages.add(ranks[i], bytes);
    return messages.seconds();
  }
  // Tokens for heads, or back, of matrices with so many columns in all.
  double change_heads(double element, int64_t columns) const {
    const std::vector<int> neighbours(context_.begin(), context_.begin() + head_ranks_);
    return exchange(neighbours, element * rows_ * columns / head_ranks_);
  }

  Work attention(bool backward) const {
    Work w;
    const int n = head_ranks_;
    const auto to_other_form = [&](double element, const std::vector<int64_t>& matrices) {
      if (n == 1) return;
      for (const int64_t columns : matrices) run(w, "columns by ranks", moves(2 * element * rows_ * columns));
      const int64_t columns = std::accumulate(matrices.begin(), matrices.end(), int64_t{0});
      wait(w, &Work::context, "all-to-all", element * rows_ * columns * (n - 1) / n,
           change_heads(element, columns));
      ++w.collectives;
    };
    const std::vector<int64_t> q = {c_.q}, q_k_v = {c_.q, c_.kv, c_.kv};
    const HeadShape heads = {static_cast<int>(c_.heads) / n, o_.model.kv_heads / shape_.tp / n,
                             o_.model.head_size()};
    const AttentionShape shape = {o_.micro_batch_size, o_.sequence_length / shape_.cp * n, heads};
    if (backward) run(w, "attention's dots", moves(2 * r * rows_ * c_.q));
    to_other_form(r, backward ? q : q_k_v);
    if (backward) to_other_form(a, {c_.heads});
    if (shape_.cp == n) {
      attention_kernels(w, whole_sequences(shape), backward);
    } else {
      attention_by_rank(w, shape, backward);
    }
    to_other_form(r, backward ? q_k_v : q);
    return w;
  }

  // A rank's queries meet the keys of one rank after the other. These are gathered, or come hop by hop.
  void attention_by_rank(Work& w, const AttentionShape& shape, bool backward) const {
    if (backward) run(w, "zero d_q", moves(a * rows_ * c_.q));
    const int n = shape_.cp / head_ranks_, rank = n - 1;  // the last one merges the longest blocks
    const double come = keys_come(), leave = gradients_leave();
    const double sent = 2 * r * rows_ * c_.kv * (gathers_ ? n - 1 : 1);
    for (int step = 0; step < n; ++step) {
      Work block;
      for (int i = 0; backward && i < 2; ++i) run(block, "zero d_k or d_v", moves(a * rows_ * c_.kv));
      const auto visible = visible_block(o_.context.cp_layout, shape, rank, (rank - step + n) % n);
      if (visible) attention_kernels(block, visible->block, backward);
      if (!backward && step > 0 && visible)
        run(block, "merge",
            moves(3 * a * visible->block.batch * visible->block.queries * c_.q / head_ranks_));
      double communication = step == 0 || (step + 1 < n && !gathers_) ? come : 0;
      if (backward && step > 0 && !gathers_) communication += leave;
      wait(w, &Work::context, gathers_ ? "all-gather, as far as not hidden" : "hop, as far as not hidden",
           communication > 0 ? sent : 0, communication, block.seconds());
      for (int i = 0; backward && step > 0 && visible && !gathers_ && i < 2; ++i)
        run(block, "sum of d_k or d_v", moves(3 * a * rows_ * c_.kv));
      w += block;
      w.collectives += communication > 0;
    }
    if (backward)
      wait(w, &Work::context, gathers_ ? "reduce-scatter of d_k and d_v" : "last hop of d_k and d_v",
           a / r * sent, leave);
    run(w, "round", moves((a + r) * rows_ * c_.q));
    for (int i = 0; backward && i < 2; ++i) run(w, "round", moves((a + r) * rows_ * c_.kv));
  }

  // ---- A layer (transformer.cu)

  void norm(Work& w) const { run(w, "residual and norm", moves(4 * r * outside_ * c_.d)); }
  void norm_backward(Pair& p) const {
    const double partials = a * rmsnorm_bands(outside_) * c_.d;
    run(p[0], "norm", moves(4 * r * outside_ * c_.d + partials));
    run(p[0], "norm's weight", moves(partials));
    run(p[1], "norm's weight", moves(3 * a * c_.d));
  }
  // The gradient of a region's output is gathered, and copied if weight gradients are put off.
  void leave_backward(Pair& p) const {
    enter(p[0]);
    if (schedule_.splits_backward) run(p[0], "copy for the weight gradients", moves(2 * r * rows_ * c_.d));
  }

  Work layer_forward(bool again) const {
    Work w;
    norm(w);
    enter(w);
    product(w, "q, k, v", rows_, c_.q + 2 * c_.kv, c_.d);
    run(w, "rotary", moves(2 * r * rows_ * (c_.q + 2 * c_.kv)));
    w += attention(false);
    product(w, "out", rows_, c_.d, c_.q);
    leave(w);
    norm(w);
    enter(w);
    if (o_.model.experts > 0) {
      w += experts_forward(again);
    } else {
      product(w, "gate, up", rows_, 2 * c_.f, c_.d);
      run(w, "swiglu", moves(3 * r * rows_ * c_.f));
      if (!again) product(w, "down", rows_, c_.d, c_.f);
    }
    if (!again) leave(w);
    return w;
  }

  Pair layer_backward() const {
    Pair p;
    leave_backward(p);
    if (o_.model.experts > 0) {
      experts_backward(p);
    } else {
      Work dgrad, down, gate_up;
      const double began = p[0].seconds();
      product(p[0], "down, input", rows_, c_.f, c_.d);
      run(p[0], "swiglu", moves(5 * r * rows_ * c_.f));
      product(dgrad, "gate, up, input", rows_, c_.d, 2 * c_.f);
      wgrad(down, "down, weight", c_.d, c_.f, rows_);
      wgrad(gate_up, "gate, up, weight", 2 * c_.f, c_.d, rows_);
      enter_backward(p, p[0].seconds() - began, dgrad, down, gate_up);
    }
    norm_backward(p);
    leave_backward(p);
    Work dgrad, out, qkv;
    const double began = p[0].seconds();
    product(p[0], "out, input", rows_, c_.q, c_.d);
    p[0] += attention(true);
    run(p[0], "rotary", moves(2 * r * rows_ * (c_.q + 2 * c_.kv)));
    product(dgrad, "q, k, v, input", rows_, c_.d, c_.q + 2 * c_.kv);
    wgrad(out, "out, weight", c_.d, c_.q, rows_);
    wgrad(qkv, "q, k, v, weight", c_.q + 2 * c_.kv, c_.d, rows_);
    // (NCCL starts the gather after attention's last exchange, because the host issues it then.)
    const double last = head_ranks_ > 1 ? change_heads(r, c_.q + 2 * c_.kv) : gradients_leave();
    enter_backward(p, shape_.cp > 1 ? last : p[0].seconds() - began, dgrad, out, qkv);
    norm_backward(p);
    return p;
  }

  // ---- Experts that get even shares (expert_parallel.h)

  double copies() const { return static_cast<double>(rows_) * o_.model.top_k; }
  int own_experts() const { return o_.model.experts / shape_.ep; }
  int64_t shared_columns() const { return o_.model.shared_experts * c_.f; }
  double sums() const { return o_.model.shared_experts > 0 ? 2 : 1; }  // how often what is summed is moved
  int64_t rows_of_expert() const { return static_cast<int64_t>(copies() / own_experts()); }
  // Bytes of the rows for one rank, and of those that travel; and how long they do.
  double rows_for_rank() const { return r * copies() * c_.d / shape_.ep; }
  double sent_rows() const { return rows_for_rank() * (shape_.ep - 1); }
  double rows_travel() const { return exchange(experts_, rows_for_rank()); }

  // A product of each of this rank's experts.
  void expert_products(Work& w, const char* name, int64_t m, int64_t n, int64_t k) const {
    expert_products(w, name, products(m, n, k, 1, sizeof(real), sizeof(real), false), true);
  }
  void expert_products(Work& w, const char* name, const Cost& one, bool can_group) const {
    if (own_experts() == 1 || !can_group) {
      for (int i = 0; i < own_experts(); ++i) run(w, name, one);
      return;
    }
    run(w, "addresses", little);
    run(w, name, one_launch(std::vector<Cost>(own_experts(), one)));
  }

  // The host waits for the counts, and issues what follows after them.
  Work experts_forward(bool again) const {
    const double e = o_.model.experts, counts = 4 * e, bands = 4 * std::min<double>(rows_, 256) * e;
    Work w, meanwhile;
    run(w, "router", products(rows_, o_.model.experts, c_.d, 1, sizeof(real), sizeof(accum), false));
    run(w, "route", moves(2 * a * rows_ * e));
    for (const double bytes : {4 * copies() + bands, bands, 2 * bands, 8 * copies()})
      run(w, "places of copies", moves(bytes));
    run(meanwhile, "permute", moves(2 * r * copies() * c_.d));
    run(meanwhile, "fractions", moves(4 * copies() + a * e));
    const bool has_loss = o_.model.balance == Balance::loss;
    if (has_loss && shape_.cp > 1)
      wait(meanwhile, &Work::context, "all-reduce of fractions", a * e, tokens_.all_reduce(a * e));
    if (has_loss && !again) run(meanwhile, "balance loss", moves(a * rows_ * e));
    const double come =
        exchange(experts_, counts / shape_.ep) + 2 * gpu_.copy_seconds(counts) + gpu_.launch_seconds;
    wait(w, &Work::experts, "counts reach the host", counts * (shape_.ep - 1) / shape_.ep, come,
         meanwhile.seconds());
    w += meanwhile;
    Work shared;
    if (o_.model.shared_experts > 0) {
      product(shared, "shared experts' gate, up", rows_, 2 * shared_columns(), c_.d);
      run(shared, "swiglu", moves(3 * r * rows_ * shared_columns()));
      if (!again) product(shared, "shared experts' down", rows_, c_.d, shared_columns());
    }
    wait(w, &Work::experts, "dispatch", sent_rows(), rows_travel(), shared.seconds());
    w += shared;
    expert_products(w, "experts' gate, up", rows_of_expert(), 2 * c_.f, c_.d);
    run(w, "swiglu", moves(3 * r * copies() * c_.f));
    expert_products(w, "experts' down", rows_of_expert(), c_.d, c_.f);
    wait(w, &Work::experts, "combine", sent_rows(), rows_travel());
    if (!again) run(w, "weigh and add", moves(r * (copies() + sums() * rows_) * c_.d));
    return w;
  }

  void experts_backward(Pair& p) const {
    const double e = o_.model.experts;
    Work route, wgrads;
    Work& now = p[0];
    run(now, "weigh", moves(r * (2 * copies() + rows_) * c_.d));
    run(route, "route", moves(2 * a * rows_ * e));
    if (o_.model.shared_experts > 0) {
      product(route, "shared experts' down, input", rows_, shared_columns(), c_.d);
      run(route, "swiglu", moves(5 * r * rows_ * shared_columns()));
      product(route, "shared experts' gate, up, input", rows_, c_.d, 2 * shared_columns());
      wgrad(wgrads, "shared experts' down, weight", c_.d, shared_columns(), rows_);
      wgrad(wgrads, "shared experts' gate, up, weight", 2 * shared_columns(), c_.d, rows_);
    }
    wait(now, &Work::experts, "dispatch, as far as not hidden", sent_rows(), rows_travel(), route.seconds());
    now += route;
    expert_products(now, "experts' down, input", rows_of_expert(), c_.f, c_.d);
    run(now, "swiglu", moves(5 * r * copies() * c_.f));
    expert_products(now, "experts' gate, up, input", rows_of_expert(), c_.d, 2 * c_.f);
    const auto weight_gradient = [&](const char* name, int64_t out, int64_t in) {
      expert_products(wgrads, name,
                      products(out, in, rows_of_expert(), 1, sizeof(real), sizeof(accum), adds_),
                      sizeof(real) == sizeof(accum));
    };
    weight_gradient("experts' down, weight", c_.d, c_.f);
    weight_gradient("experts' gate, up, weight", 2 * c_.f, c_.d);
    run(wgrads, "router, weight", moves(r * rows_ * c_.d + a * (rows_ * e + e * c_.d)));
    if (o_.model.has_balance_bias()) run(wgrads, "loads", moves(4 * copies()));
    wait(now, &Work::experts, "combine, as far as not hidden", sent_rows(), rows_travel(),
         schedule_.splits_backward ? 0 : wgrads.seconds());
    begin_gradients(now);
    (schedule_.splits_backward ? p[1] : now) += wgrads;
    run(now, "add", moves(r * (copies() + sums() * rows_) * c_.d));
    leave(now);
  }

  // ---- A chunk

  Unit layer_unit() const {
    const double attention = c_.d * (2.0 * c_.q + 2 * c_.kv + 2), mlp = 3.0 * c_.d * c_.f;
    Unit u = {layer_forward(false), layer_backward(), {attention + mlp, 0}, 9, 0};
    if (o_.model.experts > 0) {
      const int bias = o_.model.has_balance_bias();
      u.size = {attention + double(o_.model.experts) * (c_.d + bias) + o_.model.shared_experts * mlp,
                own_experts() * mlp};
      u.parameters = 7 + bias + (o_.model.shared_experts > 0 ? 3 : 0);
    }
    if (o_.recompute == Recompute::full) {
      const Work rest = std::exchange(u.backward[0], layer_forward(true));
      u.backward[0] += rest;
    }
    return u;
  }

  // In the order of forward.
  std::vector<Unit> units(const LayerRange& range) const {
    std::vector<Unit> all;
    const double table = double(c_.vocabulary) * c_.d;
    if (range.embedding) {
      Unit& u = all.emplace_back(Unit{{}, {}, {table, 0}, 1, 0});
      run(u.forward, "embedding", moves(2 * r * rows_ * c_.d));
      leave(u.forward);
      run(u.forward, "copy", moves(2 * r * outside_ * c_.d));
      leave_backward(u.backward);
      run(u.backward[1], "embedding", moves((2 * r + 2 * a) * rows_ * c_.d));
    }
    for (int layer = range.first; layer < range.last; ++layer) {
      if (!layer_) layer_ = layer_unit();
      all.push_back(*layer_);
      all.back().number = layer + 1;
    }
    if (range.head) {
      Unit& u = all.emplace_back(Unit{{}, {}, {table + c_.d, 0}, 2, o_.model.layers + 1});
      const double logits = double(rows_) * c_.vocabulary;
      norm(u.forward);
      enter(u.forward);
      product(u.forward, "head", rows_, c_.vocabulary, c_.d);
      run(u.forward, "softmax", moves(r * logits));
      if (shape_.tp > 1) {
        wait(u.forward, &Work::tensor, "all-reduces of the softmax",
             6 * a * rows_ * (shape_.tp - 1) / shape_.tp,
             tensor_.all_reduce(a * rows_) + tensor_.all_reduce(2 * a * rows_));
        run(u.forward, "softmax", moves(5 * a * rows_));
      }
      run(u.forward, "loss", little);
      run(u.backward[0], "softmax", moves(2 * r * logits));
      Work dgrad, wgrads;
      product(dgrad, "head, input", rows_, c_.d, c_.vocabulary);
      wgrad(wgrads, "head, weight", c_.vocabulary, c_.d, rows_);
      enter_backward(u.backward, 0, dgrad, {}, wgrads);
      norm_backward(u.backward);
    } else {
      run(all.back().forward, "residual", moves(3 * r * outside_ * c_.d));
    }
    return all;
  }

  const CombinedOptions& o_;
  const MeshShape shape_;
  const Style& style_;
  const DeviceProfile gpu_;
  const nccl_mpi::Network network_;
  const Schedule& schedule_;
  const bool sp_ = o_.tensor.sequence_parallel && shape_.tp > 1;
  const bool adds_ = schedule_.m > 1 && o_.zero.zero_stage < 2;  // weight gradients, to sums
  const Columns c_ = columns_of(o_.model, shape_.tp);
  // Tokens of a micro-batch on this rank, inside and outside of the regions.
  const int64_t rows_ = int64_t{o_.micro_batch_size} * o_.sequence_length / shape_.cp;
  const int64_t outside_ = sp_ ? rows_ / shape_.tp : rows_;
  // What a collective of tensor ranks takes more, if they are on several nodes.
  const double crossing_ =
      shape_.tp > network_.ranks_per_node ? style_.crossing_seconds* shape_.tp / network_.ranks_per_node : 0;
  const nccl_mpi::Collectives tensor_ = collectives(MeshGroup::tensor),
                              tokens_ = collectives(MeshGroup::context);
  const std::vector<int> context_ = members_of(shape_, MeshGroup::context, 0),
                         pipeline_ = members_of(shape_, MeshGroup::pipeline, 0),
                         experts_ = members_of(shape_, MeshGroup::experts, 0);
  // Keys are gathered, or go round in a ring. Ulysses: neighbours that exchange tokens for heads.
  const bool gathers_ = o_.context.cp_exchange == CpExchange::all_gather;
  const int head_ranks_ = context_parallel_share(o_, o_.context, shape_.cp).head_ranks;
  const nccl_mpi::Collectives replicas_[2] = {collectives(MeshGroup::gradients),
                                              collectives(MeshGroup::expert_gradients)};
  mutable std::optional<Unit> layer_;  // all layers are alike
};

}  // namespace pentatron
