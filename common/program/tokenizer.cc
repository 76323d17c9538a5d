#include "program/tokenizer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "model/mapped_file.h"
#include "program/command_line.h"

namespace pentatron {
namespace {

// The characters of a text, as numbers. It is valid UTF-8, because the parser of JSON takes nothing else.
std::vector<uint32_t> characters(const std::string& text) {
  std::vector<uint32_t> all;
  for (const char c : text) {
    const auto byte = static_cast<uint8_t>(c);
    const int ones = std::countl_one(byte);
    if (ones == 1) {
      all.back() = all.back() << 6 | (byte & 0x3f);
    } else {  // of several bytes, the first one says how many there are
      all.push_back(byte & (0xff >> (ones + 1)));
    }
  }
  return all;
}

// GPT-2 writes a byte as a character that can be seen: as itself, or as the next of U+0100, U+0101, ...
constexpr uint32_t first_substitute = 256, substitutes = 68;
std::array<uint8_t, first_substitute + substitutes> bytes_of_characters() {
  std::array<uint8_t, first_substitute + substitutes> bytes{};
  uint32_t next = first_substitute;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool visible = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte != 0xad);
    bytes[visible ? byte : next++] = static_cast<uint8_t>(byte);
  }
  return bytes;
}

std::string byte_level(const std::string& token) {
  static const auto bytes = bytes_of_characters();
  std::string text;
  for (const uint32_t c : characters(token)) {
    if (c >= bytes.size()) return token;  // it stands for itself
    text += static_cast<char>(bytes[c]);
  }
  return text;
}

// SentencePiece writes a space as U+2581, and a byte that is no character as <0x0A>.
std::string with_byte_fallback(const std::string& token) {
  unsigned byte = 0;
  if (token.size() == 6 && token.starts_with("<0x") &&
      std::from_chars(token.data() + 3, token.data() + 5, byte, 16).ptr == token.data() + 5) {
    return std::string(1, static_cast<char>(byte));
  }
  constexpr std::string_view space = "\u2581";
  std::string text = token;
  for (size_t at; (at = text.find(space)) != text.npos;) text.replace(at, space.size(), " ");
  return text;
}

// Whether a decoder is of this type, or has a part that is.
bool has_type(const nlohmann::json& decoder, const char* type) {
  if (!decoder.is_object()) return false;
  if (decoder.contains("type") && decoder["type"] == type) return true;
  return decoder.contains("decoders") && decoder["decoders"].is_array() &&
         std::any_of(decoder["decoders"].begin(), decoder["decoders"].end(),
                     [&](const nlohmann::json& part) { return has_type(part, type); });
}

}  // namespace

Tokenizer::Tokenizer(const std::string& path) {
  const MappedFile file("--data", path);
  const char* const text = reinterpret_cast<const char*>(file.bytes().data());
  const nlohmann::json json = nlohmann::json::parse(text, text + file.bytes().size(), nullptr, false);
  const auto check = [&](bool good, const char* expected) { require(good, "--data", path, expected); };
  const nlohmann::json::json_pointer vocabulary("/model/vocab");
  check(json.contains(vocabulary) && json[vocabulary].is_object(), "a tokenizer.json with a vocabulary");
  const nlohmann::json decoder = json.value("decoder", nlohmann::json());
  const bool is_byte_level = has_type(decoder, "ByteLevel");
  check(is_byte_level || has_type(decoder, "ByteFallback"), "a decoder ByteLevel or ByteFallback");
  const auto set = [&](const nlohmann::json& number, const std::string& bytes) {
    check(number.is_number_unsigned() && number < 1 << 24, "token numbers below 2^24");
    const size_t token = number;
    if (token >= bytes_.size()) bytes_.resize(token + 1);
    bytes_[token] = bytes;
  };
  for (const auto& [token, number] : json[vocabulary].items())
    set(number, is_byte_level ? byte_level(token) : with_byte_fallback(token));
  if (!json.contains("added_tokens")) return;
  for (const nlohmann::json& added : json["added_tokens"]) {  // they stand for themselves
    check(added.is_object() && added.contains("id") && added.contains("content") &&
              added["content"].is_string(),
          "added tokens with id and content");
    set(added["id"], added["content"]);
  }
}

const std::string& Tokenizer::operator[](int32_t token) const {
  static const std::string unknown = "\ufffd";
  return token >= 0 && token < std::ssize(bytes_) ? bytes_[token] : unknown;
}

int32_t Tokenizer::find(const std::string& bytes) const {
  const auto found = std::find(bytes_.begin(), bytes_.end(), bytes);
  return found == bytes_.end() ? -1 : static_cast<int32_t>(found - bytes_.begin());
}

std::string tokenizer_beside(const std::string& data) {
  const std::filesystem::path path = std::filesystem::path(data).parent_path() / "tokenizer.json";
  std::error_code ignored;
  return data.ends_with(".bin") && std::filesystem::exists(path, ignored) ? path.string() : "";
}

}  // namespace pentatron
