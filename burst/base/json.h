// JSON that comes from outside.
#pragma once

#include <nlohmann/json.hpp>

#include "absl/strings/string_view.h"

namespace burst {

// Our own files nest five deep at most.
inline constexpr int kMaxJsonDepth = 64;

// Whether objects and arrays lie deeper within one another than the limit. Of text that is not
// JSON, either answer.
bool JsonIsTooDeep(absl::string_view text);

// The value, or a discarded one (is_discarded(), and no other is_...()) for text that is not JSON
// or too deep: copying, printing and comparing values takes stack for each level.
template <typename Json = nlohmann::json>
Json ParseJson(absl::string_view text) {
  if (JsonIsTooDeep(text)) return Json(nlohmann::detail::value_t::discarded);
  return Json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
}

}  // namespace burst
