#include "train/generate/prompt.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "burst/base/json.h"
#include "burst/base/status.h"
#include "burst/cli/files.h"
#include "train/huggingface/pretrained.h"
#include "train/tokenizer/prompt_template.h"

namespace burst {
namespace {

using Json = nlohmann::json;
namespace fs = std::filesystem;

// Reads a JSON file of the directory. Returns null if the file is missing.
absl::StatusOr<Json> ReadObject(const std::string& path) {
  std::error_code error;  // reading reports a file that cannot be seen
  if (!fs::exists(path, error)) return Json();
  BURST_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  absl::StatusOr<Json> json = ParseJson(text);
  if (json.ok() && json->is_object()) return json;
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", json.ok() ? "it must be a JSON object" : json.status().message()));
}

absl::Status BadField(const std::string& path, absl::string_view field, const Json& value,
                      absl::string_view rule) {
  const std::string shown = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", field, " must be ", rule, "; got ", shown.substr(0, 60)));
}

// Appends eos_token_id, which is a number, a list of numbers, or null.
absl::Status AppendEnds(const std::string& path, std::vector<int32_t>* ends) {
  BURST_ASSIGN_OR_RETURN(const Json json, ReadObject(path));
  const Json value = json.is_null() ? json : json.value("eos_token_id", Json());
  if (value.is_null()) return absl::OkStatus();
  for (const Json& id : value.is_array() ? value : Json::array({value})) {
    if (!id.is_number_integer() || id.get<double>() < 0 || id.get<double>() > INT32_MAX) {
      return BadField(path, "eos_token_id", value, "the number of a token, or a list of them");
    }
    ends->push_back(id.get<int32_t>());
  }
  return absl::OkStatus();
}

// Appends eos_token of tokenizer_config.json: "</s>", {"content": "</s>"} or null. A text without a
// token in the tokenizer does not end anything.
absl::Status AppendEndToken(const std::string& path, const Json& config, const Tokenizer& tokenizer,
                            std::vector<int32_t>* ends) {
  Json value = config.is_null() ? config : config.value("eos_token", Json());
  if (value.is_object()) value = value.value("content", Json());
  if (value.is_null()) return absl::OkStatus();
  if (!value.is_string()) return BadField(path, "eos_token", value, "a text");
  std::vector<int32_t> tokens;
  const absl::Status status =
      tokenizer.Encode(value.get<std::string>(), &tokens, Specials::kAreTokens);
  if (status.ok() && tokens.size() == 1) ends->push_back(tokens[0]);
  return absl::OkStatus();
}

absl::StatusOr<bool> ReadBool(const std::string& path, const Json& config, const char* field) {
  const Json value = config.is_null() ? config : config.value(field, Json());
  if (value.is_null()) return false;
  if (!value.is_boolean()) return BadField(path, field, value, "true or false");
  return value.get<bool>();
}

absl::StatusOr<std::vector<int32_t>> BeginningOfModelFile(const std::string& folder,
                                                          const std::string& config_path,
                                                          const Json& config,
                                                          const Tokenizer& tokenizer) {
  const std::string json_path = (fs::path(folder) / "tokenizer.json").string();
  std::error_code error;
  if (fs::exists(json_path, error)) {
    BURST_ASSIGN_OR_RETURN(const std::string text, ReadFile(json_path));
    absl::StatusOr<std::vector<int32_t>> beginning = TemplateBeginning(text);
    if (beginning.ok()) return beginning;
    return absl::InvalidArgumentError(absl::StrCat(json_path, ": ", beginning.status().message()));
  }
  BURST_ASSIGN_OR_RETURN(const bool adds, ReadBool(config_path, config, "add_bos_token"));
  if (adds || config.is_null()) return tokenizer.Beginning();
  return std::vector<int32_t>();
}

}  // namespace

absl::StatusOr<PromptRules> ReadPromptRules(const std::string& folder, const Tokenizer& tokenizer,
                                            bool with_begin) {
  const auto in_folder = [&](const char* name) { return (fs::path(folder) / name).string(); };
  const std::string config_path = in_folder("tokenizer_config.json");
  BURST_ASSIGN_OR_RETURN(const Json config, ReadObject(config_path));
  PromptRules rules;
  BURST_RETURN_IF_ERROR(AppendEnds(in_folder("generation_config.json"), &rules.ends));
  BURST_RETURN_IF_ERROR(AppendEnds(in_folder("config.json"), &rules.ends));
  BURST_RETURN_IF_ERROR(AppendEndToken(config_path, config, tokenizer, &rules.ends));
  BURST_ASSIGN_OR_RETURN(const bool legacy, ReadBool(config_path, config, "legacy"));
  if (legacy) rules.specials = Specials::kAreTokensAndSpaced;
  if (!with_begin) return rules;
  if (tokenizer.kind() == Tokenizer::Kind::kSentencePiece) {
    BURST_ASSIGN_OR_RETURN(rules.begin,
                           BeginningOfModelFile(folder, config_path, config, tokenizer));
  } else {
    BURST_ASSIGN_OR_RETURN(rules.begin, tokenizer.Beginning());
  }
  return rules;
}

absl::StatusOr<PromptRules> RulesOfCheckpoint(const std::string& checkpoint,
                                              const Tokenizer& tokenizer, bool with_begin) {
  PromptRules rules;
  std::error_code error;
  const std::string companions = CompanionsOf(checkpoint);
  // Tokens of bytes and characters differ from the tokens that the files number.
  if (tokenizer.of_file() != nullptr && fs::is_directory(companions, error)) {
    BURST_ASSIGN_OR_RETURN(rules, ReadPromptRules(companions, tokenizer, with_begin));
  }
  if (tokenizer.marks().separator >= 0) rules.ends.push_back(tokenizer.marks().separator);
  if (with_begin && tokenizer.marks().begins) {
    BURST_ASSIGN_OR_RETURN(rules.begin, tokenizer.Beginning());
  }
  return rules;
}

absl::StatusOr<std::vector<int32_t>> EncodePrompt(const Tokenizer& tokenizer,
                                                  absl::string_view prompt,
                                                  const PromptRules& rules) {
  std::vector<int32_t> tokens;
  BURST_RETURN_IF_ERROR(tokenizer.Encode(prompt, &tokens, rules.specials));
  const auto& begin = rules.begin;
  const bool has_begin =
      tokens.size() >= begin.size() && std::equal(begin.begin(), begin.end(), tokens.begin());
  if (!has_begin) tokens.insert(tokens.begin(), begin.begin(), begin.end());
  if (!tokens.empty()) return tokens;
  if (tokenizer.end_of_text() >= 0) return std::vector<int32_t>{tokenizer.end_of_text()};
  if (!tokenizer.Encode("\n", &tokens).ok()) tokens = {0};
  return tokens;
}

}  // namespace burst
