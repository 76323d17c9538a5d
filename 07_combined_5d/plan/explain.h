// The arithmetic of one layout's step, term by term: numbers put into the formulas.
#pragma once

#include <cstdio>

#include "layouts.h"

namespace pentatron {

class Explanation : public CostModel {
 public:
  Explanation(const Plan& plan, const DeviceProfile& gpu, const Schedule& schedule, const Style& style)
      : CostModel(plan.options, plan.shape, gpu, schedule, style), plan_(plan) {}

  void print() {
    std::printf("%s\n\n", layout_of(o_).c_str());
    std::cout << "A micro-batch on a rank: " << o_.micro_batch_size << " sequences x " << o_.sequence_length
              << " tokens / cp " << shape_.cp << " = " << rows_ << " rows; outside of the tensor regions "
              << outside_ << ".\nColumns / tp " << shape_.tp << ": q " << c_.q << ", k and v " << c_.kv
              << " each, MLP " << c_.f << ", vocabulary " << c_.vocabulary << ".\n";
    print_terms("A layer forward", [&] { layer_forward(false); });
    print_terms("A layer backward", [&] { layer_backward(); });
    print_step();
    print_memory();
  }

 private:
  template <class Calls>
  void print_terms(const char* title, const Calls& calls) {
    std::vector<Term> list;
    terms = &list;
    calls();
    terms = nullptr;
    double sum = 0;
    std::printf("\n%s\n", title);
    for (const Term& t : list) {
      const Cost& c = t.cost;
      const double amount = c.flops > 0 ? c.flops / 1e9 : (c.bytes + t.sent) / 1e6;
      std::ostringstream what;
      if (c.batch > 0) what << "2 x " << c.m << " x " << c.n << " x " << c.k << " = ";
      what << std::fixed << std::setprecision(1) << amount
           << (c.flops > 0  ? " GFLOP"
               : t.sent > 0 ? " MB sent"
                            : " MB");
      std::printf("  %-34s %-44s %9.1f us\n", t.name, what.str().c_str(), t.seconds * 1e6);
      sum += t.seconds;
    }
    std::printf("  %-79s %9.1f us\n", "sum", sum * 1e6);
  }

  void print_step() {
    const std::vector<Rank> all = ranks();
    const Rank& rank = busiest(all);
    const StepCost& cost = plan_.cost;
    const int m = schedule_.m, p = shape_.pp, v = schedule_.v;
    double forward = 0, backward = 0;
    for (const Costs& c : rank.costs) forward += c.of(Action::forward), backward += c.of(Action::backward);
    const double both = forward + backward, ms = 1e3;
    std::printf("\nThe step, on pipeline rank %d, which has most to do\n",
                static_cast<int>(&rank - all.data()));
    std::printf("  F, B       forward %.3f ms and backward %.3f ms of a micro-batch\n", forward * ms,
                backward * ms);
    std::printf(
        "  work       m (F + B) = %d x %.3f = %.1f ms; of it communication that nothing hides: tensor %.1f, "
        "context %.1f, experts %.1f\n",
        m, both * ms, m * both * ms, cost.work.tensor * ms, cost.work.context * ms, cost.work.experts * ms);
    if (p > 1)
      std::printf(
          "  bubble     %.1f ms, played; by formula (p - 1)(F + B) / v = %d x %.3f / %d = %.1f ms%s\n",
          cost.bubble * ms, p - 1, both * ms, v, (p - 1) * both / v * ms,
          schedule_.splits_backward ? ", less what weight gradients fill" : "");
    double elements = 0, sums = 0, gathers = 0;
    for (int g = 0; g < 2; ++g) {
      double sums_of_group = 0, gathers_of_group = 0;
      for (const Unit& u : rank.chunks | std::views::join)
        elements += u.size[g], sums_of_group += scatter(u, g), gathers_of_group += gather(u, g);
      sums = std::max(sums, sums_of_group);  // the groups' streams run beside each other
      gathers = std::max(gathers, gathers_of_group);
    }
    const int n = shape_.dp * shape_.cp;
    if (n > 1) {
      std::printf("  data       %d ranks, %.3f G parameters each: summing the gradients takes %.1f ms%s", n,
                  elements / 1e9, sums * ms, o_.zero.zero_stage >= 2 ? " a micro-batch" : "");
      if (o_.zero.zero_stage > 0) std::printf(", gathering the weights %.1f ms", gathers * ms);
      std::printf("; of all, %.1f ms are not hidden\n", cost.data * ms);
    }
    std::printf("  optimizer  %.3f G parameters%s: %.1f ms\n", elements / 1e9 / (is_sharded(1) ? n : 1),
                is_sharded(1) && n > 1 ? " after sharding" : "", cost.optimizer * ms);
    if (cost.host > 0)
      std::printf("  host       %.1f ms of waiting for it, which issues operations or looks for memory\n",
                  cost.host * ms);
    std::printf("  sum        %.1f ms: %.0f tokens/s a GPU, MFU %.1f %%\n", cost.total() * ms,
                plan_.tokens_per_second, 100 * plan_.mfu);
  }

  void print_memory() {
    const MemoryBytes total = plan_.memory.fullest.total();
    std::printf("\nMemory of the fullest rank, GiB\n");
    for (size_t i = 0; i < total.size(); ++i)
      std::printf("  %-16s %8.2f\n", purpose_names[i].data(), static_cast<double>(total[i]) / (1 << 30));
    std::printf("  %-16s %8.2f  (an estimate)\n", "CUDA, NCCL",
                static_cast<double>(plan_.memory.libraries) / (1 << 30));
    if (plan_.memory.others > 0)
      std::printf("  %-16s %8.2f\n", "of the style", plan_.memory.others / (1 << 30));
    std::printf("  %-16s %8.2f\n", "sum", plan_.memory.total() / (1 << 30));
  }

  const Plan& plan_;
};

}  // namespace pentatron
