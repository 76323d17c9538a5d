// A coarse time of a step: the formulas of the notes of 01 to 07, one after the other. What hides behind what
// is told roughly: a dry run of the program knows it (dry_run.h). The names are those of the notes.
#pragma once

#include "../combined.h"
#include "tensor_cores/attention_tiles.h"

namespace pentatron {

class CoarseCost {
 public:
  // stages: what each pipeline rank keeps.
  CoarseCost(const CombinedOptions& options, const MeshShape& shape, const std::vector<PipelineRank>& stages,
             int micro_batches, const DeviceProfile& gpu)
      : o_(options), s_(shape), stages_(stages), m_(micro_batches), gpu_(gpu) {}

  // Where a step's seconds go on the pipeline rank that has most to do. Together they are the step.
  std::vector<std::pair<std::string, double>> step() const {
    const Passes layer = passes_of_layer();
    Passes head;
    multiply(head, rows_, c_.d, c_.vocabulary);
    const double passes = std::max(1.0, gpu_.elementwise_passes);  // which loss_bytes has counted
    const double logits = gpu_.loss_bytes > 0 ? gpu_.loss_bytes / (3 * r * passes) : 1;  // a pass over each
    move(head, logits * rows_ * c_.vocabulary, 2 * logits * rows_ * c_.vocabulary);      // softmax and loss
    Passes most, sum;  // the pipeline rank that has most to do; all pipeline ranks together
    Holds own;
    double longest = 0;
    for (const PipelineRank& stage : stages_) {
      const Holds holds = held_by(stage);
      Passes rank;  // a copy of the model takes its share of the micro-batches
      rank.add(layer, holds.layers / s_.copies), rank.add(head, holds.heads / s_.copies);
      if (s_.pp > 1) messages(rank);
      sum.add(rank, 1);
      const double lasts = m_ * rank.seconds() + data(rank, holds);
      if (lasts > longest) longest = lasts, most = rank, own = holds;
    }
    const double shards = o_.zero.zero_stage > 0 ? s_.shards() : 1;
    const double waits = most.tensor + most.context + most.experts + most.host + most.messages;
    const double updates = own.dense / shards + own.experts / std::max(1.0, shards / s_.ep);
    return {{"compute", m_ * (most.seconds() - waits)},
            {"tensor", m_ * most.tensor},
            {"context", m_ * most.context},
            {"experts", m_ * most.experts},
            {"bubble", bubble(sum)},
            {"data", data(most, own)},
            {"optimizer", moved((8 * a + r) * updates)},
            {"messages", m_ * most.messages},
            {"host", m_ * most.host}};
  }

 private:
  static constexpr double r = sizeof(real), a = sizeof(accum);
  double gradient() const { return gpu_.gradient_bytes > 0 ? gpu_.gradient_bytes : a; }

  // The seconds that a micro-batch takes forward, in backward to the input, and for weight gradients (T_F,
  // T_B, T_W of the notes); and how long of them a rank waits for the others of an axis, for messages, and
  // for the host, where nothing hides it.
  struct Passes {
    double forward = 0, input = 0, weight = 0, tensor = 0, context = 0, experts = 0, messages = 0, host = 0;
    double seconds() const { return forward + input + weight; }
    void add(const Passes& p, double times) {
      forward += times * p.forward, input += times * p.input, weight += times * p.weight;
      tensor += times * p.tensor, context += times * p.context, experts += times * p.experts;
      host += times * p.host;
    }
  };

  // What a pipeline rank holds: layers, heads; elements of parameters, but for experts, and of experts.
  struct Holds {
    double layers = 0, heads = 0, dense = 0, experts = 0;
  };
  Holds held_by(const PipelineRank& stage) const {
    const double attention = c_.d * (2.0 * c_.q + 2 * c_.kv), mlp = 3.0 * c_.d * c_.f;
    Holds sum;
    for (const auto& [range, in_flight] : stage.parts) {
      const int layers = range.last - range.first;
      sum.layers += layers, sum.heads += range.head;
      sum.dense += (range.embedding + range.head) * double(c_.vocabulary) * c_.d;
      sum.dense += layers * (attention + mlp * (o_.model.experts == 0 ? 1 : o_.model.shared_experts));
      sum.experts += layers * mlp * o_.model.experts / s_.ep;
    }
    return sum;
  }

  // ---- 01: kernels take the longer of moving and computing

  double moved(double bytes) const { return gpu_.seconds(moves(bytes)); }
  // A matrix, [rows, in] x [in, out]: forward, its input's and its weight's gradient; `times` of them.
  void multiply(Passes& p, int64_t rows, int64_t in, int64_t out, int times = 1) const {
    p.forward += times * gpu_.seconds(products(rows, out, in, 1, sizeof(real), sizeof(real), false));
    p.input += times * gpu_.seconds(products(rows, in, out, 1, sizeof(real), sizeof(real), false));
    p.weight += times * gpu_.seconds(products(out, in, rows, 1, sizeof(real), sizeof(accum), m_ > 1));
  }
  void move(Passes& p, double forward, double backward) const {
    p.forward += moved(r * forward), p.input += moved(r * backward);
  }

  // With scores in memory: products of queries and keys, and kernels that go over these scores.
  double with_scores(int queries, int keys, const HeadShape& heads, bool backward) const {
    const int64_t n = int64_t{o_.micro_batch_size} * heads.heads;
    const auto product = [&](int64_t rows, int64_t columns, int64_t sum) {
      return gpu_.seconds(products(rows, columns, sum, n, sizeof(real), sizeof(real), false));
    };
    const double moves = moved((backward ? 3 : 2) * r * double(n) * queries * keys);
    return product(queries, keys, heads.head_size) + moves +
           (backward ? 3 : 1) * product(queries, heads.head_size, keys);
  }
  // First a rank's own keys, then those of the others in its ring: in a zigzag half of its queries see them,
  // or all queries see half of them, and ranks wait for the slower.
  double attention(int products_of_pairs, bool backward) const {
    const int u = s_.cp > 1 ? ranks_for_heads(o_.context, s_.cp) : 1, n = o_.sequence_length * u / s_.cp;
    const HeadShape heads = {int(c_.heads) / u, o_.model.kv_heads / s_.tp / u, o_.model.head_size()};
    const auto unit = o_.attention == Attention::tiled ? Cost::Unit::cores : Cost::Unit::tensor_cores;
    const auto seconds = [&](int queries, int keys, bool diagonal) {
      if (o_.attention == Attention::naive) return with_scores(queries, keys, heads, backward);
      const AttentionBlock block = {o_.micro_batch_size, queries, keys, n, heads, diagonal};
      return gpu_.seconds(attention_cost(block, products_of_pairs, unit, backward));
    };
    const int part = o_.context.cp_layout == CpLayout::contiguous ? n : n / 2;
    return seconds(n, n, true) + (s_.cp / u - 1) * std::max(seconds(part, n, false), seconds(n, part, false));
  }

  Passes passes_of_layer() const {
    Passes p;
    move(p, 8 * outside_ * c_.d, 8 * outside_ * c_.d);  // residuals and norms
    multiply(p, rows_, c_.d, c_.q + 2 * c_.kv);
    move(p, 2 * rows_ * (c_.q + 2 * c_.kv), 2 * rows_ * (c_.q + 2 * c_.kv));  // rotary
    const double attends = attention(2, false),
                 attends_backward = attention(o_.attention == Attention::tiled ? 7 : 5, true);
    p.forward += attends, p.input += attends_backward;
    if (s_.cp > 1 && o_.context.cp_exchange != CpExchange::ulysses)  // blocks, whose results are added
      move(p, 4 * s_.cp * rows_ * c_.q, 16 * s_.cp * rows_ * c_.kv + 4 * rows_ * c_.q);
    multiply(p, rows_, c_.q, c_.d);
    const double of_attention = p.weight;  // weight gradients
    o_.model.experts > 0 ? moe(p) : mlp(p, rows_, c_.f, 1);
    tensor(p);
    context(p, attends, attends_backward);
    if (s_.ep > 1) experts(p, p.weight - of_attention);
    host(p);
    if (o_.recompute == Recompute::full)  // forward again, but for the last product
      p.input += p.forward - gpu_.seconds(products(rows_, c_.d, c_.f, 1, sizeof(real), sizeof(real), false));
    if (o_.recompute == Recompute::selective && o_.attention == Attention::naive) p.input += attends / 2;
    return p;
  }
  // Gate, up and down of so many MLPs, each with this many rows.
  void mlp(Passes& p, double rows, int64_t f, int times) const {
    multiply(p, rows, c_.d, 2 * f, times);
    move(p, 3 * rows * f * times, 5 * rows * f * times);  // swiglu
    multiply(p, rows, f, c_.d, times);
  }
  // ---- 02: a ring of n ranks; neighbours in it are `apart` in the world

  // n - 1 steps, each a block; a message is one. With k ranks in a node k rings leave it, on a card each.
  double ring(int n, int apart, double block_bytes) const {
    const int in_node = std::clamp(static_cast<int>(gpu_.gpus_per_node) / apart, 1, n);
    if (in_node == n) return (n - 1) * (gpu_.link_latency + block_bytes / gpu_.link_bandwidth);
    const double nodes = static_cast<double>(n) / in_node, network = in_node * gpu_.network_bandwidth;
    const double bandwidth = std::min(gpu_.link_bandwidth, network) / slower(nodes / 2);
    return (n - nodes) * gpu_.link_latency + nodes * gpu_.network_latency + (n - 1) * block_bytes / bandwidth;
  }
  double slower(double nodes) const { return std::pow(std::max(1.0, nodes), gpu_.contention); }

  // ---- 04: at a region's begin rows are gathered, at its end summed; backward the other way round. Weight
  // gradients, which take so long, hide sums, unless they are put off.

  void tensor(Passes& p) const {
    const double block = slower(s_.tp / gpu_.gpus_per_node) * ring(s_.tp, 1, r * rows_ * c_.d / s_.tp);
    const double gathers = sp_ ? 2 * block : 0, all = 4 * block;  // an all-reduce is a sum and a gather
    const bool hides = !splits_ && gpu_.exposed_sums == 0;
    wait(p, p.tensor, all, gathers + std::max(0.0, all - (hides ? p.weight : 0)));
  }
  // Nothing hides these seconds.
  void wait(Passes& p, double& axis, double forward, double backward) const {
    const bool again = o_.recompute == Recompute::full;
    p.forward += forward, p.input += backward, axis += (again ? 2 : 1) * forward + backward;
  }

  // ---- 06: keys and values come from the other ranks of the sequence, or tokens go there for heads

  void context(Passes& p, double attends, double attends_backward) const {
    const int n = s_.cp, node = static_cast<int>(gpu_.gpus_per_node);
    const double keys = 2 * r * rows_ * c_.kv, gradients = 2 * a * rows_ * c_.kv;
    double forward = ring(n, s_.tp, keys), backward = forward + ring(n, s_.tp, gradients);
    if (o_.context.cp_exchange == CpExchange::ring) {
      const int apart = n * s_.tp > node ? node : s_.tp;  // all wait for the slowest hop
      forward = (n - 1) * std::max(0.0, ring(2, apart, keys) - attends / n);
      backward = (n - 1) * std::max(0.0, ring(2, apart, keys + gradients) - attends_backward / n);
    } else if (o_.context.cp_exchange != CpExchange::all_gather) {
      forward = backward = ring(n, s_.tp, r * rows_ * 2 * (c_.q + c_.kv) / n);
    }
    wait(p, p.context, forward, backward);
  }

  // ---- 07: rows go to the ranks of their experts, and back

  void moe(Passes& p) const {
    const double copies = double(rows_) * o_.model.top_k, choices = double(rows_) * o_.model.experts;
    const int own = o_.model.experts / s_.ep;
    move(p, 4 * copies * c_.d, 4 * copies * c_.d);  // permute, weigh and add
    move(p, 4 * choices, 4 * choices);              // the router
    mlp(p, copies / own, c_.f, own);
    if (o_.model.shared_experts > 0) mlp(p, rows_, o_.model.shared_experts * c_.f, 1);
  }
  void experts(Passes& p, double weight_gradients) const {
    const double exchange = ring(s_.ep, s_.tp, r * rows_ * o_.model.top_k * c_.d / s_.ep);
    wait(p, p.experts, 2 * exchange, exchange + std::max(0.0, exchange - (splits_ ? 0 : weight_gradients)));
  }

  // ---- 05: the bubble (the table of its note); sum: of all ranks

  double bubble(const Passes& sum) const {
    const int p = s_.pp;
    const double f = sum.forward / p, b = sum.input / p, w = sum.weight / p, t = f + b + w;
    const auto is = [&](PpSchedule schedule) { return o_.pipeline.pp_schedule == schedule; };
    if (is(PpSchedule::interleaved)) return (p - 1) * t / o_.pipeline.vpp;
    if (is(PpSchedule::zb_h1)) return (p - 1) * std::max({f + b - w, f, b});
    if (is(PpSchedule::zb_v)) return (p - 1) * b / 2;
    if (is(PpSchedule::dualpipe_v)) return (p - 1) * t / 6;
    if (is(PpSchedule::dualpipe)) return (p / 2 - 1) * (f + b - w);
    return (p - 1) * t;
  }

  // ---- 02 and 03: gradients are summed behind backward, weights gathered behind what comes next

  // A ring for each unit, which is a layer. The first one (or the last) hides behind nothing. The rings of
  // experts are beside the others.
  double data(const Passes& rank, const Holds& own) const {
    if (s_.replicas() == 1) return 0;
    const int zero = o_.zero.zero_stage, n = s_.shards(), copies = s_.replicas() / n, of_experts = n / s_.ep;
    const double units = static_cast<double>(o_.model.layers) / s_.pp + 1;
    const auto rings = [&](double bytes) {
      return units * std::max(ring(n, s_.tp, bytes * own.dense / units / n),
                              ring(of_experts, s_.tp * s_.ep, bytes * own.experts / units / of_experts));
    };
    const auto exposed = [&](double lasts, double hides) {
      return std::max(lasts / units, lasts - hides * (units - 1) / units);
    };
    const bool at_end = gpu_.exposed_sums > 0 || (zero == 0 && o_.data_parallel.dp_sync == DpSync::naive);
    const double scatter = rings(gradient()), gather = rings(r);
    const double f = at_end ? 0 : rank.forward, b = at_end ? 0 : rank.input + rank.weight;
    if (zero == 0) return exposed(2 * scatter, b);
    const double shard = own.dense / n + own.experts / of_experts;  // which copies (03) sum once a step
    const double sums = 2 * units * ring(copies, s_.tp * n, gradient() * shard / units / copies);
    double seconds = exposed(std::max(scatter, sums), b);
    if (zero >= 2) seconds += (m_ - 1) * std::max(0.0, scatter - (s_.pp > 1 ? rank.seconds() : b));
    if (zero < 3 || s_.pp > 1) return seconds + exposed(gather, f);
    return m_ * (exposed(gather, f) + std::max(0.0, gather + scatter - b)) +
           (copies > 1 ? exposed(sums, b) : scatter / units);
  }

  // ---- Another framework's messages: its pipeline's ranks wait for each, forward and backward

  void messages(Passes& rank) const {
    if (gpu_.message_seconds == 0) return;
    const double bytes = r * outside_ * c_.d / (gpu_.split_messages > 0 && !sp_ ? s_.tp : 1);
    const bool over_nodes = s_.ranks() > gpu_.gpus_per_node;
    const double lasts = bytes / (over_nodes ? gpu_.network_bandwidth : gpu_.link_bandwidth);
    const double waits = o_.pipeline.vpp * (gpu_.message_seconds + lasts);
    rank.forward += waits, rank.input += waits, rank.messages = 2 * waits;
  }

  // ---- An eager framework's host issues each operation by itself: in a layer forward some 14 kernels, in
  // backward twice as many, and the collectives. A pass takes as long as the slower of host and GPU.

  void host(Passes& p) const {
    const bool over_nodes = s_.pp > 1 && s_.ranks() > gpu_.gpus_per_node;  // measured, not explained
    const double waits = over_nodes ? 1 + s_.tp * slower(s_.tp / gpu_.gpus_per_node) : 1;
    const auto late = [&](int kernels, int of_tensor, double on_gpu) {
      const double n = (s_.tp > 1 ? of_tensor : 0) + (s_.cp > 1 ? 2 * s_.cp : 0) + (s_.ep > 1 ? 3 : 0);
      return std::max(0.0,
                      (kernels + n) * gpu_.launch_seconds + n * waits * gpu_.collective_seconds - on_gpu);
    };
    const double forward = late(14, sp_ ? 4 : 2, p.forward),
                 backward = late(28, sp_ ? 6 : 2, p.input + p.weight);
    wait(p, p.host, forward, backward);
  }

  const CombinedOptions& o_;
  const MeshShape s_;
  const std::vector<PipelineRank>& stages_;
  const int m_;
  const DeviceProfile& gpu_;
  const bool sp_ = o_.tensor.sequence_parallel && s_.tp > 1;
  const bool splits_ = stages_.front().splits_backward;  // weight gradients are put off
  const Columns c_ = columns_of(o_.model, s_.tp);
  // Tokens of a micro-batch on this rank: inside the tensor regions, and outside of them.
  const int64_t rows_ = o_.rows() / s_.cp;
  const int64_t outside_ = sp_ ? rows_ / s_.tp : rows_;
};

}  // namespace pentatron
