// JSON that comes from outside the program.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

inline constexpr int kMaxJsonDepth = 64;  // our own files nest five deep at most

// InvalidArgument for what is not JSON, has a key twice in one object, or is nested more than
// kMaxJsonDepth deep: copying, comparing and printing a value recurse, and must not use up the
// stack. Json: nlohmann::json or nlohmann::ordered_json.
template <typename Json = nlohmann::json>
absl::StatusOr<Json> ParseJson(absl::string_view text);

}  // namespace burst
