// Numbers and text for people.
#pragma once

#include <string>

namespace pentatron {

std::string formatted(const char* format, double value);  // as printf
std::string human_bytes(double bytes);                    // "1.50 MiB"
std::string human_count(double count);                    // "41.2k"
std::string human_seconds(double seconds);                // "1.50 ms"

// The text for a terminal: ? for a control character, U+FFFD for bytes that are not UTF-8.
std::string printable(std::string text);

}  // namespace pentatron
