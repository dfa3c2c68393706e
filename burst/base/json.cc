#include "burst/base/json.h"

#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace burst {
namespace {

// Correct where `text` is JSON.
bool IsTooDeep(absl::string_view text) {
  int depth = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      in_string = c != '"';
      continue;
    }
    if (c == '"') in_string = true;
    if ((c == '{' || c == '[') && ++depth > kMaxJsonDepth) return true;
    if (c == '}' || c == ']') --depth;
  }
  return false;
}

}  // namespace

template <typename Json>
absl::StatusOr<Json> ParseJson(absl::string_view text) {
  if (IsTooDeep(text)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the JSON is nested more than ", kMaxJsonDepth, " deep"));
  }
  std::vector<std::set<std::string>> keys;  // of the objects that are open
  std::string twice;
  const auto note_keys = [&](int, typename Json::parse_event_t event, Json& value) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) {
      const std::string& key = value.template get_ref<const std::string&>();
      if (!keys.back().insert(key).second && twice.empty()) twice = absl::StrCat("'", key, "'");
    }
    return true;
  };
  Json json = Json::parse(text.begin(), text.end(), note_keys, /*allow_exceptions=*/false);
  if (json.is_discarded()) return absl::InvalidArgumentError("it is not JSON");
  if (!twice.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("the JSON has the key ", twice, " twice"));
  }
  return json;
}

template absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text);
template absl::StatusOr<nlohmann::ordered_json> ParseJson(absl::string_view text);

}  // namespace burst
