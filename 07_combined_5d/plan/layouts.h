// The layouts of a run on so many GPUs (for_each_layout), what memory they need, and roughly how fast they
// are. In three steps, as people choose by hand: what fits, what reaches the global batch, what is fastest. A
// layout is some of 07's options. As words they are short: "tp2 dp16 pp2 zero1 mbs2 1f1b sp full".
#pragma once

#include <cstdio>
#include <map>
#include <optional>
#include <sstream>
#include <tuple>

#include "coarse.h"

namespace pentatron {

// A word that has a number, and what it says; the number that goes without saying.
struct LayoutNumber {
  std::string word;
  const char* option;
  int& value;
  int otherwise = 1;
};
inline std::vector<LayoutNumber> numbers_of(CombinedOptions& o) {
  return {{"tp", "--tp", o.tp},
          {"cp", "--cp", o.cp},
          {"dp", "--dp", o.dp},
          {"pp", "--pp", o.pipeline.pp},
          {"ep", "--ep", o.experts.ep},
          {"zero", "--zero-stage", o.zero.zero_stage, -1},
          {"shards", "--shard-ranks", o.zero.shard_ranks, 0},
          {"mbs", "--micro-batch-size", o.micro_batch_size, -1},
          {"interleaved", "--vpp", o.pipeline.vpp}};
}

// The words of a layout. A degree of 1 is not named.
inline std::string layout_of(CombinedOptions o) {
  std::vector<std::string> words;
  const PipelineOptions& p = o.pipeline;
  const bool has_chunks = p.pp_schedule == PpSchedule::interleaved;
  for (const auto& [word, option, value, otherwise] : numbers_of(o)) {
    if (word == "interleaved" ? has_chunks : value != otherwise) words.push_back(text(word, value));
  }
  if (p.pp > 1 && !has_chunks) words.push_back(to_string(p.pp_schedule));
  if (o.tensor.sequence_parallel) words.push_back("sp");
  if (o.recompute != Recompute::none) words.push_back(to_string(o.recompute));
  return join(words, " ");
}

// As options of 07.
inline std::vector<std::string> options_of(CombinedOptions o) {
  std::vector<std::string> words;
  for (const auto& [word, option, value, otherwise] : numbers_of(o)) {
    if (value != otherwise) words.insert(words.end(), {option, std::to_string(value)});
  }
  if (o.pipeline.pp > 1) words.insert(words.end(), {"--pp-schedule", to_string(o.pipeline.pp_schedule)});
  if (o.tensor.sequence_parallel) words.push_back("--sequence-parallel");
  if (o.recompute != Recompute::none) words.insert(words.end(), {"--recompute", to_string(o.recompute)});
  words.insert(words.end(), {"--attention", to_string(o.attention)});
  return words;
}

// A word that a layout must have, such as "sp" or "tp4". A number may have a range: "tp1-8".
struct Wish {
  std::string text, name;  // "tp4", "tp"
  int from = 0, to = 0;
};
// Throws UsageError unless these are words of layouts.
inline std::vector<Wish> read_wishes(const std::string& option, const std::string& words) {
  CombinedOptions any;
  std::vector<Wish> wishes;
  std::istringstream stream(words);
  for (std::string word; stream >> word;) {
    char name[16] = "";
    int from = -1, to = -1, end = 0;
    if (std::sscanf(word.c_str(), "%15[a-z]%6d%n-%6d%n", name, &from, &end, &to, &end) == 2) to = from;
    bool valid = false;
    if (std::ranges::count(numbers_of(any), name, &LayoutNumber::word) > 0) {
      const bool is_zero = word.starts_with("zero");
      valid = end == std::ssize(word) && from >= (is_zero ? 0 : 1) && to <= (is_zero ? 3 : 999999);
    } else {
      valid = word == "sp" || word == "full" || word == "selective";
      for (const auto& [called, schedule] : pp_schedule_names)
        valid |= word == called && schedule != PpSchedule::interleaved;
    }
    require(valid, option, word,
            "tp2 cp2 dp4 pp2 ep2 zero1 shards8 mbs1 sp full selective, 1f1b afab zb-h1 zb-v ",
            "dualpipe-v dualpipe interleaved2");
    wishes.push_back({word, name, from, to});
  }
  return wishes;
}
inline bool is_as_wished(CombinedOptions o, const std::vector<Wish>& wishes) {
  if (wishes.empty()) return true;
  const std::string words = " " + layout_of(o) + " ";
  if (o.pipeline.pp_schedule != PpSchedule::interleaved) o.pipeline.vpp = 0;
  const auto numbers = numbers_of(o);
  return std::ranges::all_of(wishes, [&](const Wish& wish) {
    const auto number = std::ranges::find(numbers, wish.name, &LayoutNumber::word);
    if (number == numbers.end()) return words.find(" " + wish.text + " ") != words.npos;
    return wish.from <= number->value && number->value <= wish.to;
  });
}

// `o` with the layout of these words, in any order. --dp, if not said, is what the rest leaves of `gpus`.
// Throws UsageError.
inline CombinedOptions with_layout(CombinedOptions o, const std::string& option, const std::string& words,
                                   int gpus) {
  o.dp = 0;
  o.pipeline.pp = 1;
  const auto numbers = numbers_of(o);
  for (const auto& [word, name, from, to] : read_wishes(option, words)) {
    require(from == to, option, words, "one layout: no range");
    const auto number = std::ranges::find(numbers, name, &LayoutNumber::word);
    if (number != numbers.end()) number->value = from;
    if (name == "interleaved") o.pipeline.pp_schedule = PpSchedule::interleaved;
    for (const auto& [called, schedule] : pp_schedule_names) {
      if (word == called) o.pipeline.pp_schedule = schedule, o.pipeline.vpp = chunks_of(schedule);
    }
    for (const auto& [called, recompute] : recompute_names) {
      if (word == called) o.recompute = recompute;
    }
    if (word == "sp") o.tensor.sequence_parallel = true;
  }
  if (o.dp == 0) o.dp = static_cast<int>(std::max<int64_t>(1, gpus / (int64_t{o.tp} * o.cp * o.pipeline.pp)));
  return o;
}

// What CUDA and NCCL take of a rank's device memory, in bytes (comm.h). `of_edges`: the channels that its
// pipeline's edges have there.
inline size_t libraries_of(const CombinedOptions& o, const MeshShape& shape, int of_edges) {
  const auto channels = [](int ranks, int blocks) { return ranks > 1 ? blocks : 0; };
  const int replicas = shape.replicas(), shards = shape.shards(), ep = shape.ep;
  int all = channels(o.tp, tensor_blocks) + of_edges;
  for (const int ranks : {o.cp, shards, ep, shards / ep, replicas / shards, shape.ranks()})
    all += channels(ranks, data_blocks);
  if (o.context.cp_exchange == CpExchange::ulysses_ring && o.cp > 1)
    all += 2 * data_blocks;  // the neighbours have a communicator, and their ring
  return library_bytes(all);
}

// A layout with what it needs and how long it takes.
struct Plan {
  CombinedOptions options;
  MeshShape shape;
  int micro_batches = 0;
  std::vector<MemoryBytes> stages = {};  // bytes of tensors by purpose, on a rank of each stage
  size_t libraries = 0;                  // bytes
  // Where a step's seconds go, as they are shown: coarse (coarse.h), or of a dry run (dry_run.h).
  std::vector<std::pair<std::string, double>> parts = {};
  double seconds = 0;        // of the step
  double hidden = 0;         // of a dry run's transfers: the seconds that kernels hide
  std::string refusal = {};  // why 07 refuses it, in a line

  const MemoryBytes& tensors() const { return *std::ranges::max_element(stages, {}, sum_of); }
  double memory() const { return static_cast<double>(sum_of(tensors()) + libraries); }  // of the fullest rank
};

struct Search {
  // Layouts that divide the model; of these fit; of these reach the global batch.
  int divide = 0, fit = 0, reach = 0;
  std::vector<Plan> best;       // fastest first
  std::optional<Plan> nearest;  // it does not fit, but needs less memory than the others
};

struct Planner {
  CombinedOptions base;  // the model, the batch, and all that is not a layout's
  int gpus;
  DeviceProfile gpu;
  std::vector<Wish> wishes = {};
  // What each pipeline rank keeps, and the channels of the one that has most; computed once for all plans
  // that have this schedule.
  struct Stages {
    std::vector<PipelineRank> ranks;
    int channels = 0;
  };
  std::map<std::tuple<PpSchedule, int, int, int>, Stages> known_stages = {};

  // Throws UsageError if 07 would refuse it.
  Plan plan(const CombinedOptions& layout) {
    Plan p = {layout, mesh_shape(layout, gpus), micro_batches_of_a_rank(layout, layout.dp)};
    check_experts(layout, layout.experts);
    check_combined(p.options, p.shape);
    set_memory(p);
    set_coarse_time(p);
    return p;
  }

  // By coarse time the fastest layout of each mesh; of these the fastest ones.
  Search search(size_t count) {
    Search result;
    std::vector<Plan> candidates;
    for_each_layout([&](const CombinedOptions& layout) {
      if (!is_as_wished(layout, wishes)) return;
      const int at_once = layout.micro_batch_size * layout.dp, pp = layout.pipeline.pp;
      Plan p = {layout, mesh_shape(layout, gpus), base.global_batch_size / at_once};
      const bool reaches = base.global_batch_size % at_once == 0 &&
                           instead_of(layout.pipeline.pp_schedule, pp, p.micro_batches).empty();
      if (!reaches) {  // how much memory it needs where as many micro-batches as fill the pipeline
        p.micro_batches = pp;
        p.options.global_batch_size = at_once * pp;
      }
      ++result.divide;
      set_memory(p);
      if (p.memory() > gpu.memory_bytes) {
        if (!result.nearest || p.memory() < result.nearest->memory()) result.nearest = p;
        return;
      }
      ++result.fit;
      if (!reaches) return;
      ++result.reach;
      set_coarse_time(p);
      candidates.push_back(p);
    });
    std::ranges::stable_sort(candidates, {}, &Plan::seconds);
    for (Plan& p : candidates) {
      const auto has_its_mesh = [&](const Plan& other) { return other.shape.degrees() == p.shape.degrees(); };
      if (result.best.size() == count) break;
      if (std::ranges::any_of(result.best, has_its_mesh)) continue;
      try {
        check_combined(p.options, p.shape);
        result.best.push_back(p);
      } catch (const UsageError&) {  // 07 would refuse it
      }
    }
    return result;
  }

  static std::vector<int> divisors(int n) {
    std::vector<int> list;
    for (int i = 1; i <= n; ++i) {
      if (n % i == 0) list.push_back(i);
    }
    return list;
  }

  // Calls `use` with each layout whose axes divide the model, whose micro-batches divide a data rank's batch,
  // and whose chunks divide a pipeline rank's layers.
  void for_each_layout(const std::function<void(const CombinedOptions&)>& use) const {
    CombinedOptions o = base;
    const auto divides = [&] {
      try {
        check_tensor_parallel(o.model, o.tensor, o.tp, o.rows() / o.cp);
        check_context_parallel(o, o.context, o.cp, o.tp);
        check_experts(o, o.experts);
      } catch (const UsageError&) {
        return false;
      }
      return true;
    };
    for (const int tp : divisors(gpus)) {
      for (const int cp : divisors(gpus / tp)) {
        for (const int pp : divisors(gpus / tp / cp)) {
          o.tp = tp;
          o.cp = cp;
          o.pipeline.pp = pp;
          o.dp = gpus / tp / cp / pp;
          if (pp > o.model.layers || o.dp > o.global_batch_size) continue;
          for (const int ep : divisors(o.model.experts > 0 ? std::gcd(o.model.experts, o.dp * cp) : 1)) {
            o.experts.ep = ep;
            for (const int mbs : divisors(o.global_batch_size / o.dp)) {
              for (const bool sp : {false, true}) {
                o.micro_batch_size = mbs;
                o.tensor.sequence_parallel = sp;
                if ((!sp || tp > 1) && divides()) for_each_schedule(o, use);
              }
            }
          }
        }
      }
    }
  }
  // Calls `use` with this mesh and each schedule, stage of ZeRO, hybrid or not, and kind of recomputation.
  void for_each_schedule(CombinedOptions o, const std::function<void(const CombinedOptions&)>& use) const {
    using enum PpSchedule;
    const int pp = o.pipeline.pp;
    int &vpp = o.pipeline.vpp, &stage = o.zero.zero_stage;
    const int in_node = std::max(1, static_cast<int>(gpu.gpus_per_node) / o.tp);
    for (const PpSchedule schedule : {one_f_one_b, afab, interleaved, zb_h1, zb_v, dualpipe_v, dualpipe}) {
      if (pp == 1 ? schedule != one_f_one_b : !instead_of(schedule, pp, pp).empty()) continue;
      o.pipeline.pp_schedule = schedule;
      const int copies = copies_of(schedule), stages = o.model.layers * copies;  // at most
      const int replicas = o.dp * o.cp * copies;
      const bool can_be_hybrid = in_node < replicas && replicas % in_node == 0 && in_node % o.experts.ep == 0;
      for (vpp = chunks_of(schedule); vpp * pp <= stages; ++vpp) {
        const int layers = o.model.layers / pp, rest = o.model.layers % pp;
        const bool divides = layers % vpp == 0 || (rest > 0 && (layers + 1) % vpp == 0);
        if (schedule == interleaved && !divides) continue;
        for (const Recompute recompute : {Recompute::none, Recompute::selective, Recompute::full}) {
          const bool splits = is_v_shaped(schedule) || schedule == dualpipe || schedule == zb_h1;
          if (splits && recompute == Recompute::full) continue;  // weight gradients need what it throws away
          if (recompute == Recompute::selective && o.attention != Attention::naive) continue;  // as none
          o.recompute = recompute;
          for (stage = 0; stage <= 3; ++stage) {
            if (replicas == 1 && stage != 1) continue;  // all are alike
            o.zero.shard_ranks = 0;
            use(o);
            o.zero.shard_ranks = in_node;
            if (stage > 0 && can_be_hybrid) use(o);
          }
        }
        if (schedule != interleaved) break;  // another number of chunks
      }
    }
  }

  const Stages& stages_of(const Plan& p) {
    const PipelineOptions& o = p.options.pipeline;
    const auto [made, is_new] = known_stages.try_emplace({o.pp_schedule, o.pp, p.micro_batches, o.vpp});
    if (is_new) {
      const Schedule schedule = chosen_schedule(o, o.pp, p.micro_batches);
      TrainingConfig model = p.options;
      if (gpu.equal_stages > 0) model.model.vocab_size = 0;  // so a head costs nothing (layers_of_rank)
      auto& [ranks, channels] = made->second;
      for (int stage = 0; stage < o.pp; ++stage) {
        ranks.push_back(pipeline_rank(model, schedule, stage));
        channels = std::max(channels, channels_of_pipeline(schedule, stage, /*sums_copies=*/false));
      }
    }
    return made->second;
  }

  void set_memory(Plan& p) {
    const auto& [ranks, channels] = stages_of(p);
    for (const PipelineRank& rank : ranks) {
      p.stages.push_back(predict_memory(p.options, p.shape, rank).total());
      if (gpu.gradient_bytes > 0) p.stages.back()[Purpose::gradients] *= gpu.gradient_bytes / sizeof(accum);
    }
    p.libraries = libraries_of(p.options, p.shape, channels);
  }
  void set_coarse_time(Plan& p) {
    p.parts = CoarseCost(p.options, p.shape, stages_of(p).ranks, p.micro_batches, gpu).step();
    for (const auto& [part, seconds] : p.parts) p.seconds += seconds;
  }
};

}  // namespace pentatron
