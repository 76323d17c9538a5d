#include "program/log.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <numeric>
#include <ostream>
#include <sstream>

#include "device/errors.h"

namespace pentatron {
namespace {

// 17 significant digits, from which a double is read back unchanged. JSON has no word for infinity and NaN.
std::string json_number(double value) {
  if (!std::isfinite(value)) return "null";
  std::array<char, 32> digits;
  std::snprintf(digits.data(), digits.size(), "%.17g", value);
  return digits.data();
}

std::string json_memory(const MemoryBytes& bytes) {
  std::ostringstream json;
  for (size_t i = 0; i < purposes; ++i) {
    json << (i == 0 ? "{" : ", ") << '"' << purpose_names[i] << "\": " << bytes[i];
  }
  json << '}';
  return json.str();
}

std::string json_step(const StepRecord& record) {
  std::ostringstream json;
  json << "{\"step\": " << record.step << ", \"loss\": " << json_number(record.loss)
       << ", \"grad_norm\": " << json_number(record.grad_norm) << ", \"lr\": " << json_number(record.lr)
       << ", \"tokens\": " << record.tokens << ", \"seconds\": " << json_number(record.seconds)
       << ", \"comm_bytes\": " << record.comm_bytes << '}';
  return json.str();
}

std::string json_summary(const Summary& summary) {
  std::ostringstream json;
  json << "{\"summary\": {\"ranks\": " << summary.ranks.size() << ", \"layout\": {";
  for (const auto& [dimension, degree] : summary.layout) {
    json << (&dimension == &summary.layout.front().first ? "" : ", ") << '"' << dimension << "\": " << degree;
  }
  json << "}, \"parameters\": " << summary.parameters
       << ", \"final_loss\": " << json_number(summary.final_loss)
       << ", \"seconds\": " << json_number(summary.seconds) << ", \"memory\": [";
  for (size_t rank = 0; rank < summary.ranks.size(); ++rank) {
    const RankMemory& memory = summary.ranks[rank].memory;
    json << (rank == 0 ? "" : ", ") << "{\"rank\": " << rank
         << ", \"predicted\": " << json_memory(memory.predicted.total())
         << ", \"of_which_unit_buffers\": " << json_memory(memory.predicted.unit_buffers)
         << ", \"measured\": " << json_memory(memory.measured) << '}';
  }
  json << "], \"communication\": [";
  for (size_t rank = 0; rank < summary.ranks.size(); ++rank) {
    json << (rank == 0 ? "" : ", ") << "{\"rank\": " << rank;
    for (const OperationCount& count : summary.ranks[rank].communication) {
      json << ", \"" << count.operation << "\": {\"calls\": " << count.calls
           << ", \"elements\": " << count.elements << '}';
    }
    json << '}';
  }
  json << "]}}";
  return json.str();
}

// `value` in steps of `base`, with three digits or four.
std::string human(double value, double base, const std::array<const char*, 6>& units) {
  size_t unit = 0;
  while (value >= base - (unit == 0 ? 0.5 : 0.05) &&
         unit + 1 < units.size()) {  // would be rounded up to base
    value /= base;
    ++unit;
  }
  std::ostringstream out;
  const int decimals = unit == 0 ? 0 : value < 9.995 ? 2 : 1;
  out << std::fixed << std::setprecision(decimals) << value << units[unit];
  return out.str();
}

template <size_t columns>
void print_row(std::ostream& out, const std::array<std::string, columns>& cells,
               const std::array<int, columns>& widths) {
  for (size_t i = 0; i < columns; ++i) out << std::setw(widths[i]) << cells[i];
  out << '\n';
}

std::string formatted(const char* format, double value) {
  std::array<char, 32> digits;
  std::snprintf(digits.data(), digits.size(), format, value);
  return digits.data();
}

constexpr std::array<int, 9> step_widths = {8, 9, 11, 11, 10, 10, 9, 12, 11};  // columns, 91 together

}  // namespace

std::string human_bytes(double bytes) {
  return human(bytes, 1024, {" B", " KiB", " MiB", " GiB", " TiB", " PiB"});
}

std::string human_count(double count) { return human(count, 1000, {"", "k", "M", "G", "T", "P"}); }

std::string to_text(const RankReport& report) {
  nlohmann::json json = {{"resident", report.memory.predicted.resident},
                         {"unit_buffers", report.memory.predicted.unit_buffers},
                         {"measured", report.memory.measured},
                         {"communication", nlohmann::json::array()}};
  for (const OperationCount& c : report.communication) {
    json["communication"].push_back({c.operation, c.calls, c.elements});
  }
  return json.dump();
}

RankReport rank_report(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  RankReport report{{{json["resident"], json["unit_buffers"]}, json["measured"]}, {}};
  for (const auto& c : json["communication"]) report.communication.push_back({c[0], c[1], c[2]});
  return report;
}

RunLog::RunLog(std::ostream& out, const std::string& json_path, int steps, int log_every,
               double flops_per_token, double peak_flops)
    : out_(out),
      json_path_(json_path),
      steps_(steps),
      log_every_(log_every),
      flops_per_token_(flops_per_token),
      peak_flops_(peak_flops) {
  if (json_path_.empty()) return;
  json_.open(json_path_);
  if (!json_) throw UsageError("--log-json", json_path_, "a file that can be written");
}

void RunLog::step(const StepRecord& record) {
  if (json_.is_open()) write_json(json_step(record));
  if (record.step == 1) {
    print_row<9>(out_, {"step", "loss", "grad norm", "lr", "tokens/s", "TFLOP/s", "MFU", "memory", "sent"},
                 step_widths);
  }
  unshown_tokens_ += static_cast<double>(record.tokens);
  unshown_seconds_ += record.seconds;
  if (record.step != 1 && record.step != steps_ && record.step % log_every_ != 0) return;

  const double tokens_per_second = unshown_tokens_ / unshown_seconds_;
  const double flops = tokens_per_second * flops_per_token_;
  print_row<9>(
      out_,
      {std::to_string(record.step), formatted("%.4f", record.loss), formatted("%.4f", record.grad_norm),
       formatted("%.2e", record.lr), human_count(tokens_per_second), formatted("%.3g", flops / 1e12),
       peak_flops_ > 0 ? formatted("%.1f %%", 100 * flops / peak_flops_) : "-",
       human_bytes(static_cast<double>(record.memory_peak)),
       human_bytes(static_cast<double>(record.comm_bytes))},
      step_widths);
  out_.flush();
  unshown_tokens_ = unshown_seconds_ = 0;
}

void RunLog::summary(const Summary& summary) {
  print_memory_table(out_, summary.ranks);
  out_.flush();
  if (json_.is_open()) write_json(json_summary(summary));
}

// Flushed line by line: what a run that is killed has done so far can be read.
void RunLog::write_json(const std::string& line) {
  json_ << line << std::endl;
  if (!json_) throw std::runtime_error("cannot write " + json_path_ + " (is the disk full?)");
}

void print_memory_table(std::ostream& out, const std::vector<RankReport>& ranks) {
  constexpr std::array<int, 4> widths = {16, 14, 14, 14};
  const auto row = [&](std::string_view name, size_t predicted, size_t measured) {
    const double difference = static_cast<double>(measured) / static_cast<double>(predicted) - 1;
    print_row<4>(out,
                 {std::string(name), human_bytes(static_cast<double>(predicted)),
                  human_bytes(static_cast<double>(measured)),
                  predicted > 0 ? formatted("%+.2f %%", 100 * difference) : "-"},
                 widths);
  };
  const auto largest = [&](auto bytes_of) {
    size_t bytes = 0;
    for (const RankReport& rank : ranks) bytes = std::max(bytes, bytes_of(rank.memory));
    return bytes;
  };
  const auto total = [](const MemoryBytes& bytes) {
    return std::accumulate(bytes.begin(), bytes.end(), size_t{0});
  };

  out << "\nDevice memory at the peak";
  if (ranks.size() > 1) out << ", the largest of " << ranks.size() << " ranks";
  out << '\n';
  print_row<4>(out, {"", "predicted", "measured", "difference"}, widths);
  for (size_t i = 0; i < purposes; ++i) {
    row(purpose_names[i], largest([&](const RankMemory& rank) { return rank.predicted.total()[i]; }),
        largest([&](const RankMemory& rank) { return rank.measured[i]; }));
  }
  row("sum", largest([&](const RankMemory& rank) { return total(rank.predicted.total()); }),
      largest([&](const RankMemory& rank) { return total(rank.measured); }));
  for (size_t i = 0; i < purposes; ++i) {
    const size_t unit_buffers =
        largest([&](const RankMemory& rank) { return rank.predicted.unit_buffers[i]; });
    if (unit_buffers > 0) {
      out << "  (" << purpose_names[i] << ": of which unit buffers "
          << human_bytes(static_cast<double>(unit_buffers)) << ")\n";
    }
  }
}

}  // namespace pentatron
