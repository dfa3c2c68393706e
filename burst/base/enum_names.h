// Names of an enum's values, in one table each: what options, messages and reports print, and what
// is parsed.
//
//   constexpr EnumName<Color> kColors[] = {{Color::kRed, "red"}, {Color::kBlue, "blue"}};
//   NameOf(Color::kBlue, kColors)        // "blue"
//   ParseName("color", "blue", kColors)  // Color::kBlue
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace burst {

template <typename Enum>
struct EnumName {
  Enum value;
  const char* name;
};

// "?" for a value that the table lacks.
template <typename Enum, size_t n>
const char* NameOf(Enum value, const EnumName<Enum> (&table)[n]) {
  for (const EnumName<Enum>& entry : table) {
    if (entry.value == value) return entry.name;
  }
  return "?";
}

// InvalidArgument "unknown color 'green': use red or blue" for a name that the table lacks.
template <typename Enum, size_t n>
absl::StatusOr<Enum> ParseName(absl::string_view what, absl::string_view name,
                               const EnumName<Enum> (&table)[n]) {
  std::string names;
  for (size_t i = 0; i < n; ++i) {
    if (name == table[i].name) return table[i].value;
    absl::StrAppend(&names, i == 0 ? "" : i + 1 == n ? " or " : ", ", table[i].name);
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown ", what, " '", name, "': use ", names));
}

}  // namespace burst
