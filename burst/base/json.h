// JSON that comes from outside the program.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace burst {

inline constexpr int kMaxJsonDepth = 64;  // our own files nest five deep at most
// A limit on the estimated memory of one text's values. The vocabulary of 256,000 tokens takes 150
// MB.
inline constexpr int64_t kMaxJsonBytes = int64_t{512} << 20;

// Reads JSON in a time that grows as the text's length. Json: nlohmann::json or
// nlohmann::ordered_json. InvalidArgument for text that is not JSON, has a key twice in one object,
// takes more than kMaxJsonBytes, or is nested more than kMaxJsonDepth deep. Copying, comparing and
// printing a value recurse, and must not use up the stack.
template <typename Json = nlohmann::json>
absl::StatusOr<Json> ParseJson(absl::string_view text);

}  // namespace burst
