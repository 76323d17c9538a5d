#include "options/readable.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

namespace pentatron {

std::string formatted(const char* format, double value) {
  std::array<char, 32> digits;
  std::snprintf(digits.data(), digits.size(), format, value);
  return digits.data();
}

// Writes `value` in one of the units, each `base` times the one before, with three or four digits.
static std::string human(double value, double base, const std::array<const char*, 6>& units) {
  size_t unit = 0;  // what would be rounded up to `base` has the next one
  while (value >= base - (unit == 0 ? 0.5 : 0.05) && unit + 1 < units.size()) {
    value /= base;
    ++unit;
  }
  const char* const digits = value < 9.995 ? "%.2f" : "%.1f";
  return formatted(unit == 0 ? "%.0f" : digits, value) + units[unit];
}

std::string human_bytes(double bytes) {
  return human(bytes, 1024, {" B", " KiB", " MiB", " GiB", " TiB", " PiB"});
}

std::string human_count(double count) { return human(count, 1000, {"", "k", "M", "G", "T", "P"}); }

std::string human_seconds(double seconds) {
  const double amount = seconds * 1e9;  // ns
  for (const auto& [factor, unit] : {std::pair{1e9, " s"}, {1e6, " ms"}, {1e3, " us"}}) {
    if (amount >= 0.9995 * factor) return formatted("%.4g", amount / factor) + unit;
  }
  return formatted("%.4g", amount) + " ns";
}

std::string printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(),
      [](unsigned char c) { return (c < ' ' && c != '\n' && c != '\t') || c == 127; }, '?');
  using Json = nlohmann::json;
  return Json::parse(Json(text).dump(-1, ' ', false, Json::error_handler_t::replace)).get<std::string>();
}

}  // namespace pentatron
