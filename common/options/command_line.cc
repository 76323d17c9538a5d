#include "options/command_line.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace pentatron {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;  // keys stay in their order

// A file that is there, or a folder that can have it. The file stays open, or a pipe's reader would end.
void check_writable(const std::string& option, const std::string& path) {
  std::error_code ignored;
  const fs::path file = fs::absolute(path);
  const bool good = fs::exists(file, ignored) ? open(file.c_str(), O_WRONLY | O_NONBLOCK | O_CLOEXEC) >= 0
                                              : access((file.parent_path() / ".").c_str(), W_OK) == 0;
  require(good, option, path, "a file that can be written");
}

bool same_file(const std::string& a, const std::string& b) {  // also one that does not exist yet
  std::error_code ignored;
  const auto whole = [&](const std::string& path) {
    return fs::weakly_canonical(fs::absolute(path), ignored);
  };
  return !a.empty() && !b.empty() && (fs::equivalent(a, b, ignored) || whole(a) == whole(b));
}

}  // namespace

std::string join(const std::vector<std::string>& words, const std::string& separator) {
  std::string joined;
  for (const std::string& word : words) joined += (joined.empty() ? "" : separator) + word;
  return joined;
}

CommandLine::CommandLine(std::string_view description)
    : app_(std::make_unique<CLI::App>(std::string(description))) {
  app_->get_formatter()->column_width(36);
  app_->set_help_flag("-h,--help", "print this text and end")->group("Help");
  app_->set_version_flag("--version", version(), "print the version and the commit, and end")->group("Help");
  app_->allow_extras();  // parse() complains later: a wrong value may have caused them
}
CommandLine::~CommandLine() = default;

void CommandLine::footer(const std::string& words) { app_->footer(words); }

void CommandLine::add(const std::string& option, const std::string& placeholder, const std::string& help,
                      std::function<void(const std::string&)> assign, std::function<OptionValue()> value,
                      const std::string& preset) {
  const auto as_text = [](const auto& present) { return text(present); };
  const std::string words = preset.empty() ? std::visit(as_text, value()) : preset;
  CLI::Option* added =
      app_->add_option(option, CLI::callback_t(), words.empty() ? help : help + " [" + words + "]");
  added->type_name(placeholder)->group(group_);
  added->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  entries_.push_back({added, std::move(assign), std::move(value)});
}

void CommandLine::flag(const std::string& option, bool& value, const std::string& help) {
  CLI::Option* added = app_->add_flag(option, help)->group(group_);
  const auto assign = [option, &value](const std::string& given) {
    require(given == "true", option, given, "no value");  // what CLI11 has where nothing is given
    value = true;
  };
  entries_.push_back({added, assign, [&value] { return value; }});
}

void CommandLine::parse(int argc, const char* const* argv) {
  try {
    app_->parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    throw HelpRequest(app_->help());
  } catch (const CLI::CallForVersion&) {
    throw HelpRequest(app_->version() + '\n');
  } catch (const CLI::ArgumentMismatch& error) {
    const std::string message = error.what();  // "--steps: 1 required ..."
    throw UsageError(message.substr(0, message.find_first_of(": ")) +
                     ": value missing; expected one after it");
  } catch (const CLI::ParseError& error) {
    throw UsageError(error.what());
  }
  assign_given();
  if (!app_->remaining().empty()) {
    throw UsageError(app_->remaining().front() + ": unknown option; expected one of those that --help lists");
  }
}

void CommandLine::assign_given() {
  for (const Entry& entry : entries_) {
    if (entry.option->count() > 0) entry.assign(entry.option->results().back());
  }
}

bool CommandLine::given(const std::string& option) const { return app_->count(option) > 0; }

void CommandLine::assign(const std::string& name, const std::string& value) {
  for (const Entry& entry : entries_) {
    if (entry.option->get_lnames().front() == name) entry.assign(value);
  }
}

void CommandLine::check() const {
  for (const auto& check : checks_) check();
  for (const File& file : files_) {
    if (!file.is_written || file.path.empty()) continue;
    check_writable(file.option, file.path);
    for (const File& other : files_) {
      const bool is_later = other.is_written && &other >= &file;  // it complains itself
      require(is_later || !same_file(file.path, other.path), file.option, file.path,
              "another file than that of ", other.option);
    }
  }
}

std::string CommandLine::as_json() const {
  Json json;
  for (const Entry& entry : entries_) {
    std::visit([&](const auto& value) { json[entry.option->get_lnames().front()] = value; }, entry.value());
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);  // a path may have any bytes
}

}  // namespace pentatron
