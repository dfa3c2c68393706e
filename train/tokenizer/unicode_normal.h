// Unicode's normal form C: what can be one character is one (Unicode Standard Annex 15).
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace burst {

// Appends the normal form of `text` as of Unicode 9, as tokenizers does: characters that were added
// since stay where they are. Bytes that are not UTF-8 stay as
// they are. The form of two texts is that of their parts one after the other where the second one
// begins with an ASCII character.
void AppendNfc(absl::string_view text, std::string* out);

}  // namespace burst
