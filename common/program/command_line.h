// The options of a program as they are declared, found and printed. Every wrong value throws a UsageError,
// before any memory is allocated or any file is touched. Its one line names the option, the value and what
// would be valid.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "device/errors.h"

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
std::string text(double value);  // as short as possible: 0.003, 1e-08

// Converts all of `given`. Throws UsageError that says what was `expected`.
double convert_number(const std::string& option, const std::string& given, double lowest, double highest,
                      const std::string& expected);

// What an option has, for the JSON of a log.
using OptionValue = std::variant<bool, int64_t, uint64_t, double, std::string, std::vector<double>>;

// CLI11 finds the options in the arguments and prints the help. The values are converted here, in the order
// of declaration, so that every complaint has the same form and --model comes before the options that
// override its sizes. An option's present value is its default, which --help shows.
class CommandLine {
 public:
  explicit CommandLine(std::string_view description);
  ~CommandLine();

  void group(const std::string& name);  // under which --help prints what is declared from now on

  // Integer: int, int64_t or uint64_t. `preset`: the default in words.
  template <class Integer>
  void whole(const std::string& option, Integer& value, Integer lowest, Integer highest,
             const std::string& help, const std::string& preset = "");
  void number(const std::string& option, double& value, double lowest, double highest,
              const std::string& help, const std::string& preset = "");
  void flag(const std::string& option, bool& value, const std::string& help);
  void link(const std::string& option, std::string& link, const std::string& help);
  void folder(const std::string& option, std::string& path, const std::string& help);
  // Files that are read must not be among those that are written, and these must be different.
  void input(const std::string& option, std::string& path, const std::string& help);
  void output(const std::string& option, std::string& path, const std::string& help);
  template <class Value>
  void choice(const std::string& option, Value& value, const Names<Value>& names, const std::string& help) {
    const auto assign = [option, &value, &names](const std::string& given) {
      for (const auto& [name, named] : names) {
        if (name == given) {
          value = named;
          return;
        }
      }
      throw UsageError(option, given, "one of " + join(words_of(names), ", "));
    };
    add(option, join(words_of(names), "|"), std::string(name_of(names, value)), help, assign,
        [&value, &names] { return std::string(name_of(names, value)); });
  }
  // Any other option. `assign` converts and stores its value, and throws UsageError if the value is wrong.
  // `value` returns what was stored.
  void add(const std::string& option, const std::string& placeholder, const std::string& preset,
           const std::string& help, std::function<void(const std::string&)> assign,
           std::function<OptionValue()> value);
  // The file of an option that `add` declared is read, if the path is not empty.
  void reads(const std::string& option, const std::string& path);
  // --load takes these from the checkpoint, unless they are given. Without "--".
  void of_training(std::initializer_list<const char*> names);
  void footer(const std::string& words);

  void parse(int argc, const char* const* argv);
  bool given(const std::string& option) const;
  // Sets an option, if there is one of this name, as if it had been given.
  void assign(const std::string& name, const std::string& value);
  const std::vector<std::string>& training() const;
  // Throws UsageError unless the output files could be written. Nothing is written here: the log of an
  // earlier run must survive a request that turns out to be impossible.
  void check_files() const;
  // A JSON object with the present value of every option: {"layers": 8, ...}.
  std::string as_json() const;

 private:
  struct Declared;
  std::unique_ptr<Declared> declared_;
};

}  // namespace pentatron
