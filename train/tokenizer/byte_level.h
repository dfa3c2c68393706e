// Reads and writes bytes as files of byte-level BPE do: by the characters of GPT-2's encoder
// (Radford et al., 2019). Printable characters of Latin-1 stand for their bytes, U+0100 and
// following for the other bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace burst {

// Returns the character that stands for a byte, as UTF-8.
std::string ByteLevelCharacter(uint8_t byte);

// Returns the bytes that a file's token stands for; none if a character does not stand for a byte.
std::optional<std::string> BytesOfToken(absl::string_view token);

}  // namespace burst
