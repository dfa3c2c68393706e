#include "train/tokenizer/unicode_normal.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "train/data/utf8.h"
#include "train/tokenizer/unicode_additions.h"

namespace burst {
namespace {

bool IsAscii(char c) { return static_cast<unsigned char>(c) < 0x80; }

// Returns whether normalization may change a text. Below U+0300, every text is in normal form. 0xCC
// begins U+0300.
bool MayChange(absl::string_view text) {
  return std::any_of(text.begin(), text.end(),
                     [](char c) { return static_cast<unsigned char>(c) >= 0xCC; });
}

void AppendForm(absl::string_view text, std::string* out) {
  if (text.empty()) return;
  utf8proc_uint8_t* form = nullptr;
  const utf8proc_ssize_t bytes =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                   static_cast<utf8proc_ssize_t>(text.size()), &form,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  BURST_CHECK(bytes >= 0) << utf8proc_errmsg(bytes);
  out->append(reinterpret_cast<const char*>(form), static_cast<size_t>(bytes));
  std::free(form);
}

// Returns whether tokenizers leaves a character where it is, and combining characters do not reach
// across it.
bool IsNotNormalized(uint32_t c) {
  const auto ends_before = [](const auto& range, uint32_t c) { return range.last < c; };
  const auto in = [&](const auto& ranges) {
    const auto found = std::lower_bound(std::begin(ranges), std::end(ranges), c, ends_before);
    return found != std::end(ranges) && found->first <= c;
  };
  return in(kNotNormalized) || in(kUnicodeAdditions);
}

// Appends the normalized parts of `text`, which may have bytes that are not UTF-8.
void AppendParts(absl::string_view text, std::string* out) {
  size_t begin = 0;  // begin of the text that is not appended yet
  for (size_t at = 0; at < text.size();) {
    const size_t start = at;
    const uint32_t c = NextCodePoint(text, &at);
    if (c == kCodePoints) at = start + 1;
    if (c != kCodePoints && !IsNotNormalized(c)) continue;
    AppendForm(text.substr(begin, start - begin), out);
    absl::StrAppend(out, text.substr(start, at - start));
    begin = at;
  }
  AppendForm(text.substr(begin), out);
}

}  // namespace

void AppendNfc(absl::string_view text, std::string* out) {
  for (size_t at = 0; at < text.size();) {
    // Appends the text up to the last ASCII character, which the characters after it may combine
    // with.
    size_t other = at;
    while (other < text.size() && IsAscii(text[other])) ++other;
    const size_t begin = other == text.size() || other == at ? other : other - 1;
    absl::StrAppend(out, text.substr(at, begin - at));
    size_t end = other;
    while (end < text.size() && !IsAscii(text[end])) ++end;
    const absl::string_view part = text.substr(begin, end - begin);
    if (MayChange(part)) {
      AppendParts(part, out);
    } else {
      absl::StrAppend(out, part);
    }
    at = end;
  }
}

}  // namespace burst
