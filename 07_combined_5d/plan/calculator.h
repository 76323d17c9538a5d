// The memory of many layouts of a model, as tables: a page that has them needs no formula of its own. Memory
// has parts that depend on different choices, so three small tables serve instead of a huge one.
//
//   table        bytes of                          axes
//   states       weights, gradients, optimizer     tp, pp, seq_len, zero, replicas
//   activations  activations, communication        tp, pp, sp, recompute, seq_len, mbs, cp
//   libraries    CUDA and NCCL                     tp, cp, pp, replicas
//
// (replicas = dp x cp; seq_len decides how many layers a stage has.) An entry of the first two is a list:
// bytes of the first pipeline stage, then of the last one. The stages between need less. It is null where 07
// refuses the layout. The schedule is 1F1B.
#pragma once

#include <nlohmann/json.hpp>

#include "layouts.h"

namespace pentatron {

class Calculator {
 public:
  using Json = nlohmann::ordered_json;
  static constexpr int micro_batches = 8;  // of a data rank in a step

  explicit Calculator(const CombinedOptions& model) : model_(model) {}

  // {"precision", "micro_batches", "attention", "choices": the values of each axis, and the tables}.
  Json tables() const {
    Json result = {{"precision", precision_name}, {"micro_batches", micro_batches}};
    result["attention"] = to_string(model_.attention);
    for (const Axis& axis : axes_) result["choices"][axis.name] = axis.values;
    result["states"] = table({"tp", "pp", "seq_len", "zero", "replicas"},
                             [](const CombinedOptions& c) { return stages_of(c, 0, 3); });
    result["activations"] = table({"tp", "pp", "sp", "recompute", "seq_len", "mbs", "cp"},
                                  [](const CombinedOptions& c) { return stages_of(c, 3, purposes); });
    result["libraries"] =
        table({"tp", "cp", "pp", "replicas"}, [](const CombinedOptions& c) { return Json(libraries_of(c)); });
    return result;
  }

 private:
  struct Axis {
    std::string name;
    std::vector<Json> values;
    std::function<void(CombinedOptions&, const Json&)> choose;
  };

  // Nested arrays: for each value of the first axis those of the other axes.
  Json table(std::vector<std::string> names, const std::function<Json(const CombinedOptions&)>& entry) const {
    CombinedOptions choice = model_;
    choice.pipeline.pp = choice.dp = 1, choice.micro_batch_size = 1;
    return table(names, entry, choice);
  }
  Json table(std::vector<std::string> names, const std::function<Json(const CombinedOptions&)>& entry,
             CombinedOptions choice) const {
    if (names.empty()) return entry(choice);
    const Axis& axis = *std::ranges::find(axes_, names.front(), &Axis::name);
    names.erase(names.begin());
    Json entries = Json::array();
    for (const Json& value : axis.values) {
      axis.choose(choice, value);
      entries.push_back(table(names, entry, choice));
    }
    return entries;
  }

  // The bytes of the purposes [from, to) in the first stage and in the last one.
  static Json stages_of(CombinedOptions options, size_t from, size_t to) {
    const MeshShape shape = shape_of(options);
    options.global_batch_size = micro_batches * options.micro_batch_size * shape.dp;
    Json entry = Json::array();
    try {
      check_combined(options, shape);
    } catch (const UsageError&) {
      return {};
    }
    const Schedule schedule = make_schedule(options.pipeline, shape.pp, micro_batches);
    for (int stage = 0; stage < shape.pp; stage += std::max(1, shape.pp - 1)) {
      const MemoryBytes bytes =
          predict_memory(options, element_sizes, shape, stage_share(options, schedule, stage)).total();
      entry.push_back(std::vector<size_t>(bytes.begin() + from, bytes.begin() + to));
    }
    return entry;
  }

  const CombinedOptions model_;
  std::vector<Axis> axes_ = {
      {"seq_len",
       {1024, 2048, 4096, 8192, 16384, 32768},
       [](CombinedOptions& c, const Json& v) { c.sequence_length = v; }},
      {"mbs", {1, 2, 4, 8}, [](CombinedOptions& c, const Json& v) { c.micro_batch_size = v; }},
      {"tp", {1, 2, 4, 8}, [](CombinedOptions& c, const Json& v) { c.tp = v; }},
      {"sp", {false, true}, [](CombinedOptions& c, const Json& v) { c.tensor.sequence_parallel = v; }},
      {"cp", {1, 2, 4, 8}, [](CombinedOptions& c, const Json& v) { c.cp = v; }},
      {"pp", {1, 2, 4, 8}, [](CombinedOptions& c, const Json& v) { c.pipeline.pp = v; }},
      {"dp", {1, 2, 4, 8, 16, 32}, {}},
      {"replicas", {1, 2, 4, 8, 16, 32, 64, 128, 256}, [](CombinedOptions& c, const Json& v) { c.dp = v; }},
      {"zero", {0, 1, 2, 3}, [](CombinedOptions& c, const Json& v) { c.zero.zero_stage = v; }},
      {"recompute",
       {"none", "full"},
       [](CombinedOptions& c, const Json& v) {
         c.recompute = v == "full" ? Recompute::full : Recompute::none;
       }},
  };
};

}  // namespace pentatron
