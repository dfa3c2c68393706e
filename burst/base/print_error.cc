#include "burst/base/print_error.h"

#include <cstdio>

namespace burst {
namespace {

// Returns the bytes of the character that begins the text, or 0 if it is not UTF-8 or controls a
// terminal.
size_t ShownBytes(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7F ? 1 : 0;
  const size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || bytes > text.size()) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  const bool control = first == 0xC2 && byte(1) < 0xA0;  // U+0080 to U+009F
  const bool overlong = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xF0 && byte(1) < 0x90);
  const bool no_character =
      (first == 0xED && byte(1) >= 0xA0) || (first == 0xF4 && byte(1) >= 0x90);
  return control || overlong || no_character ? 0 : bytes;
}

}  // namespace

std::string Printable(absl::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const size_t bytes = ShownBytes(text);
    if (bytes > 0) {
      shown.append(text.data(), bytes);
    } else if (text[0] == '\n') {
      shown += "\\n";
    } else {
      char escaped[5];
      std::snprintf(escaped, sizeof(escaped), "\\x%02x", static_cast<unsigned char>(text[0]));
      shown += escaped;
    }
    text.remove_prefix(bytes > 0 ? bytes : 1);
  }
  return shown;
}

void PrintError(const absl::Status& error) {
  std::fflush(stdout);
  std::fprintf(stderr, "error: %s\n", Printable(error.message()).c_str());
  std::fflush(stderr);
}

}  // namespace burst
