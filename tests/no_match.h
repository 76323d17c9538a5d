// What a filter that no test matches is told.
#pragma once

#include <algorithm>
#include <cctype>
#include <iostream>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "catch.h"

constexpr int kNoTestMatches = 3;  // exit status

inline std::set<std::string> words_of(std::string text) {
  for (char& c : text) c = std::isalnum(static_cast<unsigned char>(c)) ? std::tolower(c) : ' ';
  std::istringstream in(text);
  std::set<std::string> words;
  for (std::string word; in >> word;) words.insert(word);
  return words;
}

// The tests of this program whose names share most words with the filter; at most five, each on a line.
inline void say_that_no_test_matches(const Catch::IConfig& config, const std::string& filter) {
  const std::set<std::string> wanted = words_of(filter);
  std::vector<std::pair<int, std::string>> nearest;  // minus the number of common words, name
  for (const auto& test : Catch::getAllTestCasesSorted(config)) {
#if __has_include(<catch2/catch_all.hpp>)
    const std::string name = test.getTestCaseInfo().name;
#else
    const std::string name = test.name;
#endif
    const std::set<std::string> words = words_of(name);
    const auto common =
        std::count_if(words.begin(), words.end(), [&](const auto& w) { return wanted.contains(w); });
    if (common > 0) nearest.push_back({-static_cast<int>(common), name});
  }
  std::sort(nearest.begin(), nearest.end());
  nearest.resize(std::min<size_t>(nearest.size(), 5));
  std::cerr << "no test here is called " << filter << (nearest.empty() ? "\n" : "; the nearest:\n");
  for (const auto& [rank, name] : nearest) std::cerr << "  " << name << '\n';
}
