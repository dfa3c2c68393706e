#include "train/tokenizer/unicode_normal.h"

#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <vector>

#include "absl/strings/str_cat.h"
#include "burst/base/check.h"
#include "train/data/utf8.h"
#include "train/tokenizer/places.h"
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

// A character of a normal form.
struct FormCharacter {
  uint32_t code_point = 0;
  int combining_class = 0;
  size_t taken = 0;  // number of characters of the text that it stands for
};

// Returns the character that two compose to, or 0.
uint32_t Composed(uint32_t first, uint32_t second) {
  utf8proc_int32_t pair[] = {static_cast<utf8proc_int32_t>(first),
                             static_cast<utf8proc_int32_t>(second)};
  const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
  return utf8proc_normalize_utf32(pair, 2, options) == 1 ? static_cast<uint32_t>(pair[0]) : 0;
}

// Returns the normal form C of valid UTF-8, by its definition. If a character is decomposed,
// its first part takes it.
std::vector<FormCharacter> FormOf(absl::string_view text) {
  std::vector<FormCharacter> decomposed, form;
  for (size_t at = 0; at < text.size();) {
    utf8proc_int32_t parts[8];  // more than any character has
    const auto options = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_DECOMPOSE);
    const utf8proc_ssize_t count =
        utf8proc_decompose_char(static_cast<utf8proc_int32_t>(NextCodePoint(text, &at)), parts,
                                std::size(parts), options, nullptr);
    for (utf8proc_ssize_t i = 0; i < count; ++i) {
      decomposed.push_back({static_cast<uint32_t>(parts[i]),
                            utf8proc_get_property(parts[i])->combining_class, i == 0 ? 1u : 0u});
    }
  }
  for (auto begin = decomposed.begin(); begin != decomposed.end();) {
    const auto end = std::find_if(begin + 1, decomposed.end(),
                                  [](const auto& c) { return c.combining_class == 0; });
    std::stable_sort(
        begin + (begin->combining_class == 0 ? 1 : 0), end,
        [](const auto& a, const auto& b) { return a.combining_class < b.combining_class; });
    begin = end;
  }
  size_t starter = decomposed.size();  // its index in the form; none yet
  for (const FormCharacter& c : decomposed) {
    if (starter < form.size()) {
      const bool next_to_it = starter + 1 == form.size();
      const bool blocked = !next_to_it && form.back().combining_class >= c.combining_class;
      const uint32_t composed = blocked ? 0 : Composed(form[starter].code_point, c.code_point);
      if (composed != 0) {
        form[starter].code_point = composed;
        form[starter].taken += c.taken;
        continue;
      }
    }
    if (c.combining_class == 0) starter = form.size();
    form.push_back(c);
  }
  return form;
}

// Makes places of valid UTF-8 places of its form.
void FormPlaces(absl::string_view text, absl::Span<size_t> places) {
  if (places.empty()) return;
  size_t characters = 0, at = 0;  // a place becomes the number of characters before it
  for (size_t& place : places) {
    for (; at < place; ++characters) NextCodePoint(text, &at);
    place = characters;
  }
  size_t taken = 0, bytes = 0;
  for (const FormCharacter& c : FormOf(text)) {
    // A character that takes none is where the one before it is.
    const size_t where = c.taken > 0 || taken == 0 ? taken : taken - 1;
    for (; !places.empty() && places.front() <= where; places.remove_prefix(1)) {
      places.front() = bytes;
    }
    taken += c.taken;
    bytes += c.code_point < 0x80 ? 1 : c.code_point < 0x800 ? 2 : c.code_point < 0x10000 ? 3 : 4;
  }
  for (size_t& place : places) place = bytes;
}

// Appends the form of valid UTF-8.
void AppendForm(absl::string_view text, absl::Span<size_t> places, std::string* out) {
  if (text.empty()) return;
  FormPlaces(text, places);
  MovePlaces(out->size(), places);
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
void AppendParts(absl::string_view text, absl::Span<size_t> places, std::string* out) {
  size_t begin = 0;  // begin of the text that is not appended yet
  for (size_t at = 0; at < text.size();) {
    const size_t start = at;
    const uint32_t c = NextCodePoint(text, &at);
    if (c == kCodePoints) at = start + 1;
    if (c != kCodePoints && !IsNotNormalized(c)) continue;
    AppendForm(text.substr(begin, start - begin), TakePlaces(begin, start, &places), out);
    MovePlaces(out->size(), TakePlaces(start, at, &places));
    absl::StrAppend(out, text.substr(start, at - start));
    begin = at;
  }
  AppendForm(text.substr(begin), TakePlaces(begin, text.size(), &places), out);
}

}  // namespace

void AppendNfc(absl::string_view text, absl::Span<size_t> places, std::string* out) {
  for (size_t at = 0; at < text.size();) {
    // Appends the text up to the last ASCII character, which the characters after it may combine
    // with.
    size_t other = at;
    while (other < text.size() && IsAscii(text[other])) ++other;
    const size_t begin = other == text.size() || other == at ? other : other - 1;
    MovePlaces(out->size(), TakePlaces(at, begin, &places));
    absl::StrAppend(out, text.substr(at, begin - at));
    size_t end = other;
    while (end < text.size() && !IsAscii(text[end])) ++end;
    const absl::string_view part = text.substr(begin, end - begin);
    const absl::Span<size_t> inside = TakePlaces(begin, end, &places);
    if (MayChange(part)) {
      AppendParts(part, inside, out);
    } else {
      MovePlaces(out->size(), inside);
      absl::StrAppend(out, part);
    }
    at = end;
  }
  for (size_t& place : places) place = out->size();
}

}  // namespace burst
