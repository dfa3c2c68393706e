// Access to the fields of a tokenizer's JSON, with errors that name them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace burst {

template <typename... What>
absl::Status InvalidField(const What&... what) {
  return absl::InvalidArgumentError(absl::StrCat(what...));
}

// Shortens a string of a file for an error.
inline std::string Shown(absl::string_view text) {
  constexpr size_t kMost = 40;
  nlohmann::json shown = std::string(text.substr(0, kMost));
  return shown.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

// Returns a member of an object, or null if it is absent.
inline const nlohmann::json& Get(const nlohmann::json& json, const char* key) {
  static const nlohmann::json kNull;
  if (!json.is_object()) return kNull;
  const auto found = json.find(key);
  return found == json.end() ? kNull : *found;
}

inline absl::StatusOr<bool> GetBool(const nlohmann::json& json, const char* key, bool otherwise,
                                    absl::string_view of) {
  const nlohmann::json& value = Get(json, key);
  if (value.is_null()) return otherwise;
  if (!value.is_boolean()) return InvalidField(of, ".", key, " must be true or false");
  return value.get<bool>();
}

// Returns the member "type", or an empty text.
inline std::string TypeOf(const nlohmann::json& json) {
  const nlohmann::json& type = Get(json, "type");
  return type.is_string() ? type.get<std::string>() : "";
}

}  // namespace burst
