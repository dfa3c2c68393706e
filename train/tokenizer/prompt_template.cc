#include "train/tokenizer/prompt_template.h"

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "burst/base/json.h"
#include "burst/base/status.h"

namespace burst {
namespace {

using Json = nlohmann::json;

const Json& Get(const Json& json, const std::string& key) {
  static const Json kNull;
  if (!json.is_object()) return kNull;
  const auto found = json.find(key);
  return found == json.end() ? kNull : *found;
}

absl::Status Invalid(absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat("post_processor: ", what));
}

absl::Status AppendId(const Json& id, std::vector<int32_t>* tokens) {
  if (!id.is_number_unsigned() || id.get<uint64_t>() > INT32_MAX) {
    return Invalid("a special token has no id");
  }
  tokens->push_back(id.get<int32_t>());
  return absl::OkStatus();
}

// {"single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}, ...],
//  "special_tokens": {"<s>": {"ids": [1]}}}
absl::Status AppendTemplate(const Json& processor, std::vector<int32_t>* tokens) {
  const Json& single = Get(processor, "single");
  if (!single.is_array()) return Invalid("TemplateProcessing has no list 'single'");
  for (const Json& part : single) {
    if (!Get(part, "Sequence").is_null()) return absl::OkStatus();
    const Json& name = Get(Get(part, "SpecialToken"), "id");
    if (!name.is_string()) return Invalid("'single' has a part that is neither a token nor a text");
    const Json& ids = Get(Get(Get(processor, "special_tokens"), name.get<std::string>()), "ids");
    if (!ids.is_array()) {
      return Invalid(absl::StrCat("the token ",
                                  absl::Utf8SafeCEscape(name.get<std::string>().substr(0, 40)),
                                  " has no ids"));
    }
    for (const Json& id : ids) BURST_RETURN_IF_ERROR(AppendId(id, tokens));
  }
  return Invalid("'single' has no text");
}

absl::Status AppendBeginning(const Json& processor, std::vector<int32_t>* tokens) {
  const Json& type = Get(processor, "type");
  if (processor.is_null() || type == "ByteLevel") return absl::OkStatus();
  if (type == "TemplateProcessing") return AppendTemplate(processor, tokens);
  if (type == "RobertaProcessing" || type == "BertProcessing") {
    const Json& cls = Get(processor, "cls");  // ["<s>", 0]
    if (!cls.is_array() || cls.size() != 2) return Invalid("'cls' is not a token and its id");
    return AppendId(cls[1], tokens);
  }
  if (type == "Sequence" && Get(processor, "processors").is_array()) {
    for (const Json& part : Get(processor, "processors")) {
      const size_t before = tokens->size();
      BURST_RETURN_IF_ERROR(AppendBeginning(part, tokens));
      if (before > 0 && tokens->size() > before) {
        return Invalid("two parts that put tokens before a text are not supported");
      }
    }
    return absl::OkStatus();
  }
  return Invalid(absl::StrCat(
      "the type ",
      type.is_string() ? absl::Utf8SafeCEscape(type.get<std::string>().substr(0, 40)) : "?",
      " is not supported"));
}

}  // namespace

absl::StatusOr<std::vector<int32_t>> TemplateBeginning(absl::string_view tokenizer_json) {
  BURST_ASSIGN_OR_RETURN(const Json json, ParseJson(tokenizer_json));
  std::vector<int32_t> tokens;
  BURST_RETURN_IF_ERROR(AppendBeginning(Get(json, "post_processor"), &tokens));
  return tokens;
}

}  // namespace burst
