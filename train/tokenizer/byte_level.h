// How files of byte-level BPE write bytes: as the characters of GPT-2's encoder (Radford et al.,
// 2019). Printable characters of Latin-1 stand for their bytes, U+0100 and following for the
// others.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace burst {

// The character that stands for a byte, as UTF-8.
std::string ByteLevelCharacter(uint8_t byte);

// The bytes that a token of a file stands for; none if it has a character that stands for none.
std::optional<std::string> BytesOfToken(absl::string_view token);

}  // namespace burst
