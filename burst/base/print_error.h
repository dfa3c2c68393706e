// Errors and warnings on stderr.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace burst {

// The text in one line that a terminal shows and does not obey. Control characters and bytes that
// are not UTF-8 become "\n", "\x1b" and so on: a name in a file of others may hold any.
std::string Printable(absl::string_view text);

// Prints "error: <message>" on stderr, after what stdout still holds.
void PrintError(const absl::Status& error);

}  // namespace burst
