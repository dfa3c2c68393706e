// Converts to Unicode's normal form C, which composes characters (Unicode Standard Annex 15).
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace burst {

// Appends the normal form of `text` by Unicode 9, as tokenizers does: later characters stay as they
// are. Bytes that are not UTF-8 stay as they are. If the second of two texts begins with an ASCII
// character, their form is the first one's form followed by the second one's.
// Places of `text`, in increasing order, become places of `*out`, as tokenizers aligns the two. A
// composed character is where its first one was.
void AppendNfc(absl::string_view text, absl::Span<size_t> places, std::string* out);

}  // namespace burst
