// The options of a program as they are declared, found and printed. Every wrong value throws a UsageError,
// before memory is allocated or a file touched. Its line names the option, the value and what is valid.
#pragma once

#include <algorithm>
#include <charconv>
#include <concepts>
#include <functional>
#include <memory>
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

// --help or --version was given. main() prints what(), the text, on stdout and ends with status 0.
struct HelpRequest : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The values of an enumeration, and what they are called on the command line.
template <class Value>
using Names = std::vector<std::pair<std::string, Value>>;

template <class Value>
std::string name_of(const Names<Value>& names, Value value) {
  for (const auto& [name, named] : names) {
    if (named == value) return name;
  }
  return "?";
}

template <class Value>
std::vector<std::string> words_of(const Names<Value>& names) {
  std::vector<std::string> words;
  for (const auto& [name, named] : names) words.push_back(name);
  return words;
}

std::string version();  // "pentatron 1.0, commit 0123abc"
std::string join(const std::vector<std::string>& words, const std::string& separator);

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
  void footer(const std::string& words);

  // Most declarations may say in words what the default is: `preset`.
  template <class Number>
  void number(const std::string& option, Number& value, std::type_identity_t<Number> lowest,
              std::type_identity_t<Number> highest, const std::string& help, const std::string& preset = "") {
    const bool is_whole = std::integral<Number>;
    const std::string expected = text(is_whole ? "a whole" : "a", " number from ", lowest, " to ", highest);
    const auto assign = [=, &value](const std::string& given) {
      Number number{};
      const char* const all = given.data() + given.size();
      const auto [end, error] = std::from_chars(given.data(), all, number);
      const bool complete = error == std::errc() && end == all;
      require(complete && number >= lowest && number <= highest, option, given, expected);  // not NaN, either
      value = number;
    };
    add(
        option, is_whole ? "N" : "X", help, assign, [&value] { return value; }, preset);
  }
  void flag(const std::string& option, bool& value, const std::string& help);
  void words(const std::string& option, const std::string& placeholder, std::string& words,
             const std::string& help, const std::string& preset = "") {
    const auto assign = [option, &words](const std::string& given) {
      require(!given.empty(), option, given, "a name that is not empty");
      words = given;
    };
    add(
        option, placeholder, help, assign, [&words] { return words; }, preset);
  }
  template <class Value>
  void choice(const std::string& option, Value& value, const Names<Value>& names, const std::string& help) {
    const auto assign = [option, &value, &names](const std::string& given) {
      const auto named = std::ranges::find(names, given, [](const auto& name) { return name.first; });
      require(named != names.end(), option, given, "one of ", join(words_of(names), ", "));
      value = named->second;
    };
    const auto name = [&value, &names] { return name_of(names, value); };
    add(option, join(words_of(names), "|"), help, assign, name);
  }
  // Any other option. `assign` converts and stores its value, and throws UsageError if the value is wrong.
  // `value` returns what was stored.
  void add(const std::string& option, const std::string& placeholder, const std::string& help,
           std::function<void(const std::string&)> assign, std::function<OptionValue()> value,
           const std::string& preset = "");

  // The option's path is that of a file. What is written must be no other option's file, and writable.
  void reads(const std::string& option, const std::string& path) { files_.push_back({option, path, false}); }
  void writes(const std::string& option, const std::string& path) { files_.push_back({option, path, true}); }
  // When all values are known, parse_options calls this: it completes or refuses some of them.
  void afterwards(const std::function<void()>& check) { checks_.push_back(check); }

  void parse(int argc, const char* const* argv);
  void assign_given();  // once more, if their defaults have changed
  bool given(const std::string& option) const;
  // Sets an option, if there is one of this name, as if it had been given.
  void assign(const std::string& name, const std::string& value);
  // Calls what is to be done afterwards. Throws UsageError unless the files could be written. Nothing is
  // written here: the log of an earlier run must survive a request that turns out to be impossible.
  void check() const;
  // A JSON object with the present value of every option: {"layers": 8, ...}.
  std::string as_json() const;

 private:
  struct Entry {
    CLI::Option* option;
    std::function<void(const std::string&)> assign;
    std::function<OptionValue()> value;
  };
  struct File {
    std::string option;
    const std::string& path;
    bool is_written;
  };
  std::unique_ptr<CLI::App> app_;
  std::string group_;
  std::vector<Entry> entries_;
  std::vector<File> files_;
  std::vector<std::function<void()>> checks_;
};

}  // namespace pentatron
