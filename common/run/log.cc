#include "run/log.h"

#include <algorithm>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <numeric>
#include <ostream>
#include <span>

#include "device/errors.h"

namespace pentatron {

namespace trace {
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Overlap::Stream, seconds, hidden)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Overlap, seconds, compute, communication)
}  // namespace trace

void from_json(const nlohmann::json& json, MemoryBytes& bytes) {
  json.get_to<std::array<size_t, purposes>>(bytes);
}
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(MemoryPrediction, resident, unit_buffers)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankMemory, predicted, measured, libraries, measured_libraries)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Traffic, calls, elements, sent_bytes)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RankReport, memory, communication, overlap, rank, stands_for)

namespace {

std::string percent(double share) { return formatted("%.1f %%", 100 * share); }

using Json = nlohmann::ordered_json;  // keys stay in their order
Json json_of(const MemoryBytes& bytes) {
  Json json;
  for (size_t i = 0; i < purposes; ++i) json[std::string(purpose_names[i])] = bytes[i];
  return json;
}

// Of the world, with those that are absent.
int number_of(const std::vector<RankReport>& ranks) {
  return std::transform_reduce(ranks.begin(), ranks.end(), 0, std::plus(),
                               [](const RankReport& rank) { return rank.stands_for; });
}

// The mean of all ranks, each as the one that stands for it, and of the steps that their reports count. All
// numbers are 0 where time is measured, not modelled.
trace::Overlap mean_overlap(const std::vector<RankReport>& ranks, int steps) {
  const double n = number_of(ranks) * steps;
  trace::Overlap mean;
  for (const RankReport& rank : ranks) {
    const double share = rank.stands_for / n;
    trace::Overlap part = rank.overlap;
    part.seconds *= share;
    part.compute *= share;
    for (auto& [name, stream] : part.communication) {
      stream.seconds *= share;
      stream.hidden *= share;
    }
    mean += part;
  }
  return mean;
}

double hidden_share(trace::Overlap::Stream stream) {
  return stream.seconds > 0 ? stream.hidden / stream.seconds : 0;
}

Json json_of(const trace::Overlap& overlap, double mfu) {
  const trace::Overlap::Stream communication = overlap.all_communication();
  return {{"seconds", overlap.seconds},
          {"compute_seconds", overlap.compute},
          {"communication_seconds", communication.seconds},
          {"hidden", hidden_share(communication)},
          {"mfu", mfu}};
}

Json json_of(const Summary& summary, const trace::Overlap& overlap, double mfu) {
  const int ranks = number_of(summary.ranks);
  Json layout = Json::object(), streams = Json::object();
  Json memory = Json::array(), communication = Json::array();
  for (const auto& [dimension, degree] : summary.layout) layout[dimension] = degree;
  for (const auto& [name, stream] : overlap.communication)
    streams[name] = {{"seconds", stream.seconds}, {"hidden", hidden_share(stream)}};
  for (const RankReport& report : summary.ranks) {
    const auto& [predicted, measured, libraries, measured_libraries] = report.memory;
    memory.push_back({{"rank", report.rank},
                      {"predicted", json_of(predicted.total())},
                      {"of_which_unit_buffers", json_of(predicted.unit_buffers)},
                      {"measured", json_of(measured)},
                      {"libraries", {{"estimated", libraries}, {"measured", measured_libraries}}}});
    if (ranks > std::ssize(summary.ranks)) memory.back()["stands_for"] = report.stands_for;
    Json counts = {{"rank", report.rank}};
    for (const auto& [operation, traffic] : report.communication)
      counts[operation] = {{"calls", traffic.calls}, {"elements", traffic.elements}};
    communication.push_back(counts);
  }
  return {{"summary",
           {{"ranks", ranks},
            {"layout", layout},
            {"parameters", summary.parameters},
            {"final_loss", summary.final_loss},
            {"seconds", summary.seconds},
            {"modelled", overlap.seconds > 0 ? json_of(overlap, mfu) : Json()},
            {"streams", streams},
            {"memory", memory},
            {"communication", communication}}}};
}

constexpr int step_widths[] = {8, 9, 11, 11, 11, 14, 9, 12, 11};  // of columns, 96 together
constexpr int summary_widths[] = {16, 14, 14, 14};

void print_row(std::ostream& out, std::span<const int> widths, const std::vector<std::string>& cells) {
  for (size_t i = 0; i < cells.size(); ++i) out << std::setw(widths[i]) << cells[i];
  out << '\n';
}

// Prints how much communication there was, and how much of it was hidden: the mean of all ranks and steps.
void print_overlap(std::ostream& out, const trace::Overlap& mean, int ranks, bool of_first_step) {
  const auto row = [&](const std::string& name, double seconds, const std::string& hidden) {
    print_row(out, summary_widths, {name, human_seconds(seconds), percent(seconds / mean.seconds), hidden});
  };
  const auto row_of_stream = [&](const std::string& name, trace::Overlap::Stream stream) {
    row(name, stream.seconds, percent(hidden_share(stream)));
  };
  out << "\nModelled time of " << (of_first_step ? "the first step, " : "a step from the second on, ")
      << human_seconds(mean.seconds);
  if (ranks > 1) out << ", a mean of " << ranks << " ranks";
  out << (of_first_step ? ";\na later one may also wait for what it leaves running (--steps 2)\n" : "\n");
  print_row(out, summary_widths, {"", "time", "of the step", "hidden"});
  row("compute", mean.compute, "");
  row("compute idle", mean.seconds - mean.compute, "");
  for (const auto& [name, stream] : mean.communication) row_of_stream(name, stream);
  if (mean.communication.size() > 1) row_of_stream("all communication", mean.all_communication());
}

}  // namespace

std::string to_text(const RankReport& report) { return nlohmann::json(report).dump(); }
RankReport rank_report(const std::string& text) { return nlohmann::json::parse(text); }

RunLog::RunLog(std::ostream& out, const Config& config) : out_(out), config_(config) {
  if (config.json_path.empty()) return;
  json_.open(config.json_path);
  if (!json_) throw UsageError("--log-json", config.json_path, "a file that can be written");
}

double RunLog::mfu(double tokens, double seconds) const {
  if (config_.peak_flops == 0) return 0;
  return tokens * config_.flops_per_token / (seconds * config_.ranks * config_.peak_flops);
}

void RunLog::begin(const std::string& options, const std::string& precision) {
  const Json line = {{"options", Json::parse(options)}, {"precision", precision}, {"ranks", config_.ranks}};
  write_json(line.dump());
}

void RunLog::step(const StepRecord& r) {
  const bool has_scale = r.scale && r.computed;
  Json json = {{"step", r.step},     {"loss", r.loss},       {"grad_norm", r.grad_norm},  {"lr", r.lr},
               {"tokens", r.tokens}, {"seconds", r.seconds}, {"comm_bytes", r.comm_bytes}};
  if (has_scale) json.update({{"loss_scale", r.scale->factor}, {"skipped_steps", r.scale->skipped}});
  if (r.modelled) json["modelled"] = json_of(*r.modelled, mfu(r.tokens, r.modelled->seconds));
  write_json(json.dump());  // a number that is infinite or not one becomes null

  if (r.step == 1) {
    print_row(out_, step_widths,
              {"step", "loss", "grad norm", "lr", "step time", "tokens/s/GPU", "MFU", "memory", "sent"});
  }
  if (all_.number == 0) first_loss_ = r.loss;
  is_dry_run_ = !r.computed;
  for (Steps* steps : {&unshown_, &all_}) {
    ++steps->number;
    steps->tokens += r.tokens;
    steps->seconds += r.modelled ? r.modelled->seconds : r.seconds;
  }
  if (r.step != 1 && r.step != config_.steps && r.step % config_.log_every != 0) return;
  const auto& [number, tokens, seconds] = unshown_;
  const auto computed = [&](double value) {
    return r.computed ? formatted(value < 1e4 ? "%.4f" : "%.1e", value) : "-";
  };
  const double use = mfu(tokens, seconds);
  print_row(out_, step_widths,
            {std::to_string(r.step), computed(r.loss), computed(r.grad_norm), formatted("%.2e", r.lr),
             human_seconds(seconds / number), human_count(tokens / seconds / config_.ranks),
             use > 1e-6 ? percent(use) : "-", human_bytes(r.memory_peak), human_bytes(r.comm_bytes)});
  if (has_scale) {
    out_ << "         loss scale " << formatted("%.0f", r.scale->factor) << ", " << r.scale->skipped
         << (r.scale->skipped == 1 ? " step" : " steps") << " skipped\n";
  }
  out_.flush();
  unshown_ = {};
}

void RunLog::summary(const Summary& summary) {
  print_memory_table(out_, summary.ranks);
  const trace::Overlap mean = mean_overlap(summary.ranks, std::max(1, all_.number - 1));
  if (mean.seconds > 0) {
    print_overlap(out_, mean, number_of(summary.ranks), all_.number == 1);
  }
  if (mean.seconds > 0 && !is_dry_run_) {
    out_ << "\nOn this machine the steps took " << human_seconds(summary.seconds) << ", "
         << human_count(all_.tokens / summary.seconds) << " tokens/s.\n";
  }
  if (all_.number > 0 && summary.final_loss > 2 * first_loss_) {
    out_ << "\nThe run has diverged: its loss was " << formatted("%.4g", first_loss_)
         << " in the first step and " << formatted("%.4g", summary.final_loss)
         << " in the last. A smaller --lr may help.\n";
  }
  out_.flush();
  write_json(json_of(summary, mean, mfu(all_.tokens / all_.number, mean.seconds)).dump());
}

// Flushes every line, so that the log of a killed run can be read up to its last step.
void RunLog::write_json(const std::string& line) {
  if (json_.is_open()) json_ << line << std::endl;
}

void print_memory_table(std::ostream& out, const std::vector<RankReport>& ranks) {
  const auto row = [&](std::string_view name, size_t predicted, size_t measured) {
    const double difference = static_cast<double>(measured) / static_cast<double>(predicted) - 1;
    print_row(out, summary_widths,
              {std::string(name), human_bytes(predicted),
               measured > 0 || predicted == 0 ? human_bytes(measured) : "-",
               predicted > 0 && measured > 0 ? formatted("%+.2f %%", 100 * difference) : "-"});
  };
  const RankReport& fullest = *std::ranges::max_element(
      ranks, {}, [](const RankReport& rank) { return sum_of(rank.memory.measured); });
  const RankMemory& memory = fullest.memory;
  const MemoryBytes predicted = memory.predicted.total();

  out << "\nDevice memory at the peak";
  if (number_of(ranks) > 1)
    out << " of rank " << fullest.rank << ", the fullest of " << number_of(ranks) << " ranks";
  out << '\n';
  print_row(out, summary_widths, {"", "predicted", "measured", "difference"});
  for (size_t i = 0; i < purposes; ++i) row(purpose_names[i], predicted[i], memory.measured[i]);
  row("sum", sum_of(predicted), sum_of(memory.measured));
  if (memory.libraries > 0) row("CUDA, NCCL", memory.libraries, memory.measured_libraries);
  for (size_t i = 0; i < purposes; ++i) {
    if (const size_t unit_buffers = memory.predicted.unit_buffers[i]; unit_buffers > 0)
      out << "  (" << purpose_names[i] << ": of which unit buffers " << human_bytes(unit_buffers) << ")\n";
  }
}

}  // namespace pentatron
