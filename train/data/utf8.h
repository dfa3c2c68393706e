// Reads the characters of UTF-8 text, one at a time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace burst {

inline constexpr uint32_t kCodePoints = 0x110000;

// Returns whether a code point is half of a pair of UTF-16, which is not a character or UTF-8.
inline bool IsSurrogate(uint32_t code_point) { return code_point >= 0xD800 && code_point < 0xE000; }

// Returns the code point at text[*position] and moves past it; kCodePoints for bytes that are not
// UTF-8.
inline uint32_t NextCodePoint(absl::string_view text, size_t* position) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const uint32_t first = byte((*position)++);
  if (first < 0x80) return first;
  const int more = first >= 0xF0 ? 3 : first >= 0xE0 ? 2 : 1;
  if (first < 0xC2 || first > 0xF4) return kCodePoints;
  uint32_t code_point = first & (0x3F >> more);
  for (int i = 0; i < more; ++i) {
    if (*position >= text.size() || (byte(*position) & 0xC0) != 0x80) return kCodePoints;
    code_point = code_point << 6 | (byte((*position)++) & 0x3F);
  }
  // Refuse overlong forms, surrogates and numbers beyond Unicode.
  constexpr uint32_t kSmallest[] = {0, 0x80, 0x800, 0x10000};
  if (code_point < kSmallest[more] || IsSurrogate(code_point)) return kCodePoints;
  return std::min(code_point, kCodePoints);
}

// Returns whether a byte continues a character.
inline bool ContinuesCharacter(char byte) {
  return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
}

}  // namespace burst
