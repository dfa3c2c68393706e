// Names of an enum's values, in one table each: what options, messages and reports print, and what
// is parsed.
//
//   constexpr EnumName<Color> kColors[] = {{Color::kRed, "red"}, {Color::kBlue, "blue"}};
//   NameOf(Color::kBlue, kColors)        // "blue"
//   ParseName("blue", kColors)           // Color::kBlue
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

// Returns InvalidArgument "must be one of red, blue; got 'green'" for a name that the table lacks.
// The caller puts the setting's name before it: an option does, and ForSetting.
template <typename Enum, size_t n>
absl::StatusOr<Enum> ParseName(absl::string_view name, const EnumName<Enum> (&table)[n]) {
  std::string names;
  for (size_t i = 0; i < n; ++i) {
    if (name == table[i].name) return table[i].value;
    absl::StrAppend(&names, i == 0 ? "" : ", ", table[i].name);
  }
  return absl::InvalidArgumentError(absl::StrCat("must be one of ", names, "; got '", name, "'"));
}

// Puts "SETTING: " before the error of a parse.
template <typename Enum>
absl::StatusOr<Enum> ForSetting(absl::string_view setting, absl::StatusOr<Enum> parsed) {
  if (parsed.ok()) return parsed;
  return absl::InvalidArgumentError(absl::StrCat(setting, ": ", parsed.status().message()));
}

}  // namespace burst
