// A coarse time of a step: the formulas of the notes of 01 to 07, one after the other. What hides behind what
// is told roughly: a dry run of the program knows it (dry_run.h). The names are those of the notes.
#pragma once

#include <map>
#include <nlohmann/json.hpp>

#include "../combined.h"
#include "clock/device_profile.h"

namespace pentatron {

// Where a step's time goes on the pipeline rank that has most to do. In seconds.
struct StepCost {
  double compute = 0;                           // kernels
  double tensor = 0, context = 0, experts = 0;  // waits for the ranks of an axis, in all micro-batches
  double bubble = 0;                            // idle in the pipeline
  double data = 0;                              // gradients and weights on their way that nothing hides
  double optimizer = 0;
  double host = 0;  // the GPU waits for the host, which issues its operations
  double total() const { return compute + tensor + context + experts + bubble + data + optimizer + host; }
};

// What another framework's host takes for collectives: "framework" in a GPU's profile that was fitted to its
// steps (calibrate.py). In seconds.
struct Framework {
  double collective_seconds = 0;  // more than for a kernel
  double crossing_seconds = 0;    // more for one of tensor ranks on n nodes, for each node
  double pipelined_seconds = 0;  // more for one of n tensor ranks whose pipeline crosses nodes, for each rank
  // Measured over predicted, by kind of layout (kind_of): the 10th and the 90th percentile. Empty: not
  // fitted.
  std::map<std::string, std::array<double, 2>> ranges;
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(Framework, collective_seconds, crossing_seconds,
                                                pipelined_seconds, ranges)

class CoarseCost {
 public:
  // stages: what each pipeline rank holds (stage_share).
  CoarseCost(const CombinedOptions& options, const MeshShape& shape, const std::vector<RankShare>& stages,
             int micro_batches, const DeviceProfile& gpu, const Framework& framework)
      : o_(options), s_(shape), stages_(stages), m_(micro_batches), gpu_(gpu), host_(framework) {}

  StepCost step() const {
    const Passes layer = passes_of_layer(), head = passes_of_head();
    const double share = 1.0 / s_.copies;  // of the micro-batches, that a copy of the model takes
    Passes most, sum;                      // of a pipeline rank: of the one that has most to do, of all
    Elements own;
    double longest = 0;
    for (const RankShare& stage : stages_) {
      Passes rank;
      for (const ModelPart& part : stage.parts) {
        const int layers = part.range.last - part.range.first;
        rank.add(layer, layers * share), rank.add(head, part.range.head * share);
      }
      sum.add(rank, 1);
      const Elements of_rank = elements(stage);
      const double lasts = m_ * rank.seconds() + data(rank, of_rank);
      if (lasts > longest) longest = lasts, most = rank, own = of_rank;
    }
    const bool over_nodes = s_.pp > 1 && s_.ranks() > gpu_.gpus_per_node;
    const double collective = host_.collective_seconds + (over_nodes ? host_.pipelined_seconds * s_.tp : 0);
    const double host =
        (most.launches + most.collectives) * gpu_.launch_seconds + most.collectives * collective;
    return {.compute = m_ * (most.forward + most.input + most.weight),
            .tensor = m_ * most.tensor,
            .context = m_ * most.context,
            .experts = m_ * most.experts,
            .bubble = bubble(sum),
            .data = data(most, own),
            .optimizer = optimizer(own),
            .host = m_ * std::max(0.0, host - most.seconds())};
  }

 private:
  static constexpr double r = sizeof(real), a = sizeof(accum);

  // Of a micro-batch: seconds of kernels of forward, of input gradients, of weight gradients; waits that
  // nothing hides, by pass and by axis; what the host issues.
  struct Passes {
    double forward = 0, input = 0, weight = 0, waits_forward = 0, waits_backward = 0;
    double tensor = 0, context = 0, experts = 0, launches = 0, collectives = 0;

    double f() const { return forward + waits_forward; }  // T_F, T_B and T_W of the notes
    double b() const { return input + waits_backward; }
    double seconds() const { return f() + b() + weight; }
    void add(const Passes& p, double times) {
      for (double Passes::*part : {&Passes::forward, &Passes::input, &Passes::weight, &Passes::waits_forward,
                                   &Passes::waits_backward, &Passes::tensor, &Passes::context,
                                   &Passes::experts, &Passes::launches, &Passes::collectives})
        this->*part += times * p.*part;
    }
  };

  // ---- 01: kernels take the longer of moving and computing

  double moved(double bytes) const { return gpu_.seconds(moves(bytes)); }
  // A matrix, [rows, in] x [in, out]: forward, its input's and its weight's gradient; `times` of them.
  void multiply(Passes& p, double rows, int64_t in, int64_t out, int times = 1) const {
    const auto n = static_cast<int64_t>(rows);
    p.forward += times * gpu_.seconds(products(n, out, in, 1, sizeof(real), sizeof(real), false));
    p.input += times * gpu_.seconds(products(n, in, out, 1, sizeof(real), sizeof(real), false));
    p.weight += times * gpu_.seconds(products(out, in, n, 1, sizeof(real), sizeof(accum), m_ > 1));
    p.launches += 3 * times;
  }
  void move(Passes& p, double forward, double backward) const {
    p.forward += moved(r * forward), p.input += moved(r * backward);
    p.launches += 2;
  }

  // (Naive attention as if on tensor cores.) Each rank of a sequence's ranks has an equal part of the
  // triangle; cut contiguously, the last has twice as much.
  double attention(int products_of_pairs, bool backward) const {
    const HeadShape heads = {static_cast<int>(c_.heads), o_.model.kv_heads / s_.tp, o_.model.head_size()};
    const AttentionBlock block = whole_sequences({o_.micro_batch_size, o_.sequence_length, heads});
    const bool last = s_.cp > 1 && o_.context.cp_layout == CpLayout::contiguous;
    const double share = (last ? 2 - 1.0 / s_.cp : 1) / s_.cp;
    const auto unit = o_.attention == Attention::tiled ? Cost::Unit::cores : Cost::Unit::tensor_cores;
    return share * gpu_.seconds(attention_cost(block, products_of_pairs, unit, backward));
  }

  Passes passes_of_layer() const {
    Passes p;
    move(p, 8 * outside_ * c_.d, 8 * outside_ * c_.d);  // residuals and norms
    multiply(p, rows_, c_.d, c_.q + 2 * c_.kv);
    move(p, 2 * rows_ * (c_.q + 2 * c_.kv), 2 * rows_ * (c_.q + 2 * c_.kv));  // rotary
    const bool is_tiled = o_.attention == Attention::tiled;
    const double attends = attention(2, false), attends_backward = attention(is_tiled ? 7 : 5, true);
    p.forward += attends, p.input += attends_backward, p.launches += 5;
    if (s_.cp > 1 &&
        o_.context.cp_exchange != CpExchange::ulysses) {  // a block a rank; their results are added
      p.forward +=
          (s_.cp - 1) * (moved(2 * a * rows_ * c_.q) + gpu_.kernel_seconds) + moved((a + r) * rows_ * c_.q);
      p.input += (s_.cp - 1) * (4 * moved(2 * a * rows_ * c_.kv) + gpu_.kernel_seconds) +
                 moved(2 * a * rows_ * c_.q);
      p.launches += 8 * s_.cp;
    }
    multiply(p, rows_, c_.q, c_.d);
    const double of_attention = p.weight;  // weight gradients
    o_.model.experts > 0 ? moe(p) : mlp(p, rows_, c_.f, 1);
    const bool again = o_.recompute == Recompute::full;  // forward again, but for the last product
    const std::pair<double Passes::*, Waits> waits[] = {
        {&Passes::tensor, tensor(of_attention, p.weight - of_attention)},
        {&Passes::context, context(attends, attends_backward)},
        {&Passes::experts, experts(p.weight - of_attention)}};
    for (const auto& [axis, wait] : waits) {
      const double in_backward = wait.backward + (again ? wait.forward : 0);
      p.waits_forward += wait.forward, p.waits_backward += in_backward;
      p.*axis += wait.forward + in_backward;
    }
    p.collectives = (s_.tp > 1 ? sp_ ? 10 : 4 : 0) + (s_.cp > 1 ? 4 * s_.cp : 0) + (s_.ep > 1 ? 6 : 0);
    if (again) {
      p.input += p.forward - gpu_.seconds(products(rows_, c_.d, c_.f, 1, sizeof(real), sizeof(real), false));
      p.launches *= 4.0 / 3, p.collectives *= 4.0 / 3;
    } else if (o_.recompute == Recompute::selective) {
      p.input += attends / 2;
    }
    return p;
  }
  // Gate, up and down of so many MLPs, each with this many rows.
  void mlp(Passes& p, double rows, int64_t f, int times) const {
    multiply(p, rows, c_.d, 2 * f, times);
    move(p, 3 * rows * f * times, 5 * rows * f * times);  // swiglu
    multiply(p, rows, f, c_.d, times);
  }
  Passes passes_of_head() const {
    Passes p;
    multiply(p, rows_, c_.d, c_.vocabulary);
    move(p, rows_ * c_.vocabulary, 2 * rows_ * c_.vocabulary);  // softmax and loss
    return p;
  }

  // ---- 02: a ring of n ranks; neighbours in it are `apart` in the world

  // n - 1 steps, each a block. With k ranks in a node k rings leave it, each by another network card.
  double ring(int n, int apart, double block_bytes) const {
    if (n == 1) return 0;
    const int in_node = std::clamp(static_cast<int>(gpu_.gpus_per_node) / apart, 1, n);
    if (in_node == n) return (n - 1) * (gpu_.link_latency + block_bytes / gpu_.link_bandwidth);
    const double nodes = static_cast<double>(n) / in_node;
    const double bandwidth = std::min(gpu_.link_bandwidth, in_node * gpu_.network_bandwidth);
    return (n - nodes) * gpu_.link_latency + nodes * gpu_.network_latency + (n - 1) * block_bytes / bandwidth;
  }
  // A message to a rank that is so far away.
  double message(int apart, double bytes) const {
    return apart >= gpu_.gpus_per_node ? gpu_.network_latency + bytes / gpu_.network_bandwidth
                                       : gpu_.link_latency + bytes / gpu_.link_bandwidth;
  }

  // Seconds of a layer in a micro-batch, that nothing hides.
  struct Waits {
    double forward = 0, backward = 0;
  };

  // ---- 04: at a region's begin rows are gathered, at its end summed; backward the other way round. Weight
  // gradients, which take so long, hide sums, unless they are put off.

  Waits tensor(double of_attention, double of_mlp) const {
    if (s_.tp == 1) return {};
    const double block = ring(s_.tp, 1, r * rows_ * c_.d / s_.tp), nodes = s_.tp / gpu_.gpus_per_node;
    const double more = nodes > 1 ? host_.crossing_seconds * nodes : 0;
    const double gather = sp_ ? block + more : 0,
                 sum = (sp_ ? 1 : 2) * block + more;  // an all-reduce is both
    double backward = 2 * gather;
    for (const double hides : {of_attention, of_mlp})
      backward += std::max(0.0, gather + sum - (splits_ ? 0 : hides));
    return {2 * (gather + sum), backward};
  }

  // ---- 06: keys and values come from the other ranks of the sequence, or tokens go there for heads

  Waits context(double attends, double attends_backward) const {
    const int n = s_.cp, node = static_cast<int>(gpu_.gpus_per_node);
    if (n == 1) return {};
    const double keys = 2 * r * rows_ * c_.kv, gradients = 2 * a * rows_ * c_.kv;
    if (o_.context.cp_exchange == CpExchange::ring) {
      const int apart = n * s_.tp > node ? node : s_.tp;  // all wait for the slowest hop
      return {(n - 1) * std::max(0.0, message(apart, keys) - attends / n),
              n * std::max(0.0, message(apart, keys + gradients) - attends_backward / n)};
    }
    const double gather = ring(n, s_.tp, keys);
    if (o_.context.cp_exchange == CpExchange::all_gather) return {gather, gather + ring(n, s_.tp, gradients)};
    const double exchange = ring(n, s_.tp, r * rows_ * 2 * (c_.q + c_.kv) / n);
    return {exchange, exchange};
  }

  // ---- 07: rows go to the ranks of their experts, and back

  double copies() const { return double(rows_) * o_.model.top_k; }
  void moe(Passes& p) const {
    const int own = o_.model.experts / s_.ep;
    move(p, 4 * copies() * c_.d, 4 * copies() * c_.d);                    // permute, weigh and add
    move(p, 4 * rows_ * o_.model.experts, 4 * rows_ * o_.model.experts);  // the router
    p.forward += 6 * gpu_.kernel_seconds, p.launches += 12;
    mlp(p, copies() / own, c_.f, own);
    if (o_.model.shared_experts > 0) mlp(p, rows_, o_.model.shared_experts * c_.f, 1);
  }
  Waits experts(double weight_gradients) const {
    const double exchange = ring(s_.ep, s_.tp, r * copies() * c_.d / s_.ep);
    return {2 * exchange, exchange + std::max(0.0, exchange - (splits_ ? 0 : weight_gradients))};
  }

  // ---- 05: the bubble (the table of its note); sum: of all ranks

  double bubble(const Passes& sum) const {
    const int p = s_.pp, v = o_.pipeline.vpp;
    if (p == 1) return 0;
    const double f = sum.f() / p, b = sum.b() / p, w = sum.weight / p, t = f + b + w;
    const int stride = s_.ranks() / p;
    const double messages = 2.0 * (p - 1) * message(stride, r * outside_ * c_.d);
    const auto is = [&](PpSchedule schedule) { return o_.pipeline.pp_schedule == schedule; };
    if (is(PpSchedule::interleaved)) return (p - 1) * t / v + v * messages;
    if (is(PpSchedule::zb_h1)) return (p - 1) * std::max({f + b - w, f, b}) + messages;
    if (is(PpSchedule::zb_v)) return (p - 1) * b / 2 + 2 * messages;
    if (is(PpSchedule::dualpipe_v)) return (p - 1) * t / 6 + 2 * messages;
    if (is(PpSchedule::dualpipe)) return (p / 2 - 1) * (f + b - w) + messages;
    return (p - 1) * t + messages;
  }

  // ---- 02 and 03: gradients are summed behind backward, weights gathered behind what comes next

  struct Elements {  // of a rank's parameters, but for those of experts; of its experts
    double dense = 0, experts = 0;
  };
  Elements elements(const RankShare& stage) const {
    const double mlp = 3.0 * c_.d * c_.f, attention = c_.d * (2.0 * c_.q + 2 * c_.kv + 2);
    const ModelConfig& model = o_.model;
    Elements sum;
    for (const ModelPart& part : stage.parts) {
      const int layers = part.range.last - part.range.first;
      sum.dense += (part.range.embedding + part.range.head) * double(c_.vocabulary) * c_.d;
      sum.dense += layers * (attention + (model.experts == 0 ? mlp : model.shared_experts * mlp));
      sum.experts += layers * mlp * model.experts / s_.ep;
    }
    return sum;
  }
  int replicas() const { return s_.dp * s_.cp * s_.copies; }
  double optimizer(const Elements& own) const {
    const bool is_sharded = o_.zero.zero_stage > 0;
    const double dense = own.dense / (is_sharded ? replicas() : 1);
    return moved((8 * a + r) * (dense + own.experts / (is_sharded ? replicas() / s_.ep : 1)));
  }

  // A ring for each unit, which is a layer. The first one (or the last) hides behind nothing. The rings of
  // experts are beside the others.
  double data(const Passes& rank, const Elements& own) const {
    if (replicas() == 1) return 0;
    const int zero = o_.zero.zero_stage;
    const double units = static_cast<double>(o_.model.layers) / s_.pp + 1;
    const auto rings = [&](double bytes) {
      const int n = replicas(), of_experts = n / s_.ep;
      return units * std::max(ring(n, s_.tp, bytes * own.dense / units / n),
                              ring(of_experts, s_.tp * s_.ep, bytes * own.experts / units / of_experts));
    };
    const auto exposed = [&](double lasts, double hides) {
      return std::max(lasts / units, lasts - hides * (units - 1) / units);
    };
    const double scatter = rings(a), gather = rings(r), backward = rank.b() + rank.weight;
    if (zero == 0) return exposed(2 * scatter, backward);
    double seconds = exposed(scatter, backward);
    if (zero >= 2) seconds += (m_ - 1) * std::max(0.0, scatter - (s_.pp > 1 ? rank.seconds() : backward));
    if (zero < 3 || s_.pp > 1) return seconds + exposed(gather, rank.f());
    return m_ * (exposed(gather, rank.f()) + std::max(0.0, gather + scatter - backward)) + scatter / units;
  }

  const CombinedOptions& o_;
  const MeshShape s_;
  const std::vector<RankShare>& stages_;
  const int m_;
  const DeviceProfile& gpu_;
  const Framework& host_;
  const bool sp_ = o_.tensor.sequence_parallel && s_.tp > 1;
  const bool splits_ = stages_.front().gradients_on_request;  // weight gradients are put off
  const Columns c_ = columns_of(o_.model, s_.tp);
  // Tokens of a micro-batch on this rank: inside the tensor regions, and outside of them.
  const int64_t rows_ = int64_t{o_.micro_batch_size} * o_.sequence_length / s_.cp;
  const int64_t outside_ = sp_ ? rows_ / s_.tp : rows_;
};

}  // namespace pentatron
