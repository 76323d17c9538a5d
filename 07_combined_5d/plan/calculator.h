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

  explicit Calculator(const CombinedOptions& model) : model_(model) {
    model_.pipeline.pp = model_.dp = 1, model_.micro_batch_size = 1;
  }

  // {"precision", "micro_batches", "attention", "choices": the values of each axis, and the tables}.
  Json tables() const {
    Json result = {{"precision", precision_name}, {"micro_batches", micro_batches}};
    result["attention"] = to_string(model_.attention);
    result["choices"] = choices_;
    result["states"] = table({"tp", "pp", "seq_len", "zero", "replicas"}, model_,
                             [](const CombinedOptions& c) { return stages_of(c, 0, 3); });
    result["activations"] = table({"tp", "pp", "sp", "recompute", "seq_len", "mbs", "cp"}, model_,
                                  [](const CombinedOptions& c) { return stages_of(c, 3, purposes); });
    result["libraries"] = table({"tp", "cp", "pp", "replicas"}, model_,
                                [](const CombinedOptions& c) { return Json(libraries_of(c)); });
    return result;
  }

 private:
  // Nested arrays: for each value of the first axis those of the other axes.
  Json table(std::vector<std::string> axes, CombinedOptions choice,
             const std::function<Json(const CombinedOptions&)>& entry) const {
    if (axes.empty()) return entry(choice);
    const std::string axis = axes.front();
    axes.erase(axes.begin());
    Json entries = Json::array();
    for (const Json& value : choices_[axis]) {
      if (axis == "sp") choice.tensor.sequence_parallel = value;
      if (axis == "recompute") choice.recompute = value == "full" ? Recompute::full : Recompute::none;
      const std::map<std::string, int*> numbers = {{"seq_len", &choice.sequence_length},
                                                   {"mbs", &choice.micro_batch_size},
                                                   {"tp", &choice.tp},
                                                   {"cp", &choice.cp},
                                                   {"pp", &choice.pipeline.pp},
                                                   {"replicas", &choice.dp},
                                                   {"zero", &choice.zero.zero_stage}};
      if (numbers.contains(axis)) *numbers.at(axis) = value;
      entries.push_back(table(axes, choice, entry));
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

  CombinedOptions model_;
  const Json choices_ = {{"seq_len", {1024, 2048, 4096, 8192, 16384, 32768}},
                         {"mbs", {1, 2, 4, 8}},
                         {"tp", {1, 2, 4, 8}},
                         {"sp", {false, true}},
                         {"cp", {1, 2, 4, 8}},
                         {"pp", {1, 2, 4, 8}},
                         {"dp", {1, 2, 4, 8, 16, 32}},
                         {"replicas", {1, 2, 4, 8, 16, 32, 64, 128, 256}},
                         {"zero", {0, 1, 2, 3}},
                         {"recompute", {"none", "full"}}};
};

}  // namespace pentatron
