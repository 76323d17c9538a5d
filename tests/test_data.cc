// Token files of every kind, good and damaged; the windows that batches are cut from; the generator that
// picks them.
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "catch.h"
#include "files.h"
#include "kernels/philox.h"
#include "model/data.h"
#include "options/options.h"
#include "run/entropy.h"

using pentatron::TokenData;
using pentatron::UsageError;
using pentatron::tests::TemporaryFolder;

namespace {

template <typename Integer>
std::string bytes_of(const std::vector<Integer>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Integer)};
}

// llm.c's header; `announced` tokens follow.
std::string llmc_header(int32_t magic, int32_t version, int32_t announced) {
  std::vector<int32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = announced;
  return bytes_of(header);
}

std::vector<uint16_t> token_range(int count) {
  std::vector<uint16_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), uint16_t{1000});
  return tokens;
}

// What TokenData says about the file, or "" if it takes it.
std::string complaint_of_data(const std::string& path, int vocab_size = 50257, int sequence_length = 8) {
  try {
    TokenData data(path, vocab_size, sequence_length);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_CASE("philox: known answers", "[01][data]") {
  // From the file kat_vectors of Random123: nothing, everything, and the digits of pi.
  struct Answer {
    pentatron::PhiloxBlock counter;
    pentatron::PhiloxKey key;
    pentatron::PhiloxBlock expected;
  };
  const Answer answers[] = {
      {{{0, 0, 0, 0}}, {{0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{~0u, ~0u, ~0u, ~0u}}, {{~0u, ~0u}}, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {{0xa4093822, 0x299f31d0}},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const Answer& answer : answers) {
    const pentatron::PhiloxBlock block = pentatron::philox4x32(answer.counter, answer.key);
    CHECK(std::equal(block.word, block.word + 4, answer.expected.word));
  }
}

TEST_CASE("philox: a key for each seed and use", "[01][data]") {
  std::set<std::pair<uint32_t, uint32_t>> keys;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 32, ~uint64_t{0}}) {
    for (const char* use : {"", "data", "atad", "model.norm.weight"}) {
      const pentatron::PhiloxKey key = pentatron::philox_key(seed, use);
      keys.insert({key.word[0], key.word[1]});
    }
  }
  CHECK(keys.size() == 16);
}

TEST_CASE("data: a text file is its bytes", "[01][data]") {
  const TemporaryFolder folder;
  const TokenData data(folder.write("a.txt", "abcab\xff"), 256, 5);
  REQUIRE(data.size() == 6);
  CHECK(data[0] == 'a');
  CHECK(data[5] == 255);
}

TEST_CASE("data: entropy of the token frequencies", "[01][data]") {
  const TemporaryFolder folder;
  const TokenData uniform(folder.write("uniform.txt", "abcdabcd"), 256, 4);
  CHECK(std::abs(unigram_entropy(uniform) - std::log(4.0)) < 1e-14);
  const TokenData uneven(folder.write("uneven.txt", "aaab"), 256, 3);
  CHECK(std::abs(unigram_entropy(uneven) + 0.75 * std::log(0.75) + 0.25 * std::log(0.25)) < 1e-14);
}

TEST_CASE("data: entropy of a text of several blocks, and of the samples of a large one", "[01][data]") {
  constexpr int block = 16384, most_blocks = 64;
  const TemporaryFolder folder;
  // Each letter of `blocks` is a block of it; `more` follows.
  const auto entropy = [&](const std::string& blocks, const std::string& more = "") {
    std::string all;
    for (const char letter : blocks) all += std::string(block, letter);
    return unigram_entropy(TokenData(folder.write("text.txt", all + more), 256, 3));
  };
  const auto expected = [](const std::vector<double>& counts) {
    const double all = std::accumulate(counts.begin(), counts.end(), 0.0);
    double sum = 0;
    for (const double count : counts) sum -= count / all * std::log(count / all);
    return sum;
  };
  CHECK(entropy("aab", "ccc") == Approx(expected({2 * block, block, 3})).epsilon(1e-12));
  std::string most(most_blocks, 'a'), large;
  most.back() = 'b';
  CHECK(entropy(most) == Approx(expected({most_blocks - 1, 1})).epsilon(1e-12));
  // Of three times as many blocks every third is counted.
  for (int i = 0; i < most_blocks; ++i) large += i % 4 == 0 ? "abb" : "cbb";
  CHECK(entropy(large) == Approx(expected({1, 3})).epsilon(1e-12));
}

TEST_CASE("data: 16-bit tokens of nanoGPT and of llm.c", "[01][data]") {
  const TemporaryFolder folder;
  const std::string tokens = bytes_of(token_range(20));
  for (const std::string& path :
       {folder.write("nano.bin", tokens), folder.write("llmc.bin", llmc_header(20240520, 1, 20) + tokens)}) {
    const TokenData data(path, 50257, 8);
    REQUIRE(data.size() == 20);
    CHECK(data[0] == 1000);
    CHECK(data[19] == 1019);
  }
}

TEST_CASE("data: 32-bit tokens of llm.c", "[01][data]") {
  const TemporaryFolder folder;
  const std::string tokens = bytes_of(std::vector<uint32_t>{7, 70000, 128255, 65535, 1});
  const TokenData data(folder.write("llmc.bin", llmc_header(20240801, 7, 5) + tokens), 128256, 4);
  REQUIRE(data.size() == 5);
  CHECK(data[1] == 70000);
  CHECK(data[2] == 128255);
}

TEST_CASE("data: files that cannot be used", "[01][data]") {
  const TemporaryFolder folder;
  const std::string tokens = bytes_of(token_range(20));
  const auto check = [&](const std::string& path, const std::string& expected, int vocab_size = 50257) {
    CHECK(complaint_of_data(path, vocab_size) == "--data: " + path + " is not valid; expected " + expected);
  };
  check(folder.path() + "/none", "a readable file (No such file or directory)");
  check(folder.path(), "a regular file");
  check("/dev/zero", "a regular file");
  const std::string pipe = folder.path() + "/pipe";  // that nobody writes into
  REQUIRE(mkfifo(pipe.c_str(), 0600) == 0);
  check(pipe, "a regular file");
  check(folder.write("empty", ""), "a file that is not empty");
  check(folder.write("short", "12345678"), "at least 9 tokens, --seq-len and one more; it has 8");
  CHECK(complaint_of_data(folder.write("enough", "123456789")) == "");
  check(folder.write("odd.bin", tokens + "x"), "an even number of bytes, as tokens have 16 bits; it has 41");
}

TEST_CASE("data: a file of another form is refused", "[01][data]") {
  const TemporaryFolder folder;
  const auto check = [&](const std::string& path, const std::string& expected, int vocab_size = 50257) {
    CHECK(complaint_of_data(path, vocab_size) == "--data: " + path + " is not valid; expected " + expected);
  };
  const auto no_text = [](int zero) {
    return "a text, which has no byte 0 (here it is byte " + std::to_string(zero) +
           "), or a file named *.bin of tokens alone, as make tokens and NumPy's tofile write it";
  };
  const std::string tokens = bytes_of(token_range(20));
  check(folder.write("tokens.BIN", tokens + bytes_of(std::vector<uint16_t>{7})), no_text(41));
  check(folder.write("tokens.npy", std::string("\x93NUMPY\1\0v\0{'descr': '<u2'}", 25) + tokens), no_text(7));
  const std::string wide =
      "llm.c's header, as make tokens writes it, before tokens of 32 bits; without it they have 16, ";
  const std::string zeros = wide + "and here every second one is 0";
  check(folder.write("wide.bin", bytes_of(std::vector<uint32_t>(20, 70000))),
        wide + "too few for --vocab-size 128256", 128256);
  check(folder.write("32.bin", bytes_of(std::vector<uint32_t>(20, 7))), zeros);
  check(folder.write("64.bin", bytes_of(std::vector<uint64_t>(20, 7))), zeros, 128256);
  CHECK(complaint_of_data(folder.write("16.bin", tokens), 1 << 16) == "");
  CHECK(complaint_of_data(folder.write("llmc.bin", llmc_header(20240520, 1, 20) + tokens), 128256) == "");
  CHECK(complaint_of_data(
            folder.write("zeros.bin", bytes_of(std::vector<uint16_t>{1, 0, 3, 0, 5, 0, 7, 8, 9}))) == "");
}

TEST_CASE("data: a token outside the vocabulary is refused when it is read", "[01][data]") {
  const TemporaryFolder folder;
  const auto check = [&](const TokenData& data, int64_t good, int64_t bad, const std::string& expected) {
    CHECK(data[good] >= 0);
    CHECK_THROWS_WITH(data[bad],
                      Catch::Matchers::EndsWith("expected token ids below --vocab-size " + expected));
  };
  const std::string ids = folder.write("ids.bin", bytes_of(token_range(20)));
  check(TokenData(ids, 1019, 8), 18, 19, "(1019); token 19 is 1019");
  const std::string wide = folder.write(
      "wide.bin", llmc_header(20240801, 7, 4) + bytes_of(std::vector<uint32_t>{1, 70000, 1u << 31, 3}));
  check(TokenData(wide, 70001, 3), 1, 2, "(70001); token 2 is 2147483648");
  check(TokenData(folder.write("bytes", "aaaz"), 100, 3), 0, 3, "(100); token 3 is 122");
}

TEST_CASE("data: a file of 10 GB is opened without reading it", "[01][data]") {
  const TemporaryFolder folder;
  const std::string path = folder.write("large.bin", bytes_of(token_range(20)));
  const int64_t bytes = int64_t{10} << 30;
  std::filesystem::resize_file(path, bytes);  // the rest is a hole
  struct rusage before {
  }, after{};
  getrusage(RUSAGE_SELF, &before);
  const TokenData data(path, 50257, 1024);
  CHECK(data.size() == bytes / 2);
  CHECK(data[19] == 1019);
  CHECK(data[bytes / 2 - 1] == 0);
  CHECK(unigram_entropy(data) < 1e-3);
  getrusage(RUSAGE_SELF, &after);
#ifndef __SANITIZE_THREAD__                          // it has pages of its own
  CHECK(after.ru_minflt - before.ru_minflt < 2000);  // pages that were looked at
#endif
}

TEST_CASE("data: damaged files of llm.c", "[01][data]") {
  const TemporaryFolder folder;
  const std::string tokens = bytes_of(token_range(20));
  const auto check = [&](const std::string& content, const std::string& expected) {
    const std::string path = folder.write("llmc.bin", content);
    CHECK(complaint_of_data(path) == "--data: " + path + " is not valid; expected " + expected);
  };
  const auto of = [](int count, int bytes) {
    return "a header of 1024 bytes and the " + std::to_string(count) + " tokens that it announces; it has " +
           std::to_string(bytes) + " bytes";
  };
  check(llmc_header(20240520, 1, 20).substr(0, 500), of(20, 500));
  check(llmc_header(20240801, 7, 20) + tokens, of(20, 1064));
  check(llmc_header(20240520, 1, 21) + tokens, of(21, 1064));
  check(llmc_header(20240520, 1, 19) + tokens, of(19, 1064));
  check(llmc_header(20240520, 1, 20) + tokens.substr(1), of(20, 1063));
  check(llmc_header(20240520, 1, -20) + tokens, of(-20, 1064));
}

TEST_CASE("data: batches are windows of the text, and targets the next tokens", "[01][data]") {
  const TemporaryFolder folder;
  const TokenData data(folder.write("range.bin", bytes_of(token_range(100))), 50257, 7);
  std::vector<int32_t> tokens(5 * 7), targets(5 * 7);
  pentatron::fill_sequences(data, 3, 1, 0, 7, tokens, targets);
  for (int i = 0; i < 5 * 7; ++i) {
    CHECK(targets[i] == tokens[i] + 1);
    if (i % 7 > 0) CHECK(tokens[i] == tokens[i - 1] + 1);
  }
}

TEST_CASE("data: every window of the text is drawn, the first and the last too", "[01][data]") {
  const TemporaryFolder folder;
  const TokenData data(folder.write("range.bin", bytes_of(token_range(12))), 50257, 7);
  std::vector<int32_t> tokens(200 * 7), targets(200 * 7);
  pentatron::fill_sequences(data, 3, 1, 0, 7, tokens, targets);
  std::set<int32_t> starts;
  for (int i = 0; i < 200; ++i) starts.insert(tokens[i * 7]);
  CHECK(starts == std::set<int32_t>{1000, 1001, 1002, 1003, 1004});
}

TEST_CASE("data: a slice of the batch equals that slice of the whole", "[01][data]") {
  const TemporaryFolder folder;
  const TokenData data(folder.write("range.bin", bytes_of(token_range(5000))), 50257, 16);
  std::vector<int32_t> tokens(12 * 16), targets(12 * 16), slice(4 * 16), slice_targets(4 * 16);
  pentatron::fill_sequences(data, 9, 5, 0, 16, tokens, targets);
  pentatron::fill_sequences(data, 9, 5, 8, 16, slice, slice_targets);
  CHECK(std::equal(slice.begin(), slice.end(), tokens.begin() + 8 * 16));
  CHECK(std::equal(slice_targets.begin(), slice_targets.end(), targets.begin() + 8 * 16));
}

TEST_CASE("data: seed, step and sequence each choose other windows", "[01][data]") {
  const TemporaryFolder folder;
  const TokenData data(folder.write("range.bin", bytes_of(token_range(60000))), 65536, 1);
  std::set<int32_t> starts;
  std::vector<int32_t> token(1), target(1);
  for (const uint64_t seed : {1, 2}) {
    for (const int64_t step : {1, 2}) {
      for (const int64_t sequence : {0, 1}) {
        pentatron::fill_sequences(data, seed, step, sequence, 1, token, target);
        starts.insert(token[0]);
      }
    }
  }
  CHECK(starts.size() == 8);
}
