#include "program/command_line.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <sstream>

namespace pentatron {
namespace {

using Json = nlohmann::ordered_json;  // keys stay in their order

template <class Number>
Number convert(const std::string& option, const std::string& given, Number lowest, Number highest,
               const std::string& expected) {
  Number value{};
  const auto [end, error] = std::from_chars(given.data(), given.data() + given.size(), value);
  const bool complete = error == std::errc() && end == given.data() + given.size();
  if (!complete || !(value >= lowest && value <= highest))
    throw UsageError(option, given, expected);  // NaN too
  return value;
}

// A number, at least `lowest`, and a unit.
bool is_quantity(std::string_view given, double lowest, std::initializer_list<std::string_view> units) {
  double value = 0;
  const char* const end = given.data() + given.size();
  const auto [unit, error] = std::from_chars(given.data(), end, value);
  return error == std::errc() && std::isfinite(value) && value >= lowest &&
         std::find(units.begin(), units.end(), std::string_view(unit, end - unit)) != units.end();
}

void check_writable(const std::string& option, const std::string& path) {
  std::error_code ignored;
  const bool exists = std::filesystem::exists(path, ignored);
  const std::string parent = std::filesystem::path(path).parent_path().string();
  const std::string folder = parent.empty() ? "." : parent;
  const bool writable =
      exists ? !std::filesystem::is_directory(path, ignored) && access(path.c_str(), W_OK) == 0
             : std::filesystem::is_directory(folder, ignored) && access(folder.c_str(), W_OK) == 0;
  if (!writable) throw UsageError(option, path, "a file that can be written");
}

bool same_file(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return false;
  namespace fs = std::filesystem;
  std::error_code ignored;  // a file that does not exist yet equals no other
  return fs::equivalent(a, b, ignored) || fs::weakly_canonical(fs::absolute(a, ignored), ignored) ==
                                              fs::weakly_canonical(fs::absolute(b, ignored), ignored);
}

}  // namespace

std::string text(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

std::string join(const std::vector<std::string>& words, const std::string& separator) {
  std::string joined;
  for (const std::string& word : words) joined += (joined.empty() ? "" : separator) + word;
  return joined;
}

double convert_number(const std::string& option, const std::string& given, double lowest, double highest,
                      const std::string& expected) {
  return convert(option, given, lowest, highest, expected);
}

struct CommandLine::Declared {
  struct Entry {
    CLI::Option* option;
    std::function<void(const std::string&)> assign;
    std::function<OptionValue()> value;
  };
  struct File {
    std::string option;
    const std::string& path;
  };
  CLI::App app;
  std::string group;
  std::vector<Entry> entries;
  std::vector<File> inputs, outputs;
  std::vector<std::string> training;
};

CommandLine::CommandLine(std::string_view description) : declared_(std::make_unique<Declared>()) {
  CLI::App& app = declared_->app;
  app.description(std::string(description));
  app.get_formatter()->column_width(36);
  app.set_help_flag("--help", "print this text and end")->group("Help");
  app.allow_extras();  // parse() complains later: a wrong value may have caused them
}
CommandLine::~CommandLine() = default;

void CommandLine::group(const std::string& name) { declared_->group = name; }
void CommandLine::footer(const std::string& words) { declared_->app.footer(words); }

void CommandLine::add(const std::string& option, const std::string& placeholder, const std::string& preset,
                      const std::string& help, std::function<void(const std::string&)> assign,
                      std::function<OptionValue()> value) {
  const std::string shown = preset.empty() ? help : help + " [" + preset + "]";
  CLI::Option* added = declared_->app.add_option(option, CLI::callback_t(), shown);
  added->type_name(placeholder)->group(declared_->group);
  added->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  declared_->entries.push_back({added, std::move(assign), std::move(value)});
}

template <class Integer>
void CommandLine::whole(const std::string& option, Integer& value, Integer lowest, Integer highest,
                        const std::string& help, const std::string& preset) {
  const auto assign = [=, &value](const std::string& given) {
    const std::string expected =
        "a whole number from " + std::to_string(lowest) + " to " + std::to_string(highest);
    value = convert(option, given, lowest, highest, expected);
  };
  using Wide = std::conditional_t<std::is_signed_v<Integer>, int64_t, uint64_t>;
  add(option, "N", preset.empty() ? std::to_string(value) : preset, help, assign,
      [&value] { return static_cast<Wide>(value); });
}
template void CommandLine::whole(const std::string&, int&, int, int, const std::string&, const std::string&);
template void CommandLine::whole(const std::string&, int64_t&, int64_t, int64_t, const std::string&,
                                 const std::string&);
template void CommandLine::whole(const std::string&, uint64_t&, uint64_t, uint64_t, const std::string&,
                                 const std::string&);

void CommandLine::number(const std::string& option, double& value, double lowest, double highest,
                         const std::string& help, const std::string& preset) {
  const auto assign = [=, &value](const std::string& given) {
    const std::string expected = "a number from " + text(lowest) + " to " + text(highest);
    value = convert(option, given, lowest, highest, expected);
  };
  add(option, "X", preset.empty() ? text(value) : preset, help, assign, [&value] { return value; });
}

void CommandLine::flag(const std::string& option, bool& value, const std::string& help) {
  CLI::Option* added = declared_->app.add_flag(option, help);
  added->group(declared_->group);
  declared_->entries.push_back(
      {added, [&value](const std::string&) { value = true; }, [&value] { return value; }});
}

void CommandLine::link(const std::string& option, std::string& link, const std::string& help) {
  const auto assign = [=, &link](const std::string& given) {
    const size_t comma = std::min(given.find(','), given.size());
    const std::string_view all = given, latency = all.substr(0, comma);
    const std::string_view bandwidth = all.substr(std::min(comma + 1, all.size()));
    if (!is_quantity(latency, 0, {"ns", "us", "ms", "s"}) ||
        !is_quantity(bandwidth, 1, {"B/s", "KB/s", "MB/s", "GB/s"})) {
      throw UsageError(option, given, "a latency and a bandwidth such as 5us,50GB/s");
    }
    link = given;
  };
  add(option, "LINK", "", help, assign, [&link] { return link; });
}

void CommandLine::folder(const std::string& option, std::string& path, const std::string& help) {
  add(
      option, "DIR", "", help, [&path](const std::string& given) { path = given; }, [&path] { return path; });
}

void CommandLine::input(const std::string& option, std::string& path, const std::string& help) {
  add(
      option, "FILE", "", help, [&path](const std::string& given) { path = given; },
      [&path] { return path; });
  reads(option, path);
}

void CommandLine::output(const std::string& option, std::string& path, const std::string& help) {
  add(
      option, "FILE", "", help, [&path](const std::string& given) { path = given; },
      [&path] { return path; });
  declared_->outputs.push_back({option, path});
}

void CommandLine::reads(const std::string& option, const std::string& path) {
  declared_->inputs.push_back({option, path});
}

void CommandLine::of_training(std::initializer_list<const char*> names) {
  declared_->training.insert(declared_->training.end(), names.begin(), names.end());
}
const std::vector<std::string>& CommandLine::training() const { return declared_->training; }

void CommandLine::parse(int argc, const char* const* argv) {
  CLI::App& app = declared_->app;
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    throw HelpRequest(app.help());
  } catch (const CLI::ArgumentMismatch& error) {
    const std::string message = error.what();  // "--steps: 1 required ..."
    throw UsageError(message.substr(0, message.find_first_of(": ")) +
                     ": value missing; expected one after it");
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  for (const Declared::Entry& entry : declared_->entries) {
    if (entry.option->count() > 0) entry.assign(entry.option->results().back());
  }
  if (!app.remaining().empty()) {
    throw UsageError(app.remaining().front() + ": unknown option; expected one of those that --help lists");
  }
}

bool CommandLine::given(const std::string& option) const {
  const CLI::Option* const found = declared_->app.get_option_no_throw(option);
  return found && found->count() > 0;
}

void CommandLine::assign(const std::string& name, const std::string& value) {
  for (const Declared::Entry& entry : declared_->entries) {
    if (entry.option->get_lnames().front() == name) entry.assign(value);
  }
}

void CommandLine::check_files() const {
  const std::vector<Declared::File>& outputs = declared_->outputs;
  for (const auto& [option, path] : outputs) {
    if (path.empty()) continue;
    for (const auto& [input, its_path] : declared_->inputs) {
      if (same_file(path, its_path)) throw UsageError(option, path, "another file than that of " + input);
    }
    check_writable(option, path);
    for (const auto& [other, its_path] : outputs) {
      if (other == option) break;
      if (same_file(path, its_path)) throw UsageError(option, path, "another file than that of " + other);
    }
  }
}

std::string CommandLine::as_json() const {
  Json json;
  for (const Declared::Entry& entry : declared_->entries) {
    std::visit([&](const auto& value) { json[entry.option->get_lnames().front()] = value; }, entry.value());
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);  // a path may have any bytes
}

}  // namespace pentatron
