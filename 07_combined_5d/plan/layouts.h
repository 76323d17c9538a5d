// All layouts of a run on so many GPUs: those that 07 accepts, what memory they need, and how fast they are.
// In three steps, as people choose by hand: what fits, what reaches the global batch, what is fastest.
#pragma once

#include <map>
#include <sstream>
#include <tuple>

#include "cost_model.h"

namespace pentatron {

// How a run is laid out. As text: "tp2 cp1 dp16 pp2 zero1 mbs2 1f1b sp full".
struct Layout {
  MeshShape shape;
  int zero_stage = 1, micro_batch_size = 1, vpp = 1;
  PpSchedule schedule = PpSchedule::one_f_one_b;
  bool sequence_parallel = false;
  Recompute recompute = Recompute::none;
};

inline std::string to_string(const Layout& l) {
  std::ostringstream text;
  for (const auto& [axis, degree] : l.shape.degrees()) {
    if (degree > 1) text << axis << degree << " ";
  }
  text << "zero" << l.zero_stage << " mbs" << l.micro_batch_size;
  if (l.shape.pp > 1) text << " " << to_string(l.schedule);
  if (l.schedule == PpSchedule::interleaved) text << l.vpp;
  if (l.sequence_parallel) text << " sp";
  if (l.recompute != Recompute::none) text << " " << to_string(l.recompute);
  return text.str();
}

// Reads to_string's words, in any order. What is not said is as in Layout, and --dp is what the rest leaves
// of `gpus`. Throws UsageError.
inline Layout parse_layout(const std::string& option, const std::string& words, int gpus) {
  Layout l;
  l.shape.dp = 0;
  const std::map<std::string, int*> numbers = {
      {"tp", &l.shape.tp}, {"cp", &l.shape.cp},     {"dp", &l.shape.dp},          {"pp", &l.shape.pp},
      {"ep", &l.shape.ep}, {"zero", &l.zero_stage}, {"mbs", &l.micro_batch_size}, {"interleaved", &l.vpp}};
  std::istringstream stream(words);
  for (std::string word; stream >> word;) {
    const size_t digits = word.find_last_not_of("0123456789") + 1;
    const std::string name = word.substr(0, digits), number = word.substr(digits);
    const int n = number.empty() || number.size() > 6 ? -1 : std::stoi(number);
    bool valid = false;
    if (const auto found = numbers.find(name); found != numbers.end()) {
      valid = name == "zero" ? 0 <= n && n <= 3 : n >= 1;
      *found->second = n;
      if (name == "interleaved") l.schedule = PpSchedule::interleaved;
    }
    for (const PpSchedule schedule : {PpSchedule::afab, PpSchedule::one_f_one_b, PpSchedule::zb_h1,
                                      PpSchedule::zb_v, PpSchedule::dualpipe_v}) {
      if (word == to_string(schedule)) valid = true, l.schedule = schedule, l.vpp = chunks_of(schedule);
    }
    for (const Recompute recompute : {Recompute::full, Recompute::selective}) {
      if (word == to_string(recompute)) valid = true, l.recompute = recompute;
    }
    if (word == "sp") valid = l.sequence_parallel = true;
    if (!valid)
      throw UsageError(
          option, words,
          "words such as tp2 cp2 dp4 pp2 ep2 zero1 mbs1 interleaved2 sp full (dualpipe and files of "
          "schedules are left out)");
  }
  const int64_t others = int64_t{l.shape.tp} * l.shape.cp * l.shape.pp;
  if (l.shape.dp == 0) l.shape.dp = static_cast<int>(std::max<int64_t>(1, gpus / others));
  return l;
}

inline CombinedOptions options_of(CombinedOptions options, const Layout& l) {
  options.tp = l.shape.tp, options.cp = l.shape.cp, options.dp = l.shape.dp, options.pp = l.shape.pp;
  options.ep = l.shape.ep, options.zero_stage = l.zero_stage, options.micro_batch_size = l.micro_batch_size;
  options.pp_schedule = l.schedule, options.vpp = l.vpp;
  options.sequence_parallel = l.sequence_parallel, options.recompute = l.recompute;
  return options;
}

// What CUDA and NCCL take of a rank's device memory, in bytes (comm.h).
inline size_t libraries_of(const MeshShape& shape, PpSchedule schedule, int vpp) {
  const auto channels = [](int ranks, int blocks) { return ranks > 1 ? blocks : 0; };
  const int replicas = shape.dp * shape.cp, experts = shape.ep;
  // Two ways for an edge, of a V four; a rank at the end of the pipeline has one edge, in a ring two.
  const bool is_v = is_v_shaped(schedule), is_ring = vpp > 1 && !is_v;
  const int edges = shape.pp == 1 ? 0 : shape.pp == 2 && !is_ring ? 1 : 2;
  return library_bytes(channels(shape.tp, tensor_blocks) + channels(shape.cp, data_blocks) +
                       channels(replicas, data_blocks) + channels(experts, data_blocks) +
                       channels(replicas / experts, data_blocks) + channels(shape.ranks(), data_blocks) +
                       (is_v ? 4 : 2) * edge_blocks * edges);
}

// Device memory of the fullest rank, in bytes. `libraries`: libraries_of.
struct MemoryOfLayout {
  MemoryPrediction fullest;
  size_t tensors = 0, libraries = 0;
  double others = 0;  // of the style
  double total() const { return static_cast<double>(tensors + libraries) + others; }
};
// `stages`: stage_share of each.
inline MemoryOfLayout memory_of(const CombinedOptions& options, const MeshShape& shape,
                                const std::vector<RankShare>& stages, const Style& style) {
  MemoryOfLayout memory;
  const double rows = double(options.micro_batch_size) * options.sequence_length / shape.cp;
  const double logits = style.logits_bytes * rows * options.model.vocab_size / shape.tp;
  for (const RankShare& stage : stages) {
    const MemoryPrediction p = predict_memory(options, element_sizes, shape, stage);
    const MemoryBytes parts = p.total();
    const size_t tensors = std::accumulate(parts.begin(), parts.end(), size_t{0});
    const double others = style.weights * parts[size_t(Purpose::weights)] +
                          (style.activations - 1) * parts[size_t(Purpose::activations)] +
                          (&stage == &stages.back() ? logits : 0);
    if (tensors + others > memory.total())
      memory.fullest = p, memory.tensors = tensors, memory.others = others;
  }
  memory.libraries = libraries_of(shape, options.pp_schedule, options.vpp);
  return memory;
}

// A layout with what it needs and how long it takes.
struct Plan {
  Layout layout;
  CombinedOptions options;
  MemoryOfLayout memory;
  StepCost cost;
  int micro_batches = 0;
  double tokens_per_second = 0, mfu = 0;  // of a GPU
  std::string kind;                       // kind_of
  double least = 0, most = 0;  // seconds: 8 of 10 steps of its kind were between these; 0: not known
};

// What a user asks of a layout, beside being fast.
struct Wishes {
  std::string words;                                              // "tp1-8 zero3 sp": what it must have
  double memory_bytes = std::numeric_limits<double>::infinity();  // of a GPU, that it may take

  bool allow(const Layout& l) const {
    if (words.empty()) return true;
    const std::string text = " " + to_string(l) + " ";
    const std::map<std::string, int> numbers = {
        {"tp", l.shape.tp},          {"cp", l.shape.cp},
        {"dp", l.shape.dp},          {"pp", l.shape.pp},
        {"ep", l.shape.ep},          {"zero", l.zero_stage},
        {"mbs", l.micro_batch_size}, {"interleaved", l.schedule == PpSchedule::interleaved ? l.vpp : 0}};
    std::istringstream stream(words);
    for (std::string word; stream >> word;) {
      const size_t dash = word.find('-', 1), digits = word.find_first_of("0123456789");
      const auto number = numbers.find(word.substr(0, digits));
      if (number == numbers.end() || digits == word.npos) {
        if (text.find(" " + word + " ") == text.npos) return false;
        continue;
      }
      const int from = std::atoi(word.c_str() + digits),
                to = dash == word.npos ? from : std::atoi(word.c_str() + dash + 1);
      if (number->second < from || number->second > to) return false;
    }
    return true;
  }
};

// Whether these are words of layouts. Throws UsageError.
inline void check_words(const std::string& option, const std::string& words) {
  std::istringstream stream(words);
  for (std::string word; stream >> word;) {
    const size_t dash = word.find('-');
    const bool is_range = dash != word.npos && dash > 0 && std::isdigit(word[dash - 1]);
    if (is_range)
      parse_layout(option, word.substr(0, word.find_first_of("0123456789")) + word.substr(dash + 1), 1);
    parse_layout(option, is_range ? word.substr(0, dash) : word, 1);
  }
}

struct Search {
  // Layouts that divide the model; of these fit; of these reach the global batch.
  int divide = 0, fit = 0, reach = 0;
  std::vector<Plan> best;       // fastest first
  std::optional<Plan> nearest;  // of those that do not fit: the one that needs the least memory
};

class Planner {
 public:
  // `base`: the model, the batch, and all that is not a layout's.
  Planner(const CombinedOptions& base, int gpus, const DeviceProfile& gpu, const Style& style = own_style,
          const Wishes& wishes = {})
      : base_(base), gpus_(gpus), gpu_(gpu), style_(style), wishes_(wishes) {
    base_.as_json.clear(), base_.training.clear();  // each plan copies the options; it needs no texts
  }

  // Throws UsageError if 07 would refuse it.
  Plan plan(const Layout& layout) {
    Plan p = prepared(layout);
    mesh_shape(p.options, gpus_);
    check_axes(p.options, layout.shape);
    p.micro_batches = micro_batches_of_a_rank(p.options, layout.shape.dp);
    complete_pipeline_options(p.options, layout.shape.pp, p.micro_batches);
    p.memory = memory_of(p.options, layout.shape, pipeline(p).stages, style_);
    set_cost(p);
    return p;
  }

  // Of a GPU, that a layout may take.
  double memory_bytes() const { return std::min(gpu_.memory_bytes, wishes_.memory_bytes); }

  const Schedule& schedule_of(const Plan& p) { return pipeline(p).schedule; }

  // The fastest layout of each mesh; of these the fastest `count`.
  Search search(size_t count) {
    Search result;
    std::vector<std::pair<double, Plan>> candidates;  // with the least time that it can take
    for_each_layout([&](const Layout& layout) {
      if (!wishes_.allow(layout)) return;
      Plan p = prepared(layout);
      const int at_once = layout.micro_batch_size * layout.shape.dp;
      p.micro_batches = base_.global_batch_size / at_once;
      const bool reaches =
          base_.global_batch_size % at_once == 0 &&
          (layout.schedule != PpSchedule::interleaved || p.micro_batches % layout.shape.pp == 0);
      if (!reaches) {  // how much memory it needs where as many micro-batches as fill the pipeline
        p.micro_batches = layout.shape.pp;
        p.options.global_batch_size = at_once * layout.shape.pp;
      }
      ++result.divide;
      p.memory = memory_of(p.options, layout.shape, pipeline(p).stages, style_);
      if (p.memory.total() > memory_bytes()) {
        if (!result.nearest || p.memory.total() < result.nearest->memory.total()) result.nearest = p;
        return;
      }
      ++result.fit;
      if (!reaches) return;
      ++result.reach;
      candidates.emplace_back(CostModel(p.options, layout.shape, gpu_, pipeline(p).schedule, style_).least(),
                              p);
    });
    std::ranges::stable_sort(candidates, {}, &std::pair<double, Plan>::first);
    const auto faster = [](const Plan& x, const Plan& y) { return x.cost.total() < y.cost.total(); };
    for (auto& [least, p] : candidates) {
      if (result.best.size() == count && least >= result.best.back().cost.total()) break;
      const auto same = std::find_if(result.best.begin(), result.best.end(),
                                     [&](const Plan& x) { return x.layout.shape == p.layout.shape; });
      if (same != result.best.end() && least >= same->cost.total()) continue;
      try {
        set_cost(p);
      } catch (const ScheduleError&) {  // it would stop, such as most schedules with grouped messages
        continue;
      }
      if (same != result.best.end()) {
        if (!faster(p, *same)) continue;
        result.best.erase(same);
      }
      result.best.insert(std::upper_bound(result.best.begin(), result.best.end(), p, faster), p);
      if (result.best.size() > count) result.best.pop_back();
    }
    return result;
  }

 private:
  struct Pipeline {
    Schedule schedule;
    std::vector<RankShare> stages;
  };

  Plan prepared(const Layout& layout) const {
    return {layout, options_of(base_, layout), {}, {}, 0, 0, 0, "", 0, 0};
  }

  static void check_axes(const CombinedOptions& o, const MeshShape& shape) {
    check_tensor_parallel(o, shape.tp, int64_t{o.micro_batch_size} * o.sequence_length / shape.cp);
    check_context_parallel(o, shape.cp);
    if (o.model.experts > 0 && o.model.experts % shape.ep != 0)
      throw UsageError("--ep", std::to_string(shape.ep), "a divisor of --experts");
  }

  // A plan's schedule, made once for all plans that have it.
  const Pipeline& pipeline(const Plan& p) {
    const CombinedOptions& o = p.options;
    const auto key = std::make_tuple(o.pp_schedule, o.pp, p.micro_batches, o.vpp);
    const auto found = pipelines_.find(key);
    if (found != pipelines_.end()) return found->second;
    Pipeline& made = pipelines_[key];
    made.schedule = make_schedule(o, o.pp, p.micro_batches);
    for (int stage = 0; stage < o.pp; ++stage) made.stages.push_back(stage_share(o, made.schedule, stage));
    return made;
  }

  // Calls `use` with each layout whose axes divide the model.
  void for_each_layout(const std::function<void(const Layout&)>& use) const {
    Layout l;
    const auto is_valid = [&] {
      try {
        check_axes(options_of(base_, l), l.shape);
      } catch (const UsageError&) {
        return false;
      }
      return true;
    };
    const auto divisors = [](int n) {
      std::vector<int> list;
      for (int i = 1; i <= n; ++i) {
        if (n % i == 0) list.push_back(i);
      }
      return list;
    };
    // (What follows lists only what complete_pipeline_options accepts.)
    for (const int tp : divisors(gpus_)) {
      for (const int cp : divisors(gpus_ / tp)) {
        for (const int pp : divisors(gpus_ / tp / cp)) {
          const int dp = gpus_ / tp / cp / pp;
          if (pp > base_.model.layers || dp > base_.global_batch_size) continue;
          for (const int ep :
               divisors(base_.model.experts > 0 ? std::gcd(base_.model.experts, dp * cp) : 1)) {
            l.shape = {tp, cp, dp, pp, ep};
            for (l.micro_batch_size = 1; l.micro_batch_size * dp <= base_.global_batch_size;
                 l.micro_batch_size *= 2) {
              for (const bool sp : {false, true}) {
                l.sequence_parallel = sp;
                if ((!sp || tp > 1) && is_valid()) for_each_schedule(l, use);
              }
            }
          }
        }
      }
    }
  }
  void for_each_schedule(Layout l, const std::function<void(const Layout&)>& use) const {
    const auto add = [&](PpSchedule schedule, int vpp) {
      l.schedule = schedule, l.vpp = vpp;
      if (vpp * l.shape.pp <= base_.model.layers) use(l);
    };
    const int most = l.shape.dp * l.shape.cp > 1 ? 3 : 1;  // without replicas all ZeRO stages are the same
    for (const Recompute recompute : {Recompute::none, Recompute::full}) {
      l.recompute = recompute;
      for (l.zero_stage = most == 3 ? 0 : 1; l.zero_stage <= most; ++l.zero_stage) {
        add(PpSchedule::one_f_one_b, 1);
        if (l.shape.pp == 1) continue;
        add(PpSchedule::afab, 1);
        if (recompute == Recompute::none) {  // these need what full recomputation throws away
          add(PpSchedule::zb_h1, 1);
          add(PpSchedule::zb_v, 2);
          add(PpSchedule::dualpipe_v, 2);
        }
        for (int vpp = 2; vpp * l.shape.pp <= base_.model.layers; vpp *= 2) add(PpSchedule::interleaved, vpp);
      }
    }
  }

  void set_cost(Plan& p) {
    p.cost = CostModel(p.options, p.layout.shape, gpu_, pipeline(p).schedule, style_).step();
    const double full = p.memory.total() / gpu_.memory_bytes;
    p.cost.host += p.micro_batches * retries(style_, full);
    p.kind = kind_of(style_, p.layout.shape, gpu_, full);
    if (const auto range = style_.ranges.find(p.kind); range != style_.ranges.end())
      p.least = p.cost.total() * range->second[0], p.most = p.cost.total() * range->second[1];
    const double tokens = double(base_.global_batch_size) * base_.sequence_length;
    p.tokens_per_second = tokens / p.cost.total() / gpus_;
    p.mfu = p.tokens_per_second * flops_per_token(p.options) / gpu_.flops_bf16;
  }

  CombinedOptions base_;
  const int gpus_;
  const DeviceProfile gpu_;
  const Style style_;
  const Wishes wishes_;
  std::map<std::tuple<PpSchedule, int, int, int>, Pipeline> pipelines_;
};

}  // namespace pentatron
