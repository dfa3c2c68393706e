// Converts to Unicode's normal form C, which composes characters (Unicode Standard Annex 15).
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace burst {

// Appends the normal form of `text` by Unicode 9, as tokenizers does: later characters stay as they
// are. Bytes that are not UTF-8 stay as they are. If the second of two texts begins with an ASCII
// character, their form is the first one's form followed by the second one's.
void AppendNfc(absl::string_view text, std::string* out);

}  // namespace burst
