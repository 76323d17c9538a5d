// The options of a program as they are declared, found and printed. Every wrong value throws a UsageError,
// before any memory is allocated or any file is touched. Its one line names the option, the value and what
// would be valid.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "device/errors.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace pentatron {

// --help was given. main() prints what(), the help text, on stdout and ends with status 0.
struct HelpRequest : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The values of an enumeration, and what they are called on the command line.
template <class Value>
using Names = std::vector<std::pair<std::string_view, Value>>;

template <class Value>
std::string_view name_of(const Names<Value>& names, Value value) {
  for (const auto& [name, named] : names) {
    if (named == value) return name;
  }
  return "?";
}

template <class Value>
std::vector<std::string> words_of(const Names<Value>& names) {
  std::vector<std::string> words;
  for (const auto& [name, named] : names) words.emplace_back(name);
  return words;
}

std::string join(const std::vector<std::string>& words, const std::string& separator);

// The values, one after the other. A double is as short as possible: 0.003, 1e-08.
template <class... Values>
std::string text(const Values&... values) {
  std::ostringstream out;
  (out << ... << values);
  return out.str();
}

// Throws UsageError unless `good`. `expected`: what would be valid, in parts.
template <class Given, class... Expected>
void require(bool good, const std::string& option, const Given& given, const Expected&... expected) {
  if (!good) throw UsageError(option, text(given), text(expected...));
}

// What an option has, for the JSON of a log.
using OptionValue = std::variant<bool, int64_t, uint64_t, double, std::string>;

// CLI11 finds the options in the arguments and prints the help. The values are converted here, in the order
// of declaration, so that every complaint has the same form and --model comes before the options that
// override its sizes. An option's present value is its default, which --help shows.
class CommandLine {
 public:
  explicit CommandLine(std::string_view description);
  ~CommandLine();

  // Under which --help prints what is declared from now on.
  void group(const std::string& name) { group_ = name; }

  // Integer: int, int64_t or uint64_t. `preset`: the default in words.
  template <class Integer>
  void whole(const std::string& option, Integer& value, Integer lowest, Integer highest,
             const std::string& help, const std::string& preset = "") {
    add_number(option, "N", value, lowest, highest, "a whole number", help, preset);
  }
  void number(const std::string& option, double& value, double lowest, double highest,
              const std::string& help, const std::string& preset = "") {
    add_number(option, "X", value, lowest, highest, "a number", help, preset);
  }
  // `then`, if there is one, is called when the flag is given.
  void flag(const std::string& option, bool& value, const std::string& help,
            const std::function<void()>& then = {});
  // `check`, if there is one, throws UsageError, or sets what depends on the words.
  void words(const std::string& option, const std::string& placeholder, std::string& words,
             const std::string& help, const std::function<void(const std::string&)>& check = {}) {
    const auto assign = [=, &words](const std::string& given) {
      if (check) check(given);
      words = given;
    };
    add(option, placeholder, words, help, assign, [&words] { return words; });
  }
  // Files that are read must not be among those that are written, and these must be different.
  void input(const std::string& option, std::string& path, const std::string& help) {
    words(option, "FILE", path, help);
    reads(option, path);
  }
  void output(const std::string& option, std::string& path, const std::string& help) {
    words(option, "FILE", path, help);
    outputs_.push_back({option, path});
  }
  template <class Value>
  void choice(const std::string& option, Value& value, const Names<Value>& names, const std::string& help) {
    const auto assign = [option, &value, &names](const std::string& given) {
      const auto named = std::ranges::find(names, given, [](const auto& name) { return name.first; });
      require(named != names.end(), option, given, "one of ", join(words_of(names), ", "));
      value = named->second;
    };
    const auto name = [&value, &names] { return std::string(name_of(names, value)); };
    add(option, join(words_of(names), "|"), name(), help, assign, name);
  }
  // Any other option. `assign` converts and stores its value, and throws UsageError if the value is wrong.
  // `value` returns what was stored.
  void add(const std::string& option, const std::string& placeholder, const std::string& preset,
           const std::string& help, std::function<void(const std::string&)> assign,
           std::function<OptionValue()> value);
  // The file of an option that `add` declared is read, if the path is not empty.
  void reads(const std::string& option, const std::string& path) { inputs_.push_back({option, path}); }
  // --load takes these from the checkpoint, unless they are given. Without "--".
  void of_training(std::initializer_list<const char*> names) {
    training_.insert(training_.end(), names.begin(), names.end());
  }
  void footer(const std::string& words);

  void parse(int argc, const char* const* argv);
  bool given(const std::string& option) const;
  // Sets an option, if there is one of this name, as if it had been given.
  void assign(const std::string& name, const std::string& value);
  const std::vector<std::string>& training() const { return training_; }
  // Throws UsageError unless the output files could be written. Nothing is written here: the log of an
  // earlier run must survive a request that turns out to be impossible.
  void check_files() const;
  // A JSON object with the present value of every option: {"layers": 8, ...}.
  std::string as_json() const;

 private:
  template <class Number>
  void add_number(const std::string& option, const char* placeholder, Number& value, Number lowest,
                  Number highest, const char* kind, const std::string& help, const std::string& preset) {
    const std::string expected = text(kind, " from ", lowest, " to ", highest);
    const auto assign = [=, &value](const std::string& given) {
      Number number{};
      const char* const all = given.data() + given.size();
      const auto [end, error] = std::from_chars(given.data(), all, number);
      const bool complete = error == std::errc() && end == all;
      require(complete && number >= lowest && number <= highest, option, given, expected);  // not NaN, either
      value = number;
    };
    add(option, placeholder, preset.empty() ? text(value) : preset, help, assign, [&value] { return value; });
  }

  struct Entry {
    CLI::Option* option;
    std::function<void(const std::string&)> assign;
    std::function<OptionValue()> value;
  };
  struct File {
    std::string option;
    const std::string& path;
  };
  std::unique_ptr<CLI::App> app_;
  std::string group_;
  std::vector<Entry> entries_;
  std::vector<File> inputs_, outputs_;
  std::vector<std::string> training_;
};

}  // namespace pentatron
