// Text for people.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace burst {

std::string Thousands(int64_t value);       // "1,234,567"
std::string ShortDuration(double seconds);  // "1:05", "2:03:10"

// `text` in lines of at most `width` characters; a longer word has a line of its own.
std::vector<std::string> WrapLines(absl::string_view text, size_t width);

// `text` as XML and HTML show it, also in an attribute within quotes.
std::string EscapeMarkup(absl::string_view text);

// The least number of insertions, deletions and substitutions that turn a into b.
size_t EditDistance(absl::string_view a, absl::string_view b);

}  // namespace burst
